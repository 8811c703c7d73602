"""File system faults under a job: a full disk, device errors, partial writes, no lock, no descriptor.

A preloaded library fails the n-th call on a file of the job, for each kind of call, each n and each error: the stress
tier tests every n and prints the figures, the gate every eighteenth.
"""

import json
import os
import sys
import textwrap
from pathlib import Path

import preloaded
import pytest
import ranks

SCRIPT = ranks.SUPPORT / "faulty_job.py"
PLANTED = f"""
    import os, sys
    from pathlib import Path
    rename = os.replace

    def careless(*arguments):
        try:
            rename(*arguments)
        except OSError:
            pass

    os.replace = careless
    sys.path.insert(0, {str(SCRIPT.parent)!r})
    import faulty_job
    faulty_job.CALLS = {{"rename": (5,)}}
    sys.exit(faulty_job.main())
    """


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloaded.build("faulty_io", tmp_path_factory.mktemp("faults"))


def run(library: Path, script: Path, folder: Path, every: int) -> tuple[int, dict[str, object], str]:
    # A fresh interpreter: what is preloaded is loaded when a program starts.
    command = [sys.executable, str(script), str(folder), str(every)]
    path = os.pathsep.join(ranks.IMPORT_PATH)
    done = ranks.run_command(command, 1200.0, {"LD_PRELOAD": str(library), "PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.output
    print(f"\nFAULTS {lines[-1]}", end="")
    return done.returncode, json.loads(lines[-1]), done.output


@pytest.mark.parametrize(
    "every", [pytest.param(45, marks=pytest.mark.matrix), pytest.param(1, marks=[pytest.mark.stress])]
)
def test_any_fault_gives_one_error_and_resumes_exactly(library: Path, tmp_path: Path, every: int):
    returncode, found, output = run(library, SCRIPT, tmp_path, every)
    assert returncode == 0, output
    assert found["failed"] > 100 // every
    assert found["answered"] > 20 // every


@pytest.mark.matrix
def test_fault_injection_detects_an_unchecked_error(library: Path, tmp_path: Path):
    """Negative control."""
    script = tmp_path / "planted.py"
    script.write_text(textwrap.dedent(PLANTED))
    returncode, found, output = run(library, script, tmp_path, 1)
    assert returncode == 1, output
    assert "EIO: exit code 0 and other bytes" in str(found["troubles"])
