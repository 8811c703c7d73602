"""Distances from the ids of an EAGLE-3 head to the target's, the tensor `d2t` of its files."""

from pathlib import Path

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint

_NAME = "d2t"


def read_distances(folder: Path, num_ids: int, vocab_size: int) -> Tensor:
    """int64 [num_ids]; zeros of a head that has all of the target's `vocab_size` ids. Raises CheckpointError."""
    with Checkpoint.open(folder) as files:
        if _NAME not in files.names():
            if num_ids == vocab_size:
                return torch.zeros(num_ids, dtype=torch.int64)
            raise CheckpointError(f"{folder}: has no {_NAME}, and {num_ids} of the target's {vocab_size} ids")
        shape = files.shape(_NAME)
        found = files.read_stored(_NAME, full_rectangle(shape))
    if shape != (num_ids,) or found.is_floating_point():
        raise CheckpointError(f"{folder}: {_NAME} is {found.dtype} {list(shape)}, config.json says int64 [{num_ids}]")
    distances = found.long().clone()
    ids = distances + torch.arange(num_ids)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{folder}: {_NAME}[{index}] names the id {int(ids[index])}, and the target has {vocab_size}: the head is "
            f"of another base"
        )
    return distances
