"""Order in which steps in flight end and their events apply: the same for every replica, in an engine and a replay.

A pipeline of d stages has d steps in flight, and an engine that decides one step ahead has two. The oldest step's
sampled ids, then its events, are applied when it has to end: when the number in flight is at its limit; and at once
when no request waits for what is in flight, when nothing can continue without it, or when workers change after the
newest.
"""

from collections.abc import Callable

from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import CommitWeights, Event, SetWeightVersion, concern_workers
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan, StepResult


def must_end_oldest(
    num_in_flight: int, is_full: bool, newest_events: tuple[Event, ...], scheduler: Scheduler, is_closed: bool
) -> bool:
    """Whether the oldest step in flight has to end before another is decided; ask again after it ended. `is_full`: the
    limit of steps in flight is reached. `newest_events`: those of the newest in flight.
    """
    is_idle = is_closed or not scheduler.has_unfinished or scheduler.waits_for_ids
    return is_full or (num_in_flight > 0 and (is_idle or concern_workers(newest_events)))


def end_step(
    scheduler: Scheduler,
    plan: StepPlan,
    result: StepResult,
    events: tuple[Event, ...],
    handle: Callable[[Event], SequenceGroup | None],
) -> list[SequenceGroup]:
    """Apply the step's sampled ids, then its events (`handle`). Returns the groups that ended, in order. New weights
    were there before the step ran.
    """
    for event in events:
        if isinstance(event, SetWeightVersion | CommitWeights):
            scheduler.begin_weights(event.version)
    ended = scheduler.apply(result) if plan.has_rows else []
    for event in events:
        aborted = handle(event)
        if aborted is not None:
            ended.append(aborted)
    return ended
