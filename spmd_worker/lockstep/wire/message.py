"""What rank 0 says to every rank of its replica in one step, as a value.

Knows nothing about bytes (`codec.py`) or about how they travel.
"""

from dataclasses import dataclass

from spmd_worker.sequence.events import Event
from spmd_worker.sequence.step import StepPlan


class MessageError(ValueError):
    """Bytes that are not a step message, or not the one that comes next, or a message that has no bytes."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Step number, events that enter with it, the plan, and the ids sampled in the step before, in that plan's order.

    `digest` is rank 0's chained digest of all that up to and with this step; empty where digests are switched off.
    """

    step: int
    events: tuple[Event, ...]
    plan: StepPlan
    sampled_token_ids: tuple[int, ...]
    digest: bytes

    def __post_init__(self) -> None:
        assert self.step == self.plan.step, f"message of step {self.step} carries the plan of step {self.plan.step}"
