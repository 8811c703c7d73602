"""Log-probabilities of given tokens of each row, and of the most probable, as arrays: for many of them a row.

They have the bits of `shard_logprobs`. All calls are made by every rank of the group, with the same rows.

K: rows; Vs: token ids of this rank's shard; N: ranks of the group; C: given tokens of a row; n: most probable tokens.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.top_k import top_k_of_rows
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.ranks.communicator import GroupHandle

Scores = tuple[NDArray[np.float32], NDArray[np.uint32]]
"""Log-probabilities [K, C + n] and ids of the most probable tokens [K, n]."""


def shard_scores(
    logits: Tensor,
    token_ids: Tensor,
    count: int,
    maxima: Tensor,
    normalisers: Tensor,
    group: GroupHandle,
    num_owned: int,
    read_back: ReadBack,
) -> Awaited[Scores]:
    """[K, Vs] and int64 [K, C], negative for none -> `Scores` with `count` most probable tokens; minus infinity for a
    token that there is not. `maxima` and `normalisers`: see `shard_logprobs`.
    """
    shard_size = logits.shape[1]
    chosen = token_ids.clamp(min=0)
    columns = (chosen - group.rank * shard_size).clamp(0, shard_size - 1)
    by_rank = group.all_gather(logits.gather(1, columns).double())
    values = by_rank.gather(0, (chosen // shard_size).unsqueeze(0)).squeeze(0)
    values = values.masked_fill(token_ids < 0, -torch.inf)
    pairs = torch.empty((len(logits), 0, 2), dtype=torch.float64, device=logits.device)
    if count:
        own = top_k_of_rows(logits[:, :num_owned], min(count, shard_size))
        own[:, :, 1].add_(group.rank * shard_size * (own[:, :, 1] >= 0))
        pairs = group.all_gather(own).transpose(0, 1).flatten(1, 2)
    logprobs = torch.cat((values, pairs[:, :, 0]), dim=1) - maxima.unsqueeze(1) - normalisers.unsqueeze(1)
    # Rounded to float32 on the device.
    return read_back.later(partial(_arrays, count), logprobs.float().double(), pairs)


def _arrays(count: int, logprobs: Tensor, pairs: Tensor) -> Scores:
    """`Scores`, from host tensors [K, C + N * n] and [K, N * n, 2]."""
    found, top = logprobs.numpy().astype(np.float32), pairs.numpy()
    num_given = found.shape[1] - top.shape[1]
    ids = top[:, :, 1]
    # Missing tokens last; of equal logits the first id.
    order = np.lexsort((ids, -top[:, :, 0], ids < 0), axis=-1)[:, :count]
    top_ids = np.take_along_axis(ids, order, 1)
    top_logprobs = np.take_along_axis(found[:, num_given:], order, 1)
    is_nan = np.isnan(found[:, :1])
    top_logprobs = np.where(top_ids < 0, np.where(is_nan, np.nan, -np.inf), top_logprobs).astype(np.float32)
    return np.concatenate((found[:, :num_given], top_logprobs), axis=1), np.maximum(top_ids, 0).astype(np.uint32)
