"""Attention over a paged cache in Triton, for NVIDIA GPUs, straight from the block tables.

A block is packed [2, Hkv, block size, D]: keys, then values, a head's tokens one after another. One query row's bits do
not depend on its chunk, its batch or how its keys were shared out: see kernels/triton/attention_kernels.py.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmd_worker.attention.metadata import AttentionMetadata
from spmd_worker.distributed.communicator import GroupHandle
from spmd_worker.kernels.api import LayerSizes, LayerWeights
from spmd_worker.kernels.triton import attention, rows

HEAD_SIZES = range(16, 129)
"""Below, no matrix instruction takes them; above, kernels spill on every chip: tests/kernels/compile_gate.py."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a step's layers share. `plans` are by window and heads."""

    source: AttentionMetadata
    slots: Tensor
    plans: dict[tuple[int, int], attention.PlannedAttention] = field(default_factory=dict)


class TritonBackend:
    """Implements `attention.backend.AttentionBackend`. A step's work is planned by its first layer; where rows decode
    on alike, the plan is that of the step before.
    """

    def __init__(self) -> None:
        self._planned: _Planned | None = None
        self._before: _Planned | None = None
        """Of the step before."""

    def block_shape(self, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, ...]:
        """See `AttentionBackend.block_shape`."""
        return (2, num_kv_heads, block_size, head_size)

    def write(self, key: Tensor, value: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        """See `AttentionBackend.write`."""
        layer_cache[metadata.token_blocks, 0, :, metadata.token_offsets] = key
        layer_cache[metadata.token_blocks, 1, :, metadata.token_offsets] = value

    def attend(
        self,
        query: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        score_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        num_heads, head_size = query.shape[1:]
        assert not metadata.sees_later, "these kernels are causal"
        # A token's heads side by side; tokens may lie apart.
        query = query if query.stride()[1:] == (head_size, 1) else query.contiguous()
        plan = self._plan(metadata, layer_cache, num_heads, window)
        return attention.attend(query, layer_cache, plan, num_heads, scale, window, score_cap, sinks)

    def attend_projected(
        self,
        projected: Tensor,
        angles: tuple[Tensor, Tensor],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """See `AttentionBackend.attend_projected`. Queries are turned where they are."""
        assert not metadata.sees_later, "these kernels are causal"
        plan = self._plan(metadata, layer_cache, num_heads, window)
        projected = projected.contiguous()
        rows.rotate_and_write(projected, *angles, layer_cache, self._of(metadata, layer_cache).slots, num_heads)
        attended = attention.attend(projected, layer_cache, plan, num_heads, scale, window)
        return attended.view(len(projected), -1)

    def join_layers(self, layers: Sequence[LayerWeights], sizes: LayerSizes, group: GroupHandle) -> None:
        """See `AttentionBackend.join_layers`: there is no such way."""

    def _of(self, metadata: AttentionMetadata, layer_cache: Tensor) -> _Planned:
        if self._planned is None or self._planned.source is not metadata:
            slots = metadata.token_blocks * layer_cache.shape[3] + metadata.token_offsets
            self._before, self._planned = self._planned, _Planned(metadata, slots.to(torch.int32))
        return self._planned

    def _plan(
        self, metadata: AttentionMetadata, layer_cache: Tensor, num_heads: int, window: int
    ) -> attention.PlannedAttention:
        plans = self._of(metadata, layer_cache).plans
        if (window, num_heads) not in plans:
            before = self._plan_before(metadata, num_heads, window)
            if before is not None and metadata.lengths is not None:
                plans[window, num_heads] = before.one_further(metadata.lengths, metadata.block_tables)
            else:
                plans[window, num_heads] = self._new_plan(metadata, layer_cache, num_heads, window)
        return plans[window, num_heads]

    def _plan_before(
        self, metadata: AttentionMetadata, num_heads: int, window: int
    ) -> attention.PlannedAttention | None:
        """That of the step before, where it has the same items: see `BatchState`, which hands on what goes on."""
        if self._before is None or self._before.source.query_starts is not metadata.query_starts:
            return None
        lengths = (self._before.source.context_lengths, metadata.context_lengths)
        is_same = attention.have_same_segments(*lengths, window)
        return self._before.plans.get((window, num_heads)) if is_same else None

    def _new_plan(
        self, metadata: AttentionMetadata, layer_cache: Tensor, num_heads: int, window: int
    ) -> attention.PlannedAttention:
        _, _, num_kv_heads, _, head_size = layer_cache.shape
        starts, lengths = metadata.starts, metadata.lengths
        return attention.plan_attention(
            metadata.query_starts,
            metadata.context_lengths,
            metadata.block_tables,
            num_heads,
            num_kv_heads,
            head_size,
            window,
            on_device=None if starts is None or lengths is None else (starts, lengths),
        )
