"""Rectangles of shards by the placements of DTensors, cut by torch's own placements."""

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from trainer_shards import sharded

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.weights.tensor_shards import shard_of

TWO_OF_TP = _StridedShard(0, split_factor=2)
CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((7, 3), (3,), (Shard(0),)),
    ((7, 3), (4,), (Shard(1),)),
    ((2,), (3,), (Shard(0),)),
    ((7, 5), (2, 2), (Replicate(), Shard(1))),
    ((9, 5), (2, 3), (Shard(0), Shard(0))),
    ((9, 5), (2, 2), (Shard(1), Shard(0))),
    ((8, 5), (2, 2), (TWO_OF_TP, Shard(0))),
    ((11, 2), (3, 2), (TWO_OF_TP, Shard(0))),
    ((11, 2), (3,), (_StridedShard(0, split_factor=4),)),
]


@pytest.mark.parametrize(("shape", "mesh", "placements"), CASES)
def test_rectangles_hold_their_elements_once(shape, mesh, placements):
    whole, num_seen = torch.arange(torch.Size(shape).numel()).view(shape).float(), torch.zeros(shape)
    for rank in range(torch.Size(mesh).numel()):
        shard = shard_of("w", sharded(whole, placements, mesh, rank))
        for region in shard.rectangles:
            place = tuple(slice(*bounds) for bounds in region)
            assert torch.equal(shard.read(region), whole[place])
            num_seen[place] += 1
    assert num_seen.unique().tolist() == [2.0 if Replicate() in placements else 1.0]


def test_placement_that_is_no_part_is_refused():
    given = sharded(torch.ones(4, 2), (Replicate(),), (2,), 0)
    given.placements = (Partial(),)
    with pytest.raises(CheckpointError, match=r"^w: \[4, 2\] has the placement P.*: call redistribute"):
        shard_of("w", given)


def test_local_shape_of_another_placement_is_refused():
    given = sharded(torch.ones(4, 2), (Shard(0),), (2,), 0)
    given.placements = (Shard(1),)
    with pytest.raises(CheckpointError, match=r"its shard has the shape \[2, 2\], but S\(1\) on a mesh of 2"):
        shard_of("w", given)
