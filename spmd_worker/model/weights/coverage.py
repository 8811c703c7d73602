"""Checks that a checkpoint and a model match, name by name and element by element, before anything is copied.

Works on names, shapes and rectangles. Problems are lines, which `raise_problems` joins into one error.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, is_inside, volume

_MAX_LISTED = 20


def checkpoint_problems(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    ignorable: Callable[[str], bool],
) -> list[str]:
    """Lines about checkpoint tensors that are missing, unexpected (unless `ignorable(name)`), or misshapen."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not ignorable(name)]
    misshapen = [
        f"{name}: checkpoint {list(found[name])}, model {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return [
        *_listed("missing from the checkpoint", missing),
        *_listed("in the checkpoint but not in the model", unexpected),
        *_listed("of another shape than the model's", misshapen),
    ]


def parameter_problems(
    slices: Sequence[WeightSlice], paddings: Sequence[PaddingSlice], parameter_shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Lines about parameters of which an element is covered by no rectangle, or by more than one."""
    destinations: dict[str, list[Rectangle]] = {name: [] for name in parameter_shapes}
    unknown = []
    pieces: list[WeightSlice | PaddingSlice] = [*slices, *paddings]
    for piece in pieces:
        if volume(piece.destination) == 0:
            continue
        if piece.parameter_name in destinations:
            destinations[piece.parameter_name].append(piece.destination)
        else:
            unknown.append(piece.parameter_name)
    faults = [
        f"{name} {list(shape)}: {fault}"
        for name, shape in parameter_shapes.items()
        if (fault := _parameter_fault(destinations[name], shape))
    ]
    return [
        *_listed("slices for a parameter that the model does not have", list(dict.fromkeys(unknown))),
        *_listed("parameters not filled exactly once", faults),
    ]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    """A title with the number of lines, and the first of them; empty if there are none."""
    if not lines:
        return []
    shown = [f"  {line}" for line in lines[:_MAX_LISTED]]
    num_more = len(lines) - len(shown)
    return [f"{len(lines)} {title}:", *shown, *([f"  and {num_more} more"] if num_more else [])]


def raise_problems(folder: Path, problems: Sequence[str]) -> None:
    """Raise all problems of a folder's files as one CheckpointError, if there are any."""
    if problems:
        raise CheckpointError(f"{folder}: checkpoint and model do not match\n" + "\n".join(problems))


def _parameter_fault(destinations: Sequence[Rectangle], shape: tuple[int, ...]) -> str | None:
    outside = next((rectangle for rectangle in destinations if not is_inside(rectangle, shape)), None)
    if outside is not None:
        return f"{list(outside)} lies outside of it"
    pair = _overlapping_pair(destinations)
    if pair is not None:
        return f"{list(pair[0])} and {list(pair[1])} overlap"
    # Disjoint rectangles inside the shape cover it exactly when their volumes add up to its own.
    num_uncovered = volume(tuple((0, size) for size in shape)) - sum(map(volume, destinations))
    return f"{num_uncovered} elements are not covered" if num_uncovered else None


def _overlapping_pair(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """The first two rectangles that overlap. Sweeps along dimension 0: linear in the number of stacked experts."""
    active: list[Rectangle] = []
    for rectangle in sorted(rectangles):
        active = [other for other in active if not other or other[0][1] > rectangle[0][0]]
        for other in active:
            if all(start < b and a < stop for (start, stop), (a, b) in zip(rectangle, other, strict=True)):
                return other, rectangle
        active.append(rectangle)
    return None
