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
BENCHMARKS = ("benchmark tiny", "benchmark tiny, triton", "benchmark tiny, eager triton")
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


def test_script_runs_the_given_interpreter_and_installs_nothing(tmp_path: Path):
    """It once made a .venv with the pinned torch, which is the CPU's where the index has one."""
    assert asked_of_python(tmp_path, "--dry") == ["scripts/gpu_check.py --dry", "path "]


def test_given_wheels_are_unpacked_without_a_registry(tmp_path: Path):
    (tmp_path / "omegaconf.whl").touch()
    install, _, check, path = asked_of_python(tmp_path, WHEELS=str(tmp_path))
    beside = path.removeprefix("path ")
    options = f"-m pip install --quiet --no-index --no-deps --no-compile --target {beside}"
    assert (install, check) == (f"{options} {tmp_path / 'omegaconf.whl'}", "scripts/gpu_check.py")
    assert not Path(beside).exists()


def test_final_output_of_part_decides_its_result():
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


def test_benchmark_with_error_or_short_rows_has_failed():
    """Kernels that answered NaN counted as ok: rows that ended as non_finite_logits were not looked at."""
    check = gpu_check()
    part = check.Part("benchmark", [], 1.0, num_output_tokens=200)
    right = {"error_rows": 0, "output_tokens": 200, "output_tokens_per_s": 1.0}
    for changed, has_failed in (
        ({}, False),
        ({"error_rows": 1}, True),
        ({"output_tokens": 199}, True),
        ({"output_tokens": None}, True),
    ):
        assert check.has_failed(part, {"returncode": 0, "result": right | changed}) == has_failed, changed
    assert check.has_failed(part, {"returncode": 0, "result": {"wrong": []}})


def test_benchmarks_match_their_rows_and_both_workers(tmp_path: Path):
    """The comparison runs with both workers."""
    for is_dry in (True, False):
        (tmp_path / str(is_dry)).mkdir()
        parts = gpu_check().parts(tmp_path / str(is_dry), is_dry=is_dry)
        benchmarks = [part for part in parts if part.name.startswith("benchmark")]
        for part in benchmarks:
            rows = [json.loads(line) for line in Path(part.arguments[2]).read_text().splitlines()]
            assert part.num_output_tokens == sum(row["max_tokens"] for row in rows), part
        assert [part.num_output_tokens for part in parts if part not in benchmarks] == [None] * 5
        plain, triton = (part for part in parts if part.name.startswith("compare"))
        assert "--worker-cls" not in plain.arguments
        assert triton.arguments[triton.arguments.index("--worker-cls") + 1].endswith(".TritonWorker")


def test_plain_benchmarks_have_few_rows(tmp_path: Path):
    """They had as many as the others, and could not end in their time."""
    for part in gpu_check().parts(tmp_path, is_dry=False):
        if part.name.startswith("benchmark"):
            assert part.num_output_tokens == (256 * 100 if part.name.endswith("triton") else 64 * 32), part.name


def test_comparison_with_short_rows_is_not_near(monkeypatch):
    """A row that ended as non_finite_logits was compared as far as it went, and counted as whole."""
    compare = script("gpu_compare")
    figures = {"dtype": "bfloat16", "device": "cpu", "num_tokens": 8, "num_same_tokens": 8, "tokens_per_s": 1.0}
    close = {"worst_lead": 0.0, "worst_logprob_difference": 0.0}
    assert compare.Comparison(**figures, **close, num_error_rows=0).is_near
    assert not compare.Comparison(**figures, **close, num_error_rows=1).is_near
    far = {"worst_lead": 0.0, "worst_logprob_difference": float("nan")}
    assert not compare.Comparison(**figures, **far, num_error_rows=0).is_near


@pytest.mark.matrix
def test_short_rows_of_comparison_are_counted(tmp_path: Path, monkeypatch):
    compare = script("gpu_compare")
    compare.make_checkpoint(tmp_path)
    prompts, run_ours, asked = compare.make_prompts(3), compare.run_ours, []

    def cut(*arguments):
        asked.append(arguments[-1])
        outputs, elapsed_s = run_ours(*arguments)
        for output, left in zip(outputs, (4, 2, 0), strict=True):
            del output.outputs[0].token_ids[left:], output.outputs[0].logprobs[left:]
        return outputs, elapsed_s

    whole = compare.compare(tmp_path, prompts, 4, "float32", "cpu")
    assert (whole.num_tokens, whole.num_error_rows, whole.is_near) == (12, 0, True)
    monkeypatch.setattr(compare, "run_ours", cut)
    worker = "spmd_worker.worker.worker.Worker"
    found = compare.compare(tmp_path, prompts, 4, "float32", "cpu", worker)
    assert (found.num_tokens, found.num_error_rows, found.is_near) == (6, 2, False)
    assert asked == [worker]


def test_missing_packages_of_part_fail_the_check(tmp_path: Path, monkeypatch, capsys):
    check = gpu_check()
    ran = []
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "transformers" else name)
    # Of a part that is not there a JSON object says nothing, so these do.
    said = {"tests": ["3 passed in 1s"], "kernels": {"right": ""}}
    said |= {key: {"error_rows": 0, "output_tokens": 6} for key in BENCHMARKS}
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
    assert ran == ["probe", "kernels", *BENCHMARKS]
    assert (report["failed"], report["is_ok"]) == ([], False)
    assert report["not_run"] == {key: ["transformers"] for key in ("tests", "compare", "compare, triton")}
    assert "gpu_check: compare does not run without transformers" in err
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    assert check.main() == 0
    assert len(ran) == 5 + 8


@pytest.mark.matrix
def test_contract_findings_must_have_their_value():
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


def test_part_over_its_limit_is_ended_others_continue():
    check = gpu_check()
    found = check.run(check.Part("hangs", ["-c", "import time; time.sleep(600)"], 2.0))
    assert found["returncode"] != 0
    assert found["result"][-1] == "ended after 2 s"


def test_all_parts_fit_into_ten_minutes(tmp_path: Path):
    parts = gpu_check().parts(tmp_path, is_dry=False)
    assert sum(part.limit_s for part in parts) < 600
    assert [part.name for part in parts][:4] == ["probe", "kernels", "tests", "compare"]


def test_files_marked_gpu_run_except_separate_parts(tmp_path: Path):
    """Two files were named, and those of the cache on CUDA and of a caller's world with NCCL never ran."""
    (tmp_path / "deeper").mkdir()
    marked = {
        "test_whole.py": "import pytest\npytestmark = pytest.mark.gpu\n",
        "deeper/test_values.py": "CUDA = pytest.param('cuda', marks=[pytest.mark.gpu])\n",
        "deeper/test_short.py": "from pytest import mark\n@mark.gpu\ndef test_it(): ...\n",
    }
    for name, text in {**marked, "test_cpu.py": "def test_it(): ...\n", "helper.py": "mark.gpu"}.items():
        (tmp_path / name).write_text(text)
    asked = gpu_check().tests_of(tmp_path, is_dry=False)
    assert [each for each in asked if each.endswith(".py")] == [str(tmp_path / name) for name in sorted(marked)]
    assert asked[asked.index("-k") + 1] == "not near_transformers and not kernels_on_a_gpu"


@pytest.mark.stress
def test_every_test_marked_gpu_is_run():
    """As pytest finds them in all of tests/, which takes half a minute."""
    check = gpu_check()

    def collected(*arguments: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    everything = collected("-m", "gpu", "tests")
    own = {each for each in everything if any(words in each for words in check.OWN_PARTS)}
    assert len(own) == len(check.OWN_PARTS)
    asked = check.tests_of(REPOSITORY / "tests", is_dry=False)
    assert asked[:3] == ["-m", "pytest", "-q"]
    assert collected(*asked[3:]) == everything - own


@pytest.mark.stress
def test_dry_run_needs_no_gpu_and_prints_json():
    """The code is that of the run on a GPU."""
    variables = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--dry"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["is_ok"]
    benchmarks = ["benchmark tiny", "benchmark tiny, triton", "benchmark tiny, eager triton"]
    names = ["probe", "kernels", "tests", "compare", "compare, triton", *benchmarks]
    assert list(report["parts"]) == names
    assert report["parts"]["probe"]["result"]["failed"] == []
