"""W8A8 GEMMs in plain torch: the reference for the compiled kernels, and the fallback if there are none.

Weights have static per-output scales, activations dynamic per-token scales: the maximum magnitude / 127. A value is
quantised to round(value x (127 / maximum magnitude)), ties to even, in float32. Integer sums are exact in any order; a
result is (sum x scale of the row) x scale of the output, + bias, in float32, rounded once. So a row's result depends
neither on the other rows nor on how its inputs are sharded over ranks, provided that the maximum magnitude is that of
the complete row. Maxima below 1e-30 have scale 0; a row with a value that is not finite has a scale that is not.

T: tokens; O: outputs; I: inputs.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_worker.base.numerical_policy import QUANTISATION, Region, source_version
from spmd_worker.model_config.int8_format import SCALE_BYTES
from spmd_worker.ops.kernels.reference import ReferenceKernels

_MAX_INT8: Final = 127.0
_MIN_MAGNITUDE: Final = 1e-30
_BLOCK_ELEMENTS: Final = 2**20
_BLOCK_ROWS: Final = 4096
_BLOCK_TOKENS: Final = 1024


def row_maxima(rows: Tensor) -> Tensor:
    """[..., I] -> float32 [...]: maximum magnitude of each row; NaN if an element is NaN."""
    rows = rows.detach()
    if rows.numel() <= _BLOCK_ELEMENTS or rows.ndim != 2:
        return rows.float().abs().amax(dim=-1)
    return torch.cat([row_maxima(rows[some]) for some in _blocks_of(rows)])


def _blocks_of(rows: Tensor) -> Iterator[slice]:
    """Ranges of rows [n, I] that are converted at a time: a float32 copy of a head takes gigabytes."""
    step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


def scales_of(maxima: Tensor) -> Tensor:
    """Float32 scales of rows with these maximum magnitudes."""
    # A tensor divides a tensor: by a number, torch on CUDA multiplies by the rounded reciprocal.
    return torch.where(maxima < _MIN_MAGNITUDE, 0.0, maxima / torch.full_like(maxima, _MAX_INT8))


def quantised(rows: Tensor, maxima: Tensor) -> Tensor:
    """[n, I] and float32 [n] -> int8 [n, I]."""
    is_usable = (maxima >= _MIN_MAGNITUDE) & maxima.isfinite()
    # torch multiplies by the rounded reciprocal if a Python number is divided by a tensor.
    factors = torch.where(is_usable, torch.full_like(maxima, _MAX_INT8) / maxima, 0.0).unsqueeze(1)
    numbers = (rows.float() * factors).round()
    return numbers.masked_fill_(~is_usable.unsqueeze(1), 0.0).to(torch.int8)


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Int8 [n, I] and float32 [n] -> [n, I], rounded once."""
    return (numbers.float() * scales.unsqueeze(1)).to(dtype)


def exact_sums(x: Tensor, numbers: Tensor) -> Tensor:
    """Int8 [T, I] x int8 [O, I] -> int32 [T, O], exact in float64 (below 2^53), block by block."""
    sums = x.new_empty((len(x), len(numbers)), dtype=torch.int32)
    for first in range(0, len(x), _BLOCK_TOKENS):
        tokens = slice(first, first + _BLOCK_TOKENS)
        wide = x[tokens].double()
        for start in range(0, len(numbers), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            sums[tokens, rows] = wide @ numbers[rows].double().t()
    return sums


def scaled(sums: Tensor, maxima: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Int32 [T, O], of rows with these maximum magnitudes -> [T, O]."""
    results = sums.float() * scales_of(maxima).unsqueeze(1) * scales
    return (results if bias is None else results + bias.float()).to(dtype)


def _true_runs(flags: Tensor) -> list[tuple[int, int]]:
    """Bool [n] -> start and end of each run of true."""
    edges = F.pad(flags.to(torch.int8), (1, 1)).diff().nonzero().squeeze(1).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def int8_region(implementation: str, version: str = "") -> Region:
    """Region of quantised products: sums are exact, so that implementations have equal bits but where they scale."""
    return Region(f"int8, {implementation}", version or source_version(__file__), {"most": int(_MAX_INT8)})


class Int8Weights:
    """Packed layout of a weight: int8 [O, I + 4], each row followed by the bytes of its scale. `dtype`: of dequantised
    rows.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pack(self, weight: Tensor, maxima: Tensor, *, is_gated: bool = False) -> Tensor:
        """[O, I] with rows of these maximum magnitudes, float32 [O]."""
        packed = self.empty(weight, is_gated=is_gated)
        self.overwrite(packed, 0, weight.detach(), maxima)
        return packed

    def empty(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        """Packed zeros for a weight of this shape. Rows keep their order, gated or not."""
        del is_gated
        return weight.new_zeros((len(weight), weight.shape[1] + SCALE_BYTES), dtype=torch.int8)

    def dequantised(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` in `dtype`, a copy."""
        return dequantised(*self.numbers_and_scales(packed, start, stop), self.dtype)

    def numbers_and_scales(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows `start` to `stop`: int8 [n, I] and float32 [n]."""
        rows = packed.detach()[start:stop]
        # Copied even if contiguous: float32 needs an alignment of 4 bytes.
        scales = rows[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
        return rows[:, :-SCALE_BYTES], scales.view(torch.float32).squeeze(1)

    def requantise_changed(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """Quantise those of `rows` [n, I] again that differ from the dequantised ones. The others were quantised from
        values that are gone: their dequantised values would be quantised differently.
        """
        for first, stop in _true_runs(self.is_changed(packed, start, rows)):
            changed = rows[first:stop]
            self.overwrite(packed, start + first, changed, row_maxima(changed))

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> Tensor:
        """Bool [n]: which of `rows` differ from the dequantised ones. NaN equals NaN."""
        known = self.dequantised(packed, start, start + len(rows))
        return ~((rows == known) | (rows.isnan() & known.isnan())).all(dim=1)

    def overwrite(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        """Quantise `rows` [n, I] of these maximum magnitudes and store them from `start` on."""
        for some in _blocks_of(rows):
            self.store(packed, start + some.start, quantised(rows[some], maxima[some]), scales_of(maxima[some]))

    def store(self, packed: Tensor, start: int, numbers: Tensor, scales: Tensor) -> None:
        """Store int8 [n, I] and float32 [n] as rows of the packed weight, from `start` on."""
        rows = packed.detach()[start : start + len(numbers)]
        rows[:, :-SCALE_BYTES] = numbers
        rows[:, -SCALE_BYTES:] = scales.unsqueeze(1).view(torch.int8)


class Int8Packing:
    """The methods of `kernels.api.IntegerKernels` that pack weights, in the layout of `weights`."""

    weights: Int8Weights
    stored: Final = None
    head: Final = None

    def pack(self, weight: Tensor) -> Tensor:
        return self.weights.pack(weight, row_maxima(weight))

    def pack_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        return self.weights.pack(weight, maxima)

    def empty_packed(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        return self.weights.empty(weight, is_gated=is_gated)

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """A dequantised copy."""
        return self.weights.dequantised(packed, start, stop)

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        self.weights.requantise_changed(packed, start, rows)

    def repack_part_(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        self.weights.overwrite(packed, start, rows, maxima)

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> bool:
        return bool(self.weights.is_changed(packed, start, rows).any())


class Int8Kernels(Int8Packing, ReferenceKernels):
    """Implements `kernels.api.IntegerKernels` on any device; all but the GEMMs is plain torch's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights = dtype, Int8Weights(dtype)

    @property
    def integer(self) -> "Int8Kernels":
        return self

    @property
    def plain(self) -> ReferenceKernels:
        return ReferenceKernels()

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        return super().numerics(dtype) | {QUANTISATION: int8_region("plain torch")}

    def row_maxima(self, x: Tensor) -> Tensor:
        return row_maxima(x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Weights that are not packed are multiplied too."""
        if weight.dtype != torch.int8:
            return super().linear(x, weight, bias, out)
        maxima = self.row_maxima(x)
        return self.scaled(self.sums(x, maxima, weight).unsqueeze(0), maxima, weight, bias)

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        return exact_sums(quantised(x, maxima), self.weights.numbers_and_scales(weight, 0, len(weight))[0])

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scales = self.weights.numbers_and_scales(weight, 0, len(weight))[1]
        return scaled(parts.sum(dim=0, dtype=torch.int32), maxima, scales, bias, self.weights.dtype)
