"""Log-probabilities from the logits of vocabulary shards, where each rank keeps its own.

What crosses ranks is a few numbers a row: the sum of the masses, the chosen token's logit, how many tokens of a shard
are likelier, and the likeliest of each shard. Every rank of the group gets the same values. A row's depend on its own
logits alone: masses are whole numbers (`Kernels.masses`), whose sums are the same bits however the vocabulary is cut.

K: rows; Vs: token ids of this rank's shard; N: ranks of the group; n: likeliest that the row with most of them wants.
All calls are made by every rank of the group, with the same rows.
"""

import math
from functools import partial

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import MASS_BITS, Kernels
from spmd_worker.ops.sampling.logprobs import entries_of, likeliest, likeliest_of_rows
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack, reads_are_free
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS


def log_masses(kernels: Kernels, logits: Tensor, largest: Tensor, factors: Tensor, group: GroupHandle) -> Tensor:
    """Float64 [K]: of each row the logarithm of the sum, over the vocabulary, of exp((logit - largest) / temperature).

    `largest` float64 [K] are the vocabulary's; `factors` float32 [K] as of `filters.factors_of`.
    """
    own = kernels.masses(logits, largest.float(), factors).sum(dim=-1)
    return group.all_gather(own).sum(dim=0).double().log() - MASS_BITS * math.log(2.0)


def shard_logprobs(
    kernels: Kernels,
    logits: Tensor,
    token_ids: Tensor,
    nums_likeliest: list[int],
    largest: Tensor,
    masses: Tensor,
    temperatures: Tensor,
    group: GroupHandle,
    num_owned: int,
    read_back: ReadBack,
) -> Awaited[list[TokenLogprobs]]:
    """[K, Vs] -> of each row the entry of its token, int64 [K], then those of its likeliest, `nums_likeliest`.

    All likeliest where their number is -1. `masses` are of `log_masses`, `temperatures` float64 [K], `num_owned` the
    token ids of this shard that exist. What is said of a row without a token (a negative one) is of no use.
    """
    chosen = token_ids.clamp(min=0)
    shard_size = logits.shape[1]
    columns = (chosen - group.rank * shard_size).clamp(0, shard_size - 1).unsqueeze(1)
    by_rank = group.all_gather(logits.gather(1, columns).squeeze(1).double())
    values = by_rank.gather(0, (chosen // shard_size).unsqueeze(0)).squeeze(0)
    counts = [shard_size * group.size if each == ALL_LOGPROBS else each for each in nums_likeliest]
    own = _candidates(logits[:, :num_owned], [min(each, shard_size) for each in counts], group.rank * shard_size)
    # Counts ride with the candidates, as a pair more.
    # The chosen logit is one of this dtype's, so float32 has it exactly.
    above = kernels.count_above(logits, values.float()).double()
    own = torch.cat((torch.stack((above, above), dim=-1).unsqueeze(1), own), dim=1)
    gathered = group.all_gather(own)
    ranks = gathered[:, :, 0, 0].sum(dim=0).long() + 1
    pairs = gathered[:, :, 1:].transpose(0, 1).flatten(1, 2)
    reported = torch.cat((values.unsqueeze(1), pairs[:, :, 0]), dim=1)
    scaled = (reported - largest.unsqueeze(1)) / temperatures.unsqueeze(1) - masses.unsqueeze(1)
    # Rounded to float32 there, and exact in what is read.
    return read_back.later(partial(_entries, counts), token_ids, ranks, scaled.float().double(), pairs)


def _entries(counts: list[int], ids: Tensor, ranks: Tensor, reported: Tensor, pairs: Tensor) -> list[TokenLogprobs]:
    """Of each row, from tensors of the host: [K], [K], [K, 1 + n], [K, n, 2]."""
    # At once: a view and a list of its own for each row take longer than all that is done with them.
    token_ids: list[int] = ids.tolist()
    rank_of: list[int] = ranks.tolist()
    logprobs: list[list[float]] = reported.tolist()
    listed: list[list[list[float]]] = pairs.tolist()
    entries = []
    for index, (token_id, (logprob, *others)) in enumerate(zip(token_ids, logprobs, strict=True)):
        merged = sorted(
            (-value, int(likely_id), other)
            for (value, likely_id), other in zip(listed[index], others, strict=True)
            if likely_id >= 0
        )
        likely = [(likely_id, other) for _, likely_id, other in merged[: counts[index]]]
        entries.append(entries_of(token_id, logprob, rank_of[index], likely))
    return entries


def _candidates(logits: Tensor, counts: list[int], first_id: int) -> Tensor:
    """Float64 [K, n, 2]: logit and id of this shard's likeliest tokens in each row; id -1 where there are no more."""
    if not reads_are_free(logits):
        found = likeliest_of_rows(logits, max(counts))
        found[:, :, 1].add_(first_id * (found[:, :, 1] >= 0))
        return found
    found = torch.full((len(counts), max(counts), 2), -1.0, dtype=torch.float64)
    for index, count in enumerate(counts):
        if count == 0:
            continue
        pairs = [(value, token_id + first_id) for token_id, value in likeliest(logits[index], count)]
        if pairs:
            found[index, : len(pairs)] = torch.tensor(pairs, dtype=torch.float64)
    return found
