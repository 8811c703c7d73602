"""What the workers' mirrors are told of a step: snapshots of what they do not know, deltas of what they do.

The one place where a plan takes token values from sequences. Knows decisions and what was sent before. Knows nothing
about how a step was decided.
"""

from collections.abc import Sequence as Sized
from dataclasses import dataclass

from kv_cache.block_table import TableChange
from spmd_worker.sequence.metadata import (
    GroupUpdate,
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Decision:
    """One sequence of a step, with what became of its block table."""

    sequence: Sequence
    num_tokens: int
    num_samples: int
    change: TableChange


def group_updates(decisions: Sized[Decision]) -> tuple[GroupUpdate, ...]:
    """One update a group, in the order of its first decision. Marks what is told as known."""
    by_request: dict[RequestId, list[Decision]] = {}
    for decision in decisions:
        by_request.setdefault(decision.sequence.request.request_id, []).append(decision)
    return tuple(_update_of(group) for group in by_request.values())


def _update_of(decisions: list[Decision]) -> GroupUpdate:
    """A snapshot when the mirrors do not hold the group with its blocks, else a delta."""
    sequences = [decision.sequence for decision in decisions]
    request = sequences[0].request
    # A fork is not known either, but a delta can carry it: everything of it is appended.
    must_snapshot = any(not sequence.is_known and not _is_new_fork(sequence) for sequence in sequences)
    update: GroupUpdate
    if must_snapshot:
        update = SequenceGroupMetadata(request, tuple(_whole(decision) for decision in decisions))
    else:
        changed = tuple(_changed(decision) for decision in decisions)
        update = SequenceGroupMetadataDelta(request.request_id, changed)
    for sequence in sequences:
        sequence.is_known = True
        sequence.num_sent_tokens = len(sequence.output_token_ids)
    return update


def _is_new_fork(sequence: Sequence) -> bool:
    return sequence.sample_index > 0 and sequence.num_sent_tokens == 0


def _whole(decision: Decision) -> SequenceData:
    sequence = decision.sequence
    return SequenceData(
        sample_index=sequence.sample_index,
        output_token_ids=tuple(sequence.output_token_ids),
        block_ids=tuple(sequence.table.block_ids),
        num_computed_tokens=sequence.num_computed_tokens - decision.num_tokens,
        num_scheduled_tokens=decision.num_tokens,
        num_samples=decision.num_samples,
    )


def _changed(decision: Decision) -> SequenceDataDelta:
    sequence, change = decision.sequence, decision.change
    if not sequence.is_known:
        change = TableChange(0, tuple(sequence.table.block_ids))
    return SequenceDataDelta(
        sample_index=sequence.sample_index,
        appended_token_ids=sequence.unsent_token_ids(),
        num_kept_blocks=change.first_index,
        appended_block_ids=change.block_ids,
        num_computed_tokens=sequence.num_computed_tokens - decision.num_tokens,
        num_scheduled_tokens=decision.num_tokens,
        num_samples=decision.num_samples,
    )
