"""Full tensors from slices of ranks: who sends which, and what comes of it."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.base.errors import SaveError
from spmd_worker.model.layers.weight_slice import HeldSlice
from spmd_worker.model.weights import full_tensors
from spmd_worker.model.weights.full_tensors import (
    Ranges,
    assembled,
    content_from,
    held_ranges,
    in_rounds,
    num_bytes_from,
    plan_gather,
    ranges_of,
)
from spmd_worker.model.weights.safetensors_writer import TensorToWrite


def held(full: torch.Tensor, ranges: Ranges) -> Any:
    part = HeldSlice(tuple(full.shape), ranges)
    return SimpleNamespace(held_slice=part, shape=tuple(part.of(full).shape), read=lambda: part.of(full))


def gathered(tensors: dict[str, torch.Tensor], ranks: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], int]:
    """What the first of the ranks assembles, and the number of bytes that the others have sent."""
    to_write = [TensorToWrite(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    ranges = [{name: ranges_of(found) for name, found in held_ranges(rank).items()} for rank in ranks]
    found, num_bytes = {}, 0
    for tensors_of_round in in_rounds(plan_gather(to_write, ranges)):
        received = {}
        for rank in range(1, len(ranks)):
            content = content_from(rank, tensors_of_round, ranks[rank])
            assert len(content) == num_bytes_from(rank, tensors_of_round)
            num_bytes += len(content)
            received[rank] = content
        names = [each.to_write.name for each in tensors_of_round]
        found |= dict(zip(names, assembled(tensors_of_round, ranks[0], received), strict=True))
    return found, num_bytes


def cut(draw: Any, size: int, num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Ranges of each rank along an axis, which cover it and may overlap."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    pieces = list(pairwise(bounds))
    owners = [draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)) for _ in pieces]
    return [tuple(piece for piece, own in zip(pieces, owners, strict=True) if rank in own) for rank in range(num_ranks)]


@given(st.data())
def test_any_slices_become_the_full_tensors(data: st.DataObject):
    num_ranks = data.draw(st.integers(1, 3))
    tensors, ranks = {}, [dict[str, Any]() for _ in range(num_ranks)]
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
        full = tensors[str(number)] = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        axis = data.draw(st.integers(0, len(shape) - 1)) if shape else -1
        along = cut(data.draw, shape[axis], num_ranks) if shape else []
        for rank in range(num_ranks):
            ranges = [((0, size),) for size in shape]
            if shape:
                ranges[axis] = along[rank]
            if () not in ranges:
                ranks[rank][str(number)] = held(full, tuple(ranges))
    found, _ = gathered(tensors, ranks)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_equal_slices_are_sent_once():
    full = torch.arange(48).float().view(8, 6)
    own, other = ((0, 4), (6, 8)), ((4, 6), (6, 8))
    ranks = [{"a": held(full, (each, ((0, 6),)))} for each in (own, other, other)]
    found, num_bytes = gathered({"a": full}, ranks)
    assert torch.equal(found["a"], full)
    assert num_bytes == 4 * 6 * 4


def test_missing_elements_are_an_error():
    full = torch.zeros(8, 6)
    with pytest.raises(SaveError, match="a: this run holds only a part of it"):
        gathered({"a": full}, [{"a": held(full, (((0, 4),), ((0, 6),)))}, {"a": held(full, (((5, 8),), ((0, 6),)))}])


def test_rounds_bound_the_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(full_tensors, "ROUND_BYTES", 100)
    sizes = [10, 15, 30, 1, 1, 24]
    plan = plan_gather(
        [TensorToWrite(str(n), torch.float32, (size,)) for n, size in enumerate(sizes)],
        [{str(n): (((0, size),),) for n, size in enumerate(sizes)}],
    )
    assert [[each.to_write.shape[0] for each in one] for one in in_rounds(plan)] == [[10, 15], [30], [1, 1], [24]]
