"""Items of a job (native/thread_pool.h) cover all tiles once, and the last ones are short."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_library import divided_work


@pytest.fixture(scope="module")
def probe():
    loaded = divided_work()
    loaded.shrinking_items.restype = ctypes.c_int64
    return loaded


def lengths(probe, num_units: int, num_threads: int, most: int, together: int = 1) -> list[int]:
    starts = (ctypes.c_int64 * (num_units + 1))()
    count = probe.shrinking_items(*map(ctypes.c_int64, (num_units, num_threads, most, together)), starts)
    assert count == 0 or (starts[0], starts[count]) == (0, num_units)
    return [starts[item + 1] - starts[item] for item in range(count)]


def test_items_are_told_literally(probe):
    assert lengths(probe, 18, 2, 100) == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert lengths(probe, 90, 2, 100)[:6] == [11, 9, 8, 7, 6, 6]
    assert lengths(probe, 90, 2, 4)[:3] == [4, 4, 4]
    assert lengths(probe, 90, 2, 100, 5)[:7] == [10, 10, 5, 5, 5, 5, 5], "whole fives, while they are that long"
    assert lengths(probe, 90, 2, 100, 5)[-8:] == [1] * 8
    # One thread takes them all, and each is a call of nobody.
    assert sum(lengths(probe, 90, 1, 100)) == 90
    assert lengths(probe, 0, 2, 100) == []
    # A gemm so large that one unit is too long already.
    assert lengths(probe, 3, 2, 0) == [1, 1, 1]


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(0, 300), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_items_cover_tiles_once_and_end_short(probe, num_units, num_threads, most, together):
    found = lengths(probe, num_units, num_threads, most, together)
    assert sum(found) == num_units
    assert all(1 <= length <= max(most, 1) for length in found)
    assert found == sorted(found, reverse=True)
    assert all(length % together == 0 for length in found if length > together)
    left = num_units
    for length in found:
        assert length <= max(1, left // (4 * num_threads))
        left -= length
