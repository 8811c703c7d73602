"""Log-probabilities from vocabulary-sharded logits.

Ranks exchange a few numbers per row: the sum of probability weights, the sampled token's logit, the number of more
probable tokens of each shard, and the top-k of each shard. Every rank of the group gets the same values. They depend on
the row's logits alone: weights are integers (`Kernels.prob_sums`), whose sums do not depend on how the vocabulary is
sharded.

K: rows; Vs: token ids of this rank's shard; N: ranks of the group; n: maximum of the rows' top-k; C: maximum of their
listed ids.
All calls are made by every rank of the group, with the same rows.
"""

import math
from functools import partial

import torch
from torch import Tensor

from spmd_worker.base.config.schema import MAX_LOGPROBS
from spmd_worker.ops.kernels.api import PROB_WEIGHT_BITS, Kernels
from spmd_worker.ops.kernels.top_k import top_k, top_k_of_rows
from spmd_worker.ops.sampling.logprobs import entries_of
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack, reads_are_free
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS


def log_normalisers(kernels: Kernels, logits: Tensor, maxima: Tensor, factors: Tensor, group: GroupHandle) -> Tensor:
    """Float64 [K]: logarithm of each row's sum over the vocabulary of exp((logit - maximum) / temperature).

    `maxima` float64 [K] are the vocabulary's; `factors` float32 [K] are from `filters.exponent_factors`.
    """
    own = kernels.prob_sums(logits, maxima.float(), factors).sum(dim=-1)
    return group.all_gather(own).sum(dim=0).double().log() - PROB_WEIGHT_BITS * math.log(2.0)


def shard_logprobs(
    kernels: Kernels,
    logits: Tensor,
    token_ids: Tensor,
    nums_top: list[int],
    maxima: Tensor,
    normalisers: Tensor,
    temperatures: Tensor,
    group: GroupHandle,
    num_owned: int,
    read_back: ReadBack,
    listed: Tensor | None = None,
) -> Awaited[list[TokenLogprobs]]:
    """[K, Vs] -> for each row the entry of its token, int64 [K], then those of its `listed` ids, int64 [K, C], negative
    for none, then those of its `nums_top` top tokens, -1 for all.

    `normalisers` are from `log_normalisers`, `temperatures` float64 [K], `num_owned` is the number of token ids of this
    shard. The entries of a row without a token (a negative one) are meaningless.
    """
    named = token_ids.unsqueeze(1) if listed is None else torch.cat((token_ids.unsqueeze(1), listed), dim=1)
    chosen, num_named, shard_size = named.clamp(min=0), named.shape[1], logits.shape[1]
    columns = (chosen - group.rank * shard_size).clamp(0, shard_size - 1)
    by_rank = group.all_gather(logits.gather(1, columns).double())
    values = by_rank.gather(0, (chosen // shard_size).unsqueeze(0)).squeeze(0)
    counts = [shard_size * group.size if each == ALL_LOGPROBS else each for each in nums_top]
    nums_own = [min(each, shard_size) for each in counts]
    own = _candidates(kernels, logits[:, :num_owned], nums_own, group.rank * shard_size)
    # Counts are gathered with the candidates, as more pairs. Float32 represents the sampled logit exactly.
    above = [kernels.count_above(logits, column.float().contiguous()).double() for column in values.unbind(1)]
    own = torch.cat((torch.stack(above, dim=1).unsqueeze(-1).expand(-1, -1, 2), own), dim=1)
    gathered = group.all_gather(own)
    ranks = gathered[:, :, :num_named, 0].sum(dim=0).long() + 1
    pairs = gathered[:, :, num_named:].transpose(0, 1).flatten(1, 2)
    reported = torch.cat((values, pairs[:, :, 0]), dim=1)
    scaled = (reported - maxima.unsqueeze(1)) / temperatures.unsqueeze(1) - normalisers.unsqueeze(1)
    # Rounded to float32 on the device.
    return read_back.later(partial(_entries, counts), named, ranks, scaled.float().double(), pairs)


def _entries(counts: list[int], ids: Tensor, ranks: Tensor, reported: Tensor, pairs: Tensor) -> list[TokenLogprobs]:
    """Entries of each row, from host tensors [K, 1 + C], [K, 1 + C], [K, 1 + C + n], [K, n, 2]."""
    # All rows at once: one `tolist` per row would take longer than the rest.
    named: list[list[int]] = ids.tolist()
    ranks_of: list[list[int]] = ranks.tolist()
    logprobs: list[list[float]] = reported.tolist()
    listed: list[list[list[float]]] = pairs.tolist()
    entries = []
    num_named = ids.shape[1]
    for index, (token_id, *listed_ids) in enumerate(named):
        (logprob, *values), others = logprobs[index][:num_named], logprobs[index][num_named:]
        merged = sorted(
            (-value, int(top_id), other)
            for (value, top_id), other in zip(listed[index], others, strict=True)
            if top_id >= 0
        )
        top = [(top_id, other) for _, top_id, other in merged[: counts[index]]]
        rank, *their_ranks = ranks_of[index]
        listed_entries = zip(listed_ids, values, their_ranks, strict=True) if listed_ids else ()
        entries.append(entries_of(token_id, logprob, rank, top, listed_entries))
    return entries


def _candidates(kernels: Kernels, logits: Tensor, counts: list[int], first_id: int) -> Tensor:
    """Float64 [K, n, 2]: logit and id of this shard's top-k tokens of each row; id -1 if there are no more."""
    most = max(counts)
    if kernels.samples_on_device or not reads_are_free(logits):
        # Sorting is faster than finding one after another where nearly all are wanted.
        find = kernels.top_logits if most <= MAX_LOGPROBS else top_k_of_rows
        found = find(logits, most)
        found[:, :, 1].add_(first_id * (found[:, :, 1] >= 0))
        return found
    found = torch.full((len(counts), most, 2), -1.0, dtype=torch.float64)
    for index, count in enumerate(counts):
        if count == 0:
            continue
        pairs = [(value, token_id + first_id) for token_id, value in top_k(logits[index], count)]
        if pairs:
            found[index, : len(pairs)] = torch.tensor(pairs, dtype=torch.float64)
    return found
