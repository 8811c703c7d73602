"""The rows of a plan as columns, and records made from columns: what codec and digest need to be fast.

A row is one sequence of one group, in plan order. The listing of the last plan foretells the rows of the next one: a
row that goes on has computed what was scheduled, and keeps the blocks it has. Knows nothing about bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar

from spmd_worker.sequence.metadata import SequenceData, SequenceDataDelta, SequenceGroupMetadataDelta
from spmd_worker.sequence.step import StepPlan

_T = TypeVar("_T")


Row = SequenceData | SequenceDataDelta


@dataclass(frozen=True, slots=True)
class Listing:
    """The rows of a plan and parallel columns of them.

    `group_numbers` counts the plan's groups; `num_computed_tokens` and `num_blocks` are as the step leaves them.
    """

    rows: list[Row]
    request_ids: list[int]
    group_numbers: list[int]
    sample_indices: list[int]
    num_computed_tokens: list[int]
    num_blocks: list[int]
    num_samples: list[int]

    @property
    def is_flat(self) -> bool:
        """Whether each group lists one sequence."""
        return self.group_numbers == list(range(len(self.rows)))

    def sampled_by_row(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The ids that each row sampled, cut from those of the step in plan order."""
        samples = self.num_samples
        if samples.count(1) == len(samples) == len(token_ids):
            return list(zip(token_ids))
        ends = accumulate(samples)
        return [tuple(token_ids[end - count : end]) for end, count in zip(ends, samples)]

    def find(self, request_ids: list[int], sample_indices: list[int]) -> Sequence[int]:
        """For rows of the next plan, where this one lists the same sequence; -1 where it does not."""
        if request_ids == self.request_ids and sample_indices == self.sample_indices:
            return range(len(request_ids))
        places = {key: place for place, key in enumerate(zip(self.request_ids, self.sample_indices))}
        return [places.get(key, -1) for key in zip(request_ids, sample_indices)]


EMPTY_LISTING: Final = Listing([], [], [], [], [], [], [])


def listing_of(plan: StepPlan) -> Listing:
    """The rows of a plan, snapshots and deltas alike."""
    groups = plan.groups
    rows: list[Row]
    if [len(group.sequences) for group in groups].count(1) == len(groups):
        rows = [group.sequences[0] for group in groups]
        request_ids: list[int] = [group.request_id for group in groups]
        group_numbers = list(range(len(groups)))
    else:
        rows = [data for group in groups for data in group.sequences]
        request_ids = [group.request_id for group in groups for _ in group.sequences]
        group_numbers = [number for number, group in enumerate(groups) for _ in group.sequences]
    return Listing(
        rows=rows,
        request_ids=request_ids,
        group_numbers=group_numbers,
        sample_indices=[data.sample_index for data in rows],
        num_computed_tokens=[data.num_computed_tokens + data.num_scheduled_tokens for data in rows],
        num_blocks=[
            data.num_kept_blocks + len(data.appended_block_ids)
            if isinstance(data, SequenceDataDelta)
            else len(data.block_ids)
            for data in rows
        ],
        num_samples=[data.num_samples for data in rows],
    )


def make_rows(columns: Sequence[Iterable[Any]], num_rows: int) -> list[SequenceDataDelta]:
    """Deltas from the columns of their fields, in declaration order."""
    rows = list(map(SequenceDataDelta._make, zip(*columns)))
    assert len(rows) == num_rows, (len(rows), num_rows)
    return rows


def make_groups(
    request_ids: list[int], sequences: Sequence[tuple[SequenceDataDelta, ...]]
) -> list[SequenceGroupMetadataDelta]:
    """Group deltas from their two columns."""
    return list(map(SequenceGroupMetadataDelta._make, zip(request_ids, sequences, strict=True)))
