"""A test that hangs fails at its limit, with its name and where it was, and the run goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from waiting import LIMIT_S

RANKS_HANG = """
import pytest
import ranks

# Before any limit of time begins: on a busy machine the server takes longer to start than the tests' own.
ranks.run_ranks("", nproc=2, timeout_s=240)

@pytest.mark.timeout(8)
def test_whose_ranks_hang():
    source = "import time\\ndef innermost():\\n    time.sleep(1000)\\ninnermost()"
    ranks.run_ranks(source, nproc=2, timeout_s=1000)

def test_after_it():
    pass
"""

INTERPRETER_IS_HELD = """
import ctypes
import pytest

@pytest.mark.timeout(2)
def test_that_holds_the_interpreter():
    process, mutex = ctypes.PyDLL(None), (ctypes.c_char * 64)()
    process.pthread_mutex_lock(mutex)
    process.pthread_mutex_lock(mutex)

def test_after_that_too():
    pass
"""


def run_tests(folder: Path, source: str) -> tuple[int, str]:
    (folder / "test_planted.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 120\n")
    # What else is installed for pytest takes two seconds to import.
    plugins = [word for name in ("xdist", "pytest_timeout", "hang_guard") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "1", "test_planted.py"]
    path = os.pathsep.join(ranks.IMPORT_PATH)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.stress
def test_hanging_ranks_are_located_and_the_run_continues(tmp_path: Path):
    code, output = run_tests(tmp_path, RANKS_HANG)
    assert code == 1, output
    assert "test_planted.py::test_whose_ranks_hang has hung" in output
    assert 'test_planted.py", line 11 in test_whose_ranks_hang' in output, output
    # pytest's closing lines say it again where CI is set.
    assert output.partition("short test summary")[0].count('ranks_script.py", line 3 in innermost') == 2, output
    assert "1 failed, 1 passed" in output


@pytest.mark.stress
def test_hang_inside_interpreter_is_named_and_run_continues(tmp_path: Path):
    """A deadlock of the interpreter runs no Python any more, so that no limit of Python's ends it."""
    code, output = run_tests(tmp_path, INTERPRETER_IS_HELD)
    assert code == 1, output
    assert "test_planted.py::test_that_holds_the_interpreter has hung" in output
    assert re.search(r'test_planted.py", line \d+ in test_that_holds_the_interpreter', output), output
    assert "crashed while running 'test_planted.py::test_that_holds_the_interpreter'" in output
    assert "1 failed, 1 passed" in output
