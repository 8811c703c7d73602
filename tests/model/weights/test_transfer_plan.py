"""Plans of transfers: each element of each need comes from one rank, in steps of bounded bytes."""

from math import prod

import pytest
import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import volume
from spmd_worker.model.weights.transfer_plan import GivenTensor, Layout, plan_steps

SHAPE, COLUMNS = (12, 5), (0, 5)
WHOLE = ((0, 12), COLUMNS)


def layout(*rectangles, needs=(WHOLE,)) -> Layout:
    return Layout((GivenTensor("w", SHAPE, "float32", "S(0)", rectangles),), (needs,))


def thirds(needs) -> list[Layout]:
    return [layout(((4 * rank, 4 * rank + 4), COLUMNS), needs=needs) for rank in range(3)]


def test_every_needed_element_comes_once():
    needs = (((0, 6), COLUMNS), ((6, 12), (1, 4)))
    for step in plan_steps(thirds(needs), [4], 1 << 20):
        for rank in range(3):
            for block, region in enumerate(needs):
                seen = torch.zeros(SHAPE)
                moves = [move for move in step if (move.destination, move.block) == (rank, block)]
                for move in moves:
                    assert 4 * move.source <= move.region[0][0] < move.region[0][1] <= 4 * move.source + 4
                    seen[tuple(slice(*bounds) for bounds in move.region)] += 1
                assert seen.max() == 1
                assert seen.sum() == volume(region)


@pytest.mark.parametrize("bucket_bytes", [64, 128, 1 << 20])
def test_steps_are_bounded_for_each_rank(bucket_bytes: int):
    needs = tuple(((row, row + 1), COLUMNS) for row in range(12))
    steps = plan_steps(thirds(needs), [4], bucket_bytes)
    for step in steps:
        remote = [move for move in step if move.source != move.destination]
        for rank in range(3):
            assert 32 * sum(move.destination == rank for move in remote) <= bucket_bytes
            assert 32 * sum(move.source == rank for move in remote) <= bucket_bytes
    assert sum(len(step) for step in steps) == 3 * prod((12,))


def test_replicas_share_the_sending():
    layouts = [layout(WHOLE) for _ in range(2)] + [layout() for _ in range(2)]
    (step,) = plan_steps(layouts, [4], 1 << 20)
    assert [(move.source, move.destination) for move in step] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_part_that_nobody_has_is_named():
    with pytest.raises(CheckpointError, match=r"^w \[12, 5\]: no rank gives rows 4 to 8 of 12 \(rank 0: S\(0\)"):
        plan_steps([thirds((WHOLE,))[0], thirds((WHOLE,))[2]], [4], 1 << 20)
