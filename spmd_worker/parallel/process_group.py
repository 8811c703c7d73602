"""One group of ranks and the collectives the layers need, as an argument to whoever uses it.

A group of one costs nothing and needs no torch.distributed. Knows nothing about models or the layout.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed it and warns of the old name; torch 2.11 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way from or to this rank: neither read nor written to before `wait` has returned."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> None:
        """Until the tensor has left or come. Raises RuntimeError where the other rank is gone."""
        self.work.wait()


class Collectives(Protocol):
    """A faster way than torch.distributed's, for tensors in host memory. Every rank of a group has it, or none has."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether it can sum such a tensor: the same on every rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `GroupHandle`, as of the others."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Of any dtype."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Of any dtype."""

    def close(self) -> None:
        """Nothing more will be exchanged this way."""


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """`ranks` are global, in group order; `rank` is this process's place among them; `group` is None for a group of
    one. `fast` is used where it can be.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    fast: Collectives | None = None

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the group, in place; returns its argument."""
        if self.fast is not None and self.fast.takes(tensor):
            return self.fast.all_reduce(tensor)
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_min(self, tensor: Tensor) -> Tensor:
        """Minimum over the group, in place; returns its argument."""
        if self.group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Equal shapes [...] -> [size, ...], in group order."""
        if self.group is None:
            return tensor.unsqueeze(0)
        if self.fast is not None:
            return self.fast.all_gather(tensor)
        gathered = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        _all_gather(gathered, tensor.contiguous().view(-1), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The rank at place `source` of the group decides, in place; returns its argument."""
        if self.fast is not None:
            return self.fast.broadcast(tensor, source)
        if self.group is not None:
            dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        return tensor

    def send_next(self, tensor: Tensor) -> Transfer:
        """To the rank that follows in the group, which calls `receive_previous` with an equal shape and dtype; returns
        at once. Wait for what was sent before.
        """
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=self.ranks[self.rank + 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work)

    def receive_previous(self, tensor: Tensor) -> Transfer:
        """From the rank before in the group, in place; returns at once. What it sends comes in the order of calls."""
        work = dist.irecv(tensor, src=self.ranks[self.rank - 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work)


def single_group(rank: int = 0) -> GroupHandle:
    """The group of a process that is alone."""
    return GroupHandle(ranks=(rank,), rank=0, group=None)
