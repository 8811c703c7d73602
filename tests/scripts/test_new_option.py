"""An option is one edit: its field in the schema, after which everything that names options has it."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import ranks
from ranks import REPOSITORY

SCHEMA = "spmd_worker/base/config/schema.py"
BEFORE = '    def __post_init__(self) -> None:\n        """Check each key alone, and that every running sequence can'
FIELD = """    num_spare_seqs: int = option(
        3, "sequences that a step leaves room for", vllm_names=("num_lookahead_seqs",), least=1, is_common=True
    )

"""
ASKS = """
import inspect
import launch
from spmd_worker import EngineArgs
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.compat.key_names import with_keyword_names
from spmd_worker.compat.llm_keywords import LLMKeywords
assert launch.main(["--help", "scheduler.num_spare_seqs=5"]) == 0
assert launch.main(["--cfg", "job", "scheduler.num_spare_seqs=6"]) == 0
assert run_config({"model": "m", "num_spare_seqs": 7}).scheduler.num_spare_seqs == 7
assert run_config({"model": "m", "num_lookahead_seqs": 8}).scheduler.num_spare_seqs == 8
assert run_config(vars(EngineArgs("m", num_spare_seqs=9))).scheduler.num_spare_seqs == 9
assert inspect.signature(EngineArgs).parameters["num_spare_seqs"].default == 3
assert LLMKeywords.__annotations__["num_spare_seqs"] == int | None
try:
    run_config({"model": "m", "num_spare_seqs": 0})
except ConfigError as error:
    print(with_keyword_names(str(error), ["num_spare_seqs"]))
"""


@pytest.mark.stress
def test_new_option_is_one_edit(tmp_path: Path):
    shutil.copytree(REPOSITORY / "spmd_worker", tmp_path / "spmd_worker", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kv_cache", "conf", "launch.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "reference_pages.py", tmp_path / "scripts")
    schema = (tmp_path / SCHEMA).read_text(encoding="utf-8")
    assert schema.count(BEFORE) == 1
    (tmp_path / SCHEMA).write_text(schema.replace(BEFORE, FIELD + BEFORE), encoding="utf-8")
    (tmp_path / "asks.py").write_text(ASKS)
    own = {"PYTHONPATH": str(tmp_path)}
    write = [sys.executable, str(tmp_path / "scripts" / "reference_pages.py")]
    done = ranks.run_command(write, timeout_s=240, env=own, cwd=tmp_path).checked()
    page = (tmp_path / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert "| **`scheduler.num_spare_seqs`** | 3 | `num_spare_seqs` (`num_lookahead_seqs`) | sequences" in page
    names = (tmp_path / "docs" / "reference" / "vllm_names.md").read_text(encoding="utf-8")
    assert "| `num_spare_seqs` | sequences that a" in names
    done = ranks.run_command(
        [sys.executable, str(tmp_path / "asks.py")], timeout_s=240, env=own, cwd=tmp_path
    ).checked()
    assert re.search(r"(?m)^  scheduler\.num_spare_seqs=5 +sequences that a step leaves room for$", done.stdout)
    assert "  num_spare_seqs: 6\n" in done.stdout
    assert done.stdout.endswith("num_spare_seqs=0 must be 1 or more\n")
