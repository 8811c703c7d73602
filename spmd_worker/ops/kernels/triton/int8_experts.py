"""The experts of a sparse layer in int8, with two grouped GEMMs whose launches depend on the number of tokens alone.

A row of activations has the scale of its maximum, so an expert's outputs have the bits of `Int8TritonKernels.linear`.

T: tokens; C: experts of a token; S = T * C slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights
from spmd_worker.ops.kernels.byte_rows import is_packed
from spmd_worker.ops.kernels.gates import bounded_gates, clamped_gates
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton import int8, int8_kernels, placing
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS
from spmd_worker.ops.kernels.triton.experts import MAX_FEW_ROWS, MAX_SOME_ROWS, TritonExperts
from spmd_worker.ops.kernels.triton.int8 import Int8Tile
from spmd_worker.ops.kernels.triton.launching import capability, num_programs
from spmd_worker.ops.kernels.triton.placing import Placed

_ALIGNED: Final = 16
FEW: Final = Int8Tile(16, 64, 256, 4, 4)
SOME: Final = Int8Tile(64, 128, 128, 4, 4)
MANY: Final = Int8Tile(128, 128, 128, 8, 3)
FEW_ELSEWHERE: Final = Int8Tile(16, 64, 128, 4, 3)
"""Few rows where shared memory may be 99 KB; others have `int8.OTHER_CHIPS`. No tile was measured."""


def tile_for(device_capability: tuple[int, int], num_slots: int, num_experts: int) -> Int8Tile:
    """The tile for `num_slots` chosen experts out of `num_experts`; no bit depends on it."""
    is_few, is_hopper = num_slots <= MAX_FEW_ROWS * num_experts, device_capability[0] == 9
    if is_few:
        return FEW if is_hopper else FEW_ELSEWHERE
    if not is_hopper:
        return int8.OTHER_CHIPS
    return SOME if num_slots <= MAX_SOME_ROWS * num_experts else MANY


class Int8Experts:
    """Implements `kernels.api.JoinedExperts`. It has the addresses of weights, which it does not keep."""

    def __init__(self, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes, kernels: ReferenceKernels) -> None:
        first = next(iter(experts.values()))
        self._sizes, self._kernels, self._device = sizes, kernels, first.gates.device
        self._ids = to_device(torch.tensor(list(experts), dtype=torch.int32), self._device)
        # Aligned as tensors are, and there as long as the tables.
        self._base = torch.zeros(_ALIGNED, dtype=torch.int8, device=self._device)
        self._gates, self._gates_bias, self._down, self._down_bias = (
            None if of_experts[0] is None else to_device(self._table(of_experts), self._device)
            for of_experts in zip(*[each.tensors() for each in experts.values()], strict=True)
        )
        self._width, self._gate_bytes, self._down_bytes = len(first.gates), first.gates.shape[-1], first.down.shape[-1]
        self._experts = TritonExperts(kernels.activate_and_mul, kernels.activate)

    takes_activation: bool = True

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        totals: Tensor,
        slots: Tensor | None = None,
        activated: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        sizes, ids = self._sizes, ids.contiguous()
        results = x.new_zeros((ids.numel(), sizes.hidden_size))
        counts = placing.count(ids, slots, len(totals), totals)
        if not ids.numel():
            return results
        tile = tile_for(capability(x.device), ids.numel(), len(totals))
        placed = placing.place(ids, slots, counts, self._ids, tile.rows)
        # The caller's activation has columns by slot, and zeros of other ranks' experts and of padding.
        is_callers = activated is not None
        columns = (x.new_zeros if is_callers else x.new_empty)((ids.numel(), self._width))
        gates, down = (self._gates, self._gates_bias, self._gate_bytes), (self._down, self._down_bias, self._down_bytes)
        self._multiply(x, gates, placed, columns, tile, gathers=True, by_slot=is_callers)
        gated = (activated or self._activated)(columns).contiguous()
        placed = replace(placed, num_chosen=1)
        self._multiply(gated, down, placed, results, tile, gathers=is_callers, by_slot=True)
        return results

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        ids = torch.empty(weights.shape, dtype=torch.int64, device=weights.device)
        return self._experts.weighted_sum(results, ids, weights, None, None)

    def _table(self, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """int64 [own]: addresses, as bytes from `_base` on."""
        start = self._base.data_ptr()
        return torch.tensor([each.data_ptr() - start for each in tensors if each is not None], dtype=torch.int64)

    def _activated(self, columns: Tensor) -> Tensor:
        sizes = self._sizes
        if sizes.limit > 0:
            gates, ups = columns.view(len(columns), -1, 2).unbind(-1)
            return clamped_gates(gates, ups, sizes.limit, self._kernels.activate)
        if sizes.bound:
            return bounded_gates(columns, sizes.activation, sizes.bound, self._kernels.activate)
        activate = self._kernels.activate_and_mul if sizes.is_gated else self._kernels.activate
        return activate(columns, sizes.activation)

    def _multiply(
        self,
        x: Tensor,
        weights: tuple[Tensor | None, Tensor | None, int],
        placed: Placed,
        out: Tensor,
        tile: Int8Tile,
        *,
        gathers: bool,
        by_slot: bool,
    ) -> None:
        """One launch: x of tokens if it `gathers`, else by place; outputs `by_slot` or by place. `weights`: addresses,
        those of biases, and bytes of a row.
        """
        (addresses, biases, row_bytes), size = weights, out.shape[1]
        numbers, scales = int8.quantise(x.contiguous())
        most = placing.most_tiles(placed.num_slots, placed.num_own, tile.rows) * -(-size // tile.columns)
        int8_kernels.expert_linear[(min(most, num_programs(x.device, 2)),)](
            *(numbers, scales, self._base, addresses, biases, out, placed.order, placed.tiles, placed.num_tiles),
            *(size, x.shape[1], row_bytes),
            CHOSEN=placed.num_chosen,
            ELEMENT=ELEMENTS[out.dtype],
            GATHERS=gathers,
            BY_SLOT=by_slot,
            BIAS=biases is not None,
            **tile.constants(),
            **tile.options(),
        )


def can_join(experts: Mapping[int, ExpertWeights]) -> bool:
    """Whether all weights are packed, and lie where the kernel reads them."""
    weights = [weight for each in experts.values() for weight in (each.gates, each.down)]
    tensors = [tensor for each in experts.values() for tensor in each.tensors() if tensor is not None]
    return (
        bool(weights)
        and all(is_packed(each) and each.ndim == 2 for each in weights)
        and all(each.is_contiguous() and each.data_ptr() % _ALIGNED == 0 for each in tensors)
    )


def addresses_of(experts: Mapping[int, ExpertWeights]) -> tuple[int, ...]:
    """Ids of experts, and addresses of their weights and biases."""
    tensors = [tensor for each in experts.values() for tensor in each.tensors() if tensor is not None]
    return (*experts, *[each.data_ptr() for each in tensors])
