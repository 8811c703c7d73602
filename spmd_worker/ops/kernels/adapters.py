"""Kernels of low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): protocol, and the reference in plain torch.

A linear layer's outputs y of a row with an adapter become y + B (A x): A and B are the adapter's matrices for the
layer, B with the scaling in it. A x stays in float32; B (A x) is a float32 sum that is added to the layer's rounded
output and rounded once more. Each row is computed by itself, in an order that depends on the layer and on its adapter
alone. Rows without an adapter, and outputs that an adapter has no matrices for, are not touched.

All adapters of a layer are in one stack, each in a slot. A merged layer has several parts, ranges of its outputs, each
with matrices of its own. Experts of a sparse layer are one stack too (`model/layers/expert_adapters.py`).

T: tokens of the step, or rows of experts; r: rank of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.kernels.torch_version import torch_version
from spmd_worker.ranks.leaves import tree_sum

RANK_STEP: Final = 16
"""Kernels may pad the rank of an adapter to a multiple of this: zeros change no bit of a sum."""
_MAX_PRODUCTS: Final = 1 << 22
"""Elements of one block's products in the reference."""

Matrices = tuple[Tensor, Tensor]
"""A [r, inputs] and B [outputs of the part, r] of one adapter and part, of the stack's dtype."""


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Sizes of a layer's stack on this rank: slots and the maximum rank of an adapter, `num_inputs` of the layer, and
    the ranges (start, stop) of outputs of each part, ascending and disjoint. A x sums over the inputs in leaves that
    end at `leaf_ends` (`ranks/leaves.py`), each one chain; none: in an order of the kernels.
    """

    num_slots: int
    max_rank: int
    num_inputs: int
    parts: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device
    leaf_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """Adapters of a step's tokens: `slots` int32 [T] on the device, -1 for a token without an adapter, of `num_slots`.
    `layout` is for the `kernels` that made it.
    """

    slots: Tensor
    num_slots: int
    kernels: "AdapterKernels"
    layout: Any = None

    def of_rows(self, slots: Tensor) -> "StepAdapters":
        """Those of other rows, for the same stacks."""
        return self.kernels.step(slots, self.num_slots)


class AdapterStack(Protocol):
    """The matrices of all adapters for one layer."""

    @property
    def is_empty(self) -> bool:
        """Whether no slot is filled, so that the layer may skip `add_`."""

    def pack(self, parts: Sequence[Matrices | None]) -> Any:
        """An adapter for `write`, with all the memory that it takes: one entry for each part of the layer, None for a
        part without matrices. Tensors are in host memory. At least one entry is not None. The stack is not changed.
        """

    def write(self, slot: int, packed: Any) -> None:
        """Fill a slot, which was never filled or cleared, with a packed adapter. No memory is allocated, so that a rank
        cannot fail where others have succeeded.
        """

    def clear(self, slot: int) -> None:
        """Empty a slot, so that its matrices add nothing."""

    def tensors(self) -> list[Tensor]:
        """The matrices in memory of a device; none if the kernels keep them in host memory."""

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by copies, on any device: while they are on another one, `add_` may not be called."""

    def add_(self, outputs: Tensor, x: Tensor, step: StepAdapters) -> None:
        """Add to the layer's outputs [T, outputs of this rank], in place, what the adapters make of its inputs x [T,
        inputs of this rank], or [T / n, inputs], each of which is that of n outputs, one behind the other.
        """

    def input_sums(self, x: Tensor, step: StepAdapters) -> Tensor:
        """A x of a layer of one part, whose inputs x [T, inputs of this rank] ranks share: float32 [T, max_rank], this
        rank's part of a tree over ranks. Rows without an adapter, and numbers beyond an adapter's rank, are 0.
        """

    def add_sums_(self, outputs: Tensor, sums: Tensor, step: StepAdapters) -> None:
        """`add_` of complete `sums` [T, max_rank], to complete outputs."""


class AdapterKernels(Protocol):
    """Makes the stacks of layers and the adapters of steps."""

    def numerics(self) -> Region:
        """Their region of a numerical policy."""

    def new_stack(self, sizes: AdapterSizes) -> AdapterStack:
        """An empty stack for one layer."""

    def step(self, slots: Tensor, num_slots: int) -> StepAdapters:
        """The adapters of a step by slot, int32 [T] on the device, negative for tokens without one, for stacks of
        `num_slots`.
        """


class AddsToExperts(Protocol):
    """Adds what a step's adapters make of the inputs of experts' projections to their outputs, which are those of each
    token's experts: S = T * k rows of k experts.
    """

    def add_to_columns_(self, columns: Tensor, x: Tensor) -> None:
        """Add to outputs of the gate and up projections [S, outputs of this rank] of inputs x [T, inputs]."""

    def add_to_parts_(self, results: Tensor, gated: Tensor) -> None:
        """Add to this rank's parts of the down projections [S, hidden] of inputs [S, columns of this rank]."""


class ReferenceStack:
    """Implements `AdapterStack` on any device: the matrices as they are, the rank padded to a multiple of 16."""

    def __init__(self, sizes: AdapterSizes) -> None:
        self.sizes = sizes
        self.slots: dict[int, list[Matrices | None]] = {}

    def pack(self, parts: Sequence[Matrices | None]) -> list[Matrices | None]:
        return [None if each is None else self._padded(*each) for each in parts]

    def write(self, slot: int, packed: list[Matrices | None]) -> None:
        self.slots[slot] = packed

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)

    @property
    def is_empty(self) -> bool:
        return not self.slots

    def tensors(self) -> list[Tensor]:
        return [tensor for parts in self.slots.values() for found in parts if found is not None for tensor in found]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        rest = iter(tensors)
        self.slots = {
            slot: [None if each is None else (next(rest), next(rest)) for each in parts]
            for slot, parts in self.slots.items()
        }

    def add_(self, outputs: Tensor, x: Tensor, step: StepAdapters) -> None:
        for slot, rows in step.layout.items():
            parts = zip(self.sizes.parts, self.slots.get(slot, ()))
            found = [(start, stop, *matrices) for (start, stop), matrices in parts if matrices is not None]
            inputs = x[rows // rows_of_each(outputs, x)].float() if found else x
            for start, stop, a, b in found:
                self._add(outputs, rows, (start, stop), self._sums(inputs, a), b)

    def input_sums(self, x: Tensor, step: StepAdapters) -> Tensor:
        sums = x.new_zeros((len(x), self.sizes.max_rank), dtype=torch.float32)
        for slot, rows in step.layout.items():
            for matrices in self.slots.get(slot, ()):
                if matrices is not None:
                    found = self._sums(x[rows].float(), matrices[0])
                    sums[rows, : found.shape[1]] = found[:, : sums.shape[1]]
        return sums

    def add_sums_(self, outputs: Tensor, sums: Tensor, step: StepAdapters) -> None:
        for slot, rows in step.layout.items():
            for part, matrices in zip(self.sizes.parts, self.slots.get(slot, ())):
                if matrices is not None:
                    rank = matrices[1].shape[1]
                    found = F.pad(sums[rows], (0, max(rank - sums.shape[1], 0)))[:, :rank]
                    self._add(outputs, rows, part, found, matrices[1])

    def _sums(self, x: Tensor, a: Tensor) -> Tensor:
        """A x of float32 rows [n, inputs], by the tree over leaves."""
        ends = self.sizes.leaf_ends or (x.shape[1],)
        bounds = zip((0, *ends), ends)
        return tree_sum([_row_by_row(x[:, start:stop], a[:, start:stop].float()) for start, stop in bounds])

    def _add(self, outputs: Tensor, rows: Tensor, part: tuple[int, int], sums: Tensor, b: Tensor) -> None:
        start, stop = part
        added = outputs[rows, start:stop].float() + _row_by_row(sums, b.float())
        outputs[rows, start:stop] = added.to(outputs.dtype)

    def _padded(self, a: Tensor, b: Tensor) -> Matrices:
        num_missing = -len(a) % RANK_STEP
        device = self.sizes.device
        return F.pad(a, (0, 0, 0, num_missing)).to(device), F.pad(b, (0, num_missing)).to(device)


class ReferenceAdapterKernels:
    """Implements `AdapterKernels` on any device. A sum over the last dimension does not depend on the other rows."""

    def numerics(self) -> Region:
        return Region("plain torch", f"{torch_version()}, {source_version(__file__)}", {"rank_step": RANK_STEP})

    def new_stack(self, sizes: AdapterSizes) -> ReferenceStack:
        return ReferenceStack(sizes)

    def step(self, slots: Tensor, num_slots: int) -> StepAdapters:
        """`layout`: the rows of each adapter, int64, by slot."""
        used = [slot for slot in sorted(dict.fromkeys(slots.tolist())) if slot >= 0]
        rows = {slot: (slots == slot).nonzero().squeeze(1) for slot in used}
        return StepAdapters(slots, num_slots, self, rows)


def rows_of_each(outputs: Tensor, x: Tensor) -> int:
    """Number of `outputs` of each of the inputs `x`."""
    if len(outputs) == len(x):
        return 1
    num_each, rest = divmod(len(outputs), len(x))
    assert not rest, (outputs.shape, x.shape)
    return num_each


def _row_by_row(x: Tensor, matrix: Tensor) -> Tensor:
    """[n, in] x [out, in] -> float32 [n, out], each a sum of its own."""
    size = max(1, _MAX_PRODUCTS // matrix.numel())
    return torch.cat([(block.unsqueeze(1) * matrix).sum(dim=-1) for block in torch.split(x, size)])
