"""Blocks of a rank's weights by what they need of a tensor that a trainer gives: read elsewhere, written one by one."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.weight_slice import Rectangle, TensorView, volume
from spmd_worker.model.weights.held_weights import HeldPiece
from spmd_worker.model.weights.region import move_block
from spmd_worker.model.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """A block of a slice, of the checkpoint tensor that is `view` of the given one, or the given one itself.

    `block` is what the slice needs of the checkpoint tensor: full rows of a quantised weight, whose scales they give.
    """

    held: HeldPiece
    block: Rectangle
    view: TensorView | None

    @property
    def region(self) -> Rectangle:
        """The region of the given tensor."""
        return self.block if self.view is None else self.view.stored_region(self.block)

    def write(self, given: Tensor) -> None:
        """Write the block from `region` of the given tensor."""
        values = given if self.view is None else self.view.of_region(given)
        held, piece = self.held, self.held.piece
        if not _needs_full_rows(held):
            held.write_block(self.block, values)
            return
        assert isinstance(held.layer, PackedLayer), piece
        rows = held.as_rows(values)
        own = piece.oriented((*piece.oriented(self.block)[:-1], piece.oriented(piece.source)[-1]))
        destination = move_block(piece.oriented(own), piece.oriented(piece.source), piece.destination)
        held.layer.load_rows(held.parameter, destination, rows[:, slice(*held.own_inputs)], rows)


def block_targets(store: WeightStore, name: str, view: TensorView | None, max_elements: int) -> Iterator[BlockTarget]:
    """Blocks of this rank's slices of a checkpoint tensor, of at most `max_elements`, or one row if that is more."""
    held_weight = store.held_of(name)
    for held in () if held_weight is None else (*held_weight.pieces, *held_weight.copies):
        if volume(held.piece.source):
            for block in _cut(held.piece.oriented(_needed(held)), max_elements):
                yield BlockTarget(held, held.piece.oriented(block), view)


def _needed(held: HeldPiece) -> Rectangle:
    return held.full_source if _needs_full_rows(held) else held.piece.source


def _needs_full_rows(held: HeldPiece) -> bool:
    return isinstance(held.layer, PackedLayer) and held.layer.needs_full_rows(held.parameter)


def _cut(region: Rectangle, max_elements: int) -> Iterator[Rectangle]:
    """Blocks of complete rows: packed weights are written so."""
    outer = region[:-1] if len(region) > 1 else region
    axis = next((dim for dim, (start, stop) in enumerate(outer) if stop - start > 1), None)
    if volume(region) <= max_elements or axis is None:
        yield region
        return
    start, stop = region[axis]
    step = max(1, (stop - start) * max_elements // volume(region))
    for first in range(start, stop, step):
        yield from _cut((*region[:axis], (first, min(first + step, stop)), *region[axis + 1 :]), max_elements)
