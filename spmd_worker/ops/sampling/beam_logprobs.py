"""Log-probabilities of a beam's next tokens: the model's own, of the tokens that rules allow alone.

transformers' beam search does the same: its logits processors change log-probabilities, which are not normalised again.

B: beams; Vs: token ids of this rank's shard; V: vocabulary.
"""

import numpy as np
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.host_copies import send
from spmd_worker.ops.sampling.filters import exponent_factors
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.ops.sampling.shard_argmax import best_of_shards
from spmd_worker.ops.sampling.shard_logprobs import log_normalisers, shard_logprobs
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.outputs import TokenLogprobs


def beam_logprobs(
    kernels: Kernels,
    logits: Tensor,
    allowed: Tensor,
    token_ids: Tensor,
    nums_top: list[int],
    group: GroupHandle,
    first_id: int,
    read_back: ReadBack,
) -> Awaited[list[TokenLogprobs]]:
    """`logits` [B, Vs] as the model gives them, `allowed` [B, V] with minus infinity for forbidden tokens, `token_ids`
    int64 [B] -> entries of each beam. Every rank of the group calls this with the same beams.
    """
    temperatures = [1.0] * len(nums_top)
    factors, divisors = send((exponent_factors(temperatures), np.array(temperatures)), logits.device)
    maxima = best_of_shards(*kernels.argmax(logits), group, first_id)[0]
    normalisers = log_normalisers(kernels, logits, maxima, factors, group)
    alone = GroupHandle(ranks=(0,), rank=0, group=None)
    numbers = (nums_top, maxima, normalisers, divisors, alone, allowed.shape[1])
    return shard_logprobs(kernels, allowed, token_ids, *numbers, read_back)
