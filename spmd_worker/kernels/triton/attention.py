"""Planning and launching attention: see attention_kernels.py, where the shapes are.

A step's work items follow from counts alone and are made on the host once a step for each window that layers have;
every layer is launched with the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_worker.kernels.triton import attention_kernels
from spmd_worker.kernels.triton.launching import capability, num_programs, power_of_two

_LOG2_E = math.log2(math.e)
_ALL_KEYS = 2**30
_HOPPER, _BLACKWELL, _SMALL_HEAD = (9, 0), 10, 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
_REDUCED_BYTES = 512


@dataclass(frozen=True, slots=True)
class WorkItems:
    """As attention_kernels.py describes them. `num_partials`: rows that partial results take."""

    items: list[list[int]]
    joins: list[list[int]]
    num_partials: int


def plan_items(
    query_starts: Sequence[int], lengths: Sequence[int], group: int, window: int = 0, *, splits: bool = True
) -> WorkItems:
    """The work of a step: `query_starts[i]:query_starts[i + 1]` are the queries at the end of the `lengths[i]` keys of
    sequence i; `group` query heads share keys; `window` 0 sees all keys. Where it `splits`, the only query of a
    sequence is an item a segment if it sees several. A prompt has work enough for all programs, and would leave a
    partial row a segment for each of its queries.
    """
    rows, segment = attention_kernels.ROWS, attention_kernels.SEGMENT
    assert 0 < group <= rows, f"{group} query heads a key-value head are more than {rows}"
    items: list[list[int]] = []
    joins: list[list[int]] = []
    partial, per_tile = 0, rows // group
    for index, length in enumerate(lengths):
        start, stop = query_starts[index], query_starts[index + 1]
        for token in range(start, stop, per_tile):
            num_tokens = min(per_tile, stop - token)
            first_position = length - stop + token
            first = max(0, first_position - window + 1) // segment if window else 0
            end = -(-(first_position + num_tokens) // segment)
            if splits and stop - start == 1 and end - first > 1:
                items += [[index, token, 1, each, each + 1, partial + each - first] for each in range(first, end)]
                joins.append([token, partial, end - first])
                partial += end - first
            else:
                items.append([index, token, num_tokens, first, end, -1])
    return WorkItems(items, joins, partial)


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
    partial_masses: Tensor


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
) -> PlannedAttention:
    """See `plan_items`. `tables` [S, B], on the device that computes."""
    device = tables.device
    work = plan_items(query_starts, lengths, num_heads // num_kv_heads, window, splits=splits)
    num_rows = max(work.num_partials, 1) * num_heads
    return PlannedAttention(
        items=_integers(work.items, device),
        num_items=_integers([len(work.items)], device),
        joins=_integers(work.joins, device),
        num_joins=_integers([len(work.joins)], device),
        starts=_integers(query_starts, device),
        lengths=_integers(lengths, device),
        tables=tables.to(torch.int32).contiguous(),
        partial_sums=torch.empty((num_rows, head_size), dtype=torch.float32, device=device),
        partial_tops=torch.empty(num_rows, dtype=torch.float32, device=device),
        partial_masses=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


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
    partials = (plan.partial_sums, plan.partial_tops, plan.partial_masses)
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
    return torch.from_numpy(np.array(values, dtype=np.int32)).to(device, non_blocking=True)
