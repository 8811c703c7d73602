"""What the workers' mirrors are told of a step: snapshots of what they do not know, deltas of what they do.

The one place where a plan takes token values from sequences. Knows decisions and what was sent before. Knows nothing
about how a step was decided.
"""

from collections.abc import Sequence as Sized
from typing import NamedTuple

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


class Decision(NamedTuple):
    """One sequence of a step: tokens [first_token, first_token + num_tokens) are computed.

    `change` is what became of its block table, None for nothing. A named tuple, because hundreds are made each step.
    """

    sequence: Sequence
    first_token: int
    num_tokens: int
    num_samples: int
    change: TableChange | None


def group_updates(decisions: Sized[Decision]) -> tuple[GroupUpdate, ...]:
    """One update a group, in the order of its first decision. Marks what is told as known."""
    # A group of several sequences leaves its list where its first decision stands.
    updates: list[GroupUpdate | list[Decision]] = []
    families: dict[RequestId, list[Decision]] = {}
    for decision in decisions:
        request = decision.sequence.request
        if request.sampling.n == 1:
            updates.append(_update_of_one(decision))
        elif request.request_id in families:
            families[request.request_id].append(decision)
        else:
            families[request.request_id] = [decision]
            updates.append(families[request.request_id])
    return tuple([_update_of(update) if isinstance(update, list) else update for update in updates])


def _update_of_one(decision: Decision) -> GroupUpdate:
    sequence = decision.sequence
    if not sequence.is_known:
        return _update_of([decision])
    delta = SequenceGroupMetadataDelta(sequence.request.request_id, (_changed(decision),))
    sequence.num_sent_tokens = len(sequence.output_token_ids)
    return delta


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
        update = SequenceGroupMetadataDelta(request.request_id, tuple(_changed(decision) for decision in decisions))
    for sequence in sequences:
        sequence.is_known = True
        sequence.num_sent_tokens = len(sequence.output_token_ids)
    return update


def _is_new_fork(sequence: Sequence) -> bool:
    return sequence.sample_index > 0 and sequence.num_sent_tokens == 0


def _whole(decision: Decision) -> SequenceData:
    sequence, first_token, num_tokens, num_samples, _ = decision
    return SequenceData(
        sample_index=sequence.sample_index,
        output_token_ids=tuple(sequence.output_token_ids),
        block_ids=tuple(sequence.table.block_ids),
        num_computed_tokens=first_token,
        num_scheduled_tokens=num_tokens,
        num_samples=num_samples,
    )


def _changed(decision: Decision) -> SequenceDataDelta:
    """Positional arguments, in declaration order: this runs for every running sequence of every step."""
    sequence, first_token, num_tokens, num_samples, change = decision
    block_ids = sequence.table.block_ids
    if not sequence.is_known:
        num_kept_blocks, appended = 0, tuple(block_ids)
    elif change is None:
        num_kept_blocks, appended = len(block_ids), ()
    else:
        num_kept_blocks, appended = change.first_index, change.block_ids
    new_ids = tuple(sequence.output_token_ids[sequence.num_sent_tokens :])
    return SequenceDataDelta(
        sequence.sample_index, new_ids, num_kept_blocks, appended, first_token, num_tokens, num_samples
    )
