"""The rank status and the diagnosis, literally, for everything that can be known of ranks."""

from dataclasses import replace

import pytest

from spmd_worker.base.errors import (
    ConfigError,
    PeerLostError,
    RankFailedError,
    RanksDisagreeError,
    ReplicaDivergedError,
)
from spmd_worker.base.liveness.failure_diagnosis import (
    GATHER_S,
    SETTLE_S,
    STALL_S,
    RankStatus,
    describe,
    diagnose,
    explained_exit_code,
    is_secondary,
    status_lines,
)
from spmd_worker.base.liveness.heartbeat import Failure, FailureKind, RankHeartbeat

LATE_S = SETTLE_S + 1


def last_heartbeat(rank: int, step: int = 812, phase: str = "execute", **changes) -> RankHeartbeat:
    return RankHeartbeat(rank, "node", 100 + rank, 5, 7, step, phase, **changes)


def well(rank: int, **changes) -> RankStatus:
    return RankStatus(rank, last_heartbeat(rank, **changes), 0.3)


def failed(rank: int, kind: FailureKind, text: str, order: int = 0, **changes) -> RankStatus:
    return RankStatus(rank, last_heartbeat(rank, failure=Failure(kind, text, order=order), **changes), 0.3)


RAISED = failed(1, FailureKind.PRIMARY, "rank 1 raised ValueError at step 812: boom")
SECONDARY = failed(0, FailureKind.SECONDARY, "rank 0 raised RuntimeError at step 812: gloo: Connection closed by peer")
GONE = RankStatus(2, last_heartbeat(2, step=811), 0.4, is_gone=True)
SILENT = RankStatus(3, last_heartbeat(3, step=811, phase="forward"), 10.2)
SIGNALLED = failed(1, FailureKind.SIGNALLED, "rank 1 received SIGTERM")
EXPLAINED = failed(0, FailureKind.EXPLAINED, "job.input is not set")
STUCK = failed(1, FailureKind.STALLED, "rank 1 is stuck: ...", phase_age_s=5.02, where="model_runner.py:88 forward")
WAITS = failed(0, FailureKind.STALLED, "rank 0 waits: ...", phase_age_s=5.1, is_waiting=True, where="x.py:1 y")
UNKNOWN = RankStatus(2, None)

CAUSES = {
    "an exception": ([SECONDARY, RAISED, well(2)], (1,), "rank 1 raised ValueError at step 812: boom"),
    "a dead rank": (
        [SECONDARY, well(1), GONE],
        (2,),
        "rank 2 is gone: last seen in step 811, phase execute, 0.4 s ago; the process ended without reporting an "
        "error, as one that was killed or ran out of memory",
    ),
    "a silent rank": (
        [SECONDARY, well(1), SILENT],
        (3,),
        "rank 3 is silent: last seen in step 811, phase forward, 10.2 s ago",
    ),
    "a stuck rank, for which another waits": (
        [WAITS, STUCK],
        (1,),
        "rank 1 is stuck: step 812, phase execute, for 5.0 s, at model_runner.py:88 forward",
    ),
    "ranks that wait for each other": (
        [WAITS, replace(WAITS, rank=1, last_heartbeat=replace(WAITS.last_heartbeat, rank=1, step=811))],
        (1,),
        "rank 1 is waiting for another rank, or for each other: step 811, phase execute, for 5.1 s, at x.py:1 y",
    ),
    "a rank without a heartbeat": (
        [SECONDARY, well(1), UNKNOWN],
        (2,),
        "rank 2 is silent: no heartbeat since the start",
    ),
    "a rank that others name": (
        [SECONDARY, failed(1, FailureKind.SECONDARY, "rank 0 is silent: no message in 4 s", order=2)],
        (1,),
        "rank 0 is silent: no message in 4 s",
    ),
    "a launcher that is gone": (
        [failed(0, FailureKind.ORPHANED, "the launcher is gone"), UNKNOWN],
        (0,),
        "the launcher is gone",
    ),
    "a busy rank": (
        [SECONDARY, well(1, phase="between steps", phase_age_s=300.0, where="row_writer.py:7 write")],
        (1,),
        "rank 1 is busy while others waited for too long: step 812, phase between steps, for 300.0 s, at "
        "row_writer.py:7 write",
    ),
    "a rank that computes in a step for which another waits": (
        [WAITS, well(1, phase_age_s=5.1, where="model_runner.py:88 forward")],
        (1,),
        "rank 1 is busy while others waited for too long: step 812, phase execute, for 5.1 s, at "
        "model_runner.py:88 forward",
    ),
    "a rank that ended while others wait for it": (
        [WAITS, RankStatus(1, last_heartbeat(1, step=9, phase="closing", has_ended=True), 4.0)],
        (1,),
        "rank 1 has ended while others went on: last seen in step 9, phase closing, 4.0 s ago",
    ),
    "a rank that left without close, before one that closed": (
        [
            SECONDARY,
            RankStatus(1, last_heartbeat(1, has_ended=True), 4.0),
            failed(2, FailureKind.LEFT, "rank 2 has left without close()", has_ended=True),
        ],
        (2,),
        "rank 2 has left without close(); last seen in step 812, phase execute, 0.3 s ago",
    ),
    "a rank that left without close and was still taking its groups down when it died": (
        [SECONDARY, replace(failed(2, FailureKind.LEFT, "rank 2 has left without close()"), is_gone=True)],
        (2,),
        "rank 2 has left without close(); last seen in step 812, phase execute, 0.3 s ago",
    ),
    "nobody but effects": ([SECONDARY, well(1)], (0,), SECONDARY.failure.text),
    "a signal to one": ([well(0), SIGNALLED], (1,), "rank 1 received SIGTERM from outside the job"),
    "a signal to one, which has ended by it": (
        # Others have lost it, and the launcher has signalled one of them.
        [SECONDARY, replace(SIGNALLED, is_gone=True), replace(SIGNALLED, rank=2)],
        (1,),
        "rank 1 received SIGTERM from outside the job",
    ),
    "a signal to one, which ended by it long ago": (
        [well(0), replace(SIGNALLED, is_gone=True, heard_ago_s=4.0)],
        (1,),
        "rank 1 received SIGTERM from outside the job",
    ),
    "a signal to one that is stopped": (
        [well(0), replace(SIGNALLED, heard_ago_s=4.0)],
        (1,),
        "rank 1 is silent",
    ),
    "a signal to all": (
        [replace(SIGNALLED, rank=0), SIGNALLED],
        (0, 1),
        "every rank received SIGTERM: the launcher or the machine ended the job",
    ),
    "a signal to all, because one went": (
        [replace(SIGNALLED, rank=0), replace(SIGNALLED, is_gone=True), GONE],
        (2,),
        "rank 2 is gone: last seen",
    ),
    "a wrong setting": ([EXPLAINED, replace(SIGNALLED, rank=1), GONE], (0,), "job.input is not set"),
    "two exceptions, the first of them": (
        [
            failed(0, FailureKind.PRIMARY, "rank 0 raised A", order=2),
            failed(1, FailureKind.PRIMARY, "rank 1 raised B", order=1),
        ],
        (1,),
        "rank 1 raised B",
    ),
    "two dead ranks": ([well(0), GONE, replace(GONE, rank=3)], (2, 3), "ranks 2, 3 are gone: last seen in step 811"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_diagnosis_names_the_cause(name: str):
    statuses, expected, text = CAUSES[name]
    diagnosis = diagnose(statuses, LATE_S)
    assert diagnosis is not None
    assert (diagnosis.ranks, diagnosis.text[: len(text)]) == (expected, text)
    assert diagnosis.is_explained == (name == "a wrong setting")
    assert diagnosis.is_silence == (
        name in ("a silent rank", "a rank without a heartbeat", "a signal to one that is stopped")
    )


def test_diagnosis_is_none_when_all_ranks_are_well():
    assert (
        diagnose(
            [well(0), well(1), replace(well(2), last_heartbeat=last_heartbeat(2, has_ended=True), heard_ago_s=99.0)],
            LATE_S,
        )
        is None
    )


def test_secondary_failures_wait_for_their_cause():
    """A rank that leaves because of another must not be named while the other's failure may still show."""
    for statuses, at_s in (
        ([SECONDARY, RAISED], GATHER_S),
        ([SECONDARY, SILENT], STALL_S),
        ([SECONDARY, well(1)], SETTLE_S),
    ):
        assert diagnose(statuses, at_s - 0.01) is None
        assert diagnose(statuses, at_s) is not None


def test_departed_secondary_rank_is_not_diagnosed_as_cause():
    left = replace(SECONDARY, is_gone=True)
    assert diagnose([left, RAISED], LATE_S).ranks == (1,)
    assert diagnose([left, SILENT], LATE_S).ranks == (3,)


def test_ended_rank_is_neither_silent_nor_gone():
    ended = RankStatus(1, last_heartbeat(1, has_ended=True), 60.0)
    assert not ended.is_silent
    assert not ended.is_living
    assert diagnose([well(0), ended], LATE_S) is None
    # Another cause counts more, and may need time to show.
    assert diagnose([SECONDARY, ended], SETTLE_S - 0.1) is None
    assert diagnose([SECONDARY, ended, GONE], LATE_S).ranks == (2,)
    assert diagnose([SECONDARY, ended, SILENT], LATE_S).ranks == (3,)


def test_ended_secondary_rank_is_not_blamed():
    ended = failed(1, FailureKind.SECONDARY, "rank 1 raised RuntimeError at step 812: gloo", has_ended=True)
    assert diagnose([SECONDARY, ended], LATE_S).text == SECONDARY.failure.text


def test_rank_status_has_one_line_per_rank():
    statuses = [
        well(0, is_waiting=True, where="channel.py:4 broadcast", phase_age_s=2.0),
        replace(RAISED, heard_ago_s=0.25),
        GONE,
        replace(SILENT, last_heartbeat=replace(SILENT.last_heartbeat, phase="lockstep")),
        RankStatus(10, None),
        RankStatus(11, last_heartbeat(11, step=9, has_ended=True), 3.0),
        replace(SIGNALLED, rank=12, heard_ago_s=0.0),
        failed(13, FailureKind.SECONDARY, "rank 1 raised ValueError at step 812: boom"),
        failed(14, FailureKind.SECONDARY, "rank 14 raised RuntimeError at step 812: gloo"),
    ]
    assert status_lines(statuses) == [
        "rank  0  step 812  execute    0.3 s ago  waits for others at channel.py:4 broadcast, 2.0 s in this phase",
        "rank  1  step 812  execute    0.2 s ago  raised ValueError at step 812: boom",
        "rank  2  step 811  execute    0.4 s ago  gone",
        "rank  3  step 811  lockstep  10.2 s ago  silent for 10.2 s",
        "rank 10  no heartbeat yet",
        "rank 11  step   9  execute    3.0 s ago  has ended",
        "rank 12  step 812  execute    0.0 s ago  received SIGTERM",
        "rank 13  step 812  execute    0.3 s ago  leaves: rank 1 raised ValueError at step 812: boom",
        "rank 14  step 812  execute    0.3 s ago  raised RuntimeError at step 812: gloo",
    ]


def test_rank_status_truncates_long_exceptions():
    line = status_lines([failed(0, FailureKind.PRIMARY, "rank 0 raised ValueError: " + "x" * 500 + "\nmore")])[0]
    assert line.endswith("xxx...")
    assert len(line) < 220


ERRORS = [
    (ValueError("x"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (PeerLostError("shared memory: timed out waiting for another rank"), True),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset"), True),
    (RuntimeError("NCCL communicator was aborted on rank 1"), True),
    (ConnectionResetError("x"), True),
    (RankFailedError("rank 1 is gone"), True),
    (OSError(28, "No space left on device"), False),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_error_from_another_rank_is_secondary(error: Exception, expected: bool):
    assert is_secondary(error) == expected


def test_failure_text_names_rank_exception_and_step():
    assert describe(ValueError("boom"), 1, 812, "execute") == "rank 1 raised ValueError at step 812: boom"
    # Regression: on several ranks the way out was missing.
    assert describe(OSError(28, "No space left on device", "run/journal"), 1, 8, "execute") == (
        "rank 1 raised OSError at step 8: run/journal: No space left on device: finished rows are kept, so free space "
        "and start the same command again"
    )
    assert describe(KeyError("w"), 2, 0, "loading the model") == "rank 2 raised KeyError while loading the model: 'w'"
    assert describe(RankFailedError("rank 3 is gone"), 2, 5, "lockstep") == "rank 3 is gone"


def test_failure_text_omits_gloo_source_location():
    error = RuntimeError(
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:406: Connection "
        "reset by peer. This is typically caused by a remote worker crashing. Check the logs of the remote worker."
    )
    assert describe(error, 1, 7, "execute") == (
        "rank 1 raised RuntimeError at step 7: Read error [127.0.0.1]:406: Connection reset by peer"
    )
    own = "[/home/me/model.py:7] shapes differ"
    assert describe(ValueError(own), 1, 7, "execute") == f"rank 1 raised ValueError at step 7: {own}"


def test_explained_errors_have_their_own_exit_codes():
    assert explained_exit_code(ReplicaDivergedError("x")) == 70
    assert explained_exit_code(RanksDisagreeError("x")) == 70
    assert explained_exit_code(ConfigError("x")) == 1
    assert explained_exit_code(KeyboardInterrupt()) == 1
    assert explained_exit_code(ValueError("x")) is None
