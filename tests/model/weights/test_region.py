from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.model.layers.weight_slice import extents, volume
from spmd_worker.model.weights.region import contiguous_runs, move_block, plan_read, split_region, widen


@st.composite
def shape_and_region(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    region = []
    for size in shape:
        start = draw(st.integers(0, size))
        region.append((start, draw(st.integers(start, size))))
    return shape, tuple(region)


def fetch(shape, region, max_gap):
    """Read a plan from a tensor whose elements are their positions."""
    plan = plan_read(shape, region, max_gap)
    positions = [position for begin, end in plan.runs for position in range(begin, end)]
    return torch.tensor(positions, dtype=torch.int64).reshape(plan.buffer_shape)[plan.wanted]


@given(shape_and_region(), st.integers(0, 200))
def test_plan_reads_exactly_the_region(case, max_gap):
    shape, region = case
    stored = torch.arange(prod(shape)).reshape(shape)
    assert torch.equal(fetch(shape, region, max_gap), stored[tuple(slice(*bounds) for bounds in region)])


@given(shape_and_region(), st.integers(1, 200))
def test_blocks_tile_the_region_within_the_bound(case, max_elements):
    shape, region = case
    covered = torch.zeros(shape, dtype=torch.int64)
    for block in split_region(shape, region, max_elements):
        assert volume(block) <= max_elements
        plan = plan_read(shape, block, max_gap=10**6)
        assert prod(plan.buffer_shape) <= max_elements
        covered[tuple(slice(*bounds) for bounds in block)] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[tuple(slice(*bounds) for bounds in region)] += 1
    assert torch.equal(covered, expected)


def test_rows_are_one_run_and_columns_many():
    assert list(contiguous_runs((4, 10), ((1, 3), (0, 10)))) == [(10, 30)]
    assert list(contiguous_runs((4, 10), ((1, 3), (2, 5)))) == [(12, 15), (22, 25)]
    assert list(contiguous_runs((2, 3, 4), ((0, 2), (1, 2), (0, 4)))) == [(4, 8), (16, 20)]
    assert list(contiguous_runs((), ())) == [(0, 1)]


def test_only_short_gaps_are_read_through():
    region = ((0, 4), (2, 5))
    assert widen((4, 10), region, max_gap=7) == ((0, 4), (0, 10))
    assert widen((4, 10), region, max_gap=6) == region


def test_single_row_has_no_gap():
    assert widen((4, 10), ((1, 2), (2, 5)), max_gap=100) == ((1, 2), (2, 5))


def test_block_keeps_its_index_in_a_stack():
    source, destination = ((4, 8), (0, 6)), ((3, 4), (10, 14), (0, 6))
    moved = move_block(((5, 7), (0, 6)), source, destination)
    assert moved == ((3, 4), (11, 13), (0, 6))
    assert extents(moved) == (1, 2, 6)
