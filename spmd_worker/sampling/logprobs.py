"""Log-probabilities of chosen and likeliest tokens.

K: rows; V: vocabulary.
"""

import torch
from torch import Tensor

from spmd_worker.sequence.outputs import Logprob, TokenLogprobs


def entries_of(token_id: int, logprob: float, rank: int, likely: list[tuple[int, float]]) -> TokenLogprobs:
    """The entry of a token, then those of `likely`: (token id, log-probability), likeliest first."""
    entries: TokenLogprobs = {token_id: Logprob(logprob, rank)}
    for rank_of_likely, (likely_id, value) in enumerate(likely, start=1):
        entries.setdefault(likely_id, Logprob(value, rank_of_likely))
    return entries


def likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """[V], log-probabilities or logits -> (token id, value) of the `count` largest, largest first; equal ones by
    ascending id, which torch.topk leaves open.
    """
    if count == 0 or logprobs.numel() == 0:
        return []
    if count < 0:
        count = logprobs.numel()
    count = min(count, logprobs.numel())
    threshold = torch.topk(logprobs, count).values[-1]
    indices = torch.nonzero(logprobs >= threshold).squeeze(1)
    if len(indices) > count:
        # Many may be equal to the last one, as all that a filter dropped are: of these the first ids alone are listed.
        values = logprobs[indices]
        above = indices[values > threshold]
        indices = torch.cat((above, indices[values == threshold][: count - len(above)]))
    return sorted(zip(indices.tolist(), logprobs[indices].tolist()), key=lambda pair: (-pair[1], pair[0]))
