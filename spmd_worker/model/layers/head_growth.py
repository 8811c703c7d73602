"""Factors of queries that grow with the logarithm of the position, with two numbers for each head.

T: tokens of the step; H: heads of this rank.
"""

from collections.abc import Iterator

from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, shard


class HeadGrowth(CheckpointLayer):
    """log(1 + position), float32 [T, 1] -> factors [T, H, 1] of the model's dtype. This rank has the range `heads` of
    all `num_heads`.
    """

    def __init__(self, context: LayerContext, num_heads: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self._num_heads, self._heads, self._dtype = num_heads, heads, context.dtype
        self.scale, self.bias = (context.parameter(heads[1] - heads[0]) for _ in range(2))

    def forward(self, log_lengths: Tensor) -> Tensor:
        """Rounded at each step, as transformers does."""
        return (log_lengths.to(self._dtype) * self.scale + self.bias).unsqueeze(-1)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        for leaf in ("scale", "bias"):
            yield shard(f"{prefix}.{leaf}", (self._num_heads,), f"{prefix}.{leaf}", 0, *self._heads)
