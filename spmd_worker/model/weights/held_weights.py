"""This rank's weights by checkpoint name, to read them and to replace them one at a time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.weight_slice import HeldSlice, Rectangle, WeightSlice, extents, joined_ranges
from spmd_worker.model.weights.region import move_block
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels import stored_weights

_MAX_SEPARATE_PIECES: Final = 3


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One slice of a checkpoint tensor, and the layer that has it."""

    piece: WeightSlice
    layer: CheckpointLayer

    def read(self) -> Tensor:
        """The slice with the checkpoint's dimensions."""
        piece = self.piece
        held = self.layer.read_region(self.parameter, piece.destination).view(extents(piece.oriented(piece.source)))
        return held.transpose(-1, -2) if piece.is_transposed else held

    def write(self, values: Tensor) -> None:
        self.write_block(self.piece.source, values)

    def write_block(self, block: Rectangle, values: Tensor) -> None:
        """Replace a block of the slice's source: all of it, if the layer is packed."""
        piece = self.piece
        destination = move_block(piece.oriented(block), piece.oriented(piece.source), piece.destination)
        values = values.transpose(-1, -2) if piece.is_transposed else values
        self.layer.write_region(self.parameter, destination, values.reshape(extents(destination)))

    def fill_block(self, block: Rectangle, values: Tensor) -> None:
        """`write_block`, which quantises complete rows of a weight that is quantised while it is filled."""
        layer, piece = self.layer, self.piece
        if not (isinstance(layer, PackedLayer) and layer.needs_full_rows(self.parameter)):
            self.write_block(block, values)
            return
        destination = move_block(piece.oriented(block), piece.oriented(piece.source), piece.destination)
        rows = self.as_rows(values)
        layer.load_rows(self.parameter, destination, rows, rows)

    @property
    def is_quantised_when_filled(self) -> bool:
        """Whether `PackedLayer.quantise_empty` replaces the parameter: blocks must be complete rows then."""
        return (
            isinstance(self.layer, PackedLayer) and self.parameter == "weight" and self.layer.is_quantised_when_filled
        )

    def is_complete(self, block: Rectangle) -> bool:
        """Whether a block of the slice's source has all inputs of rows."""
        return self.piece.oriented(block)[-1] == self.piece.oriented(self.piece.source)[-1]

    @property
    def full_source(self) -> Rectangle:
        """The slice's source with the complete rows from which the scales of a quantised weight follow."""
        piece, layer = self.piece, self.layer
        if not isinstance(layer, PackedLayer) or not layer.shares_rows:
            return piece.source
        full = piece.oriented(tuple((0, size) for size in piece.checkpoint_shape))
        return piece.oriented((*piece.oriented(piece.source)[:-1], full[-1]))

    @property
    def own_inputs(self) -> tuple[int, int]:
        """The slice's inputs among those of `full_source`."""
        (start, stop), (first, _) = (self.piece.oriented(each)[-1] for each in (self.piece.source, self.full_source))
        return start - first, stop - first

    def as_rows(self, values: Tensor) -> Tensor:
        """A part of a checkpoint tensor, a matrix or of stacked ones, as rows of the parameter [n, inputs]."""
        return (values.transpose(-1, -2) if self.piece.is_transposed else values).flatten(0, -2)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse of `as_rows` for the whole slice."""
        values = rows.reshape(extents(self.piece.oriented(self.piece.source)))
        return values.transpose(-1, -2) if self.piece.is_transposed else values

    @property
    def stored(self) -> StoredFormat | None:
        """The format in which the layer holds the parameter as files store it; None if it does not."""
        return self.layer.stored if isinstance(self.layer, PackedLayer) and self.parameter == "weight" else None

    def stored_blocks(self, max_bytes: int) -> Iterator[Rectangle]:
        """Cut the slice's source by outputs, where scales begin, into blocks of about `max_bytes` as stored."""
        piece, stored = self.piece, self.stored
        assert stored is not None, piece
        *others, (start, stop), inputs = piece.oriented(piece.source)
        num_rows = max_bytes // max(1, stored.numbers_shape(1, inputs[1] - inputs[0])[1])
        step = max(1, num_rows // stored.group_rows) * stored.group_rows
        for first in range(start, stop, step):
            yield piece.oriented((*others, (first, min(first + step, stop)), inputs))

    def write_stored(self, block: Rectangle, numbers: Tensor, scales: Tensor) -> None:
        """Replace a block of `stored_blocks` by what the file has of it."""
        assert isinstance(self.layer, PackedLayer), self.piece
        first, start = (self.piece.oriented(each)[-2][0] for each in (self.piece.source, block))
        self.layer.write_stored(self.rows[0] + start - first, numbers, scales)

    def stored_values(self, block: Rectangle, numbers: Tensor, scales: Tensor) -> Tensor:
        """Float32 values of what a file has of a block of `stored_blocks`, with the checkpoint's dimensions."""
        stored = self.stored
        assert stored is not None, self.piece
        if stored.number == "e4m3":
            scales = scales.repeat_interleave(stored.group_rows, dim=0)[: len(numbers)]
        found = stored_weights.values(stored, numbers, scales)
        return (found.t() if self.piece.is_transposed else found).reshape(extents(block))

    def write_back(self, values: Tensor) -> None:
        """`write` of values that were read, perhaps in a narrower dtype: unchanged ones must not be rounded."""
        held = self.layer.get_parameter(self.parameter)
        is_rounded = torch.promote_types(held.dtype, values.dtype) != values.dtype
        if not is_rounded or not torch.equal(self.read().to(values.dtype), values.to(held.device)):
            self.write(values)

    def oriented(self, values: Tensor) -> Tensor:
        """The slice's values with the parameter's dimensions."""
        values = values.transpose(-1, -2) if self.piece.is_transposed else values
        return values.reshape(extents(self.piece.destination))

    def full_rows(self, tensor: Tensor) -> Tensor:
        """`full_source` of a checkpoint tensor, as rows."""
        return self.as_rows(tensor[tuple(slice(*bounds) for bounds in self.full_source)])

    @property
    def parameter(self) -> str:
        return self.piece.parameter_name.rpartition(".")[2]

    @property
    def rows(self) -> tuple[int, int]:
        """The slice's rows in its parameter, a matrix."""
        return self.piece.destination[0]

    def is_before(self, other: "HeldPiece") -> bool:
        """Whether the rows of `other` follow those of this piece in the same parameter."""
        piece, after = self.piece, other.piece
        if piece.is_transposed or after.is_transposed or piece.parameter_name != after.parameter_name:
            return False
        (_, stop), *columns = piece.destination
        (start, _), *others = after.destination
        return stop == start and columns == others


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """This rank's slices of one checkpoint tensor: several if the tensor fuses several weights. They are all
    combinations of some ranges of each dimension.

    `copies` are slices inside those: a classifier's rows of a tied embedding. They are not read, and are written along.
    """

    pieces: tuple[HeldPiece, ...]
    copies: tuple[HeldPiece, ...] = ()

    @property
    def checkpoint_name(self) -> str:
        return self.pieces[0].piece.checkpoint_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's slices, concatenated."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self._ranges())

    @property
    def module_name(self) -> str:
        """Name of the layer of the first slice."""
        return self.pieces[0].piece.parameter_name.rpartition(".")[0]

    @property
    def held_slice(self) -> HeldSlice:
        return HeldSlice(self.pieces[0].piece.checkpoint_shape, tuple(map(joined_ranges, self._ranges())))

    def of_rows(self, start: int, stop: int) -> "HeldWeight | None":
        """This rank's slices of these rows of the tensor, as of a tensor of its own; None without one. No slice has
        others too.
        """
        pieces = []
        for held in self.pieces:
            ((first, last), *others), (_, *sizes) = held.piece.source, held.piece.checkpoint_shape
            if first < last and start < last and first < stop:
                assert start <= first < last <= stop, (held.piece, start, stop)
                shape, source = (stop - start, *sizes), ((first - start, last - start), *others)
                pieces.append(replace(held, piece=replace(held.piece, checkpoint_shape=shape, source=source)))
        return HeldWeight(tuple(pieces)) if pieces else None

    def read(self) -> Tensor:
        """This rank's slices: a view of the parameter if it is held in the checkpoint's order, else a copy."""
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        result: Tensor | None = None
        regions = self._regions()
        for run in self._runs():
            for number, part in zip(run, self._read_run(run), strict=True):
                result = part.new_empty(self.shape) if result is None else result
                result[regions[number]] = part
        assert result is not None, "a weight has pieces"
        return result

    def write(self, values: Tensor) -> None:
        """Replace this rank's slices by `values`, of any dtype and device, in place."""
        regions = self._regions()
        for run in self._runs():
            if len(run) == 1:
                self.pieces[run[0]].write_back(values[regions[run[0]]])
            else:
                self._write_run(run, [values[regions[number]] for number in run])
        for copy in self.copies:
            copy.write_back(values[self._region_of(copy, regions)])

    def load(self, tensor: Tensor) -> None:
        """Copy this rank's slices of the full checkpoint tensor, and nothing else of it, into its parameters."""
        sources = [tuple(slice(*bounds) for bounds in held.piece.source) for held in self.pieces]
        for run in self._runs():
            values = [tensor.detach()[sources[number]] for number in run]
            layer, parameter = self.pieces[run[0]].layer, self.pieces[run[0]].parameter
            if not isinstance(layer, PackedLayer) or not layer.needs_full_rows(parameter):
                self._write_run(run, values)
                continue
            for held, each in zip([self.pieces[number] for number in run], values, strict=True):
                full_rows = held.full_rows(tensor.detach())
                layer.load_rows(parameter, held.piece.destination, held.oriented(each), full_rows)
        for copy in self.copies:
            copy.write(tensor.detach()[tuple(slice(*bounds) for bounds in copy.piece.source)])

    def check_changes(self, values: Tensor) -> None:
        """Raise CheckpointError if `write` cannot replace this rank's slices by `values`."""
        regions = self._regions()
        for held, region in zip(self.pieces, regions, strict=True):
            try:
                held.layer.check_changes(held.parameter, held.piece.destination, held.oriented(values[region]))
            except CheckpointError as error:
                raise CheckpointError(f"{self.checkpoint_name}: {error}") from None

    def _runs(self) -> list[list[int]]:
        """Indices of pieces whose rows follow each other in one parameter: heads of a tensor that has queries, keys and
        values head by head. A run is read and written at once through a copy, which few pieces are not worth.
        """
        if len(self.pieces) <= _MAX_SEPARATE_PIECES:
            return [[number] for number in range(len(self.pieces))]
        runs: list[list[int]] = []
        in_order = [
            (held.piece.parameter_name, held.piece.destination, number) for number, held in enumerate(self.pieces)
        ]
        for _, _, number in sorted(in_order):
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
        """Ranges of each dimension, ascending."""
        return [sorted(set(bounds)) for bounds in zip(*(held.piece.source for held in self.pieces), strict=True)]

    def _regions(self) -> list[tuple[slice, ...]]:
        """Region of each piece in the tensor that `read` returns."""
        axes = [_concatenated(ranges) for ranges in self._ranges()]
        return [
            tuple(axis[bounds] for axis, bounds in zip(axes, held.piece.source, strict=True)) for held in self.pieces
        ]

    def _region_of(self, copy: HeldPiece, regions: list[tuple[slice, ...]]) -> tuple[slice, ...]:
        """Region of a copy in the tensor that `read` returns."""
        source = copy.piece.source
        number = next(i for i, held in enumerate(self.pieces) if _is_within(source, held.piece.source))
        moves = [at.start - start for at, (start, _) in zip(regions[number], self.pieces[number].piece.source)]
        return tuple(slice(start + by, stop + by) for (start, stop), by in zip(source, moves, strict=True))


def _concatenated(ranges: list[tuple[int, int]]) -> dict[tuple[int, int], slice]:
    stops = list(accumulate(stop - start for start, stop in ranges))
    return {bounds: slice(end - bounds[1] + bounds[0], end) for bounds, end in zip(ranges, stops, strict=True)}


def held_weights(slices: Iterable[WeightSlice], layers: Mapping[str, CheckpointLayer]) -> dict[str, HeldWeight]:
    """Weights by checkpoint name, in the order of the slices; `layers` by name."""
    held: dict[str, list[HeldPiece]] = {}
    for piece in slices:
        # An empty slice, of a tensor of other ranks.
        if piece.parameter_name == "":
            continue
        pieces = held.setdefault(piece.checkpoint_name, [])
        pieces.append(HeldPiece(piece, layers[piece.parameter_name.rpartition(".")[0]]))
    return {name: _held_weight(name, pieces) for name, pieces in held.items()}


def _held_weight(name: str, pieces: list[HeldPiece]) -> HeldWeight:
    copies: list[HeldPiece] = []
    last: HeldPiece | None = None
    # A slice is sorted before those inside it.
    for each in sorted(pieces, key=lambda held: [(start, -stop) for start, stop in held.piece.source]):
        if last is not None and _overlap(last.piece.source, each.piece.source):
            assert _is_within(each.piece.source, last.piece.source), ("this rank holds parts of a tensor twice", name)
            copies.append(each)
        else:
            last = each
    return HeldWeight(tuple([each for each in pieces if each not in copies]), tuple(copies))


def _joined(pieces: list[HeldPiece]) -> Rectangle:
    """Destination of the pieces of a run together."""
    first, last = pieces[0].piece.destination, pieces[-1].piece.destination
    return ((first[0][0], last[0][1]), *first[1:])


def _overlap(source: Rectangle, other: Rectangle) -> bool:
    return all(first < end and start < stop for (first, stop), (start, end) in zip(source, other, strict=True))


def _is_within(source: Rectangle, other: Rectangle) -> bool:
    return all(start <= first and end <= stop for (first, end), (start, stop) in zip(source, other, strict=True))
