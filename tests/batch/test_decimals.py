"""Numbers of vectors are written as numpy writes a float32 by itself."""

import struct

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_worker.batch.output.decimals import shortest_decimals


def one_by_one(vector: list[float]) -> list[float]:
    return [float(str(each)) for each in np.array(vector, dtype=np.float32)]


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8))
@example([0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 0.3, 1e-5, 1e-13, 9.9999998e-14, 1e6, 999999.94, 16777216.0, 3.4e38, 1e-45])
@example([0.5, 0.25, 2.0**-20, 2.0**-40, 2.0**19, 2.0**20, 0.49999997, 9.99999e-05, 0.001, 0.00099999999])
@settings(max_examples=50)
def test_any_float32_is_spelled_as_by_itself(vector: list[float]):
    assert bits(shortest_decimals(vector)) == bits(one_by_one(vector))


def test_numbers_like_those_of_vectors_are_spelled_as_by_themselves():
    chance = np.random.default_rng(5)
    values = np.concatenate(
        [
            chance.standard_normal(6000) * 0.05,
            chance.standard_normal(2000) * 10.0 ** chance.integers(-14, 8, 2000),
            # Of few digits, and their neighbours.
            np.round(chance.standard_normal(1000), 3),
            np.nextafter(np.round(chance.standard_normal(1000), 4).astype(np.float32), np.float32(9)),
        ]
    ).astype(np.float32)
    assert bits(shortest_decimals(values.tolist())) == bits(one_by_one(values.tolist()))
    # The control: as many digits for all is another spelling.
    assert [float(f"{each:.9g}") for each in values[:6000]] != one_by_one(values[:6000].tolist())
