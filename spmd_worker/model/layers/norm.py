"""Norms, alone or with the residual addition before them: the plain RMS norm (https://arxiv.org/abs/1910.07467), which
sums over ranks and joined layers know, and every other form of `NormConfig`.

T: tokens of the step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, shard, whole
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.ranks.communicator import GroupHandle


class RMSNorm(CheckpointLayer):
    """Whole on every rank. The plain form: rounded to the dtype before the weight is applied."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps, self._kernels, self._group = size, eps, context.kernels, context.parts_group
        self.weight = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """This rank's part of [T, size], and the residual stream [T, size], to which the sum of all parts is added in
        place -> the norm of the residual stream then, to be used before the next such norm in the group.

        `x` is not to be used any more. For the residual stream itself see `Collectives.all_reduce_add_rms_norm`.
        """
        fast = self._group.fast
        if fast is not None and fast.takes(x):
            return fast.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return self._kernels.add_rms_norm(self._group.all_reduce(x), residual, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield whole(f"{prefix}.weight", (self.size,), f"{prefix}.weight")


class FullNorm(CheckpointLayer):
    """Whole on every rank. Every form but the plain one: in float32 from the input to the result, rounded once."""

    def __init__(self, context: LayerContext, size: int, norm: NormConfig) -> None:
        super().__init__()
        assert norm.kind == "layer" or norm.rounds_once, norm
        self.size, self.eps, self._norm, self._kernels = size, norm.eps, norm, context.kernels
        self.weight = context.parameter(size) if norm.has_weight else None
        # What kernels are given where there is no weight.
        self._ones = None if norm.has_weight else torch.ones(size, dtype=context.dtype, device=context.device)
        self.bias = context.parameter(size) if norm.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        norm, weight = self._norm, self._ones if self.weight is None else self.weight
        assert weight is not None
        return self._kernels.full_norm(
            x, weight, self.bias, self.eps, offset=norm.offset, is_centred=norm.kind == "layer"
        )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        if self.weight is not None:
            yield whole(f"{prefix}.weight", (self.size,), f"{prefix}.weight")
        if self.bias is not None:
            yield whole(f"{prefix}.bias", (self.size,), f"{prefix}.bias")


class HeadNorms(CheckpointLayer):
    """A norm of each head by itself, with weights of its own: [T, heads of this rank, size] -> the same. Of `num_heads`
    this rank has those of `heads`.
    """

    def __init__(
        self, context: LayerContext, num_heads: int, heads: tuple[int, int], size: int, norm: NormConfig
    ) -> None:
        super().__init__()
        assert (norm.has_weight, norm.has_bias, norm.offset) == (True, False, 0.0), norm
        self._num_heads, self._heads, self._size, self._norm = num_heads, heads, size, norm
        self._kernels = context.kernels
        self.weight = context.parameter(heads[1] - heads[0], size)
        self._ones = torch.ones(size, dtype=torch.float32, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        """In float32, rounded once."""
        is_centred = self._norm.kind == "layer"
        rows = self._kernels.full_norm(x.float(), self._ones, None, self._norm.eps, offset=0.0, is_centred=is_centred)
        return (rows * self.weight.float()).to(x.dtype)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield shard(f"{prefix}.weight", (self._num_heads, self._size), f"{prefix}.weight", 0, *self._heads)


Norm = RMSNorm | FullNorm


def new_norm(context: LayerContext, size: int, norm: NormConfig) -> Norm:
    """The layer for a norm of rows of `size`."""
    return RMSNorm(context, size, norm.eps) if norm.is_plain else FullNorm(context, size, norm)


def add_whole(group: GroupHandle, x: Tensor, residual: Tensor) -> Tensor:
    """As `RMSNorm.add_and_norm`, without a norm: the residual stream, in place, whole on every rank."""
    fast = group.fast
    if fast is None or not fast.takes(x):
        return residual.add_(group.all_reduce(x))
    return fast.gather_rows(residual.add_(fast.all_reduce(x)))
