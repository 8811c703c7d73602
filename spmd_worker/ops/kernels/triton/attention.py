"""Plans and launches of attention_kernels.py, which documents the shapes.

A step's work items depend on counts alone and are made on the device, once per step for each window of the layers; all
layers of a window share them. The host knows their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.triton import attention_kernels
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two

_LOG2_E = math.log2(math.e)
_ALL_KEYS = 2**30
_HOPPER, _BLACKWELL, _SMALL_HEAD = (9, 0), 10, 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
_REDUCED_BYTES = 512
_MAX_FIXED_PARTIALS, _MAX_FIXED_BYTES = 4096, 1 << 25
"""Maximum partial results of a fixed plan, and their bytes."""


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """Numbers of items, joins and partial rows, see attention_kernels.py."""

    num_items: int
    num_joins: int
    num_partials: int


def count_items(
    query_starts: Sequence[int], lengths: Sequence[int], group: int, window: int = 0, *, splits: bool = True
) -> ItemCounts:
    """Counts of a step's work, on the host: see `make_items`."""
    assert 0 < group <= attention_kernels.ROWS, f"{group} query heads a key-value head are more than the kernel's rows"
    shares = _shares(np.array(query_starts), np.array(lengths), group, window, splits=splits)
    is_split = shares.num_partials > 0
    return ItemCounts(int(shares.num_items.sum()), int(is_split.sum()), int(shares.num_partials.sum()))


def make_items(
    starts: Tensor, lengths: Tensor, counts: ItemCounts, group: int, window: int = 0, *, splits: bool = True
) -> tuple[Tensor, Tensor]:
    """Items [.., 6] and joins [.., 3] of a step, int32, on the device of `starts` [S + 1] and `lengths` [S], int32:
    queries `starts[i]:starts[i + 1]` are at the end of the `lengths[i]` keys of sequence i; `group` query heads share
    keys; `window` 0 sees all keys. If it `splits`, the only query of a sequence has one item per segment. A prompt has
    enough items for all programs, and would need a partial row per query and segment.

    `counts` are from `count_items`, so that the host reads nothing back.
    """
    starts, lengths = starts.long(), lengths.long()
    shares = _shares(starts, lengths, group, window, splits=splits)
    ends, partials = shares.num_items.cumsum(0), shares.num_partials.cumsum(0)
    numbers = torch.arange(counts.num_items, device=starts.device)
    # The sequence of each item, and its number in the sequence.
    sequence = torch.searchsorted(ends, numbers, right=True)
    number = numbers - (ends - shares.num_items)[sequence]
    is_part = (shares.num_partials > 0)[sequence].long()
    stop = starts[1:][sequence]
    token = starts[:-1][sequence] + number * (attention_kernels.ROWS // group) * (1 - is_part)
    num_tokens = (stop - token).clip(max=attention_kernels.ROWS // group)
    seen = lengths[sequence] - stop + token + num_tokens
    first = _first_segment(seen - num_tokens, window) + number * is_part
    end = torch.where(is_part > 0, first + 1, -(-seen // attention_kernels.SEGMENT))
    partial = ((partials - shares.num_partials)[sequence] + number + 1) * is_part - 1
    items = torch.stack((sequence, token, num_tokens, first, end, partial), dim=1)
    nth = torch.arange(1, counts.num_joins + 1, device=starts.device)
    split = torch.searchsorted((shares.num_partials > 0).cumsum(0), nth)
    rows = (starts[:-1][split], (partials - shares.num_partials)[split], shares.num_partials[split])
    return items.to(torch.int32), torch.stack(rows, dim=1).to(torch.int32)


class _Shares(NamedTuple):
    """Numbers of items and partial rows of each sequence, [S]; numpy or torch."""

    num_items: Any
    num_partials: Any


def _shares(starts: Any, lengths: Any, group: int, window: int, *, splits: bool) -> _Shares:
    num_queries, per_tile = starts[1:] - starts[:-1], attention_kernels.ROWS // group
    num_segments = -(-lengths // attention_kernels.SEGMENT) - _first_segment(lengths - num_queries, window)
    is_split = (num_queries == 1) & (num_segments > 1) & splits
    num_partials = num_segments * is_split
    return _Shares(-(-num_queries // per_tile) * ~is_split + num_partials, num_partials)


def _first_segment(positions: Any, window: int) -> Any:
    """The first segment that a query at a position sees; numpy or torch."""
    return (positions - window + 1).clip(0) // attention_kernels.SEGMENT if window else positions * 0


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """A step's work for one window on the device, int32, and buffers of partial results, float32."""

    items: Tensor
    num_items: Tensor
    joins: Tensor
    num_joins: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    partial_sums: Tensor
    partial_tops: Tensor
    partial_denoms: Tensor

    def with_lengths(self, lengths: Tensor, tables: Tensor) -> "PlannedAttention":
        """The plan of the next step with the same items; it shares the buffers of partial results."""
        return replace(self, lengths=lengths, tables=tables.to(torch.int32).contiguous())


def segments_seen(lengths: Sequence[int], window: int) -> bytes:
    """A key of the segments that single queries at the end of `lengths` keys see."""
    positions = np.array(lengths) - 1
    last = positions // attention_kernels.SEGMENT
    return last.tobytes() + (_first_segment(positions, window).tobytes() if window else b"")


def plan_attention(
    query_starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    window: int = 0,
    *,
    splits: bool = True,
    on_device: tuple[Tensor, Tensor] | None = None,
) -> PlannedAttention:
    """The plan of one step, see `make_items`. `tables` [S, B] are on the device; `on_device`: `query_starts` and
    `lengths`, int32, if they are there already.
    """
    device = tables.device
    group = num_heads // num_kv_heads
    starts, ends = on_device or (_integers(query_starts, device), _integers(lengths, device))
    counts = count_items(query_starts, lengths, group, window, splits=splits)
    items, joins = make_items(starts, ends, counts, group, window, splits=splits)
    num_rows = max(counts.num_partials, 1) * num_heads
    return PlannedAttention(
        items=items,
        num_items=torch.full((1,), counts.num_items, dtype=torch.int32, device=device),
        joins=joins,
        num_joins=torch.full((1,), counts.num_joins, dtype=torch.int32, device=device),
        starts=starts,
        lengths=ends,
        tables=tables.to(torch.int32).contiguous(),
        partial_sums=torch.empty((num_rows, head_size), dtype=torch.float32, device=device),
        partial_tops=torch.empty(num_rows, dtype=torch.float32, device=device),
        partial_denoms=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def fixed_plan(
    num_tokens: int, starts: Tensor, lengths: Tensor, tables: Tensor, num_heads: int, head_size: int
) -> PlannedAttention:
    """An empty plan for `fill_plan`, whose tensors serve all steps of at most `num_tokens` tokens and S sequences.
    `starts` [S + 1], `lengths` [S] and `tables` [S, B] are int32.
    """
    device, num_sequences = lengths.device, len(lengths)
    num_partials = max(1, min(_MAX_FIXED_PARTIALS, _MAX_FIXED_BYTES // (num_heads * head_size * 4)))
    num_rows = num_partials * num_heads
    return PlannedAttention(
        items=torch.zeros((num_tokens + num_partials, 6), dtype=torch.int32, device=device),
        num_items=torch.zeros(1, dtype=torch.int32, device=device),
        joins=torch.zeros((num_sequences, 3), dtype=torch.int32, device=device),
        num_joins=torch.zeros(1, dtype=torch.int32, device=device),
        starts=starts,
        lengths=lengths,
        tables=tables,
        partial_sums=torch.empty((num_rows, head_size), dtype=torch.float32, device=device),
        partial_tops=torch.empty(num_rows, dtype=torch.float32, device=device),
        partial_denoms=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def fill_plan(
    plan: PlannedAttention,
    query_starts: Sequence[int],
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
) -> None:
    """Fill a fixed plan for a step, whose starts and lengths are in it already. If it cannot hold the partial results,
    queries are not split, with the same bits: there are enough of them then to keep a device busy.
    """
    group, num_sequences = num_heads // num_kv_heads, len(lengths)
    max_partials = len(plan.partial_tops) // num_heads
    counts = count_items(query_starts, lengths, group, window)
    splits = counts.num_partials <= max_partials
    if not splits:
        counts = count_items(query_starts, lengths, group, window, splits=False)
    starts, ends = plan.starts[: num_sequences + 1], plan.lengths[:num_sequences]
    items, joins = make_items(starts, ends, counts, group, window, splits=splits)
    plan.items[: counts.num_items] = items
    plan.joins[: counts.num_joins] = joins
    plan.num_items.fill_(counts.num_items)
    plan.num_joins.fill_(counts.num_joins)


def attend(
    queries: Tensor,
    layer_cache: Tensor,
    plan: PlannedAttention,
    num_heads: int,
    scale: float,
    window: int = 0,
    score_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [T, at least Hq * D], a token's heads contiguous; `layer_cache` [blocks, 2, Hkv, block, D], blocks
    contiguous -> [T, Hq, D]. `window` is that of the plan; for the rest see `AttentionBackend.attend`.
    """
    _, _, num_kv_heads, block_size, head_size = layer_cache.shape
    out = queries.new_empty((len(queries), num_heads, head_size))
    if not len(queries):
        return out
    partials = (plan.partial_sums, plan.partial_tops, plan.partial_denoms)
    has_sinks = sinks is not None
    sink_scores = sinks.contiguous() if sinks is not None else plan.partial_tops
    scale_log2 = scale / score_cap if score_cap > 0 else scale * _LOG2_E
    grid = (num_programs(queries.device, _PROGRAMS_PER_MULTIPROCESSOR),)
    attention_kernels.attend[grid](
        *(queries, layer_cache, plan.tables, plan.items, plan.num_items, plan.starts, plan.lengths, out),
        *(*partials, sink_scores, queries.stride(0), layer_cache.stride(0), plan.tables.stride(0)),
        *(window or _ALL_KEYS, scale_log2, score_cap * _LOG2_E),
        **attend_constants(
            num_heads, num_kv_heads, head_size, block_size, is_capped=score_cap > 0, has_sinks=has_sinks
        ),
        **attend_options(capability(queries.device), head_size),
    )
    if len(plan.joins):
        attention_kernels.join_partials[grid](
            *(plan.joins, plan.num_joins, out, *partials, sink_scores),
            **join_constants(num_heads, head_size, has_sinks=has_sinks),
            **attention_kernels.LAUNCH,
        )
    return out


def attend_constants(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    *,
    is_capped: bool = False,
    has_sinks: bool = False,
) -> dict[str, int]:
    """Constexprs of `attention_kernels.attend`."""
    return {
        "KV_HEADS": num_kv_heads,
        "G": num_heads // num_kv_heads,
        "D": head_size,
        "DP": power_of_two(head_size),
        "BLOCK": block_size,
        "TILE": attention_kernels.TILE,
        "SEGMENT": attention_kernels.SEGMENT,
        "ROWS": attention_kernels.ROWS,
        "CAPPED": is_capped,
        "SINKS": has_sinks,
    }


def attend_options(device_capability: tuple[int, int], head_size: int) -> dict[str, int]:
    """Launch options of `attention_kernels.attend`: 8 warps if 4 spill. Bits depend on the chip."""
    is_small = head_size <= _SMALL_HEAD and device_capability[0] == _BLACKWELL
    return attention_kernels.LAUNCH | {"num_warps": 4 if is_small or device_capability == _HOPPER else 8}


def shared_bytes(head_size: int, itemsize: int) -> int:
    """Maximum bytes of shared memory of `attention_kernels.attend` on chips without wgmma or tcgen05, which have the
    least: queries, the stages of keys and values that are not in registers, weights of a tile.
    """
    rows, tile = attention_kernels.ROWS, attention_kernels.TILE
    staged = rows + 2 * tile * (attention_kernels.LAUNCH["num_stages"] - 2)
    return itemsize * (staged * power_of_two(head_size) + rows * tile) + _REDUCED_BYTES


def join_constants(num_heads: int, head_size: int, *, has_sinks: bool = False) -> dict[str, int]:
    """Constexprs of `attention_kernels.join_partials`."""
    sizes = {"HEADS": num_heads, "HEADS_PADDED": power_of_two(num_heads)}
    return {**sizes, "D": head_size, "DP": power_of_two(head_size), "SINKS": has_sinks}


def _integers(values: object, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.array(values, dtype=np.int32)), device)
