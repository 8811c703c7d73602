"""Message of rank 0 to every rank of its replica in one step, as a value."""

from dataclasses import dataclass

from spmd_worker.replica.sequence.events import Event
from spmd_worker.replica.sequence.record_checks import check_num_ids
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan


class MessageError(ValueError):
    """Bytes that are not a step message, or not the next one, or a message that cannot be encoded."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Step number, events that enter with it, the plan, and the ids sampled in the step before, in that plan's order
    (`replica/sequence/sampled.py`); `num_sampled_ids` is their number per sequence, empty if each has one.

    `mask_checksums` are those of the steps that sampled the ids, of each that had rows with a grammar
    (`StepResult.mask_checksums`).

    `digest` is rank 0's chained digest of everything up to and including this step; empty where digests are switched
    off.
    """

    step: int
    events: tuple[Event, ...]
    plan: StepPlan
    sampled_token_ids: tuple[int, ...]
    digest: bytes
    num_sampled_ids: tuple[int, ...] = ()
    mask_checksums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.step == self.plan.step, f"message of step {self.step} carries the plan of step {self.plan.step}"
        check_num_ids("StepMessage.num_sampled_ids", self.num_sampled_ids, self.sampled_token_ids)

    @property
    def sampled(self) -> SampledIds:
        """The sampled ids with their number per sequence."""
        return SampledIds(self.sampled_token_ids, self.num_sampled_ids)
