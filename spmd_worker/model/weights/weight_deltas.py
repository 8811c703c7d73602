"""Deltas of weights: differences that are added, and patches that replace some elements, by checkpoint names.

A difference is added in float32 and rounded once, to the dtype in which the weight is held. A patch has the new values
of elements by their flat indices in the whole tensor: no arithmetic, so the held bits are the trainer's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.weight_slice import TensorView, extents, volume
from spmd_worker.model.weights.held_weights import HeldPiece
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.tensor_checks import check_data, check_finite, check_pair, checked_shape
from spmd_worker.model.weights.weight_update import content_digest

_INDEX_DTYPES: Final = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class SparseWeightPatch:
    """New `values` [n] of elements of the tensor `name` of `full_shape`, at flat `indices` [n], int32 or int64, each
    once. Attributes are vLLM's.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


Delta = tuple[str, Tensor] | SparseWeightPatch


@dataclass(frozen=True, slots=True)
class _Change:
    """A checked delta; `places` [n, d] are of a patch: the index in each dimension."""

    name: str
    shape: tuple[int, ...]
    values: Tensor
    places: Tensor | None
    digest: str


@torch.no_grad()
def apply_deltas(store: WeightStore, deltas: Collection[Any], base_digest: str) -> None:
    """Change weights that are held now. The update that is open then has to be committed (`partial`).

    Raises CheckpointError or TypeError for a wrong delta before anything is written. If a sum is not finite, the update
    is broken off, and all weights have to be loaded.
    """
    if isinstance(deltas, Mapping):
        raise TypeError("deltas are a dict: give its items(), pairs of a name and a difference, or SparseWeightPatch")
    changes = [_checked(each) for each in deltas]
    parts = [(change, tuple(store.parts_of(change.name, change.shape))) for change in changes]
    names: list[str] = []
    for change, of_tensor in parts:
        for name, view in of_tensor:
            store.check_shape(name, change.shape if view is None else view.shape(change.shape))
            _check_held_plainly(store, name)
            if name in names:
                raise CheckpointError(f"{name}: is changed twice in one call: give one delta of it")
            names.append(name)
    with store.writing([name for name in names if not store.is_tied_head(name)]):
        for change, of_tensor in parts:
            for name, view in of_tensor:
                _apply(store, change, name, view, f"delta of {base_digest} {change.digest} {view}")


def _checked(delta: Any) -> _Change:
    name, values, indices = _parts_of_delta(delta)
    check_pair(name, values)
    check_data(name, values)
    check_finite(f"{name}: the delta", values, torch.float32)
    if indices is None:
        return _Change(name, tuple(values.shape), values.detach(), None, content_digest(values))
    if not isinstance(indices, Tensor) or indices.dtype not in _INDEX_DTYPES or indices.ndim != 1:
        raise CheckpointError(f"{name}: indices must be a tensor [n] of torch.int32 or torch.int64")
    if indices.shape != values.shape:
        raise CheckpointError(f"{name}: has {list(indices.shape)} indices, but values of {list(values.shape)}")
    shape, places = checked_shape(f"{name}: full_shape", delta.full_shape), indices.long()
    num_elements = volume(tuple((0, size) for size in shape))
    if len(places) and not (int(places.min()) >= 0 and int(places.max()) < num_elements):
        raise CheckpointError(f"{name}: indices must be from 0 to {num_elements - 1}, of a tensor {list(shape)}")
    ordered = places.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise CheckpointError(f"{name}: an index is given twice, so its value depends on the order: give each once")
    digest = f"{content_digest(indices)} {content_digest(values)}"
    return _Change(name, shape, values.detach(), torch.stack(torch.unravel_index(places, shape), dim=1), digest)


def _parts_of_delta(delta: Any) -> tuple[str, Tensor, Tensor | None]:
    if all(hasattr(delta, each) for each in ("name", "indices", "values", "full_shape")):
        return delta.name, delta.values, delta.indices
    try:
        name, values = delta
    except (TypeError, ValueError):
        raise TypeError(
            f"a delta is a {type(delta).__name__}: give pairs of a name and a difference, or SparseWeightPatch"
        ) from None
    return name, values, None


def _check_held_plainly(store: WeightStore, name: str) -> None:
    """Raise CheckpointError for a weight whose values are rounded when they are written."""
    held = store.held_of(name)
    for each in () if held is None else held.pieces:
        if isinstance(each.layer, PackedLayer) and each.layer.needs_full_rows(each.parameter):
            raise CheckpointError(f"{name}: is quantised here, so its base is not exact: load the whole tensor instead")


def _apply(store: WeightStore, change: _Change, name: str, view: TensorView | None, digest: str) -> None:
    if store.is_tied_head(name):
        store.update.add_tied_head(digest)
        return
    weight = store.held_of(name)
    for held in () if weight is None else (*weight.pieces, *weight.copies):
        if volume(held.piece.source):
            values = _changed(held, change, view)
            if not store.allows_nonfinite:
                check_finite(f"{name}: with its delta", store.to_check(name, values), values.dtype)
            held.write(values if view is None else view.of_region(values))
    store.record(name, digest)


def _changed(held: HeldPiece, change: _Change, view: TensorView | None) -> Tensor:
    """The slice after the change, with the dimensions of the given tensor."""
    source = held.piece.source
    region = source if view is None else view.stored_region(source)
    own = held.read()
    values = torch.empty(extents(region), dtype=own.dtype, device=own.device)
    (values if view is None else view.of_region(values)).copy_(own)
    if change.places is None:
        added = change.values[tuple(slice(*bounds) for bounds in region)].to(values.device)
        return (values.float() + added.float()).to(values.dtype)
    values[tuple(_inside(change, region).T.to(values.device))] = _selected(change, region).to(
        values.device, values.dtype
    )
    return values


def _is_inside(change: _Change, region: Any) -> Tensor:
    assert change.places is not None, "of a patch"
    starts, stops = (torch.tensor(each, device=change.places.device) for each in zip(*region, strict=True))
    return ((change.places >= starts) & (change.places < stops)).all(dim=1)


def _inside(change: _Change, region: Any) -> Tensor:
    """Places in the region [n, d], from its start."""
    assert change.places is not None, "of a patch"
    starts = torch.tensor([start for start, _ in region], device=change.places.device)
    return change.places[_is_inside(change, region)] - starts


def _selected(change: _Change, region: Any) -> Tensor:
    return change.values[_is_inside(change, region).to(change.values.device)]
