"""The check on a GPU, without one: what it runs, what it never does, and how it reads what its parts say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY
from waiting import LIMIT_S

SCRIPT = REPOSITORY / "scripts" / "gpu_check.sh"
# Stands for an interpreter: notes what it is asked for.
FAKE_PYTHON = '#!/bin/sh\necho "$@" >>"$NOTES"\necho "path $PYTHONPATH" >>"$NOTES"\n'


def asked_of_python(folder: Path, *arguments: str, **variables: str) -> list[str]:
    python, notes = folder / "python", folder / "notes"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), **variables}
    environment.pop("PYTHONPATH", None)
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, check=True, timeout=LIMIT_S)
    return notes.read_text().splitlines()


def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", REPOSITORY / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs_the_interpreter_it_is_given_and_installs_nothing(tmp_path: Path):
    """It once made a .venv with the pinned torch, which is the CPU's where the index has one."""
    assert asked_of_python(tmp_path, "--dry") == ["scripts/gpu_check.py --dry", "path "]


def test_wheels_that_are_given_are_unpacked_beside_it_without_a_registry(tmp_path: Path):
    (tmp_path / "omegaconf.whl").touch()
    install, _, check, path = asked_of_python(tmp_path, WHEELS=str(tmp_path))
    beside = path.removeprefix("path ")
    options = f"-m pip install --quiet --no-index --no-deps --no-compile --target {beside}"
    assert (install, check) == (f"{options} {tmp_path / 'omegaconf.whl'}", "scripts/gpu_check.py")
    assert not Path(beside).exists()


def test_what_a_part_ends_with_is_read_and_what_it_found_counts():
    check = gpu_check()
    assert check.result_of(["words", '{"a": 1}', "a warning after it"]) == {"a": 1}
    assert check.result_of(["one", "{no object}"]) == ["one", "{no object}"]
    assert check.has_failed("probe", {"returncode": 1, "result": {}})
    assert check.has_failed("kernels", {"returncode": 0, "result": {"right": "", "wrong": "Traceback"}})
    assert not check.has_failed("kernels", {"returncode": 0, "result": {"right": ""}})


def test_a_part_that_takes_too_long_is_ended_and_the_others_go_on():
    check = gpu_check()
    found = check.run(check.Part("hangs", ["-c", "import time; time.sleep(600)"], 2.0))
    assert found["returncode"] != 0
    assert found["result"][-1] == "ended after 2 s"


def test_all_parts_fit_into_ten_minutes(tmp_path: Path):
    parts = gpu_check().parts(tmp_path, is_dry=False)
    assert sum(part.limit_s for part in parts) < 600
    assert [part.name for part in parts][:4] == ["probe", "kernels", "tests", "compare"]


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_the_same_code_runs_without_a_gpu_and_ends_in_one_json_object():
    variables = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--dry"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["is_ok"]
    assert list(report["parts"]) == ["probe", "kernels", "tests", "compare", "benchmark tiny", "benchmark tiny, triton"]
    assert report["parts"]["probe"]["result"]["failed"] == []
