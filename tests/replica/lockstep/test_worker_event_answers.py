"""What the ranks say to a worker event goes up with the next step's answers, however seldom digests are compared."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from star_channels import LONG_S, star
from thread_control import thread_controls

from spmd_worker.base.errors import ReplicaDivergedError
from spmd_worker.ranks.transport.step_channel import GlooStepChannel
from spmd_worker.replica.lockstep import lockstep as lockstep_module
from spmd_worker.replica.lockstep.channel import FollowerChannel, LeaderChannel
from spmd_worker.replica.lockstep.digest import NUM_DIGEST_BYTES
from spmd_worker.replica.lockstep.lockstep import Lockstep, StepReport
from spmd_worker.replica.lockstep.transfers import pack_answer, pack_event_answer, unpack_answer, unpack_event_answer
from spmd_worker.replica.sequence.events import EndWorkerEvent, WorkerEvent, concern_workers
from spmd_worker.replica.sequence.step import StepPlan

DIGEST = bytes(range(NUM_DIGEST_BYTES))
EVENTS = {2: WorkerEvent(1, "first", b""), 4: EndWorkerEvent(1, "no"), 5: WorkerEvent(2, "second", b"\0")}
PROBLEMS = {3: ("", "rank 1: no", "rank 2: no"), 6: ("", "", "")}
"""By step: what each rank says of the event before."""


def agree(channels: list[LeaderChannel | FollowerChannel], digest_every: int) -> list[str]:
    """What rank 0 knows after each of seven steps."""

    def rank_loop(rank: int, channel: LeaderChannel | FollowerChannel) -> list[str]:
        lockstep, heard = Lockstep(channel, digest_every), []
        for step in range(1, 8):
            events = (EVENTS[step],) if step in EVENTS else ()
            problem = PROBLEMS[step][rank] if step in PROBLEMS else "never asked for"
            report = StepReport(finished_transfers=(step,), event_problem=problem, events=events)
            assert lockstep.agree(StepPlan(step), report).events == events
            heard.append(lockstep.event_problem)
        return heard

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(rank_loop, rank, channel) for rank, channel in enumerate(channels)]
        heard, *_ = [future.result(LONG_S) for future in futures]
        return heard


@pytest.mark.parametrize("digest_every", [0, 1, 3])
def test_rank_0_hears_lowest_failed_rank_next_step(digest_every: int):
    expected = ["", "", "rank 1: no", "rank 1: no", "rank 1: no", "", ""]
    with star(2) as (leader, followers):
        assert agree([leader, *followers], digest_every) == expected
    assert agree([GlooStepChannel(control) for control in thread_controls(3)], digest_every) == expected


def test_replica_of_one_answers_itself():
    lockstep = Lockstep(None, digest_every=0)
    lockstep.agree(StepPlan(1), StepReport(events=(EVENTS[2],)))
    lockstep.agree(StepPlan(2), StepReport(event_problem="rank 0: no"))
    assert lockstep.event_problem == "rank 0: no"


@given(st.lists(st.integers(0, 2**63 - 1), max_size=3), st.text(st.characters(exclude_categories=["Cs"])))
def test_event_answer_round_trips(numbers: list[int], problem: str):
    answer, words = unpack_event_answer(pack_event_answer(pack_answer(DIGEST, numbers), problem))
    assert (unpack_answer(answer), words) == ((DIGEST, tuple(numbers), ""), problem)


@pytest.mark.parametrize("length", range(4 + NUM_DIGEST_BYTES))
def test_truncated_answer_equals_no_digest(length: int):
    damaged = pack_event_answer(pack_answer(DIGEST, ()), "no")[:length]
    assert unpack_answer(unpack_event_answer(damaged)[0])[0] != DIGEST


def test_missing_event_answer_ends_all_ranks(monkeypatch: pytest.MonkeyPatch):
    """Negative control: silence is not consent."""
    monkeypatch.setattr(lockstep_module, "pack_event_answer", lambda answer, problem: answer)
    with star(2) as (leader, followers), pytest.raises(ReplicaDivergedError):
        agree([leader, *followers], 0)


def test_only_events_of_workers_empty_the_pipeline():
    assert concern_workers((EVENTS[2],))
    assert concern_workers((EVENTS[4],))
    assert not concern_workers(())
