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


def asked_of_python(folder: Path, *arguments: str, cwd: Path | None = None, **variables: str) -> list[str]:
    python, notes = folder / "python", folder / "notes"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), **variables}
    environment.pop("PYTHONPATH", None)
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, cwd=cwd, check=True, timeout=LIMIT_S)
    return notes.read_text().splitlines()


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def gpu_check():
    return script("gpu_check")


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
    probe, kernels, tests = (
        check.Part(name, [], 1.0, is_tests=name == "tests") for name in ("probe", "kernels", "tests")
    )
    failures = [
        (probe, 1, {"device": "H200"}),
        (probe, 0, {"failed": ["graphs"], "wrong": []}),
        (probe, 0, {"failed": [], "wrong": ["attention: split is whole, bit for bit"]}),
        (probe, 0, ["it says nothing", "that can be read"]),
        (kernels, 0, {"right": "", "wrong": "Traceback"}),
        (kernels, 0, {}),
        (tests, 0, ["7 skipped in 0.1s"]),
        (tests, 0, []),
    ]
    rights = [
        (probe, 0, {"failed": [], "wrong": []}),
        (kernels, 0, {"right": ""}),
        (tests, 0, ["6 passed, 1 skipped in 3.1s"]),
        (tests, 0, ["9/70 tests collected (61 deselected) in 3.12s"]),
    ]
    for cases, has_failed in ((failures, True), (rights, False)):
        for part, returncode, result in cases:
            assert check.has_failed(part, {"returncode": returncode, "result": result}) == has_failed, (part, result)


def test_a_part_whose_packages_are_missing_is_named_and_the_check_is_not_ok(tmp_path: Path, monkeypatch, capsys):
    check = gpu_check()
    ran = []
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "transformers" else name)
    # Of a part that is not there a JSON object says nothing, so these do.
    said = {"tests": ["3 passed in 1s"], "kernels": {"right": ""}}
    monkeypatch.setattr(
        check,
        "run",
        lambda part: (
            ran.append(part.name) or {"returncode": 0, "seconds": 1, "result": said.get(part.name, {"wrong": []})}
        ),
    )
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry"])
    assert check.main() == 1
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert ran == ["probe", "kernels", "benchmark tiny", "benchmark tiny, triton"]
    assert (report["failed"], report["is_ok"]) == ([], False)
    assert report["not_run"] == {"tests": ["transformers"], "compare": ["transformers"]}
    assert "gpu_check: compare does not run without transformers" in err
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    assert check.main() == 0
    assert len(ran) == 4 + 6


@pytest.mark.matrix
def test_what_the_contract_rests_on_must_have_its_value():
    """Bits that differed were said, and the probe ended well."""
    import torch

    findings = script("gpu_probe").Findings()
    findings.must("rows", [], [])
    findings.must("same", True, True)
    one = torch.ones(3)
    findings.must_be_near("near", one, one)
    assert findings.wrong == []
    findings.must("rows", [65], [])
    findings.must("same", False, True)
    findings.must_be_near("far", one * 2, one)
    findings.must_be_near("not a number", one * float("nan"), one)
    assert findings.wrong == ["rows", "same", "far", "not a number"]


def test_relative_paths_are_the_callers(tmp_path: Path):
    """They were looked for in the checkout."""
    (tmp_path / "a.whl").touch()
    notes = asked_of_python(tmp_path, cwd=tmp_path, PYTHON="./python", WHEELS=".")
    assert str(tmp_path / "a.whl") in notes[0].replace("/./", "/")
    assert notes[2] == "scripts/gpu_check.py"


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
def test_the_same_code_runs_without_a_gpu_and_ends_in_one_json_object():
    variables = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--dry"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["is_ok"]
    assert list(report["parts"]) == ["probe", "kernels", "tests", "compare", "benchmark tiny", "benchmark tiny, triton"]
    assert report["parts"]["probe"]["result"]["failed"] == []
