"""Number of tokens that a row may draft in a step: a rule by counts, which every replica computes alike."""

from typing import Final

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.sequence.sequence import Sequence

PROBE_EVERY: Final = 32
"""A row whose drafts fail tries again with every so many output tokens."""
NUM_REMEMBERED: Final = 64
"""Drafted tokens at which a row's counts are halved, so that they follow its latest tokens."""
FEW_ROWS: Final = 16
LEAST_OF_MANY: Final = 3
"""More than `FEW_ROWS` rows draft only with room for so many drafts each: a drafting row costs the host some 0.2 ms."""
_PRIOR_DRAFTED: Final = 8
_PRIOR_ACCEPTED: Final = 3
_FAILING: Final = 10
"""Drafts fail where fewer than one of so many is accepted."""


def num_drafts(config: SpeculativeConfig, num_decoding: int, num_scheduled_tokens: int, sequence: Sequence) -> int:
    """Most drafts of `sequence` in a step that computes `num_scheduled_tokens` without drafts, one for each of
    `num_decoding` rows that decode among them:

        min(num_speculative_tokens, (max_step_tokens - num_scheduled_tokens) // num_decoding, limit of the row)

    Without prompts in the step the second is `max_step_tokens // num_decoding - 1`: drafts fill a step up to
    `max_step_tokens`, where a token begins to cost as much as a step's weights. It counts as 0 below 3 where more than
    16 rows decode, as each drafting row has its cost on the host. The limit of the row follows a = (accepted + 3) /
    (drafted + 8), of its latest drafts: `ceil(2 * a * num_speculative_tokens)`, and 0 while a is below 1 / 10, but with
    every 32nd output token.
    """
    room = (config.step_tokens - num_scheduled_tokens) // max(1, num_decoding)
    if room < (LEAST_OF_MANY if num_decoding > FEW_ROWS else 1):
        return 0
    return min(config.most_drafts, room, _limit_of_row(config.most_drafts, sequence))


def record_drafts(sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
    """Count a step's drafts of a row for its limit."""
    assert 0 <= num_accepted <= num_drafted, (sequence.key, num_accepted, num_drafted)
    sequence.num_drafted += num_drafted
    sequence.num_accepted += num_accepted
    while sequence.num_drafted >= NUM_REMEMBERED:
        sequence.num_drafted //= 2
        sequence.num_accepted //= 2


def _limit_of_row(most_drafts: int, sequence: Sequence) -> int:
    accepted, drafted = sequence.num_accepted + _PRIOR_ACCEPTED, sequence.num_drafted + _PRIOR_DRAFTED
    if _FAILING * accepted < drafted and len(sequence.output_token_ids) % PROBE_EVERY:
        return 0
    return -(-2 * accepted * most_drafts // drafted)
