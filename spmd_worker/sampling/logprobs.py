"""Log-probabilities of chosen and likeliest tokens.

K: rows; V: vocabulary.
"""

import torch
from torch import Tensor

from spmd_worker.sequence.outputs import Logprob, TokenLogprobs


def token_logprobs(logprobs: Tensor, token_id: int, num_likeliest: int) -> TokenLogprobs:
    """Float32 [V] -> the token's own entry first, then the likeliest, all where it is -1; equal ones by ascending
    id.
    """
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    entries: TokenLogprobs = {token_id: Logprob(float(chosen), rank)}
    for place, (likely_id, value) in enumerate(_likeliest(logprobs, num_likeliest), start=1):
        entries.setdefault(likely_id, Logprob(value, place))
    return entries


def log_softmax(logits: Tensor) -> Tensor:
    """Float32 [K, V] -> float32 [K, V], row by row."""
    return torch.log_softmax(logits, dim=-1)


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """(token id, log-probability), likeliest first; torch.topk leaves the order of equal values open, so it is set
    here.
    """
    if count == 0:
        return []
    if count < 0:
        count = logprobs.numel()
    threshold = torch.topk(logprobs, min(count, logprobs.numel())).values[-1]
    indices = torch.nonzero(logprobs >= threshold).squeeze(1).tolist()
    pairs = sorted(zip(indices, logprobs[indices].tolist()), key=lambda pair: (-pair[1], pair[0]))
    return pairs[:count]
