"""What compile_tests.py leaves is what pytest reads, until the module is another one."""

import os
import subprocess
import sys
from pathlib import Path

from compile_tests import compiled_by_pytest, rewrite_assertions


def version_of(module: Path) -> tuple[int, int]:
    status = compiled_by_pytest(module).stat()
    return status.st_ino, status.st_mtime_ns


def test_pytest_reads_what_was_rewritten_before(tmp_path: Path):
    module = tmp_path / "test_planted.py"
    module.write_text("def test():\n    assert [1, 2] == [1, 3]\n")
    rewrite_assertions([module])
    before = version_of(module)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(module)]
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "At index 1 diff: 2 != 3" in done.stdout
    assert version_of(module) == before, "pytest has written its own"
    # Control.
    module.write_text("def test():\n    assert [1, 2] == [1, 4]\n")
    rewrite_assertions([module])
    assert version_of(module) != before
