"""Matrices as their checkpoint stores them, in plain torch: memory, what a file's parts become, values.

`values` is the definition of what kernels decode: number times scale in float32, with powers of two taken from the one
to the other, exactly. It equals dequantising wherever it is finite. Layouts: `model_config/stored_format.py`. Numbers
and scales in memory are those of experts on GPUs; panels of CPUs are `kernels.api.StoredPanels`.

O: outputs, I: inputs of a matrix; n: some of its rows; G: groups of inputs.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.model_config.stored_format import IQ4_LEVELS, MX_GROUP, NF4_LEVELS, StoredFormat

_MX_SHIFT: Final = 14
_FP8_FACTOR: Final = 256.0
_MANTISSA_BITS: Final = 23
_MOST_STEPS: Final = 32.0
"""Above any number less its zero point."""
_FP8_MOST, _FP8_NAN = 512.0, 0x7F
"""Above any number of FP8 and the factor of its scales; the bits of NaN, but for the sign."""
_HALF_EXPONENT: Final = 0x7C
"""Bits of the exponent in a float16's second byte."""
_MAX_EXPONENT: Final = 254
"""Largest biased exponent of a finite float32."""


def empty_tensors(stored: StoredFormat, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised numbers and scales of a matrix [O, I]."""
    dtype = torch.uint8 if stored.is_mxfp4 else torch.float32
    numbers = torch.empty(stored.numbers_shape(*shape), dtype=torch.uint8, device=device)
    return numbers, torch.empty(stored.scales_shape(*shape), dtype=dtype, device=device)


def write_rows(
    stored: StoredFormat, numbers: Tensor, scales: Tensor, start: int, new_numbers: Tensor, new_scales: Tensor
) -> None:
    """Replace rows from `start` on, where a scale begins, by a file's: uint8 [n, I / 2] and exponents uint8 [n, I / 32]
    of MXFP4; bytes [n, I] and float32 [n / `group_rows`, G] of FP8.
    """
    numbers[start : start + len(new_numbers)].copy_(new_numbers)
    if stored.is_mxfp4:
        scales[:, start : start + len(new_scales)].copy_(_in_steps(new_scales, len(scales)))
        return
    assert start % stored.group_rows == 0, (start, stored)
    first = start // stored.group_rows
    scales[first : first + len(new_scales)].copy_(new_scales)


def read_values(stored: StoredFormat, numbers: Tensor, scales: Tensor, rows: tuple[int, int]) -> Tensor:
    """Values of some rows of a matrix, float32 [n, I]."""
    start, stop = rows
    if stored.is_mxfp4:
        num_groups = numbers.shape[1] * 2 // MX_GROUP
        exponents = scales[:, start:stop].permute(1, 0, 2).reshape(stop - start, -1)[:, :num_groups]
        return values(stored, numbers[start:stop], exponents)
    of_rows = torch.arange(start, stop, device=scales.device) // stored.group_rows
    return values(stored, numbers[start:stop], scales.index_select(0, of_rows))


def values(stored: StoredFormat, numbers: Tensor, scales: Tensor) -> Tensor:
    """Bytes and scales of each row, exponents [n, I / 32] or float32 [n, G] -> float32 [n, I]. Not finite where a
    kernel's factor would not be. Of "int4" and "nf4" scales are float32 [n, G, 2], scale and zero point; of GGUF's
    those of `affine_scales`.
    """
    if stored.is_affine:
        return _affine_values(stored, numbers, scales)
    if stored.is_of_panels:
        whole = _from_nibbles(numbers)
        levels = whole.to(torch.float32)
        if stored.number == "nf4":
            levels = torch.tensor(NF4_LEVELS, device=numbers.device)[whole.int()]
        factors, zeros = scales.unsqueeze(2).unbind(-1)
        return levels.view(len(numbers), scales.shape[1], -1).sub_(zeros).mul_(factors).flatten(1)
    wide = numbers.to(torch.int32)
    if stored.is_mxfp4:
        low, high = ((wide & 0x7) << 9) | ((wide & 0x8) << 12), ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
        halves = _halves(torch.stack((low, high), dim=-1).flatten(1)).view(len(numbers), -1, MX_GROUP)
        exponents = scales.to(torch.int32) + _MX_SHIFT
        factors = (exponents << _MANTISSA_BITS).view(torch.float32).masked_fill(exponents > _MAX_EXPONENT, torch.nan)
        return halves.mul_(factors.unsqueeze(2)).flatten(1)
    halves = _halves(((wide & 0x7F) << 7) | ((wide & 0x80) << 8))
    halves = halves.masked_fill_((wide & _FP8_NAN) == _FP8_NAN, torch.nan)
    factors = scales * _FP8_FACTOR
    num_inputs = numbers.shape[1]
    size = stored.group_inputs or num_inputs
    return halves.mul_(factors.repeat_interleave(size, dim=1)[:, :num_inputs])


def affine_scales(steps: Tensor, minima: Tensor, factor_of_minima: Tensor, factors: Tensor) -> Tensor:
    """Bytes uint8 [n, G, 6 or 7] of float16 steps and steps of minima [n, G], of their factors [n, G], and of those of
    steps int8 [n, G, 1 or 2].
    """
    of_minima = factor_of_minima.unsqueeze(2)
    both = torch.stack((steps, minima), dim=2).view(torch.uint8)
    return torch.cat((both, of_minima.view(torch.uint8), factors.view(torch.uint8)), dim=2)


def to_nibbles(numbers: Tensor) -> Tensor:
    """uint8 [n, I / 2] of numbers of 0 to 15, two a byte, the first in the low bits."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy: rows that are one alone may have any distance, which views of other dtypes do not take."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _from_nibbles(numbers: Tensor) -> Tensor:
    return torch.stack((numbers & 0xF, numbers >> 4), dim=-1).flatten(1)


def _affine_values(stored: StoredFormat, numbers: Tensor, scales: Tensor) -> Tensor:
    """`values` of GGUF's types."""
    if stored.number == "affine8":
        levels = numbers.view(torch.int8).to(torch.float32)
    elif stored.number == "iq4":
        levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=numbers.device)[_from_nibbles(numbers).int()]
    else:
        levels = _from_nibbles(numbers).to(torch.float32)
    steps, minima = _copied(scales[..., :4]).view(torch.float16).to(torch.float32).unbind(-1)
    factors = scales[..., 4:].view(torch.int8).to(torch.float32)
    of_halves = factors[..., 1:] * steps.unsqueeze(2)
    levels = levels.view(*of_halves.shape, -1)
    offsets = (minima * factors[..., 0]).view(*steps.shape, 1, 1)
    return levels.mul_(of_halves.unsqueeze(3)).sub_(offsets).flatten(1)


def are_surely_finite(stored: StoredFormat, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers and scales are such that `values` are finite in `dtype`, by a check that is faster than those of
    all values; False of MXFP4.
    """
    if stored.is_mxfp4:
        return False
    if stored.is_affine:
        # Values of finite steps are at most 65504 * 2 * 128 * 128.
        return not ((scales[..., 1:4:2] & _HALF_EXPONENT) == _HALF_EXPONENT).any()
    is_fp8 = stored.number == "e4m3"
    most, factors = (_FP8_MOST, scales) if is_fp8 else (_MOST_STEPS, scales[..., 0])
    if not (factors.abs() * most).amax() < torch.finfo(dtype).max:
        return False
    return not (is_fp8 and bool(((numbers & _FP8_NAN) == _FP8_NAN).any()))


def _halves(bits: Tensor) -> Tensor:
    """Float32 of the bits of float16, int32."""
    return bits.to(torch.int16).view(torch.float16).to(torch.float32)


def _in_steps(exponents: Tensor, num_steps: int) -> Tensor:
    """[n, I / 32] -> [steps, n, 4]: those of 128 inputs together, zero past the last."""
    padded = exponents.new_zeros((len(exponents), 4 * num_steps))
    padded[:, : exponents.shape[1]] = exponents
    return padded.view(len(exponents), num_steps, 4).permute(1, 0, 2)
