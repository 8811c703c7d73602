"""Beam search in its plainest form, over log-probabilities that a model computes anew for each beam."""

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
from torch import Tensor

LogProbs: TypeAlias = Callable[[list[int]], Tensor]
"""Log-probabilities [vocabulary] of the token behind these tokens of an answer."""


@torch.no_grad()
def plain_beams(
    log_probs: LogProbs, num_prompt: int, width: int, num_tokens: int, penalty: float, ends: Collection[int]
) -> list[list[int]]:
    """The best `width` answers to a prompt of so many tokens. Those that come to one of `ends` are set aside."""

    def score(each: tuple[list[int], float, bool]) -> float:
        tokens, log_prob, has_ended = each
        return log_prob / (num_prompt + len(tokens) - has_ended) ** penalty

    live: list[tuple[list[int], float, bool]] = [([], 0.0, False)]
    ended: list[tuple[list[int], float, bool]] = []
    for _ in range(num_tokens):
        longer = []
        for tokens, log_prob, _has_ended in live:
            row = log_probs(tokens)
            likeliest = row.topk(2 * width).indices.tolist()
            allowed = [each for each in likeliest if row[each] > -torch.inf]
            longer += [([*tokens, each], log_prob + float(row[each]), each in ends) for each in allowed]
        ended += [each for each in longer if each[2]]
        live = sorted([each for each in longer if not each[2]], key=score, reverse=True)[:width]
    return [tokens for tokens, _, _ in sorted([*ended, *live], key=score, reverse=True)[:width]]
