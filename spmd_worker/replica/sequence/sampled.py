"""Maps a step's flat list of sampled ids to sequences: the order of the ids, and their division, in one module.

A step samples for its continuing sequences, then for the rows of its groups, in plan order; a row that is about to fork
samples for itself and for the forks numbered after it. Each of these sequences gets zero, one or several ids, one
sequence's after another's. All ranks, the wire and a replay use this order.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

Value = TypeVar("Value")

_RUN: Final = 64
"""Keys compared at once: those of a run that has changed are compared one by one."""

NON_FINITE: Final = -1
"""Replaces the id of a sequence whose logits are not finite: it ends there, without an id."""

GRAMMAR_FAILED: Final = -2
"""Replaces the id of a sequence whose grammar allows no token, or exceeds its engine's limits: like `NON_FINITE`."""


NOT_READ: Final = -3
"""Replaces an id that a step in flight samples: it is on the device, or will be, and not yet on the host."""


def sample_indices(sample_index: int, num_samples: int) -> range:
    """Samples of a request that a row samples for: its own, and its forks' if it forks now."""
    return range(sample_index, sample_index + num_samples)


def num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Number of leading drafts that are the ids sampled at their positions."""
    count = 0
    for draft, token_id in zip(drafts, token_ids):
        if draft != token_id:
            break
        count += 1
    return count


def without(values: tuple[Value, ...], indices: Iterable[int]) -> tuple[Value, ...]:
    """The values at all other indices than these ascending ones: a copy of each run between two of them."""
    kept: list[Value] = []
    start = 0
    for index in indices:
        kept += values[start:index]
        start = index + 1
    kept += values[start:]
    return tuple(kept)


def left_out(keys: tuple[SequenceKey, ...], last_keys: tuple[SequenceKey, ...]) -> list[int] | None:
    """Indices in `last_keys` that are left out in `keys`; None unless the others are `keys` in order.

    Runs of equal keys are compared as slices: most keys are the same objects, so a run costs next to nothing.
    """
    if len(keys) > len(last_keys):
        return None
    if keys == last_keys:
        return []
    dropped: list[int] = []
    position = 0
    for start in range(0, len(keys), _RUN):
        run = keys[start : start + _RUN]
        if run == last_keys[position : position + len(run)]:
            position += len(run)
            continue
        for key in run:
            first = position
            while position < len(last_keys) and last_keys[position] != key:
                position += 1
            dropped.extend(range(first, position))
            position += 1
        if position > len(last_keys):
            return None
    dropped.extend(range(position, len(last_keys)))
    return dropped


def num_sampling(plan: StepPlan) -> int:
    """Number of sequences that the step samples for. Costs nothing, whatever numbers a plan claims."""
    return len(plan.continuing) + sum([data.num_samples for group in plan.groups for data in group.sequences])


def sampling_keys(plan: StepPlan) -> tuple[SequenceKey, ...]:
    """Sequences that the step samples for, in the order of their ids."""
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
    """Ids of some sequences, in order. `num_ids` is the number of each, empty if each has one, as nearly always."""

    token_ids: tuple[int, ...] = ()
    num_ids: tuple[int, ...] = ()

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> "SampledIds":
        """Ids from one row of them per sequence."""
        rows = list(rows)
        num_ids = tuple(map(len, rows))
        are_single = num_ids.count(1) == len(num_ids)
        return cls(tuple([token_id for row in rows for token_id in row]), () if are_single else num_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.num_ids) or len(self.token_ids)

    def rows(self) -> list[tuple[int, ...]]:
        """Ids per sequence."""
        return self.divide(self.token_ids)

    def divide(self, values: Sequence[Value]) -> list[tuple[Value, ...]]:
        """`values`, which are parallel to the ids, per sequence."""
        if not self.num_ids:
            return [(value,) for value in values]
        rest = iter(values)
        return [tuple(islice(rest, num_ids)) for num_ids in self.num_ids]

    def first(self, num_sequences: int) -> "SampledIds":
        """Ids of the first sequences."""
        if not self.num_ids:
            return SampledIds(self.token_ids[:num_sequences])
        return SampledIds.from_rows(self.rows()[:num_sequences])

    def after(self, num_sequences: int) -> "SampledIds":
        """Ids of the sequences after the first ones."""
        if not self.num_ids:
            return SampledIds(self.token_ids[num_sequences:])
        return SampledIds.from_rows(self.rows()[num_sequences:])

    def without(self, indices: Sequence[int]) -> "SampledIds":
        """Ids of all sequences but these, in ascending order."""
        if not indices:
            return self
        if not self.num_ids:
            return SampledIds(without(self.token_ids, indices))
        return SampledIds.from_rows(without(tuple(self.rows()), indices))

    def joined(self, later: "SampledIds") -> "SampledIds":
        """These ids, followed by those of later sequences."""
        if not self.num_ids and not later.num_ids:
            return SampledIds(self.token_ids + later.token_ids)
        return SampledIds.from_rows([*self.rows(), *later.rows()])
