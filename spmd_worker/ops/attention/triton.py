"""Paged attention in Triton, for NVIDIA GPUs.

The layout of a block is [2, Hkv, block size, D]: keys, then values, each head's tokens contiguous; without values [1,
1, block size, D]. One query row's bits do not depend on its chunk, its batch or the split of its keys: see
ops/kernels/triton/attention_kernels.py.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import cache_constants, from_cache
from spmd_worker.ops.attention.listed import ListKeys
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.host_copies import send
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.ops.kernels.triton import attention, attention_kernels, listed, rows
from spmd_worker.ops.kernels.triton.listed import PlacedTokens
from spmd_worker.ops.kernels.triton.version import triton_region

_NO_SLOT: Final = -1
_KINDS: Final = 3
"""Kinds of launches that the kind of a step counts."""
HEAD_SIZES = range(16, 513)
"""Smaller heads fit no matrix instruction; larger ones are not compiled by tests/ops/kernels/compile_gate.py."""
LATENT_SIZES = range(16, 577)
"""Sizes of keys whose values are their first numbers."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """Work that a step's layers share. `plans` by window, query heads, key-value heads and head size; `placed`: the
    tokens, if a layer lists keys.
    """

    source: AttentionMetadata
    slots: Tensor
    plans: dict[tuple[int, int, int, int], attention.PlannedAttention] = field(default_factory=dict)
    placed: list[PlacedTokens] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _FixedStep:
    """Slots and launches of all steps of one number of tokens and kind, the owner of what all steps share, and tokens,
    if layers list keys.
    """

    owner: "TritonFixedAttention"
    slots: Tensor
    launches: attention.Launches
    placed: PlacedTokens | None


class TritonFixedAttention:
    """Implements `attention.backend.FixedAttention` for steps of up to `max_tokens` tokens, in up to `max_seqs`
    sequences of up to `max_blocks` blocks of `block_size`. If the model `has_states`, steps have segments, which are
    padded with such that nothing is computed for. `lists_above`: layers list keys of sequences with more keys than the
    least of these numbers; steps whose sequences all have no more are of another kind. None: no layer lists keys.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        has_states: bool = False,
        lists_above: int | None = None,
    ) -> None:
        self._max_tokens, self._block_size = max_tokens, block_size
        self._lists_above, self._max_keys = lists_above, max_blocks * block_size
        num_placed = 0 if lists_above is None else max_tokens
        self._sequences, self._positions = (
            torch.full((num_placed,), _NO_SLOT, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._slots = torch.full((max_tokens,), _NO_SLOT, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_seqs, max_blocks), dtype=torch.int32, device=device)
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._segments: StateSegments | None = None
        if has_states:
            slots = torch.full((max_seqs,), _NO_SLOT, dtype=torch.int32, device=device)
            self._segments = StateSegments(slots, self._starts, torch.zeros_like(slots))
        self._plans: dict[tuple[int, int, int, int], attention.PlannedAttention] = {}
        """Key: window, query heads, key-value heads and head size."""
        self._filled: AttentionMetadata | None = None
        self._steps: dict[tuple[int, attention.Launches, int], AttentionMetadata] = {}

    def fill(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        assert metadata.starts is not None, "only for batches of `BatchState`"
        assert metadata.lengths is not None, "only for batches of `BatchState`"
        assert metadata.is_causal, "recorded steps are causal"
        count, width = metadata.block_tables.shape
        slots = _slots_of(metadata, self._block_size)
        self._slots[: len(slots)] = slots
        if len(slots) < num_tokens:
            self._slots[len(slots) : num_tokens] = _NO_SLOT
        self._tables[:count, :width] = metadata.block_tables
        self._lengths[:count] = metadata.lengths
        before, self._filled = self._filled, metadata
        if before is None or before.query_starts is not metadata.query_starts:
            self._starts[: count + 1] = metadata.starts
        self._fill_segments(metadata.segments)
        for plan in self._plans.values():
            attention.fill_plan(plan, count)
        max_partials = min((plan.max_partials for plan in self._plans.values()), default=0)
        launches = attention.launches_of(metadata.query_starts, metadata.context_lengths, max_partials)
        if launches.has_many:
            # One kind for all mixed steps.
            launches = attention.Launches(has_many=True, has_joins=True)
        most_keys = self._max_keys
        if self._lists_above is not None:
            placed = (self._sequences[:num_tokens], self._positions[:num_tokens])
            listed.place_tokens(self._starts, self._lengths, count, *placed)
            if max(metadata.context_lengths) <= self._lists_above:
                most_keys = min(most_keys, self._lists_above)
        key = (num_tokens, launches, most_keys)
        if key not in self._steps:
            nothing = self._slots[:0]
            step = _FixedStep(self, self._slots[:num_tokens], launches, self._placed(num_tokens, most_keys))
            self._steps[key] = AttentionMetadata(
                *((), (), self._tables, nothing, nothing),
                slots=step.slots,
                fixed=step,
                kind=sum(map(int, launches)) + _KINDS * (most_keys < self._max_keys),
                segments=self._segments_of(num_tokens),
                most_keys=most_keys,
            )
        return self._steps[key]

    def _placed(self, num_tokens: int, most_keys: int) -> PlacedTokens | None:
        if self._lists_above is None:
            return None
        sequences, positions, slots = (each[:num_tokens] for each in (self._sequences, self._positions, self._slots))
        return PlacedTokens(sequences, positions, self._tables, slots, most_keys)

    def _fill_segments(self, segments: StateSegments | None) -> None:
        """Those of a step, whose starts are filled; the others are padding."""
        assert (segments is None) == (self._segments is None), "steps have segments if the model has states"
        if segments is None or self._segments is None:
            return
        count = len(segments.slots)
        self._segments.slots[:count], self._segments.firsts[:count] = segments.slots, segments.firsts
        self._segments.slots[count:] = _NO_SLOT

    def _segments_of(self, num_tokens: int) -> StateSegments | None:
        """Segments for the most sequences that a step of so many tokens may have."""
        if self._segments is None:
            return None
        slots, starts, firsts = self._segments.slots, self._segments.starts, self._segments.firsts
        return StateSegments(slots[:num_tokens], starts[: num_tokens + 1], firsts[:num_tokens])

    def plan(
        self, queries: Tensor, layer_cache: Tensor, num_heads: int, window: int, launches: attention.Launches
    ) -> attention.PlannedAttention:
        """The plan of layers with these heads and this window, made at the first call."""
        num_kv_heads, head_size = _heads_of(layer_cache, num_heads)
        key = (window, num_heads, num_kv_heads, head_size)
        if key not in self._plans:
            assert self._filled is not None, "call fill first"
            of_step = (self._starts, self._lengths, self._tables)
            sizes = (num_heads, num_kv_heads, head_size, queries.element_size())
            like = next(iter(self._plans.values()), None)
            self._plans[key] = attention.fixed_plan(self._max_tokens, *of_step, *sizes, window, like)
            attention.fill_plan(self._plans[key], len(self._filled.context_lengths))
        return replace(self._plans[key], launches=launches)


class TritonBackend(AttentionBackend):
    """Implements `attention.backend.AttentionBackend`. The first layer of a group plans a step's work."""

    def __init__(self, cache_dtype: torch.dtype | None = None) -> None:
        self.cache_dtype = cache_dtype
        # Of the last step, by group.
        self._planned: dict[int, _Planned] = {}

    def numerics(self) -> Region:
        constants = cache_constants(self.cache_dtype)
        return triton_region().with_constants(key_tile=int(attention_kernels.TILE), **constants)

    def block_shape(
        self, num_kv_heads: int, block_size: int, head_size: int, *, has_values: bool = True
    ) -> tuple[int, ...]:
        return (1 + has_values, num_kv_heads, block_size, head_size)

    def listed_keys(self) -> ListKeys:
        return self._placed

    def of_sequences(self, head_size: int, block_size: int) -> "TritonBackend":
        # A step of the text keeps its own plan.
        del head_size, block_size
        return TritonBackend()

    def write(self, key: Tensor, value: Tensor | None, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        rows.write_rows(key, value, layer_cache, self._slots(metadata, layer_cache))

    def read_keys(self, layer_cache: Tensor, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        return from_cache(layer_cache[blocks, 0, 0, offsets], dtype)

    def read_tokens(
        self,
        layer_cache: Tensor,
        num_kv_heads: int,
        blocks: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
        heads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert layer_cache.shape[2] == num_kv_heads, (layer_cache.shape, num_kv_heads)
        read = slice(None) if heads is None else heads
        keys, values = from_cache(layer_cache[blocks, :, read, offsets], dtype).unbind(1)
        return keys, values

    def attend(
        self,
        query: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        score_cap: float = 0.0,
        sinks: Tensor | None = None,
        value_size: int = 0,
        distance_bias: Tensor | None = None,
        distance_scores: DistanceScores | None = None,
    ) -> Tensor:
        num_heads, head_size = query.shape[1:]
        # A token's heads must be contiguous; tokens may be strided.
        query = query if query.stride()[1:] == (head_size, 1) else query.contiguous()
        plan = self._plan(query, metadata, layer_cache, num_heads, window)
        if value_size:
            assert (score_cap, distance_bias) == (0.0, None), "latents have no caps or biases here"
            return attention.attend_latents(query, layer_cache, plan, num_heads, scale, value_size, sinks)
        if distance_scores is not None:
            distance_scores.check(query, metadata.query_starts, metadata.context_lengths)
        more = (score_cap, sinks, distance_bias, distance_scores)
        return attention.attend(query, layer_cache, plan, num_heads, scale, *more)

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
        """Queries are rotated in place."""
        assert metadata.is_causal, "this call is causal"
        projected = projected.contiguous()
        plan = self._plan(projected, metadata, layer_cache, num_heads, window)
        rows.rotate_and_write(projected, *angles, layer_cache, self._slots(metadata, layer_cache), num_heads)
        attended = attention.attend(projected, layer_cache, plan, num_heads, scale)
        return attended.view(len(projected), -1)

    def _slots(self, metadata: AttentionMetadata, layer_cache: Tensor) -> Tensor:
        """int32 [T]: slot of each token's key and value."""
        fixed = _fixed_step(metadata)
        return self._planned_step(metadata, layer_cache.shape[3]).slots if fixed is None else fixed.slots

    def _planned_step(self, metadata: AttentionMetadata, block_size: int) -> _Planned:
        planned = self._planned.get(id(metadata))
        if planned is None or planned.source is not metadata:
            if any(not each.source.is_of_step(metadata) for each in self._planned.values()):
                # Their buffers are large, and only one step's are counted as memory.
                self._planned.clear()
            slots = _slots_of(metadata, block_size)
            planned = self._planned[id(metadata)] = _Planned(metadata, slots.to(torch.int32))
        return planned

    def _placed(self, metadata: AttentionMetadata, block_size: int) -> PlacedTokens:
        """A step's tokens on the device, placed by the first layer that asks."""
        fixed = _fixed_step(metadata)
        if fixed is not None:
            assert fixed.placed is not None, "the steps were not made for layers that list keys"
            return fixed.placed
        planned = self._planned_step(metadata, block_size)
        if not planned.placed:
            device, (starts, lengths) = planned.slots.device, (metadata.starts, metadata.lengths)
            if starts is None or lengths is None:
                numbers = (metadata.query_starts, metadata.context_lengths)
                starts, lengths = send([np.array(each, dtype=np.int32) for each in numbers], device)
            sequences, positions = (torch.empty_like(planned.slots) for _ in range(2))
            listed.place_tokens(starts, lengths, len(lengths), sequences, positions)
            tables = metadata.block_tables.to(torch.int32).contiguous()
            planned.placed.append(PlacedTokens(sequences, positions, tables, planned.slots, metadata.longest))
        return planned.placed[0]

    def _plan(
        self, queries: Tensor, metadata: AttentionMetadata, layer_cache: Tensor, num_heads: int, window: int
    ) -> attention.PlannedAttention:
        fixed = _fixed_step(metadata)
        if fixed is not None:
            return fixed.owner.plan(queries, layer_cache, num_heads, window, fixed.launches)
        plans = self._planned_step(metadata, layer_cache.shape[3]).plans
        num_kv_heads, head_size = _heads_of(layer_cache, num_heads)
        key = (window, num_heads, num_kv_heads, head_size)
        if key in plans:
            return plans[key]
        # Another group's plan differs in its tables alone. Layers run one after another, so they share its buffers.
        of_step, sight = metadata.context_lengths, metadata.last_visible
        of_groups = [
            each
            for each in self._planned.values()
            if each.source.context_lengths is of_step and each.source.last_visible is sight
        ]
        like = next((each.plans[key] for each in of_groups if key in each.plans), None)
        if like is not None:
            plans[key] = replace(like, tables=metadata.block_tables.to(torch.int32).contiguous())
        else:
            starts, lengths = metadata.starts, metadata.lengths
            plans[key] = attention.plan_attention(
                *(metadata.query_starts, metadata.context_lengths, metadata.block_tables),
                *(num_heads, num_kv_heads, head_size, window),
                itemsize=queries.element_size(),
                later=metadata.num_later_keys(window),
                on_device=None if starts is None or lengths is None else (starts, lengths),
                last_visible=metadata.last_visible,
            )
        return plans[key]


def _heads_of(layer_cache: Tensor, num_heads: int) -> tuple[int, int]:
    """Key-value heads of the plan, and the head size."""
    _, num_parts, num_kv_heads, _, head_size = layer_cache.shape
    return attention.latent_groups(num_heads) if num_parts == 1 else num_kv_heads, head_size


def _slots_of(metadata: AttentionMetadata, block_size: int) -> Tensor:
    """Integers [T]."""
    if metadata.slots is not None:
        return metadata.slots
    return metadata.token_blocks * block_size + metadata.token_offsets


def _fixed_step(metadata: AttentionMetadata) -> _FixedStep | None:
    assert metadata.fixed is None or isinstance(metadata.fixed, _FixedStep), metadata.fixed
    return metadata.fixed
