"""Products of int8 by int8 in plain torch: what compiled ones are compared with, and what runs where there are none.

A weight has one scale an output, a row of inputs one of its own: the largest magnitude / 127. A number becomes the
nearest whole number, ties to even, of itself times (127 / the largest magnitude), in float32. Products are summed as
whole numbers, which is exact in any order; a result is (sum x scale of the row) x scale of the output, + bias, in
float32, rounded once. So a row's result depends neither on the rows beside it nor on how its inputs are shared among
ranks, as long as the largest magnitude is that of the whole row. Nothing but magnitudes below 1e-30 is zero; what has
a number that is not finite has no number as its scale.

T: tokens; O: outputs; I: inputs.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_worker.model_config.int8_format import SCALE_BYTES
from spmd_worker.ops.kernels.reference import ReferenceKernels

_MOST: Final = 127.0
_LEAST: Final = 1e-30
_ROWS_AT_ONCE: Final = 4096
_TOKENS_AT_ONCE: Final = 1024


def row_maxima(rows: Tensor) -> Tensor:
    """[..., I] -> float32 [...]: the largest magnitude of each row; NaN where one is."""
    return rows.detach().float().abs().amax(dim=-1)


def scales_of(maxima: Tensor) -> Tensor:
    """Float32, of rows with these largest magnitudes."""
    return torch.where(maxima < _LEAST, 0.0, maxima / _MOST)


def quantised(rows: Tensor, maxima: Tensor) -> Tensor:
    """[n, I] and float32 [n] -> int8 [n, I]."""
    is_usable = (maxima >= _LEAST) & maxima.isfinite()
    # Not a number divided by a tensor, which torch takes as a product with the rounded reciprocal.
    factors = torch.where(is_usable, torch.full_like(maxima, _MOST) / maxima, 0.0).unsqueeze(1)
    numbers = (rows.float() * factors).round()
    return numbers.masked_fill_(~is_usable.unsqueeze(1), 0.0).to(torch.int8)


def dequantised(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Int8 [n, I] and float32 [n] -> [n, I], rounded once."""
    return (numbers.float() * scales.unsqueeze(1)).to(dtype)


def exact_sums(x: Tensor, numbers: Tensor) -> Tensor:
    """Int8 [T, I] x int8 [O, I] -> int32 [T, O]. Whole numbers below 2^53 are exact in float64, of which there is one
    block of each at a time.
    """
    sums = x.new_empty((len(x), len(numbers)), dtype=torch.int32)
    for first in range(0, len(x), _TOKENS_AT_ONCE):
        tokens = slice(first, first + _TOKENS_AT_ONCE)
        wide = x[tokens].double()
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            sums[tokens, rows] = wide @ numbers[rows].double().t()
    return sums


def scaled(sums: Tensor, maxima: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Int32 [T, O], of rows with these largest magnitudes -> [T, O]."""
    results = sums.float() * scales_of(maxima).unsqueeze(1) * scales
    return (results if bias is None else results + bias.float()).to(dtype)


def _runs(flags: Tensor) -> list[tuple[int, int]]:
    """Bool [n] -> the first and the end of each run of those that are true."""
    edges = F.pad(flags.to(torch.int8), (1, 1)).diff().nonzero().squeeze(1).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Int8Weights:
    """How a weight is packed: int8 [O, I + 4], numbers and then the bytes of their scale.

    What a weight shows is what its numbers stand for, in `dtype`, which is not quite what it was made of.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pack(self, weight: Tensor, maxima: Tensor, *, is_gated: bool = False) -> Tensor:
        """[O, I], of rows with these largest magnitudes, float32 [O]."""
        packed = self.empty(weight, is_gated=is_gated)
        self.overwrite(packed, 0, weight.detach(), maxima)
        return packed

    def empty(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        """Zeros, for a weight like this. Rows stay in their order, also where it `is_gated`."""
        del is_gated
        return weight.new_zeros((len(weight), weight.shape[1] + SCALE_BYTES), dtype=torch.int8)

    def shown(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, a copy."""
        return dequantised(*self.numbers_and_scales(packed, start, stop), self.dtype)

    def numbers_and_scales(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows `start` to `stop`: int8 [n, I] and float32 [n]."""
        rows = packed.detach()[start:stop]
        # A copy also of one row, which is in one piece where it is: a float32 may begin at every fourth byte alone.
        scales = rows[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
        return rows[:, :-SCALE_BYTES], scales.view(torch.float32).squeeze(1)

    def take_changed(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """Quantise those of `rows` [n, I] anew that are not what is shown of them. The others were made of numbers that
        nobody has any more, and would become others.
        """
        for first, stop in _runs(self.is_changed(packed, start, rows)):
            changed = rows[first:stop]
            self.overwrite(packed, start + first, changed, row_maxima(changed))

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> Tensor:
        """Bool [n]: which of `rows` are not what is shown of them. What is no number is equal to itself here."""
        shown = self.shown(packed, start, start + len(rows))
        return ~((rows == shown) | (rows.isnan() & shown.isnan())).all(dim=1)

    def overwrite(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        """Quantise `rows` [n, I], which have these largest magnitudes, and put them from `start` on."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            self.put(packed, start + first, quantised(rows[some], maxima[some]), scales_of(maxima[some]))

    def put(self, packed: Tensor, start: int, numbers: Tensor, scales: Tensor) -> None:
        """Int8 [n, I] and float32 [n] become rows of the packed weight, from `start` on."""
        rows = packed.detach()[start : start + len(numbers)]
        rows[:, :-SCALE_BYTES] = numbers
        rows[:, -SCALE_BYTES:] = scales.unsqueeze(1).view(torch.int8)


class Int8Packing:
    """The part of `kernels.api.QuantisedKernels` that is about weights, which are packed as `weights` says."""

    weights: Int8Weights

    def pack(self, weight: Tensor) -> Tensor:
        return self.weights.pack(weight, row_maxima(weight))

    def pack_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        return self.weights.pack(weight, maxima)

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """See `Kernels.unpack`: what the numbers stand for, a copy."""
        return self.weights.shown(packed, start, stop)

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """See `Kernels.repack_` and `QuantisedKernels`."""
        self.weights.take_changed(packed, start, rows)

    def repack_part_(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        self.weights.overwrite(packed, start, rows, maxima)

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> bool:
        return bool(self.weights.is_changed(packed, start, rows).any())


class Int8Kernels(Int8Packing, ReferenceKernels):
    """Implements `kernels.api.QuantisedKernels` on any device; what is not a product is plain torch's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.weights = dtype, Int8Weights(dtype)

    def row_maxima(self, x: Tensor) -> Tensor:
        return row_maxima(x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`. Of weights that are not packed too. Makes no use of `room`."""
        if weight.dtype != torch.int8:
            return super().linear(x, weight, bias, room)
        maxima = self.row_maxima(x)
        return self.scaled(self.sums(x, maxima, weight).unsqueeze(0), maxima, weight, bias)

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        return exact_sums(quantised(x, maxima), self.weights.numbers_and_scales(weight, 0, len(weight))[0])

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scales = self.weights.numbers_and_scales(weight, 0, len(weight))[1]
        return scaled(parts.sum(dim=0, dtype=torch.int32), maxima, scales, bias, self.weights.dtype)
