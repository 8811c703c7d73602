"""Arithmetic of quantised weights: stored numbers -> float32, as the formats define it.

w = (q - zero) * scale, computed in float32: the difference of two small integers is exact, and so is its product with a
16-bit scale; copying the weight then rounds once, to the run's dtype. Knows tensors, not files or names.

O: outputs, I: inputs of the weight; Go, Gi: groups of outputs and inputs that share a scale.
"""

from functools import cache
from typing import Final

import torch
from torch import Tensor

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of each of the eight columns that AWQ packs into an int32 (https://github.com/casper-hansen/AutoAWQ)."""

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""FP4 values by their four bits: sign, two of exponent, one of mantissa (OCP Microscaling Formats v1.0)."""

_MX_BIAS: Final = 127


def unpack(packed: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned numbers of `bits` (4 or 8), the first in the lowest bits -> int32 numbers, 32 / bits
    times as many along `dim` (0 or 1 of two). `order`: index of each number in its word.
    """
    shifts = _shifts(bits, order, packed.device)
    mask = (1 << bits) - 1
    if dim == 0:
        return (packed.unsqueeze(1) >> shifts.view(1, -1, 1)).bitwise_and_(mask).flatten(0, 1)
    return (packed.unsqueeze(2) >> shifts).bitwise_and_(mask).flatten(1, 2)


def apply_scales(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, row_groups: Tensor, column_groups: Tensor
) -> Tensor:
    """float32 [O, I] of stored numbers -> (numbers - zero) * scale, in place and returned. `scales` and `zeros` are
    [Go, Gi] of any dtype; `row_groups` int64 [O] and `column_groups` int64 [I], which may be on the CPU, index them.
    """
    if zeros is not None:
        numbers.sub_(_spread(zeros, row_groups, column_groups))
    return numbers.mul_(_spread(scales, row_groups, column_groups))


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Bytes of two FP4 numbers, the first in the low bits, uint8 [..., G, 16], and exponents, uint8 [..., G] -> float32
    [..., 32 G]: number * 2^(exponent - 127).
    """
    table, powers = _fp4_tables(blocks.device)
    low, high = (blocks & 15).to(torch.int32), (blocks >> 4).to(torch.int32)
    numbers = torch.stack((table[low], table[high]), dim=-1).flatten(-2)
    factors = powers[scales.to(torch.int32)]
    return numbers.mul_(factors.unsqueeze(-1)).flatten(-2)


def values_of_bytes(packed: Tensor, values: Tensor, *, is_high_first: bool) -> Tensor:
    """Bytes of two indices of `values`, float32 [16], uint8 [..., n] -> float32 [..., 2 n]. `is_high_first`: the first
    index is in the high bits.
    """
    of_high, of_low = values.repeat_interleave(len(values)), values.repeat(len(values))
    pairs = torch.stack((of_high, of_low) if is_high_first else (of_low, of_high), dim=-1)
    found = pairs.index_select(0, packed.flatten().to(torch.int32))
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])


def fp4_values(packed: Tensor) -> Tensor:
    """Bytes of two FP4 numbers, the first in the low bits, uint8 [..., n] -> float32 [..., 2 n]."""
    return values_of_bytes(packed, _fp4_tables(packed.device)[0], is_high_first=False)


@cache
def _shifts(bits: int, order: tuple[int, ...] | None, device: torch.device) -> Tensor:
    shifts = [bits * index for index in order or range(32 // bits)]
    return torch.tensor(shifts, dtype=torch.int32, device=device)


@cache
def _fp4_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of FP4 numbers, and 2^(exponent - 127) of all exponents, which GPUs might round."""
    exponents = torch.arange(256, dtype=torch.int32) - _MX_BIAS
    powers = torch.ldexp(torch.ones(256, dtype=torch.float32), exponents)
    return torch.tensor(E2M1, dtype=torch.float32, device=device), powers.to(device)


def _spread(values: Tensor, row_groups: Tensor, column_groups: Tensor) -> Tensor:
    """[Go, Gi] -> float32 [O, I], or a tensor that broadcasts to it."""
    values = values.to(torch.float32)
    if values.shape[0] > 1:
        values = values.index_select(0, row_groups.to(values.device))
    return values.index_select(1, column_groups.to(values.device)) if values.shape[1] > 1 else values
