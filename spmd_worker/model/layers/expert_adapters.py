"""Low-rank adapters of a sparse layer's experts, which add to the outputs of all experts in one call.

Kernels of adapters (`ops/kernels/adapters.py`) know slots and rows. Here a slot is that of an adapter and an expert,
and a row is a token at one of its experts.

T: tokens of the step; k: experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.ops.kernels.adapters import AdapterKernels, AdapterStack, StepAdapters
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.leaves import tree_sum


@dataclass(frozen=True, slots=True)
class AddedToExperts:
    """Implements `AddsToExperts`. `step` has a row for each token and expert of it."""

    gate_up: AdapterStack
    down: AdapterStack
    step: StepAdapters

    def add_to_columns_(self, columns: Tensor, x: Tensor) -> None:
        if not self.gate_up.is_empty:
            self.gate_up.add_(columns, x, self.step)

    def add_to_parts_(self, results: Tensor, gated: Tensor) -> None:
        if not self.down.is_empty:
            self.down.add_(results, gated, self.step)

    def add_to_sums_(self, results: Tensor, gated: Tensor, group: GroupHandle) -> None:
        """Add to down projections that are summed over the group. Every rank calls it."""
        if not self.down.is_empty:
            sums = tree_sum(list(group.all_gather(self.down.input_sums(gated, self.step))))
            self.down.add_sums_(results, sums, self.step)


class ExpertAdapters:
    """The matrices of all adapters for the `own` experts of a rank, ascending, of `num_choices`: adapter a of the
    expert at place e among `own` is in slot a * len(own) + e of each stack. There are `max_adapters`.
    """

    def __init__(
        self, kernels: AdapterKernels, max_adapters: int, own: Sequence[int], num_choices: int, device: torch.device
    ) -> None:
        self._kernels, self._num_own, self._num_slots = kernels, len(own), max_adapters * len(own)
        places = torch.full((num_choices,), -1)
        places[list(own)] = torch.arange(len(own))
        self._places = places.to(device)
        self.stacks: dict[str, AdapterStack] = {}
        """Those of `gate_up_proj` and `down_proj`."""

    @property
    def is_empty(self) -> bool:
        """Whether no adapter of experts is loaded."""
        return all(stack.is_empty for stack in self.stacks.values())

    def step(self, adapters: StepAdapters, ids: Tensor) -> AddedToExperts:
        """The adapters of a step's tokens for the experts `ids`, int64 [T, k], or [T * k, 1], of each."""
        slots = adapters.slots.long().repeat_interleave(ids.numel() // len(adapters.slots))
        places = self._places[ids.flatten()]
        found = torch.where((slots < 0) | (places < 0), -1, slots * self._num_own + places)
        step = self._kernels.step(found.to(torch.int32), self._num_slots)
        return AddedToExperts(self.stacks["gate_up_proj"], self.stacks["down_proj"], step)
