"""Plan of a transfer: which rank sends which part of a trainer's tensors to which rank, in steps of bounded memory.

Every rank describes what it has (`Layout.shards`) and what its engine needs (`Layout.needs`), and all compute the same
plan of it. A rank that has a part itself does not receive it; of several others that have it, ranks take turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_worker.base.errors import CheckpointError, RanksDisagreeError
from spmd_worker.model.layers.weight_slice import HeldSlice, Rectangle, volume
from spmd_worker.model.weights.tensor_shards import intersection, subtract

ALIGNMENT_BYTES = 16
"""Parts in a buffer begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor as one rank gives it: its part are the `rectangles`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    rectangles: tuple[Rectangle, ...]

    @property
    def kind(self) -> tuple[str, tuple[int, ...], str]:
        """Equal on every rank."""
        return self.name, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)}, {self.placement})"


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's tensors, and the regions of each that its engine needs."""

    shards: tuple[GivenTensor, ...]
    needs: tuple[tuple[Rectangle, ...], ...]

    def as_json(self) -> list[Any]:
        shards = [[each.name, each.shape, each.dtype, each.placement, each.rectangles] for each in self.shards]
        return [shards, self.needs]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Layout":
        given, needs = value
        shards = [
            GivenTensor(name, tuple(shape), dtype, placement, _rectangles(rectangles))
            for name, shape, dtype, placement, rectangles in given
        ]
        return cls(tuple(shards), tuple(map(_rectangles, needs)))


@dataclass(frozen=True, slots=True)
class Move:
    """A region of tensor number `tensor`, for block number `block` of those that `destination` needs of it."""

    tensor: int
    source: int
    destination: int
    block: int
    region: Rectangle


Step = list[Move]


def num_buffer_bytes(region: Rectangle, element_bytes: int) -> int:
    """Bytes of a region in a buffer, with its padding."""
    return -(-volume(region) * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_moved_bytes(moves: Sequence[Move], element_bytes: Sequence[int]) -> int:
    """Bytes of parts in one buffer; `element_bytes` are of each tensor."""
    return sum(num_buffer_bytes(move.region, element_bytes[move.tensor]) for move in moves)


def check_same(layouts: Sequence[Layout]) -> None:
    """Raise RanksDisagreeError, naming the first tensor that differs, unless all ranks give the same tensors."""
    first = layouts[0].shards
    for rank, layout in enumerate(layouts):
        for number in range(max(len(first), len(layout.shards))):
            pair = [each[number] if number < len(each) else None for each in (first, layout.shards)]
            kinds = [None if each is None else each.kind for each in pair]
            if kinds[0] != kinds[1]:
                words = ["no more tensors" if each is None else str(each) for each in pair]
                raise RanksDisagreeError(
                    f"tensor {number} of the update is {words[0]} on rank 0 and {words[1]} on rank {rank}: every rank "
                    f"gives its shards of the same tensors, in the same order; nothing of them was written"
                )


def plan_steps(layouts: Sequence[Layout], element_bytes: Sequence[int], bucket_bytes: int) -> list[Step]:
    """Moves in steps, in each of which a rank receives and sends at most `bucket_bytes`, or one block if that is more.

    The moves of a block are in one step. Raises CheckpointError for a part that no rank has.
    """
    steps: list[Step] = [[]]
    loads: dict[tuple[str, int], int] = {}
    for number, size in enumerate(element_bytes):
        for moves in _blocks(layouts, number):
            added = _loads(moves, size)
            if any(loads.get(key, 0) and loads[key] + num_bytes > bucket_bytes for key, num_bytes in added.items()):
                steps.append([])
                loads = {}
            steps[-1] += moves
            for key, num_bytes in added.items():
                loads[key] = loads.get(key, 0) + num_bytes
    return [step for step in steps if step]


def _blocks(layouts: Sequence[Layout], number: int) -> Iterator[list[Move]]:
    """The moves of each block of a tensor."""
    given = [layout.shards[number] for layout in layouts]
    num_blocks = max(len(layout.needs[number]) for layout in layouts)
    # Ranks alternate, so that a step fills all of them.
    for block in range(num_blocks):
        for rank, layout in enumerate(layouts):
            if block < len(layout.needs[number]):
                region = layout.needs[number][block]
                parts = _parts(region, given, rank)
                yield [Move(number, source, rank, block, part) for source, part in parts]


def _parts(region: Rectangle, given: Sequence[GivenTensor], destination: int) -> list[tuple[int, Rectangle]]:
    """Ranks and disjoint parts of a region that is needed at `destination`."""
    found: list[tuple[int, Rectangle]] = []
    missing = [region]
    holders = [rank for rank, each in enumerate(given) if each.rectangles]
    first = destination % max(1, len(holders))
    for source in dict.fromkeys([destination, *holders[first:], *holders[:first]]):
        for rectangle in given[source].rectangles:
            left: list[Rectangle] = []
            for each in missing:
                part = intersection(each, rectangle)
                if part is None:
                    left.append(each)
                else:
                    found.append((source, part))
                    left += subtract(each, part)
            missing = left
        if not missing:
            return found
    whole = HeldSlice(given[0].shape, tuple((bounds,) for bounds in missing[0]))
    placements = "; ".join(f"rank {rank}: {each.placement}" for rank, each in enumerate(given))
    raise CheckpointError(
        f"{given[0].name} {list(given[0].shape)}: no rank gives {whole} ({placements}): every rank of the mesh has to "
        f"be in the group of the update"
    )


def _loads(moves: Sequence[Move], element_bytes: int) -> Mapping[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for move in moves:
        if move.source != move.destination:
            num_bytes = num_buffer_bytes(move.region, element_bytes)
            for key in (("sent by", move.source), ("received by", move.destination)):
                found[key] = found.get(key, 0) + num_bytes
    # A block that needs no exchange is written at once.
    return found


def _rectangles(value: Any) -> tuple[Rectangle, ...]:
    return tuple(tuple(map(tuple, each)) for each in value)
