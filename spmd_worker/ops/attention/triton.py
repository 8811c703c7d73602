"""Attention over a paged cache in Triton, for NVIDIA GPUs, straight from the block tables.

A block is packed [2, Hkv, block size, D]: keys, then values, a head's tokens one after another. One query row's bits do
not depend on its chunk, its batch or how its keys were shared out: see ops/kernels/triton/attention_kernels.py.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import JoinableLayer
from spmd_worker.ops.kernels.triton import attention, rows
from spmd_worker.ranks.communicator import GroupHandle

_NO_SLOT: Final = -1
HEAD_SIZES = range(16, 129)
"""Below, no matrix instruction takes them; above, kernels spill on every chip: tests/ops/kernels/compile_gate.py."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a step's layers share. `plans` are by window and heads."""

    source: AttentionMetadata
    slots: Tensor
    plans: dict[tuple[int, int], attention.PlannedAttention] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _FixedStep:
    """Of every step of one number of tokens: their slots, and what steps of all numbers share."""

    owner: "TritonFixedAttention"
    slots: Tensor


class TritonFixedAttention:
    """Implements `attention.backend.FixedAttention` for steps of up to `max_tokens` tokens, in up to `max_seqs`
    sequences of up to `max_blocks` blocks of `block_size`.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._max_tokens, self._block_size = max_tokens, block_size
        self._slots = torch.full((max_tokens,), _NO_SLOT, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_seqs, max_blocks), dtype=torch.int32, device=device)
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._plans: dict[tuple[int, int, int], attention.PlannedAttention] = {}
        """By window, query heads and key-value heads."""
        self._seen: dict[tuple[int, int, int], bytes] = {}
        """The segments that plans were made for, while steps go on."""
        self._filled: AttentionMetadata | None = None
        self._steps: dict[int, AttentionMetadata] = {}

    def fill(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        assert metadata.starts is not None, "of batches that the device keeps: see `BatchState`"
        assert metadata.lengths is not None, "as starts"
        count, width = metadata.block_tables.shape
        slots = metadata.token_blocks * self._block_size + metadata.token_offsets
        self._slots[: len(slots)] = slots
        if len(slots) < num_tokens:
            self._slots[len(slots) : num_tokens] = _NO_SLOT
        self._tables[:count, :width] = metadata.block_tables
        self._lengths[:count] = metadata.lengths
        before, self._filled = self._filled, metadata
        goes_on = before is not None and before.query_starts is metadata.query_starts
        if not goes_on:
            self._starts[: count + 1] = metadata.starts
            self._seen.clear()
        for key, plan in self._plans.items():
            # Of a step that goes on each query is alone: see `BatchState`.
            seen = attention.segments_seen(metadata.context_lengths, key[0])
            if seen != self._seen.get(key):
                self._fill_plan(key, plan)
                self._seen[key] = seen
        if num_tokens not in self._steps:
            nothing = self._slots[:0]
            step = _FixedStep(self, self._slots[:num_tokens])
            self._steps[num_tokens] = AttentionMetadata((), (), self._tables, nothing, nothing, fixed=step)
        return self._steps[num_tokens]

    def plan(self, layer_cache: Tensor, num_heads: int, window: int) -> attention.PlannedAttention:
        """For layers of such heads and such a window. The first to ask, of all steps, has it made."""
        _, _, num_kv_heads, _, head_size = layer_cache.shape
        key = (window, num_heads, num_kv_heads)
        if key not in self._plans:
            of_step = (self._starts, self._lengths, self._tables)
            self._plans[key] = attention.fixed_plan(self._max_tokens, *of_step, num_heads, head_size)
            self._fill_plan(key, self._plans[key])
        return self._plans[key]

    def _fill_plan(self, key: tuple[int, int, int], plan: attention.PlannedAttention) -> None:
        assert self._filled is not None, "fill comes first"
        window, num_heads, num_kv_heads = key
        counts = (self._filled.query_starts, self._filled.context_lengths)
        attention.fill_plan(plan, *counts, num_heads, num_kv_heads, window)


class TritonBackend:
    """Implements `attention.backend.AttentionBackend`. A step's work is planned by its first layer; where rows decode
    on alike, the plan is that of the step before.
    """

    def __init__(self) -> None:
        self._planned: _Planned | None = None
        self._before: _Planned | None = None
        """Of the step before."""

    def block_shape(self, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, ...]:
        return (2, num_kv_heads, block_size, head_size)

    def write(self, key: Tensor, value: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        rows.write_rows(key, value, layer_cache, self._slots(metadata, layer_cache))

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
        rows.rotate_and_write(projected, *angles, layer_cache, self._slots(metadata, layer_cache), num_heads)
        attended = attention.attend(projected, layer_cache, plan, num_heads, scale, window)
        return attended.view(len(projected), -1)

    def join_layers(self, layers: Sequence[JoinableLayer], group: GroupHandle) -> None:
        """See `AttentionBackend.join_layers`: there is no such way."""

    def _slots(self, metadata: AttentionMetadata, layer_cache: Tensor) -> Tensor:
        """int32 [T]: where each token's key and value go."""
        if metadata.fixed is not None:
            assert isinstance(metadata.fixed, _FixedStep), metadata.fixed
            return metadata.fixed.slots
        return self._of(metadata, layer_cache).slots

    def _of(self, metadata: AttentionMetadata, layer_cache: Tensor) -> _Planned:
        if self._planned is None or self._planned.source is not metadata:
            slots = metadata.token_blocks * layer_cache.shape[3] + metadata.token_offsets
            self._before, self._planned = self._planned, _Planned(metadata, slots.to(torch.int32))
        return self._planned

    def _plan(
        self, metadata: AttentionMetadata, layer_cache: Tensor, num_heads: int, window: int
    ) -> attention.PlannedAttention:
        if metadata.fixed is not None:
            assert isinstance(metadata.fixed, _FixedStep), metadata.fixed
            return metadata.fixed.owner.plan(layer_cache, num_heads, window)
        plans = self._of(metadata, layer_cache).plans
        if (window, num_heads) not in plans:
            before = self._plan_before(metadata, num_heads, window)
            if before is not None and metadata.lengths is not None:
                plans[window, num_heads] = before.with_lengths(metadata.lengths, metadata.block_tables)
            else:
                plans[window, num_heads] = self._new_plan(metadata, layer_cache, num_heads, window)
        return plans[window, num_heads]

    def _plan_before(
        self, metadata: AttentionMetadata, num_heads: int, window: int
    ) -> attention.PlannedAttention | None:
        """That of the step before, where it has the same items: see `BatchState`, which hands on what goes on."""
        if self._before is None or not _is_same_work(self._before.source, metadata, window=window):
            return None
        return self._before.plans.get((window, num_heads))

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


def _is_same_work(before: AttentionMetadata, metadata: AttentionMetadata, *, window: int) -> bool:
    """Whether a step has the items of the one before: `BatchState` hands on the starts of what goes on."""
    if before.query_starts is not metadata.query_starts:
        return False
    return attention.see_same_segments(before.context_lengths, metadata.context_lengths, window)
