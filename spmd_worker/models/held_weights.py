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
    """One checkpoint tensor, of which `layer` holds this rank's slice."""

    piece: WeightSlice
    layer: CheckpointLayer

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's slice."""
        return extents(self.piece.source)

    def read(self) -> Tensor:
        """This rank's slice: a view of the parameter where it is held in the checkpoint's order, else a copy."""
        return self.layer.read_region(self._parameter, self.piece.destination).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Make `values`, of any dtype and device, this rank's slice. The parameter's storage stays where it is."""
        self.layer.write_region(self._parameter, self.piece.destination, values)

    def load(self, tensor: Tensor) -> None:
        """Make this rank's slice of the whole checkpoint tensor, which `check_tensor` let pass, its weight; nothing but
        that slice is copied.
        """
        self.write(tensor.detach()[tuple(slice(*bounds) for bounds in self.piece.source)])

    @property
    def _parameter(self) -> str:
        return self.piece.parameter_name.rpartition(".")[2]


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
        assert piece.checkpoint_name not in held, ("this rank holds a tensor twice", piece)
        held[piece.checkpoint_name] = HeldWeight(piece, layers[piece.parameter_name.rpartition(".")[0]])
    return held
