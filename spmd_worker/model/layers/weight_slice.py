"""Which rectangle of a checkpoint tensor becomes which rectangle of a parameter of this rank.

A model describes its weights as a list of `WeightSlice` (and `PaddingSlice` for what no checkpoint holds); reading,
checking, updating in place, dummy weights and saving all work from that one list. Knows nothing of files, tensors
or ranks: a rank's share is already in the numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

Rectangle = tuple[tuple[int, int], ...]
"""Per dimension (start, stop), half open. `()` is the one element of a tensor without dimensions."""


def extents(rectangle: Rectangle) -> tuple[int, ...]:
    """Number of indices per dimension."""
    return tuple(stop - start for start, stop in rectangle)


def volume(rectangle: Rectangle) -> int:
    """Number of elements; 0 when any dimension is empty."""
    return prod(extents(rectangle))


def full_rectangle(shape: tuple[int, ...]) -> Rectangle:
    """The rectangle that is the whole of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def is_inside(rectangle: Rectangle, shape: tuple[int, ...]) -> bool:
    """Whether the rectangle has the dimensions of `shape` and lies within it."""
    return len(rectangle) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(rectangle, shape, strict=True)
    )


_AXES = {1: ("rows",), 2: ("rows", "columns"), 3: ("matrices", "rows", "columns")}
"""Words for the dimensions of a tensor, by their number."""


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """What a rank holds of a checkpoint tensor of `checkpoint_shape`: per dimension the ranges (start, stop), ascending
    and apart, that are moved together. As text "rows 192 to 288 of 288", or "whole".
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
        return ", ".join(cut) or "whole"

    @property
    def is_whole(self) -> bool:
        """Whether that is all of it."""
        return all(ranges == ((0, size),) for ranges, size in zip(self.ranges, self.checkpoint_shape, strict=True))

    def of(self, tensor: Any) -> Any:
        """This slice of the whole checkpoint tensor, or of an array of its shape: a view where each dimension has one
        range.
        """
        for axis, ranges in enumerate(self.ranges):
            before = (slice(None),) * axis
            numbers = [number for start, stop in ranges for number in range(start, stop)]
            tensor = tensor[(*before, slice(*ranges[0]) if len(ranges) == 1 else numbers)]
        return tensor


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """In ascending order, those that touch as one."""
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
class WeightSlice:
    """One rectangle of one checkpoint tensor and where it lands in a parameter of this rank.

    `checkpoint_shape` is the full shape the checkpoint must have. `source` may be empty: this rank owns nothing of
    the tensor but knows that it belongs to the model (see `nothing_of`); the parameter need not exist then.
    `destination` has the extents of `source`, but for leading dimensions of extent 1, which either may have more of
    (one expert's matrix of a tensor that stacks the experts). `is_transposed`: the matrix is the other way round in the
    checkpoint, so `destination` has the last two extents of `source` in reverse. `is_buffer`, `is_float32`: as of
    `ModelTensor`.
    """

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]
    source: Rectangle
    parameter_name: str
    destination: Rectangle
    is_transposed: bool = False
    is_buffer: bool = False
    is_float32: bool = False

    def __post_init__(self) -> None:
        assert is_inside(self.source, self.checkpoint_shape), self
        given, taken = extents(self.turned(self.source)), extents(self.destination)
        num_leading = len(taken) - len(given)
        given, taken = (1,) * num_leading + given, (1,) * -num_leading + taken
        assert self.parameter_name == "" or given == taken, self

    def turned(self, rectangle: Rectangle) -> Rectangle:
        """A rectangle of the checkpoint tensor, as the parameter has its dimensions."""
        return (*rectangle[:-2], *rectangle[:-3:-1]) if self.is_transposed else rectangle

    @property
    def is_empty(self) -> bool:
        """Whether this rank takes nothing of the tensor."""
        return volume(self.source) == 0

    @property
    def tensor(self) -> "ModelTensor":
        """The checkpoint tensor."""
        return ModelTensor(self.checkpoint_shape, self.is_buffer, self.is_float32)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A checkpoint tensor that the model has, on whichever rank. `is_buffer`: transformers has it as a buffer, so it is
    in files and not among the parameters that a trainer hands over. `is_float32`: held in float32 in every dtype.
    """

    shape: tuple[int, ...]
    is_buffer: bool = False
    is_float32: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in another, `stored`: rows of its slice `number`, or, without a number, all of it with the last
    two dimensions exchanged.
    """

    stored: str
    number: int | None = None
    rows: tuple[int, int] = (0, 0)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor."""
        if self.number is None:
            return (*stored[:-2], stored[-1], stored[-2])
        return (self.rows[1] - self.rows[0], *stored[2:])

    def of(self, stored: Any) -> Any:
        """The tensor, a view of `stored`."""
        return stored.transpose(-1, -2) if self.number is None else stored[self.number, slice(*self.rows)]

    def outer(self, region: Rectangle) -> Rectangle:
        """The region of `stored` in which that of the tensor is."""
        if self.number is None:
            return (*region[:-2], region[-1], region[-2])
        (start, stop), *others = region
        return ((self.number, self.number + 1), (self.rows[0] + start, self.rows[0] + stop), *others)


@dataclass(frozen=True, slots=True)
class PaddingSlice:
    """A rectangle of a parameter that no checkpoint tensor fills: the loader sets it to zero."""

    parameter_name: str
    destination: Rectangle


def whole(name: str, shape: tuple[int, ...], parameter_name: str, *, is_buffer: bool = False) -> WeightSlice:
    """The whole checkpoint tensor becomes the whole parameter (a replicated weight)."""
    rectangle = full_rectangle(shape)
    return WeightSlice(name, shape, rectangle, parameter_name, rectangle, is_buffer=is_buffer)


def nothing_of(name: str, shape: tuple[int, ...]) -> WeightSlice:
    """The tensor belongs to the model, but not to this rank (a layer of another pipeline stage)."""
    assert shape, (name, "a tensor without dimensions has no empty rectangle")
    rectangle = ((0, 0),) * len(shape)
    return WeightSlice(name, shape, rectangle, "", rectangle)


def shard(name: str, shape: tuple[int, ...], parameter_name: str, dim: int, start: int, stop: int) -> WeightSlice:
    """Indices `start` to `stop` of one dimension become the whole parameter; the other dimensions are kept whole."""
    source = (*full_rectangle(shape[:dim]), (start, stop), *full_rectangle(shape[dim + 1 :]))
    return WeightSlice(name, shape, source, parameter_name, full_rectangle(extents(source)))
