"""Number of drafts of a sequence in a step, from counts alone."""

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.sequence.sequence import Sequence


def num_drafts(config: SpeculativeConfig, num_decoding: int, num_scheduled_tokens: int, sequence: Sequence) -> int:
    """Most drafts of one of `num_decoding` sequences in a step of `num_scheduled_tokens` without drafts: they share
    what is left of `max_step_tokens`, up to which more tokens cost a step next to nothing.
    """
    num_left = config.step_tokens - num_scheduled_tokens
    return min(max(num_left, 0) // max(num_decoding, 1), config.most_drafts)


def record_drafts(sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
    """Count a step's drafts of a row."""
    sequence.num_drafted += num_drafted
    sequence.num_accepted += num_accepted
