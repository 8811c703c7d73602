"""File system faults under a job: a full disk, device errors, partial writes, no lock, no descriptor.

A preloaded library fails the n-th call on a file of the job, for each kind of call, each n and each error: the stress
tier tests every n and prints the figures, the gate every forty-fifth.
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
RIGHT_AND_PLANTED = f"""
    import os, sys
    from pathlib import Path
    sys.path.insert(0, {str(SCRIPT.parent)!r})
    import faulty_job
    code = faulty_job.main()
    rename = os.replace

    def careless(*arguments):
        try:
            rename(*arguments)
        except OSError:
            pass

    os.replace = careless
    faulty_job.CALLS = {{"rename": (5,)}}
    sys.argv[2] = "4"
    sys.exit(code or 10 + faulty_job.main())
    """


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloaded.build("faulty_io", tmp_path_factory.mktemp("faults"))


def run(library: Path, script: Path, folder: Path, every: int) -> tuple[int, list[dict[str, object]], str]:
    """The exit code, what was found each time, and the output."""
    # A fresh interpreter: what is preloaded is loaded when a program starts.
    command = [sys.executable, str(script), str(folder), str(every)]
    path = os.pathsep.join(ranks.IMPORT_PATH)
    done = ranks.run_command(command, 1200.0, {"LD_PRELOAD": str(library), "PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.output
    print(f"\nFAULTS {lines[-1]}", end="")
    return done.returncode, [json.loads(line) for line in lines], done.output


@pytest.fixture(scope="module")
def right_and_planted(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict], str]:
    """Every 45th fault, then every fourth of renaming under a planted mistake: one process imports all once."""
    folder = tmp_path_factory.mktemp("right_and_planted")
    (folder / "script.py").write_text(textwrap.dedent(RIGHT_AND_PLANTED))
    return run(library, folder / "script.py", folder, 45)


def check_found(found: dict[str, object], every: int) -> None:
    assert not found["troubles"]
    assert found["failed"] > 100 // every
    assert found["answered"] > 20 // every


@pytest.mark.matrix
def test_any_fault_gives_one_error_and_resumes_exactly(right_and_planted: tuple[int, list[dict], str]):
    code, (found, _), output = right_and_planted
    assert code >= 10, output
    check_found(found, 45)


@pytest.mark.stress
def test_every_fault_gives_one_error_and_resumes_exactly(library: Path, tmp_path: Path):
    code, (found,), output = run(library, SCRIPT, tmp_path, 1)
    assert code == 0, output
    check_found(found, 1)


@pytest.mark.matrix
def test_fault_injection_detects_an_unchecked_error(right_and_planted: tuple[int, list[dict], str]):
    """Negative control."""
    code, (_, found), output = right_and_planted
    assert code == 11, output
    assert "EIO: exit code 0 and other bytes" in str(found["troubles"])
