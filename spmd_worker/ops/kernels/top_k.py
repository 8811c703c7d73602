"""The largest logits of rows, in torch: ties by ascending id, which `torch.topk` does not define.

K: rows; V: vocabulary.
"""

from typing import Final

import torch
from torch import Tensor

_MAX_BLOCK_ELEMENTS: Final = 1 << 22
"""Each takes about 36 bytes: 144 MiB, which the memory profile of a GPU counts."""


def top_k(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """[V], log-probabilities or logits -> (token id, value) of the `count` largest in descending order, ties by
    ascending id, which torch.topk does not define.
    """
    if count == 0 or logprobs.numel() == 0:
        return []
    if count < 0:
        count = logprobs.numel()
    count = min(count, logprobs.numel())
    threshold = torch.topk(logprobs, count).values[-1]
    indices = torch.nonzero(logprobs >= threshold).squeeze(1)
    if len(indices) > count:
        # Many may be equal to the last one, e.g. all dropped by a filter: of these the first ids alone are listed.
        values = logprobs[indices]
        above = indices[values > threshold]
        indices = torch.cat((above, indices[values == threshold][: count - len(above)]))
    return sorted(zip(indices.tolist(), logprobs[indices].tolist()), key=lambda pair: (-pair[1], pair[0]))


def top_k_of_rows(logits: Tensor, count: int) -> Tensor:
    """[K, V] -> float64 [K, count, 2]: value and token id of each row's `top_k`; -1 for both if there are no more or a
    value is NaN. The host reads nothing back.
    """
    num_found = min(count, logits.shape[1])
    if num_found == 0:
        return torch.full((len(logits), count, 2), -1.0, dtype=torch.float64, device=logits.device)
    rows_at_once = max(1, _MAX_BLOCK_ELEMENTS // max(1, logits.shape[1]))
    pieces = [_top_pairs(each, num_found) for each in torch.split(logits, rows_at_once)]
    return torch.nn.functional.pad(torch.cat(pieces), (0, 0, 0, count - num_found), value=-1.0)


def _top_pairs(logits: Tensor, count: int) -> Tensor:
    # Adding zero merges the two zeros; every NaN gets the same bits, the maximum.
    values = logits.float() + 0.0
    bits = values.masked_fill(values.isnan(), torch.nan).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # With the id in the lower bits no two keys are equal, so the result of topk is defined.
    ids = torch.arange(logits.shape[1], device=logits.device)
    found = torch.topk((ordered << 32) - ids, count, dim=1).indices
    values = logits.gather(1, found).double()
    pairs = torch.stack((values, found.double()), dim=-1)
    return pairs.masked_fill(values.isnan().unsqueeze(-1), -1.0)
