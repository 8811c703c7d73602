"""Sums of a trainer's tensors, as `weight_comparison` has them of held weights: each rank's of its own shards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spmd_worker.model.layers.weight_slice import Rectangle, TensorView, full_rectangle
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.tensor_checks import check_data, pairs_of
from spmd_worker.model.weights.tensor_shards import TensorShard, intersection, is_sharded, shard_of
from spmd_worker.model.weights.weight_comparison import Sums, element_sums


@torch.no_grad()
def trainer_sums(store: WeightStore, tensors: Iterable[tuple[str, Tensor]]) -> Sums:
    """Sums of tensors, or of this rank's shards of them, as the model would hold them. Raises as `WeightStore.load`."""
    found: Sums = {}
    for name, tensor in pairs_of(tensors):
        shard = shard_of(name, tensor) if is_sharded(tensor) else _whole(name, tensor)
        for part, view in store.parts_of(name, shard.shape):
            store.check_shape(part, shard.shape if view is None else view.shape(shard.shape))
            if not store.is_tied_head(part):
                found.setdefault(store.joined(part), []).extend(_sums_of(store, shard, part, view))
    return found


def _whole(name: str, tensor: Tensor) -> TensorShard:
    check_data(name, tensor)
    shape = tuple(tensor.shape)
    return TensorShard(name, shape, "whole", tuple((each,) for each in full_rectangle(shape)), tensor.detach())


def _sums_of(
    store: WeightStore, shard: TensorShard, name: str, view: TensorView | None
) -> list[tuple[Rectangle, str, tuple[int, int]]]:
    shape, dtype = store.given_shape(name), store.dtype_of(name)
    joined, (first, _) = store.separate.get(name, (name, (0, 0)))
    found: list[tuple[Rectangle, str, tuple[int, int]]] = []
    wanted = full_rectangle(shape) if view is None else view.stored_region(full_rectangle(shape))
    for rectangle in shard.rectangles:
        stored = intersection(rectangle, wanted)
        if stored is not None:
            region, values = stored, shard.read(stored)
            if view is not None:
                region, values = view.region_of(stored), view.of_region(values)
            if first:
                (start, stop), *others = region
                region = ((start + first, stop + first), *others)
            both = element_sums(values.to(dtype), region, store.shapes[joined])
            found.append((region, str(dtype).removeprefix("torch."), both))
    return found


def sums_from_json(value: dict[str, list[Any]]) -> Sums:
    """Sums that came as JSON."""
    return {
        name: [(tuple(map(tuple, source)), dtype, tuple(both)) for source, dtype, both in slices]
        for name, slices in value.items()
    }
