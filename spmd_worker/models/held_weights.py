"""The weights of this rank by checkpoint name: read them, and write new ones over them one at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spmd_worker.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.layers.weight_slice import WeightSlice, extents

_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """One checkpoint tensor, of which `layer` holds this rank's slices: several where the tensor has what are several
    weights in other checkpoints.
    """

    pieces: tuple[WeightSlice, ...]
    layer: CheckpointLayer

    @property
    def checkpoint_name(self) -> str:
        """Of the tensor."""
        return self.pieces[0].checkpoint_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's slices, one after the other."""
        shapes = [extents(piece.source) for piece in self.pieces]
        total = list(shapes[0])
        total[self._dimension] = sum(shape[self._dimension] for shape in shapes)
        return tuple(total)

    def read(self) -> Tensor:
        """This rank's slices: a view of the parameter where it is held in the checkpoint's order, else a copy."""
        parts = [self._read(piece) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._dimension)

    def write(self, values: Tensor) -> None:
        """Make `values`, of any dtype and device, this rank's slices. The parameter's storage stays where it is."""
        sizes = [extents(piece.source)[self._dimension] for piece in self.pieces]
        parts = torch.split(values, sizes, self._dimension) if len(sizes) > 1 else (values,)
        for piece, part in zip(self.pieces, parts, strict=True):
            self._write(piece, part)

    def load(self, tensor: Tensor) -> None:
        """Make this rank's slices of the whole checkpoint tensor, which `check_tensor` let pass, its weight; nothing
        but those is copied.
        """
        for piece in self.pieces:
            self._write(piece, tensor.detach()[tuple(slice(*bounds) for bounds in piece.source)])

    @property
    def _dimension(self) -> int:
        """In which slices of one tensor follow each other: its outputs."""
        return 1 if self.pieces[0].is_transposed else 0

    def _read(self, piece: WeightSlice) -> Tensor:
        held = self.layer.read_region(self._parameter, piece.destination).view(extents(piece.turned(piece.source)))
        return held.T if piece.is_transposed else held

    def _write(self, piece: WeightSlice, values: Tensor) -> None:
        values = values.T if piece.is_transposed else values
        self.layer.write_region(self._parameter, piece.destination, values)

    @property
    def _parameter(self) -> str:
        return self.pieces[0].parameter_name.rpartition(".")[2]


def check_pair(name: object, tensor: object) -> None:
    """Raise TypeError for what is not a name and a tensor."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a weight is a {type(name).__name__}: give pairs of a name, as text, and a tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: is a {type(tensor).__name__}: give pairs of a name and a tensor")


def check_form(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a tensor that could not be the weight `name` of `shape`, whatever its elements."""
    fault = _form_fault(tensor, shape)
    if fault is not None:
        raise ValueError(f"{name}: {fault}")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As `check_form`; its elements must be finite in `dtype`, too. The whole tensor is looked at, so that ranks with
    other slices come to the same answer.
    """
    check_form(name, tensor, shape)
    # Bounds are NaN where an element is. They are rounded as the elements will be.
    if not torch.stack(tensor.detach().aminmax()).to(dtype).isfinite().all():
        raise ValueError(f"{name}: has elements that are not finite in {dtype}: the weight is as it was")


def _form_fault(tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(tensor.shape) != shape:
        return f"has the shape {list(tensor.shape)}, the model's has {list(shape)}"
    # A DTensor, known by its method. Gathering it is a collective, which is the caller's to order.
    if hasattr(tensor, "full_tensor"):
        return "is sharded: pass its full_tensor()"
    if tensor.is_meta:
        return "is on the meta device and has no data"
    if tensor.dtype not in _DTYPES:
        return f"has the dtype {tensor.dtype}, weights have one of {', '.join(map(str, _DTYPES))}"
    return None


def held_weights(slices: Iterable[WeightSlice], layers: Mapping[str, CheckpointLayer]) -> dict[str, HeldWeight]:
    """By checkpoint name, in the order of the slices; `layers` by name."""
    held: dict[str, HeldWeight] = {}
    for piece in slices:
        layer = layers[piece.parameter_name.rpartition(".")[0]]
        before = held.get(piece.checkpoint_name)
        pieces = () if before is None else before.pieces
        assert before is None or before.layer is layer, ("one layer holds all of a tensor", piece)
        assert all(not _overlap(piece, other) for other in pieces), ("this rank holds a tensor twice", piece)
        held[piece.checkpoint_name] = HeldWeight((*pieces, piece), layer)
    return held


def _overlap(piece: WeightSlice, other: WeightSlice) -> bool:
    return all(first < end and start < stop for (first, stop), (start, end) in zip(piece.source, other.source))
