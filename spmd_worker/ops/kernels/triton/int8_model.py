"""Kernels of a model in int8."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import QUANTISATION, Region
from spmd_worker.ops.kernels import int8
from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights, JoinedExperts
from spmd_worker.ops.kernels.byte_rows import ByteRowPacking, ByteRows
from spmd_worker.ops.kernels.triton import int8 as triton_int8
from spmd_worker.ops.kernels.triton import int8_experts
from spmd_worker.ops.kernels.triton.kernels import PackedTritonKernels
from spmd_worker.ops.kernels.triton.version import triton_region


class Int8TritonKernels(ByteRowPacking, PackedTritonKernels):
    """Implements `kernels.api.IntegerKernels` on CUDA; all but the GEMMs of packed weights is that of `TritonKernels`.

    Bits of `linear`, and of `sums` and `scaled`, are those of the CPU's kernels for the same dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.weights = dtype, ByteRows(dtype)
        self._joined: dict[tuple[int, ...], JoinedExperts] = {}
        """Experts of layers, by addresses. They are not dropped: graphs read their tables."""

    def join_experts(self, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes) -> JoinedExperts | None:
        if not int8_experts.can_join(experts):
            return None
        addresses = int8_experts.addresses_of(experts)
        if addresses not in self._joined:
            self._joined[addresses] = int8_experts.Int8Experts(experts, sizes, self.plain)
        return self._joined[addresses]

    @property
    def integer(self) -> "Int8TritonKernels":
        return self

    stored: Final = None
    head: Final = None

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        own = triton_region()
        return super().numerics(dtype) | {QUANTISATION: int8.int8_region(own.implementation, own.version)}

    def row_maxima(self, x: Tensor) -> Tensor:
        return int8.row_maxima(x)

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        numbers, x_scales = triton_int8.quantise(_as_rows(x), maxima)
        scales = self.weights.scales(weight)
        return triton_int8.multiply(numbers, x_scales, self.weights.numbers(weight), scales, None, torch.int32)

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = parts.sum(dim=0, dtype=torch.int32)
        return int8.scaled(total, maxima, self.weights.scales(weight)[:, 0], bias, self.dtype)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
        quantised, numbers, scales = (
            triton_int8.quantise(_as_rows(x)),
            self.weights.numbers(weight),
            self.weights.scales(weight),
        )
        result = triton_int8.multiply(*quantised, numbers, scales, bias, x.dtype, is_gated=is_gated)
        return result.view(*x.shape[:-1], result.shape[1])


def _as_rows(x: Tensor) -> Tensor:
    """[M, K], K contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
