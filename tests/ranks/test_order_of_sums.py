"""Sums over ranks whose rows do not depend on the other rows, beside an NCCL that adds in an order of its own."""

from dataclasses import replace

import pytest
import torch

from spmd_worker.ranks import communicator
from spmd_worker.ranks.communicator import GroupHandle

NUM_RANKS, WIDTH = 4, 8


class FakeNccl:
    """Four ranks in one process, of which the group's is one. Adds in float32 and turns the order of ranks round by the
    number of elements, as NCCL changes from tree to ring.
    """

    def __init__(self, parts: torch.Tensor) -> None:
        self.parts, self.num_rows = parts, 0

    def all_gather(self, output: torch.Tensor, own: torch.Tensor, group: object) -> None:
        assert torch.equal(own, self.parts[1, : self.num_rows].flatten())
        output.copy_(self.parts[:, : self.num_rows].flatten())

    def all_reduce(self, tensor: torch.Tensor, group: object) -> None:
        order = range(NUM_RANKS) if tensor.numel() == WIDTH else range(NUM_RANKS)[::-1]
        tensor.copy_(sum(self.parts[rank, : self.num_rows].float() for rank in order))


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    generator = torch.Generator().manual_seed(5)
    # Large ones that cancel: the order shows in what is left.
    parts = torch.randn(NUM_RANKS, 64, WIDTH, generator=generator) * torch.tensor([1.0, 1e8, -1e8, 1e-3])[:, None, None]
    parts[2] = -parts[1]
    fake = FakeNccl(parts.to(request.param))
    monkeypatch.setattr(communicator, "_all_gather", fake.all_gather)
    monkeypatch.setattr(communicator.dist, "all_reduce", fake.all_reduce)
    return fake


def summed(nccl: FakeNccl, group: GroupHandle, num_rows: int) -> torch.Tensor:
    """What rank 1 has of its first rows."""
    nccl.num_rows = num_rows
    own = nccl.parts[1, :num_rows].clone()
    found = group.all_reduce(own)
    assert found is own
    return found


@pytest.mark.guarantee("TritonWorker adds in rank order", is_control_inside=True)
def test_row_sum_is_independent_of_the_row_count(nccl: FakeNccl):
    group = GroupHandle(ranks=tuple(range(NUM_RANKS)), rank=1, group=object(), adds_in_order=True)
    whole = summed(nccl, group, 64)
    assert torch.equal(summed(nccl, group, 1), whole[:1])
    first, second, third, last = nccl.parts.float()
    assert torch.equal(whole, (((first + second) + third) + last).to(whole.dtype)), "by rank, rounded once"
    # Control: as it was, the same row alone has other bits.
    plain = replace(group, adds_in_order=False)
    assert not torch.equal(summed(nccl, plain, 1), summed(nccl, plain, 64)[:1])


def test_exact_sum_is_not_gathered(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch):
    group = GroupHandle(ranks=tuple(range(NUM_RANKS)), rank=1, group=object(), adds_in_order=True)
    nccl.parts[0] = nccl.parts[2] = nccl.parts[3] = 0.0
    nccl.num_rows = 64
    own = nccl.parts[1].clone()
    ordered = group.all_reduce(own.clone())
    monkeypatch.setattr(communicator, "_all_gather", None)
    assert torch.equal(group.all_reduce(own, is_exact=True), ordered)
    # Control: without the word it is.
    with pytest.raises(TypeError):
        group.all_reduce(own)


def test_integer_and_wide_sums_keep_their_dtype(nccl: FakeNccl):
    group = GroupHandle(ranks=tuple(range(NUM_RANKS)), rank=1, group=object(), adds_in_order=True)
    for dtype in (torch.int64, torch.float64):
        nccl.parts = torch.tensor([[[2**40 + rank] * WIDTH] for rank in range(NUM_RANKS)], dtype=dtype)
        if dtype == torch.float64:
            assert summed(nccl, group, 1).tolist() == [[4.0 * 2**40 + 6] * WIDTH]
        else:
            nccl.parts = nccl.parts % 2**20
            assert summed(nccl, group, 1).tolist() == [[6] * WIDTH]
