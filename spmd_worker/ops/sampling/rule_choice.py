"""The parts of `TokenRules` that depend on logits: Whisper's choice between timestamps and text, and the most probable
of `first_tokens`. Applied to the shards of the vocabulary after all masks.

Probabilities are compared as whole numbers (`Kernels.prob_sums`), whose sums do not depend on how the vocabulary is
sharded, so every rank forbids the same tokens.

K: rows of logits; k: rows with a rule; Vs: token ids of this rank's shard.
All calls are made by every rank of the group, with the same rows.
"""

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.sampling.filters import exponent_factors
from spmd_worker.ops.sampling.shard_argmax import best_of_shards
from spmd_worker.ops.sampling.step_rows import SomeRows
from spmd_worker.ranks.communicator import GroupHandle


def apply_rules(kernels: Kernels, logits: Tensor, part: SomeRows, group: GroupHandle, first_id: int) -> None:
    """Forbid tokens in place: [K, Vs], whose first column is token `first_id`; K are the rows of `part`."""
    for first_timestamp, named in part.timestamps.items():
        rows = part.index(("timestamps", first_timestamp), named)
        prefer_timestamps(kernels, logits, rows, first_timestamp, group, first_id)
    first = [index for index in part.drawn_first if not part.rows[index].output_token_ids]
    if first:
        keep_best(kernels, logits, to_device(torch.tensor(first, dtype=torch.int64), logits.device), group, first_id)


def prefer_timestamps(
    kernels: Kernels, logits: Tensor, rows: Tensor, first_timestamp: int, group: GroupHandle, first_id: int
) -> None:
    """Forbid text, in place, in those of `rows`, int64 [k], in which all timestamps together are more probable than
    every text token. [K, Vs], whose first column is token `first_id`. Rows with a logit that is not finite keep it.
    """
    own = logits.index_select(0, rows)
    num_text = min(max(first_timestamp - first_id, 0), own.shape[1])
    text, stamps = own[:, :num_text], own[:, num_text:].contiguous()
    maxima = torch.stack((_row_maxima(text), _row_maxima(stamps)), dim=-1)
    best_text, best_stamp = group.all_gather(maxima).amax(dim=0).unbind(dim=-1)
    best = torch.maximum(best_text, best_stamp)
    # NaN and infinity have no weight; NaN compares as not finite.
    is_finite = best.isfinite()
    best = best.masked_fill(~is_finite, 0.0).float()
    factors = torch.full_like(best, float(exponent_factors([1.0])[0]))
    weights = _weights(kernels, stamps.masked_fill(~is_finite.unsqueeze(1), 0.0), best, factors)
    of_text = best_text.masked_fill(~is_finite, 0.0).float().unsqueeze(1)
    of_stamps = group.all_gather(weights).sum(dim=0)
    is_preferred = is_finite & (of_stamps > _weights(kernels, of_text, best, factors))
    text.masked_fill_(is_preferred.unsqueeze(1), -torch.inf)
    logits.index_copy_(0, rows, own)


def keep_best(kernels: Kernels, logits: Tensor, rows: Tensor, group: GroupHandle, first_id: int) -> None:
    """Forbid all tokens but the most probable in each of `rows`, int64 [k], in place: [K, Vs]."""
    own = logits.index_select(0, rows)
    token_ids = best_of_shards(*kernels.argmax(own), group, first_id)[1].long()
    columns = torch.arange(own.shape[1], device=own.device) + first_id
    logits.index_copy_(0, rows, own.masked_fill(columns != token_ids.unsqueeze(1), -torch.inf))


def _row_maxima(values: Tensor) -> Tensor:
    """Float64 [k]; minus infinity without a column."""
    if not values.shape[1]:
        return torch.full((len(values),), -torch.inf, dtype=torch.float64, device=values.device)
    return values.amax(dim=1).double()


def _weights(kernels: Kernels, logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
    """Int64 [k]: sums of the rows' probability weights."""
    if not logits.shape[1]:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return kernels.prob_sums(logits, maxima, factors).sum(dim=-1)
