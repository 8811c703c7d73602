"""Rectangles of checkpoint tensors and the rectangles of this rank's parameters that they fill.

A model describes its weights as a list of `WeightSlice` (and `PaddingSlice` for rows that no checkpoint has); reading,
checking, in-place updates, dummy weights and saving all use that one list. Knows nothing of files or ranks: a rank's
share is already in the numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

Rectangle = tuple[tuple[int, int], ...]
"""(start, stop) per dimension, half open. `()` is the one element of a tensor without dimensions."""


def extents(rectangle: Rectangle) -> tuple[int, ...]:
    """Number of indices per dimension."""
    return tuple(stop - start for start, stop in rectangle)


def volume(rectangle: Rectangle) -> int:
    """Number of elements; 0 when any dimension is empty."""
    return prod(extents(rectangle))


def full_rectangle(shape: tuple[int, ...]) -> Rectangle:
    """The rectangle of all elements of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def is_inside(rectangle: Rectangle, shape: tuple[int, ...]) -> bool:
    """Whether the rectangle has the dimensions of `shape` and lies within it."""
    return len(rectangle) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(rectangle, shape, strict=True)
    )


_AXES = {1: ("rows",), 2: ("rows", "columns"), 3: ("matrices", "rows", "columns")}
"""Names of a tensor's dimensions, by their number."""


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """A rank's part of a checkpoint tensor of `checkpoint_shape`: the ranges (start, stop) of each dimension, ascending
    and disjoint, which are concatenated. As text "rows 192 to 288 of 288", or "complete".
    """

    checkpoint_shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def __str__(self) -> str:
        axes = _AXES.get(len(self.ranges)) or [f"dimension {axis}:" for axis in range(len(self.ranges))]
        cut = [
            f"{axis} {_listed([f'{start} to {stop}' for start, stop in ranges])} of {size}"
            for axis, ranges, size in zip(axes, self.ranges, self.checkpoint_shape, strict=True)
            if ranges != ((0, size),)
        ]
        return ", ".join(cut) or "complete"

    @property
    def is_complete(self) -> bool:
        return all(ranges == ((0, size),) for ranges, size in zip(self.ranges, self.checkpoint_shape, strict=True))

    def of(self, tensor: Any) -> Any:
        """This slice of the full tensor, or of an array of its shape: a view if each dimension has one range."""
        for axis, ranges in enumerate(self.ranges):
            before = (slice(None),) * axis
            indices = [index for start, stop in ranges for index in range(start, stop)]
            tensor = tensor[(*before, slice(*ranges[0]) if len(ranges) == 1 else indices)]
        return tensor


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ranges in ascending order, with adjacent and overlapping ones merged."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A checkpoint tensor of the model, on any rank. `is_buffer`: a buffer in transformers, so files have it and the
    parameters that a trainer passes do not. `is_float32`: held in float32 whatever the model's dtype. `is_bound`: a
    bound, which is infinite if it bounds nothing.
    """

    shape: tuple[int, ...]
    is_buffer: bool = False
    is_float32: bool = False
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """One rectangle of one checkpoint tensor, and the rectangle of a parameter of this rank that it fills.

    `checkpoint_shape` is the full shape that the checkpoint must have. `source` may be empty: the model has the tensor
    and this rank has no part of it (see `empty_slice`); the parameter need not exist then. `destination` has the
    extents of `source`, except for leading dimensions of extent 1, of which either may have more (one expert's matrix
    of a stacked tensor). `is_transposed`: the checkpoint has the matrix as [inputs, outputs], so `destination` has the
    last two extents of `source` in reverse. `is_buffer`, `is_float32` and `is_bound` are as in `ModelTensor`.
    """

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]
    source: Rectangle
    parameter_name: str
    destination: Rectangle
    is_transposed: bool = False
    is_buffer: bool = False
    is_float32: bool = False
    is_bound: bool = False

    def __post_init__(self) -> None:
        assert is_inside(self.source, self.checkpoint_shape), self
        source, destination = extents(self.oriented(self.source)), extents(self.destination)
        num_leading = len(destination) - len(source)
        source, destination = (1,) * num_leading + source, (1,) * -num_leading + destination
        assert self.parameter_name == "" or source == destination, self

    def oriented(self, rectangle: Rectangle) -> Rectangle:
        """A rectangle of the checkpoint tensor with its dimensions in the parameter's order."""
        return (*rectangle[:-2], *rectangle[:-3:-1]) if self.is_transposed else rectangle

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no part of the tensor."""
        return volume(self.source) == 0

    @property
    def tensor(self) -> ModelTensor:
        return ModelTensor(self.checkpoint_shape, self.is_buffer, self.is_float32, self.is_bound)


@dataclass(frozen=True, slots=True)
class RecutRows:
    """Rows from `first` on of the tensors `stored`, one behind the other."""

    first: int
    num_rows: int
    stored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A view of the tensor `stored`: rows of its slice `index`, or, if that is None, these rows of all slices, or of
    the tensor itself without `has_slices`, or, without `rows`, its transpose.
    """

    stored: str
    index: int | None = None
    rows: tuple[int, int] = (0, 0)
    has_slices: bool = True

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self._is_transposed:
            return (*stored[:-2], stored[-1], stored[-2])
        if not self.has_slices:
            return (self.rows[1] - self.rows[0], *stored[1:])
        num_slices = stored[:1] if self.index is None else ()
        return (*num_slices, self.rows[1] - self.rows[0], *stored[2:])

    def of(self, stored: Any) -> Any:
        if self._is_transposed:
            return stored.transpose(-1, -2)
        if not self.has_slices:
            return stored[slice(*self.rows)]
        return stored[slice(None) if self.index is None else self.index, slice(*self.rows)]

    def stored_region(self, region: Rectangle) -> Rectangle:
        """A region of the view as a region of `stored`."""
        if self._is_transposed:
            return (*region[:-2], region[-1], region[-2])
        if not self.has_slices:
            (start, stop), *others = region
            return ((self.rows[0] + start, self.rows[0] + stop), *others)
        slices, ((start, stop), *others) = region[:1], region[1:] if self.index is None else region
        slices = slices if self.index is None else ((self.index, self.index + 1),)
        return (*slices, (self.rows[0] + start, self.rows[0] + stop), *others)

    def region_of(self, stored: Rectangle) -> Rectangle:
        """A region of `stored`, inside of what the view has, as a region of the view."""
        if self._is_transposed:
            return (*stored[:-2], stored[-1], stored[-2])
        slices, ((start, stop), *others) = (stored[:1], stored[1:]) if self.has_slices else ((), stored)
        slices = slices if self.index is None else ()
        return (*slices, (start - self.rows[0], stop - self.rows[0]), *others)

    def of_region(self, read: Any) -> Any:
        """A region of the view from that of `stored`, `stored_region`."""
        if self._is_transposed:
            return read.transpose(-1, -2)
        return read if self.index is None else read[0]

    @property
    def _is_transposed(self) -> bool:
        return self.index is None and self.rows == (0, 0)


@dataclass(frozen=True, slots=True)
class PaddingSlice:
    """A rectangle of a parameter that no checkpoint tensor fills: the loader sets it to zero."""

    parameter_name: str
    destination: Rectangle


def replicated(name: str, shape: tuple[int, ...], parameter_name: str, *, is_buffer: bool = False) -> WeightSlice:
    """The complete checkpoint tensor, which every rank has as a parameter."""
    rectangle = full_rectangle(shape)
    return WeightSlice(name, shape, rectangle, parameter_name, rectangle, is_buffer=is_buffer)


def empty_slice(name: str, shape: tuple[int, ...]) -> WeightSlice:
    """A tensor of the model of which this rank has no part (an expert of another rank)."""
    assert shape, (name, "a tensor without dimensions has no empty rectangle")
    rectangle = ((0, 0),) * len(shape)
    return WeightSlice(name, shape, rectangle, "", rectangle)


def shard(name: str, shape: tuple[int, ...], parameter_name: str, dim: int, start: int, stop: int) -> WeightSlice:
    """Indices `start` to `stop` of one dimension, and all of the others, as a full parameter."""
    source = (*full_rectangle(shape[:dim]), (start, stop), *full_rectangle(shape[dim + 1 :]))
    return WeightSlice(name, shape, source, parameter_name, full_rectangle(extents(source)))
