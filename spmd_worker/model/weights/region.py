"""Positions of a rectangle's elements in a tensor that is stored in row-major order, and reads of them in few runs.

Arithmetic on shapes, in elements, not bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from spmd_worker.model.layers.weight_slice import Rectangle, extents, volume


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A read of a rectangle: fill a buffer of `buffer_shape` from `runs` in order, then index it with `wanted`.

    `runs` are (begin, end) positions in the stored tensor, ascending and disjoint.
    """

    buffer_shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    wanted: tuple[slice, ...]


def plan_read(shape: tuple[int, ...], region: Rectangle, max_gap: int) -> ReadPlan:
    """A plan that reads through gaps of up to `max_gap` elements rather than start another run."""
    widened = widen(shape, region, max_gap)
    wanted = tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, widened, strict=True)
    )
    return ReadPlan(extents(widened), tuple(contiguous_runs(shape, widened)), wanted)


def widen(shape: tuple[int, ...], region: Rectangle, max_gap: int) -> Rectangle:
    """The region with its inner dimensions extended to their full size while the gap closed is at most `max_gap`."""
    widened = list(region)
    for dim in reversed(range(len(shape))):
        start, stop = region[dim]
        gap = (shape[dim] - (stop - start)) * prod(shape[dim + 1 :])
        num_runs = volume(region[:dim])
        if num_runs <= 1 or gap > max_gap:
            break
        widened[dim] = (0, shape[dim])
    return tuple(widened)


def contiguous_runs(shape: tuple[int, ...], region: Rectangle) -> Iterator[tuple[int, int]]:
    """Positions (begin, end) of the region's elements, in the region's row-major order."""
    if volume(region) == 0:
        return
    full_from = len(shape)
    while full_from > 0 and region[full_from - 1] == (0, shape[full_from - 1]):
        full_from -= 1
    split_dim = max(full_from - 1, 0)
    outer, inner = region[:split_dim], region[split_dim:]
    run_length = volume(inner)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner_begin = inner[0][0] * strides[split_dim] if inner else 0
    for indices in product(*(range(start, stop) for start, stop in outer)):
        begin = inner_begin + sum(index * stride for index, stride in zip(indices, strides))
        yield begin, begin + run_length


def split_region(shape: tuple[int, ...], region: Rectangle, max_elements: int, dim: int = 0) -> Iterator[Rectangle]:
    """Cut a region into blocks in ascending order, each within `max_elements` consecutive elements of the stored
    tensor.

    Full stored rows are counted, so a read plan that widens a block keeps the bound.
    """
    if volume(region) == 0:
        return
    if dim == len(shape):
        yield region
        return
    start, stop = region[dim]
    num_indices = max_elements // prod(shape[dim + 1 :])
    step = max(num_indices, 1)
    for first in range(start, stop, step):
        block = (*region[:dim], (first, min(first + step, stop)), *region[dim + 1 :])
        if num_indices > 0:
            yield block
        else:
            yield from split_region(shape, block, max_elements, dim + 1)


def move_block(block: Rectangle, source: Rectangle, destination: Rectangle) -> Rectangle:
    """A block of `source` moved to `destination`; either may have more leading dimensions of extent 1."""
    num_leading = max(len(destination) - len(source), 0)
    num_dropped = max(len(source) - len(destination), 0)
    moved = (
        (start - source_start + target_start, stop - source_start + target_start)
        for (start, stop), (source_start, _), (target_start, _) in zip(
            block[num_dropped:], source[num_dropped:], destination[num_leading:], strict=True
        )
    )
    return (*destination[:num_leading], *moved)
