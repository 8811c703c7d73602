"""Values of a mirror's sequences, to be compared with a scheduler's."""

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.sequence.sequence import SequenceKey

SequenceState = tuple[tuple[int, ...], tuple[BlockId, ...], int]
"""Output tokens, block table, and number of computed tokens once the last plan has run."""


def mirror_state(mirror: Mirror) -> dict[SequenceKey, SequenceState]:
    """Every sequence, in the order of keys."""
    state = {}
    for request_id in sorted(mirror._groups):
        for sample_index, each in sorted(mirror._groups[request_id].sequences.items()):
            tokens, block_ids = tuple(each.output_token_ids), tuple(each.block_ids)
            num_computed_tokens = each.num_computed_tokens + each.num_scheduled_tokens
            state[SequenceKey(request_id, sample_index)] = (tokens, block_ids, num_computed_tokens)
    return state


def mirror_slots(mirror: Mirror) -> dict[SequenceKey, int]:
    """The slot of recurrent states of every sequence; -1 where the model has none, or another sequence has it now."""
    return {key: sequence.state_slot for key, sequence in sorted(mirror._sequences.items())}
