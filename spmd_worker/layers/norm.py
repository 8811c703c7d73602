"""RMS norm, alone or with the residual addition before it (https://arxiv.org/abs/1910.07467).

T: tokens of the step.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.weight_slice import WeightSlice, whole


class RMSNorm(nn.Module):
    """Whole on every rank."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps, self._kernels = size, eps, context.kernels
        self.weight = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, size] and the residual stream [T, size] -> the norm of their sum, and the sum."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield whole(f"{prefix}.weight", (self.size,), f"{prefix}.weight")
