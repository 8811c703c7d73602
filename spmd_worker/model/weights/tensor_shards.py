"""A rank's shard of a trainer's tensor: the rectangles of the whole tensor that it is, from a DTensor's placements.

The arithmetic of `Shard`, `_StridedShard` (FSDP2 over tensor parallelism) and `Replicate`, for shards of any size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import Rectangle, extents, full_rectangle
from spmd_worker.model.weights.tensor_checks import check_data, check_pair

Runs = list[tuple[int, int]]
"""Ranges (start, stop) of one dimension that a rank has, in the order of its shard."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of a tensor of `shape`. `ranges` are of each dimension of the whole tensor; their product, with the
    ranges of a dimension concatenated, is `values`. `placement` are words for messages.
    """

    name: str
    shape: tuple[int, ...]
    placement: str
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    values: Tensor

    @property
    def rectangles(self) -> list[Rectangle]:
        """The parts that are not empty, ascending in `values`."""
        return list(product(*self.ranges)) if self.shape else [()] * self.values.numel()

    def read(self, region: Rectangle) -> Tensor:
        """A region inside one of `rectangles`: a view."""
        return self.values[tuple(map(_local, self.ranges, region))]


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor, recognised by its method: shards of others are reached by a collective."""
    return hasattr(tensor, "full_tensor")


def shard_of(name: str, tensor: Any) -> TensorShard:
    """This rank's shard of a DTensor. Raises CheckpointError for a placement that is no shard, such as `Partial`, for a
    local tensor of another shape than placements and mesh give, and as `check_data` does.
    """
    check_pair(name, tensor)
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    placement = f"{', '.join(map(str, placements))} on a mesh of {' x '.join(map(str, mesh.shape))}"
    coordinate = mesh.get_coordinate()
    values = tensor.detach().to_local().detach()
    if coordinate is None:
        # A rank outside of the mesh has nothing.
        empty = torch.empty(0, dtype=tensor.dtype).reshape((0,) * max(len(shape), 1))
        return TensorShard(name, shape, "outside of the mesh", ((),) * len(shape), empty)
    runs: list[Runs] = [[bounds] for bounds in full_rectangle(shape)]
    for each, size, index in zip(placements, mesh.shape, coordinate, strict=True):
        if each.is_replicate():
            continue
        dim = getattr(each, "dim", None)
        if dim is None or each.is_partial():
            raise CheckpointError(
                f"{name}: {list(shape)} has the placement {each}, which is no part of the tensor: call "
                f"redistribute with Shard or Replicate first"
            )
        runs[dim] = _shard(runs[dim], size, index, getattr(each, "split_factor", 1))
    ranges = tuple(tuple([each for each in of_dim if each[0] < each[1]]) for of_dim in runs)
    expected = tuple(sum(stop - start for start, stop in of_dim) for of_dim in ranges)
    # Empty shards have any shape.
    if tuple(values.shape) != expected and prod(expected) + values.numel() > 0:
        raise CheckpointError(
            f"{name}: its shard has the shape {list(values.shape)}, but {placement} of {list(shape)} gives this rank "
            f"{list(expected)}"
        )
    check_data(name, values)
    return TensorShard(name, shape, placement, ranges, values)


def _shard(runs: Runs, num_ranks: int, index: int, split_factor: int) -> Runs:
    """Part `index` of a dimension that is cut as `Shard` does; with a `split_factor`, of each of its first parts."""
    length = sum(stop - start for start, stop in runs)
    found: Runs = []
    for start, stop in _chunks(0, length, split_factor):
        found += _inside(runs, *_chunks(start, stop, num_ranks)[index])
    return found


def _chunks(start: int, stop: int, number: int) -> Runs:
    """Cuts of `torch.chunk`, with empty parts at the end."""
    step = -(-(stop - start) // number)
    return [(min(start + step * each, stop), min(start + step * (each + 1), stop)) for each in range(number)]


def _inside(runs: Runs, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of the places `first` to `last` of the concatenated ranges."""
    starts = accumulate((stop - start for start, stop in runs), initial=0)
    for (start, stop), at in zip(runs, starts, strict=False):
        begin, end = max(first - at, 0), min(last - at, stop - start)
        if begin < end:
            yield start + begin, start + end


def _local(ranges: Sequence[tuple[int, int]], bounds: tuple[int, int]) -> slice:
    """The place of a range in the concatenated ranges, of one of which it is a part."""
    at = 0
    for start, stop in ranges:
        if start <= bounds[0] and bounds[1] <= stop:
            return slice(at + bounds[0] - start, at + bounds[1] - start)
        at += stop - start
    raise AssertionError((ranges, bounds))


def subtract(whole: Rectangle, part: Rectangle) -> Iterator[Rectangle]:
    """Disjoint rectangles that are `whole` without its `part`."""
    for dim, ((start, stop), (first, last)) in enumerate(zip(whole, part, strict=True)):
        for bounds in ((start, first), (last, stop)):
            if bounds[0] < bounds[1]:
                yield (*part[:dim], bounds, *whole[dim + 1 :])


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(size > 0 for size in extents(found)) else None
