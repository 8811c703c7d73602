"""One group of ranks and the collectives the layers need, as an argument to the code that uses it.

A group of one costs nothing and needs no torch.distributed.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed it and warns of the old name; torch 2.11 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """A transfer in flight: torch.distributed's, or another of ours."""

    def wait(self) -> object:
        """Until it is done. What is sent, and what is received, is waited for in the order of calls."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way from or to this rank: neither read nor written to before `wait` has returned."""

    tensor: Tensor
    work: Work

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

    def room_for_part(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Memory for this rank's part of the very next sum, which then copies nothing; None where it does not fit."""

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`all_reduce` of x [T, H], and `Kernels.add_rms_norm` of that, in one pass.

        What comes back may be memory of the group, to be read before the next such sum. Of `residual` each rank may
        have some rows up to date and the others not, always the same ones: `gather_rows` makes it whole.
        """

    def gather_rows(self, residual: Tensor) -> Tensor:
        """The residual stream [T, H] of such sums, whole on every rank; in place."""

    def carries(self, tensor: Tensor) -> bool:
        """Whether it can send such a tensor to the next rank: the same on both."""

    def send_next(self, tensor: Tensor) -> Work:
        """See `GroupHandle`, as of the other."""

    def receive_previous(self, tensor: Tensor) -> Work:
        """In place."""

    def close(self) -> None:
        """Nothing more will be exchanged this way."""


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """`ranks` are global, in group order; `rank` is this process's place among them; `group` is None for a group of
    one. `fast` is used where it can be. `adds_in_order`: see `all_reduce`.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    fast: Collectives | None = None
    adds_in_order: bool = False

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, *, is_exact: bool = False) -> Tensor:
        """Sum over the group, in place; returns its argument. `is_exact`: whatever the order, as where all but one rank
        have zeros.

        With `adds_in_order` each number is added up in the order of the ranks, in float32 at least, and rounded once,
        as `fast` does it. Elsewhere it is torch.distributed's sum, and NCCL takes its order by the bytes of the tensor:
        from three ranks on a row's bits then depend on how many rows are beside it. The order costs traffic: each rank
        gets every other's whole part, so N ranks move N / 2 times the bytes of a ring (equal at 2, twice at 4, four
        times at 8) and hold N parts and their sum meanwhile. It takes one round instead of a ring's two, which is what
        the small sums of a decode step wait for.
        """
        if self.fast is not None and self.fast.takes(tensor):
            return self.fast.all_reduce(tensor)
        if self.group is not None and self.adds_in_order and not is_exact and tensor.is_floating_point():
            first, *others = self.all_gather(tensor)
            total = first.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for part in others:
                total += part
            return tensor.copy_(total)
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
        before that has come, if it is not two messages behind. Wait for what was sent before.
        """
        tensor = tensor.contiguous()
        if self.fast is not None and self.fast.carries(tensor):
            return Transfer(tensor, self.fast.send_next(tensor))
        work = dist.isend(tensor, dst=self.ranks[self.rank + 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work)

    def receive_previous(self, tensor: Tensor) -> Transfer:
        """From the rank before in the group, in place; returns at once. What it sends comes in the order of calls."""
        if self.fast is not None and self.fast.carries(tensor):
            return Transfer(tensor, self.fast.receive_previous(tensor))
        work = dist.irecv(tensor, src=self.ranks[self.rank - 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work)


def single_group(rank: int = 0) -> GroupHandle:
    """The group of a process that is alone."""
    return GroupHandle(ranks=(rank,), rank=0, group=None)
