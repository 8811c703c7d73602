"""Norms, alone or with the residual addition before them: the plain RMS norm (https://arxiv.org/abs/1910.07467), which
collectives and fused layers support, and all others of `NormConfig`.

T: tokens of the step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.ranks.communicator import GroupHandle


class RMSNorm(CheckpointLayer):
    """[..., size] -> [..., size]. Replicated. The plain norm: rounded to the dtype before the weight is applied."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self._kernels, self._group = eps, context.kernels, context.parts_group
        self.weight = context.parameter(size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of `x`; with a residual stream [T, size] that of the stream, after the sum of all ranks' parts `x`
        [T, size] was added to it in place, which is valid until the next such call in the group.

        `x` must not be used afterwards. See `Collectives.all_reduce_add_rms_norm` for the residual stream.
        """
        if residual is None:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        fast = self._group.fast
        if fast is not None and fast.takes(residual):
            return fast.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return self._kernels.add_rms_norm(self._group.sum_parts(x, residual.dtype), residual, self.weight, self.eps)


class FullNorm(CheckpointLayer):
    """[..., size] -> [..., size]. Replicated. Any other norm, in float32 and rounded once."""

    def __init__(self, context: LayerContext, size: int, norm: NormConfig) -> None:
        super().__init__()
        assert norm.kind == "layer" or norm.rounds_once, norm
        self._norm, self._kernels = norm, context.kernels
        self.weight = context.parameter(size) if norm.has_weight else None
        # Kernels need a weight.
        self._ones = None if norm.has_weight else torch.ones(size, dtype=context.dtype, device=context.device)
        self.bias = context.parameter(size) if norm.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        norm, weight = self._norm, self._ones if self.weight is None else self.weight
        assert weight is not None
        is_centred = norm.kind == "layer"
        return self._kernels.full_norm(x, weight, self.bias, norm.eps, offset=norm.offset, is_centred=is_centred)


class HeadNorms(CheckpointLayer):
    """A norm of each head, with a weight for each: [T, heads of this rank, size] -> the same, in float32, rounded once.
    This rank has the range `heads` of all `num_heads`.
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
        is_centred = self._norm.kind == "layer"
        rows = self._kernels.full_norm(x.float(), self._ones, None, self._norm.eps, offset=0.0, is_centred=is_centred)
        return (rows * self.weight.float()).to(x.dtype)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield shard(f"{prefix}.weight", (self._num_heads, self._size), f"{prefix}.weight", 0, *self._heads)


Norm = RMSNorm | FullNorm


def new_norm(context: LayerContext, size: int, norm: NormConfig) -> Norm:
    """The layer for a norm of rows of `size`."""
    return RMSNorm(context, size, norm.eps) if norm.is_plain else FullNorm(context, size, norm)


def add_without_norm(group: GroupHandle, x: Tensor, residual: Tensor) -> Tensor:
    """`RMSNorm` without the norm: the complete residual stream [T, size] on every rank, in place."""
    fast = group.fast
    residual.add_(group.sum_parts(x, residual.dtype))
    return residual if fast is None or not fast.takes(residual) else fast.gather_rows(residual)
