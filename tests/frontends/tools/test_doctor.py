"""The doctor reports how a run ended, which rank caused a failure and what to do."""

import json
import os
from pathlib import Path

import pytest
from tools_main import tool

from spmd_worker.base.liveness.error_file import ErrorRecord, write_record
from spmd_worker.base.liveness.failure_diagnosis import Diagnosis, RankStatus, diagnose
from spmd_worker.base.liveness.heartbeat import Failure, FailureKind, RankHeartbeat
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStats, StepStatsWriter
from spmd_worker.frontends.tools.doctor import ADVICE

STEPS = [StepStats(step, step * 1_000, 10, 20, 600, 30, *[0] * 15) for step in range(1, 4)]
METRICS = {"rows": 7, "error_rows": 2, "error_codes": {"invalid_json": 2}}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]):
    """Run the script: (exit code, standard output, standard error)."""
    return tool("doctor", capsys)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that has not ended."""
    with StepStatsWriter(tmp_path / STEP_STATS_NAME) as writer:
        for stats in STEPS:
            writer.write(stats)
    return tmp_path


def age(path: Path, seconds: float) -> None:
    then_s = path.stat().st_mtime - seconds
    os.utime(path, (then_s, then_s))


def record_of(rank: int, statuses: list[RankStatus], wall_s: float, traceback: str = "") -> ErrorRecord:
    diagnosis = diagnose(statuses, 60.0)
    assert diagnosis is not None
    return ErrorRecord(rank, wall_s, tuple(statuses), diagnosis, traceback)


def status(rank: int, failure: Failure | None = None, **changes) -> RankStatus:
    return RankStatus(rank, RankHeartbeat(rank, "node", 1, 1, 1, 812, "execute", failure=failure), 0.3, **changes)


def test_successful_run_is_reported(doctor, run_dir: Path):
    (run_dir / "metrics.json").write_text(json.dumps(METRICS))
    code, out, err = doctor(run_dir)
    assert (code, err) == (0, "")
    assert out == "The run ended well: 7 rows, 2 of them error rows.\nError rows by code: 2 invalid_json.\n"


def test_exception_is_reported_with_status_advice_and_traceback(doctor, run_dir: Path):
    boom = Failure(FailureKind.PRIMARY, "rank 1 raised ValueError at step 812: boom", order=1)
    secondary = Failure(FailureKind.SECONDARY, "rank 0 raised RuntimeError at step 812: gloo", order=2)
    statuses = [status(0, secondary), status(1, boom)]
    write_record(run_dir, record_of(0, statuses, 1000.5, "a secondary failure"))
    write_record(run_dir, record_of(1, statuses, 1000.4, "Traceback (most recent call last):\nValueError: boom\n"))
    (run_dir / "stacks.rank0.txt").write_text("Thread 1")
    code, out, _ = doctor(run_dir)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("The run failed at ")
    assert lines[1:4] == [
        "  rank 0  step 812  execute  0.3 s ago  raised RuntimeError at step 812: gloo",
        "  rank 1  step 812  execute  0.3 s ago  raised ValueError at step 812: boom",
        "",
    ]
    assert lines[4] == "To blame: rank 1 raised ValueError at step 812: boom"
    assert lines[5].startswith("What to do: Its traceback is below")
    assert lines[6] == "Steps recorded: 3, the last is step 3."
    assert lines[7] == f"Stacks of ranks without progress: {run_dir / 'stacks.rank0.txt'}"
    assert lines[8:] == ["", "Rank 1:", "Traceback (most recent call last):", "ValueError: boom"]


SIGNALLED = Failure(FailureKind.SIGNALLED, "rank 0 received SIGTERM")
STALLED = Failure(FailureKind.STALLED, "rank 1 is stuck")
FULL = Failure(FailureKind.PRIMARY, "rank 0 raised OSError at step 3: No space left on device")
ENDS = {
    "dead": ([status(0), status(1, is_gone=True)], "rank 1 is gone", "out-of-memory killer"),
    "silent": ([status(0), RankStatus(1, status(1).last_heartbeat, 60.0)], "rank 1 is silent", "unreachable"),
    "stuck": ([status(0), status(1, STALLED)], "rank 1 is stuck", "stacks show where"),
    "signalled": ([status(0, SIGNALLED), status(1)], "rank 0 received SIGTERM", "Not all ranks received it"),
    "all signalled": ([status(0, SIGNALLED)], "every rank received ", "start it again"),
    "full disk": ([status(0, FULL), status(1)], "rank 0 raised OSError", "The disk is full"),
}


@pytest.mark.guarantee("spmd-worker-doctor gives each end its advice")
@pytest.mark.parametrize("name", ENDS)
def test_each_end_has_its_advice(doctor, run_dir: Path, name: str):
    statuses, blamed, advice = ENDS[name]
    write_record(run_dir, record_of(0, statuses, 1000.0))
    code, out, _ = doctor(run_dir)
    assert code == 1
    assert f"To blame: {blamed}" in out
    assert advice in next(line for line in out.splitlines() if line.startswith("What to do: "))


@pytest.mark.control("spmd-worker-doctor gives each end its advice")
@pytest.mark.parametrize("name", ENDS)
def test_advice_test_detects_advice_of_another_end(
    doctor, run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, control
):
    """Negative control."""
    parts, texts = zip(*ADVICE)
    monkeypatch.setattr("spmd_worker.frontends.tools.doctor.ADVICE", (*zip(parts, (*texts[1:], texts[0])),))
    with control("What to do: "):
        test_each_end_has_its_advice(doctor, run_dir, name)


@pytest.mark.parametrize("name", ["all signalled", "full disk"])
def test_advice_test_detects_later_matching_advice(doctor, run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Negative control."""
    monkeypatch.setattr("spmd_worker.frontends.tools.doctor.ADVICE", ADVICE[::-1])
    with pytest.raises(AssertionError, match="What to do: "):
        test_each_end_has_its_advice(doctor, run_dir, name)


def test_earliest_record_counts(doctor, run_dir: Path):
    write_record(run_dir, record_of(0, [status(0), status(1, is_gone=True)], 1000.0))
    write_record(run_dir, record_of(2, [status(0, is_gone=True), status(2)], 1002.0))
    assert "To blame: rank 1 is gone" in doctor(run_dir)[1]


def test_records_without_diagnosis_still_give_rank_status(doctor, run_dir: Path):
    write_record(run_dir, ErrorRecord(0, 1000.0, (status(0), RankStatus(1, None)), None))
    code, out, _ = doctor(run_dir)
    assert code == 1
    assert "  rank 1  no heartbeat yet\n" in out
    assert "To blame" not in out


def test_killed_run_is_reported_with_its_last_step(doctor, run_dir: Path):
    age(run_dir / STEP_STATS_NAME, 3600)
    code, out, _ = doctor(run_dir)
    assert code == 1
    assert out.startswith(
        "The run did not end: 3 steps, the last is step 3, recorded 3,600 s ago, and no rank wrote an error record."
    )


def test_running_run_is_not_called_dead(doctor, run_dir: Path):
    code, out, _ = doctor(run_dir)
    assert code == 1
    assert "It may still be running." in out


def test_metrics_of_earlier_run_do_not_count(doctor, run_dir: Path):
    (run_dir / "metrics.json").write_text(json.dumps(METRICS))
    age(run_dir / "metrics.json", 60)
    assert doctor(run_dir)[0] == 1


def test_diverged_ranks_are_reported_by_their_records(doctor, run_dir: Path):
    (run_dir / "records.rank1.log").write_bytes(b"")
    code, out, _ = doctor(run_dir)
    assert code == 1
    assert "its ranks diverged" in out
    assert "python -m spmd_worker.tools.replay --diff A B: " in out


def test_unreadable_run_exits_with_2(doctor, tmp_path: Path, run_dir: Path):
    assert doctor(tmp_path / "nosuch")[0] == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    code, out, err = doctor(empty)
    assert (code, out) == (2, "")
    assert "no job reached its first step here" in err
    (run_dir / "error.rank0.json").write_text("{}")
    code, _, err = doctor(run_dir)
    assert code == 2
    assert "error.rank0.json: not an error record" in err


def test_error_record_round_trips(run_dir: Path):
    record = record_of(1, [status(0), status(1, STALLED)], 12.5, "trace")
    write_record(run_dir, record)
    value = json.loads((run_dir / "error.rank1.json").read_text())
    assert ErrorRecord.from_plain(value) == record
    assert (value["step"], value["phase"], value["text"]) == (812, "execute", "rank 1 is stuck")
    assert value["diagnosis"]["ranks"] == [1]
    assert isinstance(record.diagnosis, Diagnosis)
