"""The hot operations of a layer in Triton, for NVIDIA GPUs: a row's bits depend on the row alone.

Matmuls, norms and what tokens are drawn by are ours. What is left to torch is done number by number, or takes a
largest: no order of sums is in it.
"""

from torch import Tensor

from spmd_worker.ops.kernels.api import LogitFilters
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton import matmul, rows, sampling


class TritonKernels(ReferenceKernels):
    """Implements `kernels.api.Kernels` on CUDA, and on the CPU where kernels are interpreted."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`. Makes no use of `room`."""
        del room
        return matmul.linear(x, weight, bias)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.gated_linear`. In one pass."""
        return matmul.gated_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.add_rms_norm(x, residual, weight, eps)

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        return rows.full_norm(x, weight, bias, eps, offset=offset, is_centred=is_centred)

    def prob_sums(self, logits: Tensor, largest: Tensor, factors: Tensor) -> Tensor:
        return sampling.prob_sums(logits, largest, factors)

    def invert_cdf(self, logits: Tensor, largest: Tensor, factors: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
        return sampling.invert_cdf(logits, largest, factors, masses, targets)

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        return sampling.count_above(logits, values)

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, places: Tensor, first_id: int) -> None:
        sampling.forbid_(logits, allowed, rows, places, first_id)

    def filter_(self, logits: Tensor, filters: LogitFilters) -> None:
        """See `Kernels.filter_`. Nothing is sorted: the threshold's bits are found one after the other."""
        sampling.filter_(logits, filters)
