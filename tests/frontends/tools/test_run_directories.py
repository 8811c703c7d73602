"""The tools agree on a run directory: its validity, the state of its run, and its arguments."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from jobs_of_rows import job_config, run_here
from ranks import REPOSITORY
from tools_main import tool

from spmd_worker.base.errors import JobError
from spmd_worker.base.liveness.error_file import ErrorRecord, write_record
from spmd_worker.base.liveness.failure_diagnosis import Diagnosis, RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.frontends.batch import open_job
from spmd_worker.frontends.batch.file_lock import FileLock
from spmd_worker.frontends.tools import report
from spmd_worker.frontends.tools.run_dir import RunState, look_at_run

TOOLS = ("doctor", "collect", "replay", "report")
MODEL = REPOSITORY / "scripts" / "demo" / "model"
WHERE = "(a run's directory is job.run_dir, by default <job.output>.run)"

config_of = partial(job_config, model=MODEL, sampling={"max_tokens": 4}, step_log=True)


def codes(doctor: int, collect: int) -> dict[str, int]:
    return {"doctor": doctor, "collect": collect, "replay": 0, "report": 0}


class KilledError(Exception):
    """The job ends where it was, as if it were killed."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each end of a job."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("ended", "failed", "killed"):
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text('{"prompt": "add 1 2 ="}\nno row\n')
    run_here(config_of(folder / "ended"))
    with pytest.raises(JobError):
        run_here(config_of(folder / "failed", max_error_rows=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_job, "write_lines", kill)
        with pytest.raises(KilledError):
            run_here(config_of(folder / "killed"))
    return folder


def kill(*_: object) -> None:
    raise KilledError


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    """All tools of one argument: name -> (exit code, output, errors)."""
    return lambda path: {name: tool(name, capsys)(path) for name in TOOLS}


@pytest.mark.finding(number="D11")
def test_tools_report_missing_folder_alike(say, tmp_path: Path):
    for code, out, err in say(tmp_path / "absent").values():
        assert (code, out) == (2, "")
        assert f": {tmp_path / 'absent'}: no such folder {WHERE}" in err
    for code, out, err in say(tmp_path / ("x" * 300)).values():
        assert (code, out) == (2, "")
        assert "File name too long" in err
    (tmp_path / "out.jsonl").write_text("{}\n")
    (tmp_path / "out.jsonl.run").mkdir()
    told = say(tmp_path / "out.jsonl")
    for name in ("doctor", "collect", "report"):
        assert told[name][:2] == (2, "")
        assert f"out.jsonl: is a file: give {tmp_path / 'out.jsonl.run'} {WHERE}" in told[name][2]
    assert "is not a step log" in told["replay"][2]


@pytest.mark.finding(number="D11")
def test_tools_report_alike_that_no_job_ran(say, tmp_path: Path):
    told = say(tmp_path)
    assert all(code == 2 for code, _, _ in told.values())
    assert all("no job " in err for _, _, err in told.values())
    assert all("<job.output>.run" in err for _, _, err in told.values())


@pytest.mark.finding(number="D11")
def test_tools_agree_on_ended_run(say, runs: Path):
    run_dir = runs / "ended" / "out.jsonl.run"
    told = say(run_dir)
    assert {name: code for name, (code, _, _) in told.items()} == codes(doctor=0, collect=2)
    assert told["doctor"][1].startswith("The run ended well: 2 rows, 1 of them error rows.")
    assert f"the job has ended and its output is complete: read {runs}/ended/out.jsonl" in told["collect"][2]
    assert "digests equal" in told["replay"][1]


def test_tools_agree_on_missing_output(say, runs: Path, tmp_path: Path):
    """Regression: the run had ended well, and collect told to read a file that was not there."""
    shutil.copy(runs / "ended" / "rows.jsonl", tmp_path)
    run_here(config_of(tmp_path))
    (tmp_path / "out.jsonl").unlink()
    told = say(tmp_path / "out.jsonl.run")
    assert {name: code for name, (code, _, _) in told.items()} == codes(doctor=1, collect=2)
    for said in (told["doctor"][1], told["collect"][2]):
        assert f"its output {tmp_path}/out.jsonl is missing" in said
        assert "restore it, or start the same command again, which computes it again" in said


def test_tools_find_relative_output_from_any_folder(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Regression: they looked for it below their own working directory, also after both had moved."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    config = config_of(runs / "ended")
    run_here(replace(config, job=replace(config.job, output="out.jsonl")))
    monkeypatch.chdir(runs)
    for name in ("job", "moved"):
        (tmp_path / "job").rename(tmp_path / name)
        run_dir = tmp_path / name / "out.jsonl.run"
        assert tool("verify", capsys)("--images", run_dir)[0] == 0
        assert f": read {tmp_path / name / 'out.jsonl'}\n" in tool("collect", capsys)(run_dir)[2]


@pytest.mark.finding(number="D11")
def test_tools_agree_on_failed_run(say, runs: Path):
    """Its output is complete, and doctor said that it had ended well."""
    told = say(runs / "failed" / "out.jsonl.run")
    assert {name: code for name, (code, _, _) in told.items()} == codes(doctor=1, collect=0)
    assert "the job failed: 2 rows, 1 of them error rows" in told["doctor"][1]
    assert "job.max_error_rows" in told["doctor"][1]
    assert told["collect"][1].count("\n") == 2


def test_tools_agree_on_job_without_a_step(say, runs: Path, tmp_path: Path):
    """Regression: report said that no job had run here, and replay that it had been started without a step log."""
    run_dir = shutil.copytree(runs / "killed" / "out.jsonl.run", tmp_path / "run")
    for path in run_dir.glob("steps.*"):
        path.unlink()
    told = say(run_dir)
    assert told["doctor"][1] == "The run did not end: no job reached its first step here. Start it again.\n"
    for name, file in (("report", "steps.csv"), ("replay", "steps.log")):
        assert told[name][0] == 2
        assert told[name][2].endswith(f"{run_dir} has no {file}: no job reached its first step here\n")


def test_tools_name_what_cannot_be_read(say, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: report named a file of pools that it could not write, and a run of an unreadable lock had ended."""
    run_dir = shutil.copytree(runs / "killed" / "out.jsonl.run", tmp_path / "run")
    (run_dir / "lock").unlink()
    (run_dir / "lock").mkdir()
    code, out, err = say(run_dir)["doctor"]
    assert (code, out) == (2, "")
    assert f"{run_dir / 'lock'} is a folder" in err

    def denied(path: Path, *given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # The superuser, who may run the tests, may enter every folder.
    monkeypatch.setattr(Path, "is_file", denied)
    monkeypatch.setattr(report, "write_file", denied)
    code, _, err = say(run_dir)["report"]
    assert code == 2
    assert err.endswith(
        f"cannot write {run_dir / 'report.html'}: Permission denied: give --output FILE in a folder where it can be "
        f"written\n"
    )


@pytest.mark.finding(number="D11")
def test_tools_agree_on_killed_run(say, runs: Path):
    told = say(runs / "killed" / "out.jsonl.run")
    assert {name: code for name, (code, _, _) in told.items()} == codes(doctor=1, collect=0)
    assert told["doctor"][1].startswith("The run did not end: ")
    assert "2 rows are finished" in told["collect"][2]


@pytest.mark.finding(number="D11")
def test_tools_agree_on_running_run(say, runs: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "killed" / "out.jsonl.run", run_dir)
    with FileLock(run_dir / "lock", "job.run_dir", "wait"):
        assert look_at_run(run_dir).state is RunState.RUNNING
        told = say(run_dir)
    assert look_at_run(run_dir).state is RunState.UNFINISHED
    assert "Its process is running" in told["doctor"][1]
    assert told["collect"][0] == 0


@pytest.mark.finding(number="D11")
def test_copy_of_ended_run_counts_as_ended(say, runs: Path, tmp_path: Path):
    """Times of files, which a copy does not keep, said that it had not."""
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "ended" / "out.jsonl.run", run_dir)
    os.utime(run_dir / "metrics.json", (1, 1))
    assert say(run_dir)["doctor"][0] == 0


@pytest.mark.finding(number="D11")
def test_doctor_names_the_failure_of_unfinished_run(say, runs: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "killed" / "out.jsonl.run", run_dir)
    status = RankStatus(0, RankHeartbeat(0, "n", 1, 1, 1, 2, "execute"))
    write_record(run_dir, ErrorRecord(0, 1e9, (status,), Diagnosis((0,), "rank 0 raised X"), ""))
    code, out, _ = say(run_dir)["doctor"]
    assert (code, "To blame: rank 0 raised X" in out) == (1, True)


@pytest.mark.finding(number="D11")
def test_replay_accepts_a_run_directory_or_its_log(runs: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = runs / "ended" / "out.jsonl.run"
    replay = tool("replay", capsys)
    assert replay(run_dir) == replay(run_dir / "steps.log")
    assert replay("--diff", run_dir, run_dir / "steps.log")[0] == 0


@pytest.mark.finding(number="D11")
def test_replay_reports_that_no_log_was_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(runs / "ended" / "out.jsonl.run", tmp_path / "run")
    (tmp_path / "run" / "steps.log").unlink()
    code, _, err = tool("replay", capsys)(tmp_path / "run")
    assert (code, "has no steps.log: the job was started without job.step_log=true" in err) == (2, True)


@pytest.mark.finding(number="D11")
def test_verify_says_what_it_expects_of_folder(runs: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = tool("verify", capsys)(runs / "ended" / "out.jsonl.run", runs / "ended" / "out.jsonl")
    assert (code, "is a folder: give the output of a job (job.output)" in err) == (2, True)


@pytest.mark.finding(number="D11")
@pytest.mark.parametrize("name", TOOLS)
def test_tool_names_its_argument_alike(name: str, capsys: pytest.CaptureFixture[str]):
    main = import_module(f"spmd_worker.frontends.tools.{name}").main
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "RUN_DIR" in told.partition("\n\n")[0]
    assert "job.run_dir, by default <job.output>.run" in " ".join(told.split())
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "RUN_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["index rows.jsonl", "collect --merge a.run b.run", "report a.run"])
def test_tool_writes_no_file_named_minus(command: str, capsys: pytest.CaptureFixture[str]):
    """The file - was written, where - means standard output elsewhere."""
    name, *arguments = command.split()
    with pytest.raises(SystemExit) as left:
        import_module(f"spmd_worker.frontends.tools.{name}").main([*arguments, "--output", "-"])
    assert left.value.code == 2
    assert "--output: it is not written to standard output: give the file to write" in capsys.readouterr().err


@pytest.mark.finding(number="C1")
@pytest.mark.parametrize("name", ["steps.csv", "metrics.json", "journal", "timeline.json", "lock"])
def test_report_overwrites_no_file_of_the_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    shutil.copytree(runs / "failed" / "out.jsonl.run", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    code, _, err = tool("report", capsys)(tmp_path / "run", "--output", tmp_path / "run" / name)
    assert (code, ": give another" in err) == (2, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_fixture_metrics_match_their_jobs(runs: Path):
    """The fixture has the states of its names."""
    metrics = json.loads((runs / "failed" / "out.jsonl.run" / "metrics.json").read_text())
    assert metrics["error_rows"] == 1
    assert replace(config_of(runs)).job.step_log


@pytest.mark.gate("False-doctor", "True-replay", "True-collect")
@pytest.mark.parametrize("name", [*TOOLS, "verify"])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_tool_ends_quietly_with_its_reader(runs: Path, tmp_path: Path, name: str, is_buffered: bool):
    """`spmd-worker-doctor RUN_DIR | head -1` was a BrokenPipeError, and then 0 for a run that had failed."""
    run_dir = shutil.copytree(runs / "killed" / "out.jsonl.run", tmp_path / "run")
    output = str(runs / "ended" / "out.jsonl")
    arguments = [output, output] if name == "verify" else [str(run_dir)]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *([] if is_buffered else ["-u"]), "-m", f"spmd_worker.tools.{name}", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=variables,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert "Pipe" not in done.stderr
    assert done.returncode == (1 if name == "doctor" else 0)


@pytest.mark.parametrize("name", ["collect", "verify", pytest.param("report", marks=pytest.mark.stress)])
def test_tool_names_a_full_standard_output(runs: Path, tmp_path: Path, name: str):
    """Regression: a traceback, and 1, by which verify means outputs that differ."""
    run_dir = shutil.copytree(runs / "killed" / "out.jsonl.run", tmp_path / "run")
    arguments = [str(runs / "ended" / "out.jsonl")] * 2 if name == "verify" else [str(run_dir)]
    command = [sys.executable, "-m", f"spmd_worker.tools.{name}", *arguments]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, timeout=120, check=False
        )
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert f"{name}: standard output: No space left on device: redirect it elsewhere\n" in done.stderr
