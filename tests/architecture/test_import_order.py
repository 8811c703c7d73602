"""The order of the house holds, and each way of breaking it is seen. Every torch-free module imports where torch cannot
be imported: on a head node, in a replay tool, in a test.
"""

import json
import subprocess
import sys
from pathlib import Path

import house
import pytest
from import_rules import import_violations, is_torch_free
from planting import CLEAN_HOUSE, REPOSITORY, plant
from source_tree import read_modules

DOC = '"""Planted."""\n\n'
ENGINE, SCHEDULER, BLOCK = "kv_cache/cache_engine.py", "spmd_worker/replica/scheduler/scheduler.py", "kv_cache/block.py"
REQUEST, LAYOUT = "spmd_worker/replica/sequence/request.py", "spmd_worker/ranks/topology.py"
READER = "spmd_worker/frontends/batch/input/row_reader.py"
TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"

# file -> what is appended to it, and the words of the violation that it must raise
PLANTED = [
    # The order, wherever the import stands.
    (BLOCK, "import spmd_worker.base.config.schema", "spmd_worker.base.config.schema stands below kv_cache.block"),
    (REQUEST, "import spmd_worker.frontends.batch.output_file", "spmd_worker.frontends.batch.output_file stands below"),
    (REQUEST, "def late():\n    import spmd_worker.frontends.batch.output_file", "stands below"),
    (REQUEST, f"{TYPE_CHECKING}    import spmd_worker.frontends.batch.output_file", "stands below"),
    (REQUEST, "import importlib\nimportlib.import_module('spmd_worker.frontends.batch.output_file')", "stands below"),
    (REQUEST, "from importlib import import_module as load\nload('spmd_worker.llm')", "which imports torch"),
    ("spmd_worker/ranks/groups.py", "from spmd_worker.llm import LLM", "spmd_worker.llm stands below"),
    (REQUEST, "from spmd_worker import LLM", "spmd_worker is for users"),
    (LAYOUT, "import spmd_worker.tools.report", "spmd_worker.tools.report is for users"),
    (REQUEST, "from spmd_worker.attic import old", "spmd_worker.attic stands nowhere in the house"),
    (REQUEST, "import launch", "launch is not among the dependencies"),
    # What is apart.
    (REQUEST, "from spmd_worker.ranks import topology", "spmd_worker.ranks.topology is apart from"),
    (LAYOUT, "import spmd_worker.replica.sequence.request", "stands below spmd_worker.ranks.topology"),
    # Torch, and what brings it.
    (SCHEDULER, "import torch", "spmd_worker.replica.scheduler.scheduler is torch-free and imports torch"),
    (SCHEDULER, "import torch.distributed as dist", "is torch-free and imports torch"),
    (SCHEDULER, "def late():\n    from torch import Tensor", "is torch-free and imports torch"),
    (SCHEDULER, f"{TYPE_CHECKING}    import torch", "is torch-free"),
    (SCHEDULER, "from safetensors.torch import save_file", "safetensors is not among the dependencies"),
    (BLOCK, "from kv_cache import cache_engine", "imports kv_cache.cache_engine, which imports torch"),
    (SCHEDULER, "import spmd_worker.ranks.transport.channel", "ranks.transport.channel, which imports torch"),
    (READER, "from spmd_worker.llm import LLM", "imports spmd_worker.llm, which imports torch, at top level"),
    (READER, "import spmd_worker.frontends.batch.job", "spmd_worker.frontends.batch.job, which imports torch"),
    ("launch.py", "import torch", "launch imports torch, at top level"),
    (
        "launch.py",
        "from spmd_worker.frontends.batch.job import run",
        "launch imports spmd_worker.frontends.batch.job, which imports torch",
    ),
    ("spmd_worker/__init__.py", "from spmd_worker.llm import LLM", "which imports torch, at top level"),
    # Third parties.
    (REQUEST, "import requests", "requests is not among the dependencies"),
    (
        REQUEST,
        "def late():\n    import pyarrow",
        "pyarrow is optional and for spmd_worker.frontends.batch.input.input_files and",
    ),
    (
        "spmd_worker/frontends/batch/output_file.py",
        "import pyarrow",
        "pyarrow is optional: import it where it is needed",
    ),
    (REQUEST, "import pandas", "pandas is not among the dependencies"),
    (REQUEST, "from omegaconf import DictConfig", "omegaconf is for spmd_worker.base.config.compose only"),
    ("spmd_worker/base/config/schema.py", "import hydra", "hydra is for spmd_worker.base.config.compose only"),
    # Bytes and names that become code.
    (REQUEST, "import pickle", "pickle is forbidden"),
    (REQUEST, "from marshal import loads", "marshal is forbidden"),
    (REQUEST, "def late():\n    import shelve", "shelve is forbidden"),
    (REQUEST, "eval('1')", "eval is forbidden"),
    (REQUEST, "exec('1')", "exec is forbidden"),
    (REQUEST, "__import__('torch')", "__import__ is forbidden"),
    (ENGINE, "torch.load('weights.bin')", "torch.load is forbidden"),
    (ENGINE, "import torch as t\nload = t.load", "torch.load is forbidden"),
    (ENGINE, "from torch import load", "torch.load is forbidden"),
    (ENGINE, "import torch.distributed as dist\ndist.broadcast_object_list([])", "broadcast_object_list is forbidden"),
    (ENGINE, "import numpy as np\nnp.load('x.npy')", "numpy.load is forbidden"),
    ("spmd_worker/base/config/compose.py", "hydra.utils.instantiate({})", "hydra.utils.instantiate is forbidden"),
    (
        "spmd_worker/base/config/compose.py",
        "from hydra.utils import instantiate",
        "hydra.utils.instantiate is forbidden",
    ),
    (REQUEST, "KEY = '_target_'", "_target_ is forbidden"),
    (REQUEST, "class Config:\n    _target_: str = 'x'", "_target_ is forbidden"),
    (REQUEST, "dict(_target_='x')", "_target_ is forbidden"),
    # Imports that hide.
    (REQUEST, "from . import other", "relative import"),
    (REQUEST, "from ..scheduler import scheduler", "relative import"),
    (REQUEST, "from kv_cache.block import *", "a star hides"),
    (REQUEST, "import importlib\nimportlib.import_module(NAME)", "computed or relative name"),
    (REQUEST, "import importlib\nimportlib.import_module('.x', 'spmd_worker')", "computed or relative name"),
]


@pytest.mark.guarantee("No pickle, no eval; .bin refused")
def test_repository_keeps_its_import_order():
    assert import_violations(REPOSITORY) == []


def test_clean_tree_has_no_violation(tmp_path: Path):
    assert import_violations(plant(tmp_path, {})) == []


@pytest.mark.control("No pickle, no eval; .bin refused")
@pytest.mark.parametrize(("path", "code", "words"), PLANTED, ids=lambda value: str(value)[:50])
def test_import_check_detects_violation_at_its_line(tmp_path: Path, path: str, code: str, words: str):
    found = import_violations(plant(tmp_path, {path: f"+\n{code}\n"}))
    first_line = CLEAN_HOUSE[path].count("\n") + 2
    lines = range(first_line, first_line + code.count("\n") + 1)
    assert [v for v in found if words in v and int(v.split(":")[1]) in lines], found
    # What imports the file may now need torch as well.
    assert all(v.startswith((f"{path}:", "import cycle:", "cycle of folders:")) for v in found if "torch" not in v)


def test_import_check_detects_unlisted_module_and_folder(tmp_path: Path):
    files = {"spmd_worker/util/__init__.py": "", "spmd_worker/util/misc.py": DOC}
    assert import_violations(plant(tmp_path, files)) == [
        "spmd_worker/util/__init__.py:1: spmd_worker.util stands nowhere in the house: "
        "give it a place in house.py's WINGS",
        "spmd_worker/util/misc.py:1: spmd_worker.util.misc stands nowhere in the house: "
        "give it a place in house.py's WINGS",
    ]


def test_import_check_detects_init_code_and_missing_init(tmp_path: Path):
    files = {
        "spmd_worker/replica/sequence/__init__.py": "from json import loads\n",
        "spmd_worker/ops/kernels/cpu/gemm.py": DOC,
    }
    found = import_violations(plant(tmp_path, files))
    assert [violation.split(":")[0] for violation in found] == [
        "spmd_worker/replica/sequence/__init__.py",
        "spmd_worker/ops/kernels/cpu",
    ]


def test_import_check_detects_and_names_cycle_once(tmp_path: Path):
    files = {
        "spmd_worker/replica/sequence/first.py": DOC + "import spmd_worker.replica.sequence.second\n",
        "spmd_worker/replica/sequence/second.py": DOC
        + "def late():\n    from spmd_worker.replica.sequence import third\n",
        "spmd_worker/replica/sequence/third.py": DOC + "from spmd_worker.replica.sequence.first import x\n",
        "spmd_worker/replica/scheduler/user.py": DOC + "import spmd_worker.replica.sequence.first\n",
    }
    found = import_violations(plant(tmp_path, files))
    names = [f"spmd_worker.replica.sequence.{name}" for name in ("first", "second", "third", "first")]
    assert found == [f"import cycle: {' -> '.join(names)}"]


def test_import_check_detects_cycle_of_folders(tmp_path: Path):
    files = {
        "spmd_worker/replica/sequence/late.py": DOC + "import spmd_worker.replica.scheduler.scheduler\n",
        "spmd_worker/replica/scheduler/own.py": DOC + "import spmd_worker.replica.scheduler.scheduler\n",
    }
    found = import_violations(plant(tmp_path, files))
    names = [f"spmd_worker.replica.{name}" for name in ("scheduler", "sequence", "scheduler")]
    assert found == [f"cycle of folders: {' -> '.join(names)}"]


def test_import_check_detects_indirect_torch_import_by_command(tmp_path: Path):
    files = {
        "spmd_worker/ranks/topology.py": "+\nimport spmd_worker.ranks.groups\n",
        "spmd_worker/tools/__init__.py": "",
        "spmd_worker/tools/plan.py": DOC + "import spmd_worker.frontends.batch.input.row_reader\n",
    }
    assert import_violations(plant(tmp_path, files)) == [
        f"{READER}:3: spmd_worker.frontends.batch.input.row_reader imports spmd_worker.ranks.topology, "
        "which imports torch, at top level",
        "spmd_worker/tools/plan.py:3: spmd_worker.tools.plan imports "
        "spmd_worker.frontends.batch.input.row_reader, which imports torch, at top level",
    ]


def test_import_check_detects_target_in_yaml(tmp_path: Path):
    found = import_violations(plant(tmp_path, {"conf/model/m.yaml": "path: x\n_target_: os.system\n"}))
    assert found == ["conf/model/m.yaml:2: _target_ is forbidden: YAML holds values only"]


def test_import_check_detects_early_import_of_optional_language(tmp_path: Path):
    kernels, room = "spmd_worker/ops/kernels/triton/matmul_kernels.py", "spmd_worker/ops/kernels"
    files = {
        **{f"{folder}/__init__.py": "" for folder in (room, f"{room}/triton", "spmd_worker/worker")},
        kernels: DOC + "import triton\n",
        f"{room}/triton/matmul.py": DOC + "import spmd_worker.ops.kernels.triton.matmul_kernels\n",
        "spmd_worker/worker/late.py": DOC + "def f():\n    import spmd_worker.ops.kernels.triton.matmul\n",
        "spmd_worker/worker/early.py": DOC + "import spmd_worker.ops.kernels.triton.matmul\n",
        "spmd_worker/worker/own.py": DOC + "def f():\n    import triton\n",
    }
    early, own = import_violations(plant(tmp_path, files))
    assert early.startswith(
        "spmd_worker/worker/early.py:3: spmd_worker.ops.kernels.triton.matmul is in the language of an"
    )
    assert own.startswith("spmd_worker/worker/own.py:4: triton is optional and for spmd_worker.ops.kernels.triton only")


def test_entry_points_may_import_late_or_for_types(tmp_path: Path):
    code = "+\nif TYPE_CHECKING:\n    from spmd_worker.llm import LLM\n\n\ndef late():\n    import torch\n"
    assert import_violations(plant(tmp_path, {"launch.py": code, "spmd_worker/__init__.py": code})) == []


def test_similar_names_are_not_import_violations(tmp_path: Path):
    code = "+\nmodel.eval()\nself.load(path)\nimport re\nre.compile('x')\npickled = 1\n"
    assert import_violations(plant(tmp_path, {ENGINE: code, REQUEST: code})) == []


@pytest.mark.stress
def test_import_check_detects_appended_torch_in_real_tree(tmp_path: Path):
    torch_free = [m for m in read_modules(REPOSITORY).values() if is_torch_free(m.name) and m.text]
    for module in torch_free:
        planted = tmp_path / module.path
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(f"{module.text}\n\nimport torch\n", encoding="utf-8")
    found = [v.split(":")[0] for v in import_violations(tmp_path) if "torch-free" in v or "imports torch" in v]
    assert set(found) == {str(module.path) for module in torch_free}


def test_every_path_of_house_exists_in_its_wing():
    modules = read_modules(REPOSITORY)
    paths = (*house.WINGS, *house.APART, *house.COMMANDS, *house.WITHOUT_TORCH, *house.WITH_TORCH, *house.TORCH_LATE)
    assert [path for path in paths if path not in modules] == []
    assert all(house.is_within_any(path, house.WITHOUT_TORCH) for path in house.WITH_TORCH)
    assert all(house.may_import_torch(path) for path in (*house.WITH_TORCH, *house.TORCH_LATE))


# Refuses torch as if it were not installed, imports what it is told on stdin, prints {module: error} of what fails.
IMPORT_WITHOUT_TORCH = """
import importlib, json, sys


class RefuseTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"torch is blocked, and {name} was asked for", name=name)


sys.meta_path.insert(0, RefuseTorch())
sys.path.insert(0, sys.argv[1])
failures = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


def import_without_torch(root: Path, names: list[str]) -> dict[str, str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, str(root)]
    done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def torch_free_modules(root: Path) -> list[str]:
    return [name for name in read_modules(root) if is_torch_free(name)]


def test_every_torch_free_module_imports_without_torch():
    assert import_without_torch(REPOSITORY, torch_free_modules(REPOSITORY)) == {}


def test_torch_check_detects_import_through_other_modules(tmp_path: Path):
    planted = {
        "kv_cache/block.py": '"""Blocks."""\n\nBlockId = int\n',
        "kv_cache/block_pool.py": '"""Pool."""\n\nfrom kv_cache.cache_engine import engine\n',
        "kv_cache/cache_manager.py": '"""Manager."""\n\nimport kv_cache.block_pool\n',
        "kv_cache/cache_engine.py": '"""Tensors."""\n\nimport torch\n',
    }
    names = ["kv_cache.block", "kv_cache.block_pool", "kv_cache.cache_manager"]
    blocked = "ModuleNotFoundError: torch is blocked, and torch was asked for"
    found = import_without_torch(plant(tmp_path, planted), names)
    assert found == {"kv_cache.block_pool": blocked, "kv_cache.cache_manager": blocked}


def test_cache_manager_and_scheduler_import_no_torch():
    command = (
        "import kv_cache.cache_manager, spmd_worker.replica.scheduler.scheduler, sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
