"""Tiles of experts' matrices as files store them, decoded while they are loaded (`model_config/stored_format.py`).

Decoding is exact up to one rounding, that of number * scale in float32, and a second to ELEMENT: what dequantising does
when a checkpoint is loaded. So the tile is the one that would be loaded of the dequantised matrix, bit for bit, and
what is multiplied, in which order, does not depend on how weights are stored.

Bits of a number are those of a float16 of the same sign, exponent and mantissa, at another place: a float16 that is
2^-14 times the number in e2m1 and 2^-8 times that in e4m3, subnormal numbers too. The power is part of the scale's
factor, which is exact. Conversions to float16 of a chip, which not all have, are not needed.

O: outputs of an expert's matrix, K: its inputs; row r of a matrix's part is output `first` + r * STRIDE.
"""

import triton
import triton.language as tl

PLAIN, MXFP4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How weights are stored."""
_STEP = tl.constexpr(128)
_MX_GROUP = tl.constexpr(32)
_MX_IN_STEP = tl.constexpr(4)
_MX_SHIFT = tl.constexpr(14)
_FP8_FACTOR = tl.constexpr(256.0)


@triton.jit
def _opaque(values):
    """Float32 [BN, BK] as they are, through a sum over an axis of size 1.

    For mma.sync Triton looks through elementwise operations for the width of what was loaded, and of bytes puts 4 or 8
    inputs side by side in a thread, where it puts 2 of the dequantised weights: each instruction then adds other
    inputs, and sums have other bits. It does not look through a reduction.
    """
    return tl.sum(values[:, :, None], 2)


@triton.jit
def mxfp4_values(numbers, factors, ELEMENT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Bytes [BN, BK / 2] and float32 factors [BN, BK / 32] -> [BN, BK]."""
    groups: tl.constexpr = BK // _MX_GROUP
    wide = numbers.to(tl.uint16)
    low = ((wide & 0x7) << 9) | ((wide & 0x8) << 12)
    high = ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
    halves = tl.join(low, high).to(tl.float16, bitcast=True)
    values = tl.reshape(halves, [BN, groups, _MX_GROUP]).to(tl.float32) * factors[:, :, None]
    return _opaque(tl.reshape(values, [BN, BK])).to(ELEMENT)


@triton.jit
def mxfp4_factors(
    scales, expert, first, STRIDE: tl.constexpr, row, rows, num_outputs, k, K, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Float32 [BN, BK / 32] of BN rows from `row` on, below `rows`, and inputs from k on: 2^(exponent - 127 + 14)."""
    groups: tl.constexpr = BK // _MX_GROUP
    n, j = row + tl.arange(0, BN), tl.arange(0, groups)
    output = first + tl.where(n < rows, n, 0) * STRIDE
    # A matrix's exponents of 128 inputs are 4 bytes of each output, side by side.
    of_step = (expert.to(tl.int64) * tl.cdiv(K, _STEP) + k // _STEP) * num_outputs * _MX_IN_STEP
    if BK >= _STEP:
        column = (j // _MX_IN_STEP) * num_outputs * _MX_IN_STEP + j % _MX_IN_STEP
    else:
        column = k // _MX_GROUP - k // _STEP * _MX_IN_STEP + j
    at = of_step + output[:, None] * _MX_IN_STEP + column[None, :]
    exponents = tl.load(scales + at, mask=(k + j * _MX_GROUP < K)[None, :], other=0).to(tl.int32)
    return ((exponents + _MX_SHIFT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_values(numbers, factors, ELEMENT: tl.constexpr):
    """Bytes [BN, BK] and float32 factors, one or [BN, 1] -> [BN, BK]. NaN of e4m3 is 480: weights are finite."""
    wide = numbers.to(tl.uint16)
    halves = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
    return _opaque(halves.to(tl.float32) * factors).to(ELEMENT)


@triton.jit
def fp8_factors(
    scales, expert, first, STRIDE: tl.constexpr, row, rows, num_outputs, k, K, BN: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_INPUTS: tl.constexpr,
):  # fmt: skip
    """Float32 factors of BN rows from `row` on, below `rows`, and inputs from k on: 256 times the scales, [BN, 1], or
    one if a tile has one.
    """
    num_groups = 1
    group = 0
    if GROUP_INPUTS > 0:
        num_groups = tl.cdiv(K, GROUP_INPUTS)
        group = k // GROUP_INPUTS
    of_expert = expert.to(tl.int64) * tl.cdiv(num_outputs, GROUP_ROWS)
    if STRIDE == 1 and GROUP_ROWS % BN == 0:
        # Gates and ups begin at a scale of their own, and tiles at a multiple of BN.
        return tl.load(scales + (of_expert + (first + row) // GROUP_ROWS) * num_groups + group) * _FP8_FACTOR
    else:
        n = row + tl.arange(0, BN)
        output = first + tl.where(n < rows, n, 0) * STRIDE
        at = (of_expert + output // GROUP_ROWS) * num_groups + group
        return (tl.load(scales + at) * _FP8_FACTOR)[:, None]
