"""Bias of attention scores by the distance between query and key: a learned table (T5,
https://arxiv.org/abs/1910.10683), or slopes (ALiBi, https://arxiv.org/abs/2108.12409).

Hq: query heads of this rank; M: `RelativeBias.max_distance`. A distance is the key's position less the query's.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import Rectangle, WeightSlice, shard
from spmd_worker.model_config.layer_config import RelativeBias
from spmd_worker.ranks.topology import shard_range


class RelativeBiasTable(CheckpointLayer):
    """A number for each bucket of distances and head, `weight` [num_buckets, Hq]: a rank has the columns of its heads.
    `sees_later`: attention is bidirectional, and half of the buckets are of later keys.
    """

    def __init__(self, context: LayerContext, bias: RelativeBias, num_heads: int, *, sees_later: bool) -> None:
        super().__init__()
        self._bias, self._num_heads, self._sees_later = bias, num_heads, sees_later
        self._heads = shard_range(num_heads, context.tensor_group.size, context.tensor_group.rank)
        self.weight = context.parameter(bias.num_buckets, self._heads[1] - self._heads[0])
        self._by_distance: Tensor | None = None

    def table(self) -> Tensor:
        """`distance_bias` of `AttentionBackend.attend`, float32 [Hq, 2 * M + 1]: the same tensor until the weight
        changes.
        """
        if self._by_distance is None:
            # On the CPU: logarithms of devices differ, and a bucket may begin at an exact one.
            distances = torch.arange(-self._bias.max_distance, self._bias.max_distance + 1, device="cpu")
            buckets = buckets_of(distances, self._bias, sees_later=self._sees_later).to(self.weight.device)
            self._by_distance = self.weight.detach()[buckets].t().float().contiguous()
        return self._by_distance

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """`CheckpointLayer.write_region`; the table is made again at its next use."""
        super().write_region(parameter, region, values)
        self._by_distance = None

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = f"{prefix}.weight"
        yield shard(name, (self._bias.num_buckets, self._num_heads), name, 1, *self._heads)


class AlibiTable:
    """`distance_bias` of `AttentionBackend.attend`: minus `factor` slopes of each head of this rank for each token of
    distance, with an entry for every distance of a row of `max_len` tokens. A row's bits hang on distances alone.
    """

    def __init__(self, context: LayerContext, factor: float, num_heads: int, max_len: int) -> None:
        start, stop = shard_range(num_heads, context.tensor_group.size, context.tensor_group.rank)
        slopes = [factor * slope for slope in alibi_slopes(num_heads)[start:stop]]
        distances = torch.arange(-max_len, max_len + 1, dtype=torch.float32, device=context.device).abs()
        of_heads = torch.tensor(slopes, dtype=torch.float32).to(context.device)
        # Made here: recorded steps need an address.
        self._by_distance: Tensor = of_heads.unsqueeze(1) * -distances

    def table(self) -> Tensor:
        """Float32 [Hq, 2 * max_len + 1]."""
        return self._by_distance


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head: powers of 2 ** (-8 / p) for the first p heads, the largest power of 2, and for the others odd
    powers of its root.
    """
    first = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * power / first for power in range(1, first + 1)]
    exponents += [4 * power / first for power in range(1, 2 * (num_heads - first), 2)]
    return [2.0**-each for each in exponents]


def buckets_of(distances: Tensor, bias: RelativeBias, *, sees_later: bool) -> Tensor:
    """int64 distances -> their buckets, by transformers' arithmetic in float32. Distances from M on have the last."""
    num_buckets = bias.num_buckets // 2 if sees_later else bias.num_buckets
    # Causal attention sees no later key.
    away = distances.abs() if sees_later else (-distances).clamp(min=0)
    num_exact = num_buckets // 2
    share = torch.log(away.clamp(min=1).float() / num_exact) / math.log(bias.max_distance / num_exact)
    shared = (num_exact + (share * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    buckets = torch.where(away < num_exact, away, shared)
    return buckets + (distances > 0) * num_buckets if sees_later else buckets
