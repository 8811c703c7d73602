"""Tensors as a trainer's ranks have them, and the group over which they are exchanged, played by threads.

`GivenTensor` has what the product reads of a DTensor; its shard is cut by torch's own placements.
"""

from threading import Barrier
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement


class ShardedTensor(Tensor):
    """A whole tensor that shows only the shard of one rank."""

    device_mesh: Any
    placements: tuple[Placement, ...]
    local: Tensor

    def full_tensor(self) -> Tensor:
        raise AssertionError("no rank gathers")

    def detach(self) -> "ShardedTensor":
        return self

    def to_local(self) -> Tensor:
        return self.local


def sharded(whole: Tensor, placements: tuple[Placement, ...], mesh: tuple[int, ...], rank: int) -> ShardedTensor:
    """The tensor of a rank of the mesh, which counts its ranks in row-major order; None's coordinate is outside."""
    found = whole.as_subclass(ShardedTensor)
    coordinate = [int(each) for each in torch.unravel_index(torch.tensor(rank), mesh)] if rank >= 0 else None
    found.device_mesh = SimpleNamespace(shape=mesh, get_coordinate=lambda: coordinate)
    found.placements, found.local = placements, whole
    for placement, size, index in zip(placements, mesh, coordinate or [], strict=False):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(found.local, size, with_padding=False, contiguous=True)
            found.local = parts[index]
    found.local = found.local.as_subclass(Tensor).clone()
    return found


class ThreadExchange:
    """`TensorExchange` of threads; `shared` has a slot a rank. `largest` is the most that was received in a step."""

    device = torch.device("cpu")

    def __init__(self, rank: int, barrier: Barrier, shared: list[Any]) -> None:
        self.rank, self._barrier, self._shared = rank, barrier, shared
        self.size, self.num_gathers, self.largest, self.num_bytes = len(shared), 0, 0, 0

    def _all(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait()
        found = list(self._shared)
        self._barrier.wait()
        return found

    def gather(self, payload: bytes) -> list[bytes]:
        self.num_gathers += 1
        return self._all(payload)

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, int]) -> dict[int, Tensor]:
        sent = self._all(outgoing)
        received = {rank: sent[rank][self.rank].clone() for rank in incoming}
        assert {rank: len(each) for rank, each in received.items()} == incoming
        self.largest = max(self.largest, sum(incoming.values()), sum(map(len, outgoing.values())))
        self.num_bytes += sum(incoming.values())
        return received
