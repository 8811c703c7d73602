"""The check on a GPU, without one: what it runs, what it never does, how it reads what its parts say, and how results
become a page.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY
from waiting import LIMIT_S, wait_until

SCRIPT = REPOSITORY / "scripts" / "gpu_check.sh"
# Stands for an interpreter: notes what it is asked for, and says that all wheels are lacking.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >>"$NOTES"
echo "path $PYTHONPATH" >>"$NOTES"
if [ "$2" = --lacking ]; then ls "$3"/*.whl; fi
"""


def asked_of_python(folder: Path, *arguments: str, cwd: Path | None = None, **variables: str) -> list[str]:
    python, notes = folder / "python", folder / "notes"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), **variables}
    environment.pop("PYTHONPATH", None)
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, cwd=cwd, check=True, timeout=LIMIT_S)
    return [line.replace(f"{REPOSITORY}/", "") for line in notes.read_text().splitlines()]


def script(name: str):
    scripts = str(REPOSITORY / "scripts")
    if scripts not in sys.path:
        sys.path.append(scripts)
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def gpu_check():
    return script("gpu_check")


def printing(value: object) -> list[str]:
    """Arguments of an interpreter that ends with this JSON."""
    return ["-c", f"print({json.dumps(value)!r})"]


def test_script_runs_the_given_interpreter_and_installs_nothing(tmp_path: Path):
    """It once made a .venv with the pinned torch, which is the CPU's where the index has one."""
    assert asked_of_python(tmp_path, "--dry") == ["scripts/gpu_check.py --dry", "path "]


def test_given_wheels_are_unpacked_without_a_registry(tmp_path: Path):
    (tmp_path / "omegaconf.whl").touch()
    lacking, _, install, _, check, path = asked_of_python(tmp_path, WHEELS=str(tmp_path))
    beside = path.removeprefix("path ")
    options = f"-m pip install --quiet --no-index --no-deps --no-compile --target {beside}"
    assert lacking == f"scripts/gpu_check.py --lacking {tmp_path}"
    assert (install, check) == (f"{options} {tmp_path / 'omegaconf.whl'}", "scripts/gpu_check.py")
    assert not Path(beside).exists()


def test_only_lacking_wheels_are_named(tmp_path: Path):
    """A wheel of what is installed would be put before it."""
    for name in ("pytest-1.0-py3-none-any.whl", "not_a_package_here-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert [path.name for path in gpu_check().lacking_wheels(tmp_path)] == ["not_a_package_here-1.0-py3-none-any.whl"]


def test_relative_paths_are_the_callers(tmp_path: Path):
    """They were looked for in the checkout."""
    (tmp_path / "a.whl").touch()
    notes = asked_of_python(tmp_path, cwd=tmp_path, PYTHON="./python", WHEELS=".")
    assert str(tmp_path / "a.whl") in notes[2].replace("/./", "/")
    assert notes[4] == "scripts/gpu_check.py"


def test_final_output_of_part_decides_its_result():
    check = gpu_check()
    assert check.result_of(["words", '{"a": 1}', "a warning after it"]) == {"a": 1}
    assert check.result_of(["one", "{no object}"]) == {}
    probe, cases, tests = (
        check.Part(name, "bits", [], 1.0, is_tests=name == "tests") for name in ("probe bits", "cases", "tests")
    )
    right, wrong = {"failed": [], "wrong": []}, {"failed": [], "wrong": ["attention: other bits"]}
    expected = [
        (probe, 1, right, "failed"),
        (probe, 0, {"failed": ["graphs"], "wrong": []}, "failed"),
        (probe, 0, wrong, "failed"),
        (probe, 0, {"is_near": False}, "failed"),
        (probe, 0, "it says nothing that can be read", "failed"),
        (probe, 0, {**right, "not_offered": {"fp8": "not yet"}}, "not offered"),
        (probe, 0, {**wrong, "not_offered": {"fp8": "not yet"}}, "failed"),
        (probe, 0, right, "ok"),
        (cases, 0, {"right": "", "wrong": "Traceback"}, "failed"),
        (cases, 0, {}, "failed"),
        (cases, 0, {"right": ""}, "ok"),
        (tests, 0, "7 skipped in 0.1s", "failed"),
        (tests, 0, "", "failed"),
        (tests, 1, "6 passed, 1 failed in 3.1s", "failed"),
        (tests, 0, "6 passed, 1 skipped in 3.1s", "ok"),
        (tests, 0, "9/70 tests collected (61 deselected) in 3.12s", "ok"),
    ]
    for part, returncode, said, state in expected:
        lines = tuple((said if isinstance(said, str) else json.dumps(said)).splitlines())
        found = check.judged(part, returncode, 1.0, lines)
        assert found.state == state, (part.name, said)
        assert bool(found.why) == (state != "ok"), found


def test_parts_are_chosen_by_words_and_kinds():
    check = gpu_check()
    every = check.parts(is_dry=False)
    names = [part.name for part in check.chosen_parts(every, ["bits", "warm", "alone", "speed"], ["matmul", "experts"])]
    of_cases = ["cases experts", "cases matmul"]
    assert names == ["bits experts", *of_cases, "warm matmul", "speed matmul", "warm experts", "speed experts"]
    assert {part.kind for part in check.chosen_parts(every, ["bits", "alone"], [])} == {"bits", "alone"}
    assert [part.name for part in check.chosen_parts(every, ["bits"], ["compare plain torch"])] == [
        "compare plain torch"
    ]
    with pytest.raises(ValueError, match="--only nothing names no part"):
        check.chosen_parts(every, ["bits"], ["matmul", "nothing"])


def test_every_speed_has_a_part_that_warms_it():
    every = gpu_check().parts(is_dry=False)
    warmed = [part.name.removeprefix("warm ") for part in every if part.kind == "warm"]
    assert warmed == [part.name.removeprefix("speed ") for part in every if part.kind == "speed"]
    assert len(warmed) == 11
    assert all(part.limit_s <= 90 for part in every)


def test_every_file_of_kernel_cases_is_a_part():
    names = [part.name for part in gpu_check().parts(is_dry=False)]
    files = sorted((REPOSITORY / "tests" / "ops" / "kernels").glob("triton_*cases.py"))
    assert len([name for name in names if name.split()[0] == "cases"]) == len(files) >= 1


HANGS = "import pathlib, sys, time; print('on it', flush=True); pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
HANGS_S = 0.75


def test_failing_and_hanging_parts_take_no_other_down(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Control included: the part that hangs would be running still. Its time begins when it is on it."""
    check = gpu_check()
    out, note, has_ended = tmp_path / "out.jsonl", tmp_path / "on it", check._has_ended

    def has_ended_once_on_it(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
        if limit_s == HANGS_S:
            wait_until(note.exists)
        return has_ended(process, limit_s)

    monkeypatch.setattr(check, "_has_ended", has_ended_once_on_it)
    running = check.Check(out, tmp_path, 60.0)
    some = [
        check.Part("hangs", "bits", ["-c", HANGS, str(note)], HANGS_S),
        check.Part("fails", "bits", ["-c", "raise SystemExit('it is broken')"], 60.0),
        check.Part("right", "bits", printing({"wrong": [], "figures": [{"name": "a"}]}), 60.0),
        check.Part("lacks", "bits", [], 60.0, needs=("no_such_module_here",)),
    ]
    running.run_side_by_side(some, 60.0, 4)
    running.run_one(check.Part("too late", "speed", [], 60.0), 0.0)
    states = {each.part.name: (each.state, each.why) for each in running.outcomes}
    assert states == {
        "hangs": ("late", "ended after 1 s"),
        "fails": ("failed", "it ended without a JSON object"),
        "right": ("ok", ""),
        "lacks": ("not run", "no no_such_module_here"),
        "too late": ("not run", "no time is left"),
    }
    records = {record["part"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert records["right"]["figures"] == [{"name": "a"}]
    assert records["right"]["result"] == {"wrong": []}
    summary = check.summary(running.outcomes)
    assert (sorted(summary["failed"]), summary["is_ok"]) == (["fails", "hangs"], False)
    assert list(summary["not_run"]) == ["lacks", "too late"]
    shown = capsys.readouterr().out
    assert "on it" in shown
    assert "it is broken" in shown


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_check
signal.signal(signal.SIGTERM, gpu_check.end_all)
start = gpu_check.subprocess.Popen
if sys.argv[3:]:
    gpu_check.subprocess.Popen = lambda *given, **named: (start(*given, **named), time.sleep(600))[0]
hangs = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
gpu_check.run(gpu_check.Part("hangs", "bits", ["-c", hangs, sys.argv[2]], 600.0), 600.0, Path("."))
"""


@pytest.mark.parametrize("when", [(), ("while it starts one",)], ids=["runs", "starts"])
def test_ended_check_leaves_no_part_behind(tmp_path: Path, when: tuple[str, ...]):
    """Parts are in sessions of their own, and would hold the GPU."""
    note = tmp_path / "pid"
    command = [sys.executable, "-c", INTERRUPTED, str(REPOSITORY / "scripts"), str(note), *when]
    with subprocess.Popen(command) as running:
        wait_until(lambda: note.exists() and note.read_text() != "")
        part = int(note.read_text())
        assert Path(f"/proc/{part}").exists()
        running.terminate()
        assert running.wait(LIMIT_S) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(part))


def is_running(pid: int) -> bool:
    """Whether there is such a process, which is not only waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_late_warming_does_not_fail_the_check():
    check = gpu_check()
    warm, speed = check.Part("warm 8b", "warm", [], 1.0), check.Part("speed 8b", "speed", [], 1.0)
    assert check.summary([check.Outcome(warm, "late"), check.Outcome(speed, "ok")])["is_ok"]
    assert not check.summary([check.Outcome(warm, "ok"), check.Outcome(speed, "late")])["is_ok"]


def test_missing_packages_of_part_fail_the_check(tmp_path: Path, monkeypatch, capsys):
    check = gpu_check()
    ran = []
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "transformers" else name)
    monkeypatch.setattr(check, "run", lambda part, limit_s, cache: ran.append(part.name) or check.Outcome(part, "ok"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry", "--only", "demo,dense,tests,speed matmul"])
    assert check.main() == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(ran) == ["job demo", "speed matmul"]
    assert (report["failed"], report["is_ok"]) == ([], False)
    assert report["not_run"] == {"bits dense": "no transformers", "tests": "no transformers"}
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    assert check.main() == 0


FIGURE = {"library": 99.0, "floor": 76.0, "wanted": 118.8, "is_least": False}
RESULTS = [
    {"about": {"device": "an older one"}},
    {"part": "speed 8b", "kind": "speed", "state": "late", "seconds": 90.0, "why": "ended after 90 s", "figures": []},
    {
        "about": {
            "device": "NVIDIA H200",
            "python": "3.12.3",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "commit": "0123456789abcdef0123",
            "command": "bash scripts/gpu_check.sh",
            "date": "2026-11-27",
        }
    },
    {"part": "bits dense", "kind": "bits", "state": "ok", "seconds": 21.5, "why": "", "figures": [], "result": {}},
    {"part": "warm matmul", "kind": "warm", "state": "ok", "seconds": 9.0, "why": "", "figures": [], "result": {}},
    {
        "part": "speed matmul",
        "kind": "speed",
        "state": "ok",
        "seconds": 8.25,
        "why": "",
        "figures": [
            {"name": "gate_up, 256 rows", "value": 107.25, "unit": "us", **FIGURE},
            {"name": "down, 256 rows", "value": 131.0, "unit": "us", **FIGURE},
            {"name": "135m: decode, share of the device", "value": 91.0, "unit": "%", "wanted": 90.0, "is_least": True},
        ],
        "result": {},
    },
    {"part": "bits gemma", "kind": "bits", "state": "not offered", "seconds": 4.0, "why": "a | b", "figures": []},
    {"summary": {"seconds": 200.4}},
]
RENDERED = """`bash scripts/gpu_check.sh`, NVIDIA H200, 2026-11-27, commit 0123456789abcdef0123: torch 2.11.0, triton
3.6.0, Python 3.12.3, 200 s.

| figure | measured | library | floor | of the floor | wanted |
| --- | --- | --- | --- | --- | --- |
| gate_up, 256 rows | 107 us | 99.0 | 76.0 | 71 % | at most 119, met |
| down, 256 rows | 131 us | 99.0 | 76.0 | 58 % | at most 119, **missed** |
| 135m: decode, share of the device | 91.0 % |  |  |  | at least 90.0, met |

| part | result | seconds |
| --- | --- | --- |
| bits dense | ok | 21.5 |
| speed matmul | ok | 8.2 |
| bits gemma | not offered: a \\| b | 4.0 |"""


def test_last_run_is_rendered_as_a_table():
    report = script("gpu_report")
    lines = [json.dumps(record) for record in RESULTS]
    assert report.rendered(*report.last_run(lines)) == RENDERED
    with pytest.raises(ValueError, match="no run is in this file"):
        report.last_run([])


def test_first_line_of_page_names_the_last_run(tmp_path: Path, monkeypatch):
    report = script("gpu_report")
    page = tmp_path / report.PAGE
    page.parent.mkdir(parents=True)
    for each in (report.PAGE, report.FIGURES_PAGE):
        (tmp_path / each).write_text((REPOSITORY / each).read_text(encoding="utf-8"), encoding="utf-8")
    results = tmp_path / "results.jsonl"
    results.write_text("".join(f"{json.dumps(record)}\n" for record in RESULTS))
    said = "Last run on a GPU: NVIDIA H200, 2026-11-27, commit 0123456789ab, "
    for is_ancestor, words in (
        (False, "**no ancestor of this page's commit**"),
        (True, "an ancestor of this page's commit"),
    ):
        monkeypatch.setattr(report, "is_ancestor", lambda root, commit, found=is_ancestor: found)
        report.write_docs(tmp_path, results)
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line and "<!--" not in line]
        assert lines[1] == f"{said}{words}"
        assert RENDERED in (tmp_path / report.FIGURES_PAGE).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="0 pairs of markers"):
        report.with_section("a page without them", report.STATE, "")


def test_ancestor_is_told_from_other_commits(tmp_path: Path):
    """Two commits on one branch, and one beside them."""
    report = script("gpu_report")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    commits = []
    for name in ("first", "second"):
        git("commit", "--quiet", "--allow-empty", "--message", name)
        commits.append(git("rev-parse", "HEAD"))
    git("checkout", "--quiet", "-b", "beside", commits[0])
    git("commit", "--quiet", "--allow-empty", "--message", "third")
    assert [report.is_ancestor(tmp_path, commit) for commit in commits] == [True, False]
    assert not report.is_ancestor(tmp_path, f"{commits[0]}-dirty")


@pytest.mark.matrix
def test_busy_time_counts_overlapping_kernels_once():
    """Profiled kernels of two streams overlap."""
    covered = script("gpu_speed").covered
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0
    assert covered([]) == 0.0


@pytest.mark.matrix
def test_library_matmuls_are_put_back():
    speed = script("gpu_speed")
    ours = {name: getattr(speed.TritonKernels, name) for name in ("linear", "gated_linear")}
    import torch

    x, weight = torch.randn(2, 4), torch.randn(6, 4)
    with speed.library_matmuls() as library:
        assert torch.equal(speed.TritonKernels().linear(x, weight, None), torch.nn.functional.linear(x, weight))
        assert library.num_calls == 1
    assert {name: getattr(speed.TritonKernels, name) for name in ours} == ours


def test_comparison_with_short_rows_is_not_near(monkeypatch):
    """A row that ended as non_finite_logits was compared as far as it went, and counted as whole."""
    compare = script("gpu_compare")
    figures = {"dtype": "bfloat16", "device": "cpu", "num_tokens": 8, "num_same_tokens": 8, "tokens_per_s": 1.0}
    close = {"worst_lead": 0.0, "worst_logprob_difference": 0.0}
    assert compare.Comparison(**figures, **close, num_error_rows=0).is_near
    assert not compare.Comparison(**figures, **close, num_error_rows=1).is_near
    far = {"worst_lead": 0.0, "worst_logprob_difference": float("nan")}
    assert not compare.Comparison(**figures, **far, num_error_rows=0).is_near


def test_rows_whose_experts_are_tied_are_told():
    """Float32 tokens of one row in 256 differed from transformers': its router's logits were equal to seven digits."""
    compare = script("gpu_compare")
    import torch

    logits = torch.tensor([[0.5, 3.0, 1.0, 1.00001], [0.5, 3.0, 1.0, 1.5]])
    assert (compare.gap_behind(logits, 2) < compare.TIED).tolist() == [True, False]
    assert (compare.gap_behind(logits, 3) < compare.TIED).tolist() == [False, False]


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
    found = compare.compare(tmp_path, prompts, 4, "float32", "cpu", "torch")
    assert (found.num_tokens, found.num_error_rows, found.is_near) == (6, 2, False)
    assert asked == ["torch"]


@pytest.mark.matrix
def test_contract_findings_must_have_their_value():
    """Bits that differed were said, and the probe ended well."""
    import torch

    findings = script("gpu_figures").Findings()
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


def test_files_marked_gpu_run_except_separate_parts(tmp_path: Path):
    """Two files were named, and those of the cache on CUDA and of a caller's world with NCCL never ran."""
    check = gpu_check()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "scenarios").mkdir()
    marked = {
        "test_whole.py": "import pytest\npytestmark = pytest.mark.gpu\n",
        "deeper/test_values.py": "CUDA = pytest.param('cuda', marks=[pytest.mark.gpu])\n",
        "deeper/test_short.py": "from pytest import mark\n@mark.gpu\ndef test_it(): ...\n",
    }
    names = ("test_one", "test_cache_is_sized_here", "test_ours_is_near_transformers_too")
    split = {"scenarios/test_gpu.py": "".join(f"@pytest.mark.gpu\ndef {name}(): ...\n" for name in names)}
    for name, text in {**marked, **split, "test_cpu.py": "def test_it(): ...\n", "helper.py": "mark.gpu"}.items():
        (tmp_path / name).write_text(text)
    parts = check.test_parts(tmp_path, 80.0, is_dry=False)
    assert [(part.name, part.kind) for part in parts] == [
        ("test one", "bits"),
        ("test cache_is_sized_here", "alone"),
        ("tests", "bits"),
    ]
    asked = parts[-1].arguments
    assert [each for each in asked if each.endswith(".py")] == [str(tmp_path / name) for name in sorted(marked)]
    assert asked[asked.index("-k") + 1] == "not near_transformers and not kernels_on_a_gpu"
    assert parts[0].arguments[-1] == f"{tmp_path / 'scenarios' / 'test_gpu.py'}::test_one"


@pytest.mark.stress
def test_every_test_marked_gpu_is_run():
    """As pytest finds them in all of tests/, which takes half a minute."""
    check = gpu_check()

    def collected(*arguments: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1150, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    everything = collected("-m", "gpu", "tests")
    own = {each for each in everything if any(words in each for words in check.OWN_PARTS)}
    assert len(own) >= len(check.OWN_PARTS)
    found: set[str] = set()
    for part in check.test_parts(REPOSITORY / "tests", 80.0, is_dry=False):
        assert part.arguments[:3] == ["-m", "pytest", "-q"]
        found |= collected(*part.arguments[3:])
    assert found == everything - own


@pytest.mark.stress
def test_dry_run_needs_no_gpu_and_prints_json(tmp_path: Path):
    """The code is that of the run on a GPU."""
    variables = {**os.environ, "PYTHON": sys.executable}
    out = tmp_path / "out.jsonl"
    command = ["bash", str(SCRIPT), "--dry", "--out", str(out)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["is_ok"]
    names = [part.name for part in gpu_check().parts(is_dry=True)]
    assert sorted(report["states"]) == sorted(names)
    assert set(report["states"].values()) <= {"ok", "not offered"}
    assert len(out.read_text().splitlines()) == len(names) + 2
