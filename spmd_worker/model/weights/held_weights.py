"""The weights of this rank by checkpoint name: read them, and write new ones over them one at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.weight_slice import HeldSlice, Rectangle, WeightSlice, extents, joined_ranges
from spmd_worker.model.weights.region import move_block

_FEW: Final = 3


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One slice of a checkpoint tensor, and the layer that holds it."""

    piece: WeightSlice
    layer: CheckpointLayer

    def read(self) -> Tensor:
        """The slice, as the checkpoint has its dimensions."""
        piece = self.piece
        held = self.layer.read_region(self.parameter, piece.destination).view(extents(piece.turned(piece.source)))
        return held.transpose(-1, -2) if piece.is_transposed else held

    def write(self, values: Tensor) -> None:
        """Make `values` the slice."""
        self.write_block(self.piece.source, values)

    def write_block(self, block: Rectangle, values: Tensor) -> None:
        """Make `values` a block of the slice's source: all of it, where the layer is packed."""
        piece = self.piece
        destination = move_block(piece.turned(block), piece.turned(piece.source), piece.destination)
        values = values.transpose(-1, -2) if piece.is_transposed else values
        self.layer.write_region(self.parameter, destination, values.reshape(extents(destination)))

    def write_shown(self, values: Tensor) -> None:
        """As `write`, of values that were shown, perhaps in a narrower dtype: to look at them must not round them."""
        held = self.layer.get_parameter(self.parameter)
        is_rounded = torch.promote_types(held.dtype, values.dtype) != values.dtype
        if not is_rounded or not torch.equal(self.read().to(values.dtype), values.to(held.device)):
            self.write(values)

    def placed(self, values: Tensor) -> Tensor:
        """The slice's values as the parameter has its dimensions."""
        values = values.transpose(-1, -2) if self.piece.is_transposed else values
        return values.reshape(extents(self.piece.destination))

    def whole_rows(self, tensor: Tensor) -> Tensor:
        """Of a checkpoint tensor that is a matrix: the rows, as the parameter has them, of which the slice is part."""
        start, stop = self.piece.turned(self.piece.source)[0]
        return (tensor.t() if self.piece.is_transposed else tensor)[start:stop]

    @property
    def parameter(self) -> str:
        """Its name in the layer."""
        return self.piece.parameter_name.rpartition(".")[2]

    @property
    def place(self) -> tuple[str, Rectangle]:
        """Pieces of one parameter are in the order of its rows by this."""
        return self.piece.parameter_name, self.piece.destination

    def is_before(self, other: "HeldPiece") -> bool:
        """Whether the rows of `other` begin where those of this piece end, in the same parameter."""
        piece, after = self.piece, other.piece
        if piece.is_transposed or after.is_transposed or piece.parameter_name != after.parameter_name:
            return False
        (_, stop), *columns = piece.destination
        (start, _), *others = after.destination
        return stop == start and columns == others


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """One checkpoint tensor, of which this rank holds slices: several where the tensor has what are several weights in
    other checkpoints. They are the crossings of some ranges of each dimension, all of them.

    `copies` are of slices inside those: rows of a tied embedding from which a classifier scores. They are not shown,
    and follow what is loaded and written.
    """

    pieces: tuple[HeldPiece, ...]
    copies: tuple[HeldPiece, ...] = ()

    @property
    def checkpoint_name(self) -> str:
        """Of the tensor."""
        return self.pieces[0].piece.checkpoint_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's slices, moved together."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self._ranges())

    @property
    def module_name(self) -> str:
        """Of the layer that holds the first slice."""
        return self.pieces[0].piece.parameter_name.rpartition(".")[0]

    @property
    def held_slice(self) -> HeldSlice:
        """Which part of the checkpoint tensor this rank's slices are."""
        return HeldSlice(self.pieces[0].piece.checkpoint_shape, tuple(map(joined_ranges, self._ranges())))

    def read(self) -> Tensor:
        """This rank's slices: a view of the parameter where it is held in the checkpoint's order, else a copy."""
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        whole: Tensor | None = None
        regions = self._regions()
        for run in self._runs():
            for number, part in zip(run, self._read_run(run), strict=True):
                whole = part.new_empty(self.shape) if whole is None else whole
                whole[regions[number]] = part
        assert whole is not None, "a weight has pieces"
        return whole

    def write(self, values: Tensor) -> None:
        """Make `values`, of any dtype and device, this rank's slices. The parameter's storage stays where it is."""
        regions = self._regions()
        for run in self._runs():
            if len(run) == 1:
                self.pieces[run[0]].write_shown(values[regions[run[0]]])
            else:
                self._write_run(run, [values[regions[number]] for number in run])
        for copy in self.copies:
            copy.write_shown(values[self._region_of(copy, regions)])

    def load(self, tensor: Tensor) -> None:
        """Make this rank's slices of the whole checkpoint tensor its weight; nothing but those is copied."""
        sources = [tuple(slice(*bounds) for bounds in held.piece.source) for held in self.pieces]
        for run in self._runs():
            pieces = [self.pieces[number] for number in run]
            values = [tensor.detach()[sources[number]] for number in run]
            if pieces[0].layer.takes_whole_rows(pieces[0].parameter):
                _load_rows(pieces, values, tensor.detach())
            else:
                self._write_run(run, values)
        for copy in self.copies:
            copy.write(tensor.detach()[tuple(slice(*bounds) for bounds in copy.piece.source)])

    def check_changes(self, values: Tensor) -> None:
        """Raise CheckpointError where `write` cannot make `values` this rank's slices."""
        regions = self._regions()
        for held, region in zip(self.pieces, regions, strict=True):
            try:
                held.layer.check_changes(held.parameter, held.piece.destination, held.placed(values[region]))
            except CheckpointError as error:
                raise CheckpointError(f"{self.checkpoint_name}: {error}") from None

    def _runs(self) -> list[list[int]]:
        """Numbers of pieces whose rows follow each other in one parameter: heads of a tensor that has queries, keys and
        values head by head. A run is read and written at once, by way of a copy, which few pieces are not worth.
        """
        if len(self.pieces) <= _FEW:
            return [[number] for number in range(len(self.pieces))]
        runs: list[list[int]] = []
        for number in sorted(range(len(self.pieces)), key=lambda each: self.pieces[each].place):
            if runs and self.pieces[runs[-1][-1]].is_before(self.pieces[number]):
                runs[-1].append(number)
            else:
                runs.append([number])
        return runs

    def _read_run(self, run: list[int]) -> list[Tensor]:
        pieces = [self.pieces[number] for number in run]
        if len(pieces) == 1:
            return [pieces[0].read()]
        rows = pieces[0].layer.read_region(pieces[0].parameter, _joined(pieces))
        parts = rows.split_with_sizes([extents(each.piece.destination)[0] for each in pieces])
        return [part.reshape(extents(each.piece.source)) for part, each in zip(parts, pieces, strict=True)]

    def _write_run(self, run: list[int], values: list[Tensor]) -> None:
        pieces = [self.pieces[number] for number in run]
        if len(pieces) == 1:
            pieces[0].write(values[0])
            return
        rows = [each.reshape(extents(held.piece.destination)) for held, each in zip(pieces, values, strict=True)]
        pieces[0].layer.write_region(pieces[0].parameter, _joined(pieces), torch.cat(rows))

    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Of each dimension, ascending."""
        return [sorted(set(bounds)) for bounds in zip(*(held.piece.source for held in self.pieces), strict=True)]

    def _regions(self) -> list[tuple[slice, ...]]:
        """Where each piece is in what is shown."""
        places = [_moved_together(ranges) for ranges in self._ranges()]
        return [
            tuple(place[bounds] for place, bounds in zip(places, held.piece.source, strict=True))
            for held in self.pieces
        ]

    def _region_of(self, copy: HeldPiece, regions: list[tuple[slice, ...]]) -> tuple[slice, ...]:
        """Where a copy is in what is shown."""
        source = copy.piece.source
        number = next(i for i, held in enumerate(self.pieces) if _is_within(source, held.piece.source))
        moves = [at.start - start for at, (start, _) in zip(regions[number], self.pieces[number].piece.source)]
        return tuple(slice(start + by, stop + by) for (start, stop), by in zip(source, moves, strict=True))


def _moved_together(ranges: list[tuple[int, int]]) -> dict[tuple[int, int], slice]:
    stops = list(accumulate(stop - start for start, stop in ranges))
    return {bounds: slice(end - bounds[1] + bounds[0], end) for bounds, end in zip(ranges, stops, strict=True)}


def held_weights(slices: Iterable[WeightSlice], layers: Mapping[str, CheckpointLayer]) -> dict[str, HeldWeight]:
    """By checkpoint name, in the order of the slices; `layers` by name."""
    held: dict[str, list[HeldPiece]] = {}
    for piece in slices:
        # Of what other ranks hold there is a name and a shape alone.
        if piece.parameter_name == "":
            continue
        pieces = held.setdefault(piece.checkpoint_name, [])
        pieces.append(HeldPiece(piece, layers[piece.parameter_name.rpartition(".")[0]]))
    return {name: _held_weight(name, pieces) for name, pieces in held.items()}


def _held_weight(name: str, pieces: list[HeldPiece]) -> HeldWeight:
    copies: list[HeldPiece] = []
    last: HeldPiece | None = None
    # What begins first comes first, and of what begins together the largest.
    for each in sorted(pieces, key=lambda held: [(start, -stop) for start, stop in held.piece.source]):
        if last is not None and _overlap(last.piece.source, each.piece.source):
            assert _is_within(each.piece.source, last.piece.source), ("this rank holds parts of a tensor twice", name)
            copies.append(each)
        else:
            last = each
    return HeldWeight(tuple([each for each in pieces if each not in copies]), tuple(copies))


def _load_rows(pieces: list[HeldPiece], values: list[Tensor], tensor: Tensor) -> None:
    """The pieces of a run, of `tensor`, which is a matrix: experts, which may be stacked, are not quantised."""
    for held, each in zip(pieces, values, strict=True):
        destination = held.piece.destination
        held.layer.load_rows(held.parameter, destination, held.placed(each), held.whole_rows(tensor))


def _joined(pieces: list[HeldPiece]) -> Rectangle:
    """What the pieces of a run are together."""
    first, last = pieces[0].piece.destination, pieces[-1].piece.destination
    return ((first[0][0], last[0][1]), *first[1:])


def _overlap(source: Rectangle, other: Rectangle) -> bool:
    return all(first < end and start < stop for (first, stop), (start, end) in zip(source, other, strict=True))


def _is_within(source: Rectangle, other: Rectangle) -> bool:
    return all(start <= first and end <= stop for (first, end), (start, stop) in zip(source, other, strict=True))
