"""Whose is the k-th sampled id: the order of a step's ids, and how they are shared out, in one place.

A step samples for its continuing sequences, then for the rows of its groups, in plan order; a row that is about to fork
samples for itself and for the forks numbered after it. Each of these sequences is given zero, one or several ids, one
sequence's after another's. All ranks, the wire and a replay count in this order.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

Value = TypeVar("Value")

NON_FINITE: Final = -1
"""Stands for the id of a sequence whose logits are no numbers to choose by: it ends there, and is given no id."""

FORM_FAILED: Final = -2
"""As `NON_FINITE`, of a sequence whose form lets no token follow, or takes more than the limits of its engine."""


NOT_READ: Final = -3
"""Stands where an id belongs that a step in flight samples: the device has it, or will, and the host has not."""


def sample_indices(sample_index: int, num_samples: int) -> range:
    """The samples of a request that a row samples for: its own, and its forks', where it forks now."""
    return range(sample_index, sample_index + num_samples)


def num_sampling(plan: StepPlan) -> int:
    """How many sequences the step samples for. Costs nothing, however many a plan claims."""
    return len(plan.continuing) + sum([data.num_samples for group in plan.groups for data in group.sequences])


def sampling_keys(plan: StepPlan) -> tuple[SequenceKey, ...]:
    """The sequences that the step samples for, in the order of their ids."""
    if not plan.groups:
        return plan.continuing
    rows = [
        SequenceKey(group.request_id, index)
        for group in plan.groups
        for data in group.sequences
        for index in sample_indices(data.sample_index, data.num_samples)
    ]
    return (*plan.continuing, *rows)


class SampledIds(NamedTuple):
    """Ids of some sequences, one sequence's after another's. `num_ids` says how many each has; it is empty where each
    has one, which is nearly always.
    """

    token_ids: tuple[int, ...] = ()
    num_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "SampledIds":
        """From each sequence's ids."""
        rows = list(rows)
        num_ids = tuple(map(len, rows))
        are_single = num_ids.count(1) == len(num_ids)
        return cls(tuple([token_id for row in rows for token_id in row]), () if are_single else num_ids)

    @property
    def num_sequences(self) -> int:
        """How many sequences were sampled for."""
        return len(self.num_ids) or len(self.token_ids)

    def rows(self) -> list[tuple[int, ...]]:
        """Each sequence's ids."""
        return self.shared_out(self.token_ids)

    def shared_out(self, values: Sequence[Value]) -> list[tuple[Value, ...]]:
        """Each sequence's part of `values`, which are parallel to the ids."""
        if not self.num_ids:
            return [(value,) for value in values]
        rest = iter(values)
        return [tuple(islice(rest, num_ids)) for num_ids in self.num_ids]

    def first(self, num_sequences: int) -> "SampledIds":
        """The ids of the first sequences."""
        if not self.num_ids:
            return SampledIds(self.token_ids[:num_sequences])
        return SampledIds.of(self.rows()[:num_sequences])

    def after(self, num_sequences: int) -> "SampledIds":
        """The ids of the others."""
        if not self.num_ids:
            return SampledIds(self.token_ids[num_sequences:])
        return SampledIds.of(self.rows()[num_sequences:])

    def without(self, indices: Sequence[int]) -> "SampledIds":
        """The ids of all sequences but these."""
        if not indices:
            return self
        left_out = dict.fromkeys(indices)
        return SampledIds.of([row for index, row in enumerate(self.rows()) if index not in left_out])

    def joined(self, later: "SampledIds") -> "SampledIds":
        """These, and then those of later sequences."""
        if not self.num_ids and not later.num_ids:
            return SampledIds(self.token_ids + later.token_ids)
        return SampledIds.of([*self.rows(), *later.rows()])
