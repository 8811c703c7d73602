"""A group of ranks and its collectives, passed as an argument to the code that uses it.

A group of one costs nothing and needs no torch.distributed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ranks import leaves
from spmd_worker.ranks.leaves import tree_sum

# Torch 2.13 renamed it and warns of the old name; torch 2.11 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor in flight, neither read nor written before `wait`, which raises RuntimeError if the other rank is gone.
    Call `wait` once, in the order of the transfers.
    """

    tensor: Tensor
    wait: Callable[[], object]


class Collectives(Protocol):
    """Faster collectives than torch.distributed's, for tensors in host memory, on all ranks of a group or on none."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether such a tensor can be summed; the same on every rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`GroupHandle.all_reduce`."""

    def sum_parts(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """`GroupHandle.sum_parts` of a group that `adds_by_tree`."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Any dtype."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Any dtype."""

    def part_buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Buffer for this rank's part of the next sum, which then copies nothing; None if it does not fit."""

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`GroupHandle.sum_parts` of x [T, H], and `Kernels.add_rms_norm` of that, in one pass.

        The result may be memory of the group, to be read before the next such sum. Of `residual` each rank may have
        some rows up to date and the others not, always the same ones: `gather_rows` completes it.
        """

    def gather_rows(self, residual: Tensor) -> Tensor:
        """The residual stream [T, H] of such sums, complete on every rank; in place."""

    def carries(self, tensor: Tensor) -> bool:
        """Whether such a tensor can be sent to the next rank; the same on both."""

    def send_next(self, tensor: Tensor) -> None:
        """Returns when the tensor is copied."""

    def receive_previous(self, tensor: Tensor) -> None:
        """Waits until the tensor, which must be contiguous, is received."""

    def close(self) -> None:
        """No exchange may follow."""


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """`ranks` are global, in group order; `rank` is this process's index among them; `group` is None for a group of
    one. `fast` is used where it can be. `adds_in_order`: see `all_reduce`. `adds_by_tree`: see `sum_parts`.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    fast: Collectives | None = None
    adds_in_order: bool = False
    adds_by_tree: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def has_tree(self) -> bool:
        """Whether parts of sums are float32, and added by a tree over several ranks."""
        return self.adds_by_tree and self.size > 1

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of a rank's part of a sum of this dtype."""
        return torch.float32 if self.has_tree else dtype

    def sum_parts(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of what each rank's row-parallel layer leaves, of `part_dtype`; in place if `dtype` is the same.

        With `adds_by_tree` float32 parts, each the root of a tree over leaves (leaves.py), are added by a binary tree
        over the ranks and rounded once: groups whose sizes divide the number of leaves have the bits of one rank. It
        moves as many numbers as `adds_in_order`, twice the bytes in bfloat16.
        """
        if not self.has_tree:
            return self.all_reduce(part)
        assert part.dtype == torch.float32, part.dtype
        if self.fast is not None and self.fast.takes(part):
            return self.fast.sum_parts(part, dtype)
        total: Tensor = tree_sum(list(self.all_gather(part)))
        return total.to(dtype)

    def numerics(self, num_leaves: int, *, is_exact: bool = False) -> Region:
        """The region of a numerical policy in which parts are summed, with products in `num_leaves`. `is_exact`: all
        parts are integers.
        """
        version = source_version(__file__, leaves.__file__)
        if is_exact:
            return Region("sums of integers", version)
        if self.adds_by_tree and num_leaves % self.size == 0:
            return Region("binary tree of leaves in float32", version, {"leaves": num_leaves})
        is_ordered = self.adds_in_order or self.fast is not None
        order = "binary tree of ranks in float32" if self.has_tree else "rank order" if is_ordered else "any order"
        return Region(order if self.size > 1 else "one rank", version, {"ranks": self.size})

    def once(self, complete: Tensor) -> Tensor:
        """A tensor that every rank has, as parts of a sum with the same bits: the first rank's, and negative zeros, to
        keep the signs of zeros.
        """
        part = complete.to(self.part_dtype(complete.dtype), copy=True)
        return part if self.rank == 0 else torch.full_like(part, -0.0)

    def all_reduce(self, tensor: Tensor, *, is_exact: bool = False) -> Tensor:
        """Sum over the group, in place; returns its argument. `is_exact`: the order does not matter, for example if all
        but one rank have zeros.

        With `adds_in_order` numbers are added in rank order, in float32 at least, and rounded once, as by `fast`.
        Otherwise NCCL chooses the order by the tensor's size: with three or more ranks a row's bits then depend on the
        batch size. Rank order needs N / 2 times the traffic of a ring (equal for 2 ranks, four times for 8) and memory
        for N parts, but one round instead of two, and rounds dominate the small sums of a decode step.
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
        """Copy the tensor of the rank at index `source` of the group to all, in place; returns its argument."""
        if self.fast is not None:
            return self.fast.broadcast(tensor, source)
        if self.group is not None:
            dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to the rank at index `to`, which calls `receive` with an equal shape and dtype; returns once it has."""
        dist.send(tensor.contiguous(), dst=self.ranks[to], group=self.group)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Receive from the rank at index `source`, in place; returns its argument."""
        dist.recv(tensor, src=self.ranks[source], group=self.group)
        return tensor

    def send_next(self, tensor: Tensor) -> Transfer:
        """Send to the next rank of the group, which calls `receive_previous` with an equal shape and dtype; returns
        before that has arrived, unless it is two messages behind. Wait for the last transfer first.
        """
        tensor = tensor.contiguous()
        if self.fast is not None and self.fast.carries(tensor):
            self.fast.send_next(tensor)
            return Transfer(tensor, lambda: None)
        work = dist.isend(tensor, dst=self.ranks[self.rank + 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work.wait)

    def receive_previous(self, tensor: Tensor) -> Transfer:
        """Receive from the previous rank of the group, in place; returns at once. Tensors arrive in call order."""
        if self.fast is not None and self.fast.carries(tensor):
            return Transfer(tensor, partial(self.fast.receive_previous, tensor))
        work = dist.irecv(tensor, src=self.ranks[self.rank - 1], group=self.group)
        assert work is not None, "this rank is in its own group"
        return Transfer(tensor, work.wait)


def single_group(rank: int = 0) -> GroupHandle:
    """The group of a single process."""
    return GroupHandle(ranks=(rank,), rank=0, group=None)
