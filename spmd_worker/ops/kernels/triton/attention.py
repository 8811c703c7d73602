"""Planning and launching attention: see attention_kernels.py, where the shapes are.

A step's work items follow from counts alone and are made once a step for each window that layers have, on the device;
every layer is launched with the same. The host knows how many there are.
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
_MOST_FIXED_PARTIALS, _MOST_FIXED_BYTES = 4096, 1 << 25
"""Partial results that a fixed plan has room for, and what they take."""


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """How much there is of what attention_kernels.py describes. `num_partials`: rows that partial results take."""

    num_items: int
    num_joins: int
    num_partials: int


def count_items(
    query_starts: Sequence[int], lengths: Sequence[int], group: int, window: int = 0, *, splits: bool = True
) -> ItemCounts:
    """The work of a step, on the host: see `make_items`."""
    assert 0 < group <= attention_kernels.ROWS, f"{group} query heads a key-value head are more than the kernel's rows"
    shares = _shares(np.array(query_starts), np.array(lengths), group, window, splits=splits)
    is_split = shares.num_partials > 0
    return ItemCounts(int(shares.num_items.sum()), int(is_split.sum()), int(shares.num_partials.sum()))


def make_items(
    starts: Tensor, lengths: Tensor, counts: ItemCounts, group: int, window: int = 0, *, splits: bool = True
) -> tuple[Tensor, Tensor]:
    """Items [.., 6] and joins [.., 3] of a step, int32, where `starts` [S + 1] and `lengths` [S] are, int32 too: its
    queries `starts[i]:starts[i + 1]` are at the end of the `lengths[i]` keys of sequence i; `group` query heads share
    keys; `window` 0 sees all keys. Where it `splits`, the only query of a sequence is an item a segment if it sees
    several. A prompt has work enough for all programs, and would leave a partial row a segment for each of its queries.

    `counts` are those of `count_items`, so that the host reads nothing back.
    """
    starts, lengths = starts.long(), lengths.long()
    shares = _shares(starts, lengths, group, window, splits=splits)
    ends, partials = shares.num_items.cumsum(0), shares.num_partials.cumsum(0)
    places = torch.arange(counts.num_items, device=starts.device)
    # The sequence of each item, and which of its items it is.
    sequence = torch.searchsorted(ends, places, right=True)
    place = places - (ends - shares.num_items)[sequence]
    is_part = (shares.num_partials > 0)[sequence].long()
    stop = starts[1:][sequence]
    token = starts[:-1][sequence] + place * (attention_kernels.ROWS // group) * (1 - is_part)
    num_tokens = (stop - token).clip(max=attention_kernels.ROWS // group)
    seen = lengths[sequence] - stop + token + num_tokens
    first = _first_segment(seen - num_tokens, window) + place * is_part
    end = torch.where(is_part > 0, first + 1, -(-seen // attention_kernels.SEGMENT))
    partial = ((partials - shares.num_partials)[sequence] + place + 1) * is_part - 1
    items = torch.stack((sequence, token, num_tokens, first, end, partial), dim=1)
    nth = torch.arange(1, counts.num_joins + 1, device=starts.device)
    split = torch.searchsorted((shares.num_partials > 0).cumsum(0), nth)
    rows = (starts[:-1][split], (partials - shares.num_partials)[split], shares.num_partials[split])
    return items.to(torch.int32), torch.stack(rows, dim=1).to(torch.int32)


class _Shares(NamedTuple):
    """Of each sequence, [S]: its items, and the partial rows among their results. Of numpy or of torch."""

    num_items: Any
    num_partials: Any


def _shares(starts: Any, lengths: Any, group: int, window: int, *, splits: bool) -> _Shares:
    num_queries, per_tile = starts[1:] - starts[:-1], attention_kernels.ROWS // group
    num_segments = -(-lengths // attention_kernels.SEGMENT) - _first_segment(lengths - num_queries, window)
    is_split = (num_queries == 1) & (num_segments > 1) & splits
    num_partials = num_segments * is_split
    return _Shares(-(-num_queries // per_tile) * ~is_split + num_partials, num_partials)


def _first_segment(positions: Any, window: int) -> Any:
    """That a query at a position sees. Of numpy or of torch."""
    return (positions - window + 1).clip(0) // attention_kernels.SEGMENT if window else positions * 0


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """A step's work on the device, int32, for one window, and room for partial results, float32. `joins` may have no
    rows.
    """

    items: Tensor
    num_items: Tensor
    joins: Tensor
    num_joins: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    partial_sums: Tensor
    partial_tops: Tensor
    partial_sums_of_exp: Tensor

    def with_lengths(self, lengths: Tensor, tables: Tensor) -> "PlannedAttention":
        """Of a step with the same items. It has the same room for partial results: steps follow one another."""
        return replace(self, lengths=lengths, tables=tables.to(torch.int32).contiguous())


def see_same_segments(before: Sequence[int], lengths: Sequence[int], window: int) -> bool:
    """Whether queries, each the only one of its sequence, at the end of `lengths` keys see the segments that those did
    that were at the end of `before`.
    """
    return len(before) == len(lengths) and segments_seen(before, window) == segments_seen(lengths, window)


def segments_seen(lengths: Sequence[int], window: int) -> bytes:
    """Of such queries: equal where they see the same segments."""
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
    """See `make_items`. `tables` [S, B], on the device that computes; `on_device` are `query_starts` and `lengths`,
    int32, where they are there already.
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
        partial_sums_of_exp=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def fixed_plan(
    num_tokens: int, starts: Tensor, lengths: Tensor, tables: Tensor, num_heads: int, head_size: int
) -> PlannedAttention:
    """A plan of no work, for `fill_plan`: its tensors are those of every step of at most `num_tokens` tokens and of as
    many sequences as `lengths` [S] has. `starts` [S + 1], `lengths` and `tables` [S, B] are int32.
    """
    device, num_sequences = lengths.device, len(lengths)
    num_partials = max(1, min(_MOST_FIXED_PARTIALS, _MOST_FIXED_BYTES // (num_heads * head_size * 4)))
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
        partial_sums_of_exp=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def fill_plan(
    plan: PlannedAttention,
    query_starts: Sequence[int],
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
) -> None:
    """Make a fixed plan a step's, whose starts and lengths stand in it already. Where there is no room for so many
    partial results, queries stay whole, with the same bits: there are enough of them then to keep a device busy.
    """
    group, num_sequences = num_heads // num_kv_heads, len(lengths)
    room = len(plan.partial_tops) // num_heads
    counts = count_items(query_starts, lengths, group, window)
    splits = counts.num_partials <= room
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
    """Queries [T, at least Hq * D], a token's heads side by side; `layer_cache` [blocks, 2, Hkv, block, D], a block in
    one piece -> [T, Hq, D]. See `AttentionBackend.attend` for the rest; `window` is the one that was planned with.
    """
    _, _, num_kv_heads, block_size, head_size = layer_cache.shape
    out = queries.new_empty((len(queries), num_heads, head_size))
    if not len(queries):
        return out
    partials = (plan.partial_sums, plan.partial_tops, plan.partial_sums_of_exp)
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
    """Of a launch of `attention_kernels.attend`. Where 4 warps spill, 8 share out a tile; bits are a chip's own."""
    is_small = head_size <= _SMALL_HEAD and device_capability[0] == _BLACKWELL
    return attention_kernels.LAUNCH | {"num_warps": 4 if is_small or device_capability == _HOPPER else 8}


def shared_bytes(head_size: int, itemsize: int) -> int:
    """Of shared memory, at most, that a program of `attention_kernels.attend` takes on chips without wgmma or tcgen05,
    which have the least: queries, the stages of keys and values that are not in registers, weights of a tile.
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
