"""Ranks of a group played by threads of one process: the collectives of `GroupHandle` without processes.

Knows all-gather, all-reduce and broadcast. A rank that raises breaks the barrier, so no other waits for it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor
from waiting import LIMIT_S

from spmd_worker.ranks.communicator import GroupHandle

Value = TypeVar("Value")


class ThreadGroup:
    """One rank's handle; `shared` has a slot a rank."""

    has_tree, part_dtype, sum_parts, once = (
        GroupHandle.has_tree,
        GroupHandle.part_dtype,
        GroupHandle.sum_parts,
        GroupHandle.once,
    )

    def __init__(self, rank: int, barrier: Barrier, shared: list[Tensor | None], *, adds_by_tree: bool = False) -> None:
        self.rank, self._barrier, self._shared, self.adds_by_tree = rank, barrier, shared, adds_by_tree
        self.num_gathered_elements = 0
        self.fast, self.ranks = None, tuple(range(len(shared)))

    @property
    def size(self) -> int:
        return len(self._shared)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.num_gathered_elements += tensor.numel()
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack([each for each in self._shared if each is not None])
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: Tensor, *, is_exact: bool = False) -> Tensor:
        return tensor.copy_(self.all_gather(tensor).sum(dim=0))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self.all_gather(tensor)[source])


def on_ranks(size: int, function: Callable[[Any], Value], *, adds_by_tree: bool = False) -> list[Value]:
    """Call `function` with each rank's handle, all at once; the results in rank order."""
    barrier, shared = Barrier(size), [None] * size

    def run(rank: int) -> Value:
        try:
            return function(ThreadGroup(rank, barrier, shared, adds_by_tree=adds_by_tree))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result(timeout=LIMIT_S) for future in [pool.submit(run, rank) for rank in range(size)]]


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """The sum from the first part to the last, in place of a tree."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
