"""The emulated tile instructions (native/amx.h) give what Intel's manual says, number by number.

TDPBF16PS sums the products of first and of second elements of all pairs apart, each product fused into its sum, adds
the two sums and then the destination. It rounds to nearest even, takes subnormal numbers for zero and gives none.
"""

import ctypes
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from native_builds import EMULATE
from numpy.typing import NDArray
from probe_library import probe_library

ROWS, STEPS, COLUMNS = 5, 16, 16
SMALLEST = Fraction(2) ** -126


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    loaded = probe_library("amx_tiles.cpp", tmp_path_factory.mktemp("tiles"), EMULATE, "-march=native")
    if not loaded.has_tiles():
        pytest.skip("the emulation is made of AVX-512 and its bfloat16 instructions")
    return loaded


def call(function, left: NDArray, right: NDArray, sums: NDArray) -> NDArray:
    result = sums.copy()
    numbers, addresses = (ROWS, STEPS, COLUMNS), (left, right, result)
    function(*map(ctypes.c_int64, numbers), *(ctypes.c_void_p(each.ctypes.data) for each in addresses))
    return result


def exact(number: float) -> Fraction:
    value = Fraction(float(number))
    return value if abs(value) >= SMALLEST else Fraction(0)


def nearest(value: Fraction) -> Fraction:
    """Float32, ties to even; zero where it would be subnormal."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 24
    unit = Fraction(2) ** exponent
    while abs(value / unit) >= 1 << 24:
        unit *= 2
    while abs(value / unit) < 1 << 23:
        unit /= 2
    rounded = round(value / unit) * unit
    return rounded if abs(rounded) >= SMALLEST else Fraction(0)


def by_the_manual(left: NDArray, right: NDArray, sums: NDArray) -> Iterator[float]:
    widened = [(each.astype(np.uint32) << 16).view(np.float32) for each in (left, right)]
    for row in range(ROWS):
        for column in range(COLUMNS):
            apart = [Fraction(0), Fraction(0)]
            for step in range(STEPS):
                for which in (0, 1):
                    pair = exact(widened[0][row, 2 * step + which]), exact(widened[1][step, 2 * column + which])
                    apart[which] = nearest(apart[which] + pair[0] * pair[1])
            yield float(nearest(exact(sums[row, column]) + nearest(apart[0] + apart[1])))


def bfloat16(numbers: NDArray) -> NDArray:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("scale", [1.0, 2.0**-63, 2.0**-120], ids=["ordinary", "results subnormal", "inputs subnormal"])
def test_emulated_bfloat16_dot_matches_intel_manual(tiles, scale: float):
    chance = np.random.default_rng(3)
    left = bfloat16(chance.standard_normal((ROWS, 2 * STEPS)) * scale)
    spread = 2.0 ** chance.integers(-9, 9, (STEPS, 2 * COLUMNS))
    right = bfloat16(chance.standard_normal((STEPS, 2 * COLUMNS)) * (scale if scale > 2.0**-100 else 1.0) * spread)
    sums = (chance.standard_normal((ROWS, COLUMNS)) * scale**2).astype(np.float32)
    expected = np.array(list(by_the_manual(left, right, sums)), dtype=np.float32).reshape(sums.shape)
    assert np.array_equal(call(tiles.tdpbf16ps, left, right, sums), expected)
    assert np.count_nonzero(expected) > expected.size / 4
    # The control: one chain of all products, as AVX-512 has it, has other bits.
    wide = [(each.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for each in (left, right)]
    pairs = wide[1].reshape(STEPS, COLUMNS, 2).transpose(0, 2, 1).reshape(2 * STEPS, COLUMNS)
    assert not np.array_equal((sums + wide[0] @ pairs).astype(np.float32), expected)


def test_products_of_bytes_are_summed_exactly(tiles):
    chance = np.random.default_rng(4)
    left, right = (
        chance.integers(-128, 128, shape, dtype=np.int8) for shape in ((ROWS, 4 * STEPS), (STEPS, 4 * COLUMNS))
    )
    sums = chance.integers(-(2**30), 2**30, (ROWS, COLUMNS), dtype=np.int32)
    quads = right.reshape(STEPS, COLUMNS, 4).transpose(0, 2, 1).reshape(4 * STEPS, COLUMNS)
    expected = sums + left.astype(np.int32) @ quads.astype(np.int32)
    assert np.array_equal(call(tiles.tdpbssd, left, right, sums), expected)
