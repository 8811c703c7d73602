"""W8A8 GEMMs in FP8 (e4m3): the definition in plain torch, which tests compare with, and how weights are packed.

Weights have static scales, activations dynamic ones: of each row, the maximum magnitude / 448; or, for weights that a
checkpoint stores so, of each group of 128 inputs of a row. A scale of zero is 1. A value is quantised to value / scale
(IEEE division), rounded to the nearest e4m3, ties to even, within +-448. Products are added over 512 inputs (CHAIN), or
over each group, from zero, then to the sum in float32, ascending; a result is (sum x scale of the row) x scale of the
output, or with groups each part x (scale of the row's group x scale of the output's), + bias, in float32, rounded once.
A rank's share of a row is
a row of its own: results of several ranks are added like those of plain weights, and bits depend on their number.

The token head keeps the model's dtype, as in most FP8 checkpoints: its share of the difference in perplexity was more
than half (docs/lab/kernels.md).

T: tokens; O: outputs; I: inputs; G: scales of a row, 1 or I / 128.
"""

from typing import Final, Self

import torch
from torch import Tensor

from spmd_worker.model_config.byte_rows import GROUP, fits_bytes
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.byte_rows import ByteRowPacking, ByteRows, is_packed
from spmd_worker.ops.kernels.int8 import row_maxima
from spmd_worker.ops.kernels.reference import ReferenceKernels

LARGEST: Final = 448.0
CHAIN: Final = 512
"""Inputs whose products the matrix unit adds by itself: few enough that its 14 bits lose far less than e4m3 does, and
enough that it need not wait (docs/internals/gpu.md).
"""
_BLOCK_ROWS: Final = 4096
_BLOCKED: Final = 4
"""Dimensions of a packed weight with scales of blocks."""


def scales_of(rows: Tensor, *, is_grouped: bool = False, is_blocked: bool = False) -> Tensor:
    """[n, I] -> float32 [n, G]: scales of rows, of groups of 128 inputs, or of blocks of 128 rows and inputs."""
    shaped = rows.view(len(rows), -1, GROUP) if is_grouped or is_blocked else rows.unsqueeze(1)
    maxima = row_maxima(shaped)
    if is_blocked:
        blocks = [maxima[start : start + GROUP] for start in range(0, len(maxima), GROUP)]
        maxima = torch.cat([block.amax(dim=0).expand_as(block) for block in blocks])
    scales = maxima * (1.0 / LARGEST)
    return scales.masked_fill_(scales == 0, 1.0)


def are_blocked(scales: Tensor, start: int, num_rows: int) -> bool:
    """Whether rows from `start` on, of `num_rows`, are whole blocks of 128 rows that share scales of groups [n, G]."""
    stop = start + len(scales)
    firsts = scales[::GROUP].repeat_interleave(GROUP, dim=0)[: len(scales)]
    return start % GROUP == 0 and (stop % GROUP == 0 or stop == num_rows) and torch.equal(firsts, scales)


def quantised(rows: Tensor, scales: Tensor) -> Tensor:
    """[n, I] and float32 [n, G] -> e4m3 [n, I]."""
    quotients = rows.float().reshape(*scales.shape, -1) / scales.unsqueeze(2)
    return quotients.clamp_(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """E4m3 [n, I] and float32 [n, G] -> [n, I], rounded once."""
    return (numbers.float().view(*scales.shape, -1) * scales.unsqueeze(2)).flatten(1).to(dtype)


def products(x: Tensor, x_scales: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """E4m3 [T, I] x [O, I] -> float32 [T, O], scaled. A chain's sum is rounded once; matrix units keep fewer bits."""
    is_grouped = scales.shape[1] > 1
    chain = GROUP if is_grouped else CHAIN
    total = torch.zeros(len(x), len(numbers), device=x.device)
    wide, weight = x.double(), numbers.double()
    for start in range(0, x.shape[1], chain):
        step = slice(start, start + chain)
        part = (wide[:, step] @ weight[:, step].t()).float()
        if is_grouped:
            # Fused: the product of part and scale is not rounded.
            scale = x_scales[:, start // GROUP, None] * scales[:, start // GROUP]
            part, total = part.double() * scale.double(), total.double()
        total = (total + part).float()
    return total if is_grouped else total * x_scales * scales[:, 0]


class Fp8Weights(ByteRows):
    """Packed layout of a weight in e4m3."""

    number = torch.float8_e4m3fn

    def pack_stored(self, weight: Tensor, scales: Tensor) -> Tensor:
        """[O, I], dequantised with these scales, float32 [O, G] -> the numbers that were stored, bit for bit, if the
        weight's dtype holds them to 5 bits: as e4m3 they are further apart than the rounding moved them.
        """
        packed = self.empty(weight, is_gated=False)
        if scales.shape[1] > 1:
            packed = packed.unsqueeze(1)
            packed = packed.unsqueeze(1) if are_blocked(scales, 0, len(weight)) else packed
        self.store_stored(packed, 0, weight.detach(), scales)
        return packed

    def store_stored(self, packed: Tensor, start: int, rows: Tensor, scales: Tensor) -> None:
        """`pack_stored` of `rows` [n, I] from `start` on."""
        scales = scales.masked_fill(scales == 0, 1.0)
        for first in range(0, len(rows), _BLOCK_ROWS):
            some = slice(first, first + _BLOCK_ROWS)
            self.store(packed, start + first, quantised(rows[some], scales[some]), scales[some])

    def dequantised(self, packed: Tensor, start: int, stop: int) -> Tensor:
        return dequantised(self.numbers(packed)[start:stop], self.scales(packed)[start:stop], self.dtype)

    def overwrite(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        """Rows have their own maxima, or those of their groups or blocks; other rows of a block are quantised again."""
        del maxima
        if packed.ndim == _BLOCKED:
            first, stop = start // GROUP * GROUP, min(-(-(start + len(rows)) // GROUP) * GROUP, len(packed))
            whole = self.dequantised(packed, first, stop)
            whole[start - first : start - first + len(rows)] = rows
            start, rows = first, whole
        for first in range(0, len(rows), _BLOCK_ROWS):
            some = rows[first : first + _BLOCK_ROWS]
            scales = scales_of(some, is_grouped=packed.ndim > 2, is_blocked=packed.ndim == _BLOCKED)
            self.store(packed, start + first, quantised(some, scales), scales)


class Fp8Packing(ByteRowPacking):
    """The methods of `kernels.api.StoredScaleKernels` that pack weights."""

    dtype: torch.dtype
    weights: Fp8Weights
    head: Kernels
    integer: Final = None

    @property
    def stored(self) -> Self | None:
        # Float16 does not hold small dequantised numbers, from which the stored ones are found again.
        return None if self.dtype == torch.float16 else self

    def pack_stored(self, weight: Tensor, scales: Tensor) -> Tensor:
        return self.weights.pack_stored(weight, scales) if fits_bytes(weight.shape[1]) else weight

    def repack_stored_(self, packed: Tensor, start: int, rows: Tensor, scales: Tensor) -> None:
        """A weight keeps its kind of scales."""
        is_alike = is_packed(packed) and self.weights.scales(packed).shape[1] == scales.shape[1]
        if is_alike and (packed.ndim != _BLOCKED or are_blocked(scales, start, len(packed))):
            self.weights.store_stored(packed, start, rows, scales)
        else:
            self.repack_part_(packed, start, rows, row_maxima(rows))


class ReferenceFp8Kernels(Fp8Packing, ReferenceKernels):
    """Implements `kernels.api.QuantisedKernels` on any device, slowly: for tests."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights, self.head = dtype, Fp8Weights(dtype), ReferenceKernels()

    @property
    def plain(self) -> Kernels:
        return self.head

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Weights that are not packed are multiplied too."""
        if not is_packed(weight):
            return super().linear(x, weight, bias, out)
        scales = self.weights.scales(weight)
        x_scales = scales_of(x, is_grouped=weight.ndim > 2)
        result = products(quantised(x, x_scales), x_scales, self.weights.numbers(weight), scales)
        return (result if bias is None else result + bias.float()).to(self.dtype)
