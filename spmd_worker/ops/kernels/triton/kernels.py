"""Kernels of a layer in Triton, for NVIDIA GPUs: a row's bits depend on the row alone.

Matmuls, norms and sampling are ours. The rest is torch's elementwise operations and maxima, which have no order of
sums.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import (
    COLUMN_PARALLEL,
    EXPERTS,
    HEAD,
    NORM,
    ROW_PARALLEL,
    SAMPLING,
    Region,
)
from spmd_worker.ops.kernels.adapters import AdapterKernels
from spmd_worker.ops.kernels.api import ExpertKernels
from spmd_worker.ops.kernels.byte_rows import is_packed
from spmd_worker.ops.kernels.recurrent import RecurrentKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton import experts, head_products, leaf_matmul, matmul, rows, sampling
from spmd_worker.ops.kernels.triton.adapters import TritonAdapterKernels
from spmd_worker.ops.kernels.triton.penalties import RowHistories
from spmd_worker.ops.kernels.triton.recurrent import TritonRecurrentKernels
from spmd_worker.ops.kernels.triton.version import triton_region


class TritonKernels(ReferenceKernels):
    """Implements `kernels.api.Kernels` on CUDA, and on the CPU if kernels are interpreted."""

    samples_on_device = True

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        regions, own = super().numerics(dtype), triton_region()
        sampling = own.with_constants(**regions[SAMPLING].constants)
        return regions | dict.fromkeys((COLUMN_PARALLEL, ROW_PARALLEL, HEAD, EXPERTS, NORM), own) | {SAMPLING: sampling}

    def new_histories(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> RowHistories:
        return RowHistories(vocab_size, eos_token_ids, device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        del out
        return matmul.linear(x, weight, bias)

    def linear_of_leaves(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Sequence[int],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        del out
        return leaf_matmul.linear_of_leaves(x, weight, bias, ends, dtype)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return matmul.gated_linear(x, weight, bias)

    def linear_of_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        head_products.linear_of_heads(x, weight, out)

    def expert_kernels(self) -> ExpertKernels:
        return experts.TritonExperts(self.activate_and_mul, self.activate)

    def adapter_kernels(self) -> AdapterKernels:
        return TritonAdapterKernels()

    def recurrent_kernels(self) -> RecurrentKernels:
        return TritonRecurrentKernels()

    rms_norm = staticmethod(rows.rms_norm)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    full_norm = staticmethod(rows.full_norm)
    silu_and_mul = staticmethod(rows.silu_and_mul)
    argmax = staticmethod(sampling.argmax)
    draw = staticmethod(sampling.draw)
    random_bits = staticmethod(sampling.random_bits)
    top_logits = staticmethod(sampling.top_logits)
    prob_sums = staticmethod(sampling.prob_sums)
    invert_cdf = staticmethod(sampling.invert_cdf)
    count_above = staticmethod(sampling.count_above)
    forbid_ = staticmethod(sampling.forbid_)
    filter_ = staticmethod(sampling.filter_)


class PackedTritonKernels(TritonKernels):
    """Base of kernels whose packed weights (`byte_rows.is_packed`) have GEMMs of their own, `_multiply`."""

    @property
    def plain(self) -> TritonKernels:
        return TritonKernels()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if not is_packed(weight):
            return super().linear(x, weight, bias, out)
        return self._multiply(x, weight, bias, is_gated=False)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_packed(weight):
            return super().gated_linear(x, weight, bias)
        return self._multiply(x, weight, bias, is_gated=True)

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if not is_packed(weight):
            return super().linear_argmax(x, weight, count)
        return self.argmax(self.linear(x, weight, None)[:, :count])

    @abstractmethod
    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
        """[..., in] x packed weight -> `linear`, or `gated_linear` if `is_gated`."""
