"""The order in which an engine and a replay end steps: results before events, and nothing stays where nobody waits."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.replica.scheduler.step_order import end_step, must_end_oldest
from spmd_worker.replica.sequence.events import Abort, EndWorkerEvent, ResetPrefixCache, WorkerEvent
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan, StepResult


@pytest.mark.parametrize(
    ("num_in_flight", "is_full", "has_unfinished", "is_closed", "must_end"),
    [
        (0, False, False, True, False),
        (1, False, True, False, False),
        (1, False, False, False, True),
        (1, False, True, True, True),
        (2, True, True, False, True),
    ],
)
def test_step_ends_when_due_or_nothing_waits(
    num_in_flight: int, is_full: bool, has_unfinished: bool, is_closed: bool, must_end: bool
):
    scheduler: Any = SimpleNamespace(has_unfinished=has_unfinished, waits_for_ids=False)
    assert must_end_oldest(num_in_flight, is_full, (ResetPrefixCache(),), scheduler, is_closed) is must_end


def test_oldest_step_ends_when_its_ids_are_needed():
    scheduler: Any = SimpleNamespace(has_unfinished=True, waits_for_ids=True)
    assert must_end_oldest(1, False, (), scheduler, False)
    assert not must_end_oldest(0, False, (), scheduler, False)


@pytest.mark.parametrize("event", [WorkerEvent(1, "sleep", b""), EndWorkerEvent(1, "")], ids=["prepare", "end"])
def test_worker_events_wait_for_steps_in_flight(event: Any):
    scheduler: Any = SimpleNamespace(has_unfinished=True, waits_for_ids=False)
    assert must_end_oldest(1, False, (event,), scheduler, False)
    assert not must_end_oldest(0, False, (event,), scheduler, False)


def test_results_come_before_events_and_both_end_groups():
    told: list[Any] = []

    def apply(result: StepResult) -> list[Any]:
        told.append(result)
        return ["ended"]

    def handle(event: Any) -> Any:
        told.append(event)
        return "aborted" if isinstance(event, Abort) else None

    scheduler: Any = SimpleNamespace(apply=apply)
    events = (ResetPrefixCache(), Abort(RequestId(3)))
    result = StepResult(1, (5,))
    assert end_step(
        scheduler, StepPlan(1, num_tokens=1, continuing=(SequenceKey(RequestId(3), 0),)), result, events, handle
    ) == ["ended", "aborted"]
    assert told == [result, *events]
    told.clear()
    # A step without rows has no result to apply.
    assert end_step(scheduler, StepPlan(2), StepResult(2), (), handle) == []
    assert told == []
