"""Log-probabilities of chosen and likeliest tokens.

K: rows; V: vocabulary.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.replica.sequence.outputs import Logprob, TokenLogprobs

_NUMBERS_AT_ONCE: Final = 1 << 22
"""Each takes some 36 bytes: 144 MiB, which the profile of a GPU sees."""


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


def likeliest_of_rows(logits: Tensor, count: int) -> Tensor:
    """[K, V] -> float64 [K, count, 2]: value and token id of each row's largest, as `likeliest` orders them, and -1 for
    both where there are no more or a value is NaN. Nothing is read back.
    """
    num_found = min(count, logits.shape[1])
    if num_found == 0:
        return torch.full((len(logits), count, 2), -1.0, dtype=torch.float64, device=logits.device)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // max(1, logits.shape[1]))
    pieces = [_largest_pairs(each, num_found) for each in torch.split(logits, rows_at_once)]
    return torch.nn.functional.pad(torch.cat(pieces), (0, 0, 0, count - num_found), value=-1.0)


def _largest_pairs(logits: Tensor, count: int) -> Tensor:
    # Adding zero leaves one zero, and all that are NaN are to have the same bits, the largest.
    values = logits.float() + 0.0
    bits = values.masked_fill(values.isnan(), torch.nan).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # With the id below the value no two are equal, so which ones are the largest is not left open.
    ids = torch.arange(logits.shape[1], device=logits.device)
    found = torch.topk((ordered << 32) - ids, count, dim=1).indices
    values = logits.gather(1, found).double()
    pairs = torch.stack((values, found.double()), dim=-1)
    return pairs.masked_fill(values.isnan().unsqueeze(-1), -1.0)
