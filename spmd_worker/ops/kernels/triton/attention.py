"""Plans and launches of attention_kernels.py, which documents the shapes.

A step's work items are made on the device by one launch for each window of the layers; all layers of a window share
them. The host knows bounds of their numbers and which launches a layer needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.triton import attention_kernels
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two

MAX_GROUP = 64
"""Most query heads per key-value head: all of a token's are in one tile."""
FEW_ROWS = 16
"""Rows of a tile for sequences with few queries: the fewest of a matrix instruction."""
_LOG2_E = math.log2(math.e)
_ALL_KEYS = 2**30
_ITEM, _JOIN = 8, 3
_BATCH, _EACH = 256, 64
_LATENT_GROUP = 16
"""Most query heads in a tile of latents: sums of 512 numbers for more would spill."""
HEADS_OF_TWO_PARTS = 512
"""The largest heads with keys and values; longer keys are latents, which are their own values."""
_JOINED_HEADS = 16
"""Heads that a program joins at once: more of 512 numbers spill."""
_REDUCED_BYTES = 512
_MAX_PARTIALS, _MAX_PARTIAL_BYTES = 8192, 1 << 26
"""Maximum partial results of a plan, and their bytes."""


class Tile(NamedTuple):
    """Rows of a tile and how it is launched: warps, stages of keys and values, programs per multiprocessor, parts of
    the values' columns that are computed by themselves.
    """

    rows: int
    num_warps: int
    num_stages: int
    programs: int
    parts: int = 1

    def options(self) -> dict[str, int]:
        return attention_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}


def latent_groups(num_heads: int, most: int | None = None) -> int:
    """Number of equal groups, of at most `most` heads, in which query heads see latents; a group is the rows of a token
    in a tile.
    """
    most = min(num_heads, most or _LATENT_GROUP)
    return next(num_heads // size for size in range(most, 0, -1) if num_heads % size == 0)


def few_tile(device_capability: tuple[int, int], head_size: int, group: int, itemsize: int) -> Tile:
    """The tile of sequences with few queries, in a decode step all. No bit depends on it."""
    if group > FEW_ROWS:
        return many_tile(device_capability, head_size, group, itemsize)
    if itemsize > 2:
        return Tile(FEW_ROWS, 4, 1, 2)
    if head_size > 256:
        return Tile(FEW_ROWS, 8, 2, 1)
    if device_capability[0] != 9:
        return Tile(FEW_ROWS, 8 if head_size > 128 else 4, 2, 2)
    if head_size > 128:
        return Tile(FEW_ROWS, 4, 2, 2)
    return Tile(FEW_ROWS, 2, 2, 4) if head_size > 64 else Tile(FEW_ROWS, 2, 3, 6)


def many_tile(device_capability: tuple[int, int], head_size: int, group: int, itemsize: int) -> Tile:
    """The tile of prompts. No bit depends on it."""
    if itemsize > 2:
        return Tile(max(FEW_ROWS, power_of_two(group)), 4, 1, 2)
    if device_capability[0] == 9 and head_size <= 128:
        return Tile(128, 8, 3, 1)
    if device_capability[0] == 9 and (256 < head_size <= 320 or head_size > HEADS_OF_TWO_PARTS):
        # wgmma. Of latents of 512 numbers a segment's sums fill the registers, and those of the segments before lie on
        # the stack meanwhile: once a segment, not once a tile of keys.
        return Tile(64, 8, 2, 1)
    if head_size > 256:
        return Tile(max(FEW_ROWS, power_of_two(group)), 8, 2, 1)
    if head_size > 128:
        # 64 rows of whole values spill, and fewer have no wgmma.
        if device_capability[0] == 9 and head_size % 32 == 0:
            return Tile(128, 8, 2, 1, parts=2)
        return Tile(max(32, power_of_two(group)), 8, 2, 1)
    if device_capability[0] != 10 and 64 < head_size < 128 and head_size % 16 == 0:
        return Tile(64, 8, 3, 2, parts=2)
    return Tile(64, 4 if device_capability[0] == 10 and head_size <= 64 else 8, 3, 2)


def head_parts(size: int) -> tuple[int, int]:
    """One or two powers of two, 0 for none, which cover a head size with the least padding."""
    first = power_of_two(size)
    if first == size:
        return first, 0
    second = max(16, power_of_two(size - first // 2))
    return (first // 2, second) if second < first // 2 else (first, 0)


class Launches(NamedTuple):
    """Launches that a step needs in addition to the one of sequences with few queries."""

    has_many: bool
    has_joins: bool


def launches_of(query_starts: Sequence[int], lengths: Sequence[int], max_partials: int) -> Launches:
    """The launches of a step, perhaps more than it needs. `max_partials` as of `attention_kernels.make_items`."""
    longest, segment = max(lengths, default=0), attention_kernels.SEGMENT
    if tuple(query_starts) != tuple(range(len(lengths) + 1)):
        return Launches(has_many=True, has_joins=longest > segment)
    if longest <= segment:
        return Launches(has_many=False, has_joins=False)
    if len(lengths) * -(-longest // segment) <= max_partials:
        return Launches(has_many=False, has_joins=True)
    num_partials = int((-(-np.array(lengths) // segment)).sum())
    return Launches(has_many=num_partials > max_partials, has_joins=True)


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """A step's work for one window on the device, int32, and buffers of partial results, float32.

    `items` of both kinds, the few first; `counts` of both and of joins. A token sees `later` keys after its own, or
    those up to `last_visible`.
    """

    items: Tensor
    joins: Tensor
    counts: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    partial_sums: Tensor
    partial_tops: Tensor
    partial_denoms: Tensor
    num_few: int
    max_partials: int
    few: Tile
    many: Tile
    launches: Launches
    group: int
    window: int
    later: int = 0
    last_visible: Tensor | None = None


def plan_attention(
    query_starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    window: int = 0,
    *,
    itemsize: int = 2,
    later: int = 0,
    splits: bool = True,
    on_device: tuple[Tensor, Tensor] | None = None,
    last_visible: Tensor | None = None,
) -> PlannedAttention:
    """The plan of one step: queries `query_starts[i]:query_starts[i + 1]` are at the end of the `lengths[i]` keys of
    sequence i. `tables` [S, B] are on the device; `on_device`: `query_starts` and `lengths`, int32, if they are there
    already. `last_visible`: `AttentionMetadata.last_visible`. `itemsize` of queries and keys. If it `splits`, the only
    query of a sequence has an item per segment; a prompt has enough items for all programs, and would need a partial
    row per query and segment.
    """
    starts, ends = on_device or (_integers(query_starts, tables.device), _integers(lengths, tables.device))
    most = len(lengths) * -(-max(lengths, default=0) // attention_kernels.SEGMENT) if splits else 0
    sizes = (num_heads, num_kv_heads, head_size, itemsize)
    tables = tables.to(torch.int32).contiguous()
    plan = _empty_plan(query_starts[-1], starts, ends, tables, *sizes, window, later, most)
    launches = launches_of(query_starts, lengths, plan.max_partials)
    plan = replace(plan, launches=launches, last_visible=last_visible)
    fill_plan(plan, len(lengths))
    return plan


def plan_lists(
    counts: Tensor, listed: Tensor, longest: int, num_heads: int, num_groups: int, head_size: int, itemsize: int
) -> PlannedAttention:
    """The plan of one query each, of `counts` int32 [T] keys of its own, at most `longest`, in pages that `listed`
    int32 [T, longest] lists. It fits every step of T tokens: nothing on the host depends on the counts.
    """
    num_tokens, most = len(counts), len(counts) * -(-longest // attention_kernels.SEGMENT)
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=counts.device)
    sizes = (num_heads, num_groups, head_size, itemsize)
    plan = _empty_plan(num_tokens, starts, counts, listed, *sizes, 0, 0, most)
    has_joins = longest > attention_kernels.SEGMENT
    launches = Launches(has_many=has_joins and most > plan.max_partials, has_joins=has_joins)
    plan = replace(plan, launches=launches)
    fill_plan(plan, num_tokens)
    return plan


def fixed_plan(
    num_tokens: int,
    starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    window: int,
    like: PlannedAttention | None = None,
) -> PlannedAttention:
    """An empty plan for `fill_plan`, whose tensors serve all steps of at most `num_tokens` tokens and S sequences.
    `starts` [S + 1], `lengths` [S] and `tables` [S, B] are int32. Layers run one after another, so that partial results
    may be where another plan has its own (`like`).
    """
    sizes = (num_heads, num_kv_heads, head_size, itemsize)
    plan = _empty_plan(num_tokens, starts, lengths, tables, *sizes, window, 0, _MAX_PARTIALS)
    plan.counts.zero_()
    if like is None or like.partial_sums.shape != plan.partial_sums.shape:
        return plan
    names = ("partial_sums", "partial_tops", "partial_denoms")
    return replace(plan, **{name: getattr(like, name) for name in names})


def fill_plan(plan: PlannedAttention, num_sequences: int) -> None:
    """Make the items of a step, whose starts and lengths are in the plan. If it cannot hold the partial results,
    queries are not split, with the same bits: there are enough of them then to keep a device busy.
    """
    if not num_sequences:
        plan.counts.zero_()
        return
    attention_kernels.make_items[(num_sequences,)](
        *(plan.starts, plan.lengths, plan.items, plan.joins, plan.counts, _sight(plan), num_sequences, plan.num_few),
        *(plan.max_partials, plan.window or _ALL_KEYS, plan.later),
        FEW=plan.few.rows // plan.group,
        MANY=plan.many.rows // plan.group,
        SEGMENT=attention_kernels.SEGMENT,
        BATCH=_BATCH,
        EACH=_EACH,
        SIGHT=plan.last_visible is not None,
        num_warps=1,
    )


def _sight(plan: PlannedAttention) -> Tensor:
    """int32: `PlannedAttention.last_visible`, or a tensor that is not read."""
    return plan.counts if plan.last_visible is None else plan.last_visible


def _empty_plan(
    num_tokens: int,
    starts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    window: int,
    later: int,
    max_partials: int,
) -> PlannedAttention:
    assert 0 < num_heads // num_kv_heads <= MAX_GROUP, (num_heads, num_kv_heads)
    device, num_sequences, group = lengths.device, len(lengths), num_heads // num_kv_heads
    chosen = (capability(device), head_size, group, itemsize)
    few, many = few_tile(*chosen), many_tile(*chosen)
    max_partials = min(max_partials, _MAX_PARTIALS, _MAX_PARTIAL_BYTES // (num_heads * head_size * 4))
    num_few, num_rows = num_sequences + max_partials, max(1, max_partials) * num_heads
    num_many = num_tokens // (many.rows // group) + num_sequences
    return PlannedAttention(
        items=torch.empty((num_few + num_many, _ITEM), dtype=torch.int32, device=device),
        joins=torch.empty((num_sequences, _JOIN), dtype=torch.int32, device=device),
        counts=torch.empty(3, dtype=torch.int32, device=device),
        starts=starts,
        lengths=lengths,
        tables=tables,
        partial_sums=torch.empty((num_rows, head_size), dtype=torch.float32, device=device),
        partial_tops=torch.empty(num_rows, dtype=torch.float32, device=device),
        partial_denoms=torch.empty(num_rows, dtype=torch.float32, device=device),
        num_few=num_few,
        max_partials=max_partials,
        few=few,
        many=many,
        launches=Launches(has_many=True, has_joins=True),
        group=group,
        window=window,
        later=later,
    )


def attend(
    queries: Tensor,
    layer_cache: Tensor,
    plan: PlannedAttention,
    num_heads: int,
    scale: float,
    score_cap: float = 0.0,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
    distance_scores: DistanceScores | None = None,
) -> Tensor:
    """Queries [T, at least Hq * D], a token's heads contiguous; `layer_cache` [blocks, 2, Hkv, block, D], blocks
    contiguous -> [T, Hq, D]. For the rest see `AttentionBackend.attend`.
    """
    keys, values = layer_cache[:, 0], layer_cache[:, 1]
    return attend_pages(queries, keys, values, plan, num_heads, scale, score_cap, sinks, distance_bias, distance_scores)


def attend_latents(
    queries: Tensor,
    layer_cache: Tensor,
    plan: PlannedAttention,
    num_heads: int,
    scale: float,
    value_size: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [T, Hq * D], a token's contiguous; `layer_cache` [blocks, 1, 1, block, D] -> [T, Hq, value_size]."""
    keys = layer_cache[:, 0].expand(-1, latent_groups(num_heads), -1, -1)
    return attend_pages(queries, keys, keys[..., :value_size], plan, num_heads, scale, sinks=sinks, is_latent=True)


def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PlannedAttention,
    num_heads: int,
    scale: float,
    score_cap: float = 0.0,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
    distance_scores: DistanceScores | None = None,
    *,
    is_latent: bool = False,
) -> Tensor:
    """`attend` with keys [blocks, Hkv, block, D] and values [blocks, Hkv, block, DV] -> [T, Hq, DV]."""
    _, num_kv_heads, block_size, head_size = keys.shape
    value_size, device = values.shape[3], queries.device
    assert keys.stride(0) == values.stride(0), (keys.stride(), values.stride())
    out = queries.new_empty((len(queries), num_heads, value_size))
    if not len(queries):
        return out
    partials = (plan.partial_sums, plan.partial_tops, plan.partial_denoms)
    sink_scores = sinks.contiguous() if sinks is not None else plan.partial_tops
    biases, most = plan.partial_tops, 0
    if distance_bias is not None:
        biases, most = distance_bias.contiguous(), distance_bias.shape[1] // 2
        assert biases.dtype == torch.float32, biases.dtype
        assert biases.shape == (num_heads, 2 * most + 1), (biases.shape, num_heads)
    scores: tuple[object, ...] = (plan.partial_tops, plan.partial_tops, plan.counts, 0, 0)
    if distance_scores is not None:
        assert (score_cap, distance_bias) == (0.0, None), "scores of distances are with plain ones"
        assert num_heads == num_kv_heads, (num_heads, num_kv_heads)
        tables, columns = distance_scores.tables, distance_scores.columns
        scores, most = (*tables, columns, *tables[0].stride()[:2]), len(columns) // 2
    scale_log2 = scale / score_cap if score_cap > 0 else scale * _LOG2_E
    sizes = (num_heads, num_kv_heads, head_size, value_size, block_size)
    is_short = plan.launches == Launches(has_many=False, has_joins=False)
    few = plan.few
    num_short = min(len(queries), len(plan.joins)) * num_kv_heads * few.parts
    kinds = [(plan.items, plan.counts, few, num_short if is_short else num_programs(device, few.programs), True)]
    if plan.launches.has_many:
        many = plan.many
        kinds.append((plan.items[plan.num_few :], plan.counts[1:], many, num_programs(device, many.programs), False))
    kind = {"is_capped": score_cap > 0, "has_sinks": sinks is not None, "is_latent": is_latent}
    kind |= {"is_chunked": plan.window < 0, "has_sight": plan.last_visible is not None}
    kind |= {"is_biased": distance_bias is not None}
    if distance_scores is not None:
        kind["has_query_scores"] = distance_scores.of_queries is not None
        kind["has_key_scores"] = distance_scores.of_keys is not None
    for items, count, tile, programs, is_one in kinds:
        attention_kernels.attend[(programs,)](
            *(queries, keys, values, plan.tables, items, count, out, *partials, sink_scores, biases, _sight(plan)),
            *scores,
            *(queries.stride(0), keys.stride(0), plan.tables.stride(0)),
            *(plan.window or _ALL_KEYS, plan.later, most, scale_log2, score_cap * _LOG2_E),
            **attend_constants(tile, *sizes, **kind),
            ONE=is_one,
            LOOPS=not is_short,
            **tile.options(),
        )
    if plan.launches.has_joins:
        attention_kernels.join_partials[(num_programs(device, few.programs),)](
            *(plan.joins, plan.counts[2:], out, *partials, sink_scores),
            **join_constants(num_heads, value_size, has_sinks=sinks is not None),
            **attention_kernels.LAUNCH,
        )
    return out


def attend_constants(
    tile: Tile,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
    block_size: int,
    *,
    is_capped: bool = False,
    has_sinks: bool = False,
    is_latent: bool = False,
    is_chunked: bool = False,
    has_sight: bool = False,
    is_biased: bool = False,
    has_query_scores: bool = False,
    has_key_scores: bool = False,
) -> dict[str, int]:
    """Constexprs of `attention_kernels.attend` that its items do not choose."""
    assert value_size % tile.parts == 0, (value_size, tile)
    k0, k1 = head_parts(head_size)
    v0, v1 = head_parts(value_size // tile.parts)
    return {
        "KV_HEADS": num_kv_heads,
        "G": num_heads // num_kv_heads,
        "D": head_size,
        "DV": value_size,
        "K0": k0,
        "K1": k1,
        "V0": v0,
        "V1": v1,
        "PARTS": tile.parts,
        "BLOCK": block_size,
        "TILE": attention_kernels.TILE,
        "SEGMENT": attention_kernels.SEGMENT,
        "ROWS": tile.rows,
        "CAPPED": is_capped,
        "SINKS": has_sinks,
        "LATENT": is_latent,
        "CHUNKED": is_chunked,
        "SIGHT": has_sight,
        "BIASED": is_biased,
        "OF_QUERIES": has_query_scores,
        "OF_KEYS": has_key_scores,
    }


def join_constants(num_heads: int, value_size: int, *, has_sinks: bool = False) -> dict[str, int]:
    """Constexprs of `attention_kernels.join_partials`."""
    v0, v1 = head_parts(value_size)
    each = min(_JOINED_HEADS, power_of_two(num_heads))
    return {"HEADS": num_heads, "HEADS_EACH": each, "DV": value_size, "V0": v0, "V1": v1, "SINKS": has_sinks}


def shared_bytes(tile: Tile, head_size: int, itemsize: int, *, has_biases: bool = False) -> int:
    """Maximum bytes of shared memory of `attention_kernels.attend` on chips without wgmma or tcgen05, which have the
    least: queries, the stages of keys and values that are not in registers, weights of a tile and its biases, float32.
    """
    keys = attention_kernels.TILE
    staged = tile.rows + 2 * keys * max(1, tile.num_stages - 2)
    of_biases = 4 * tile.rows * keys * has_biases
    return itemsize * (staged * sum(head_parts(head_size)) + tile.rows * keys) + of_biases + _REDUCED_BYTES


def _integers(values: object, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.array(values, dtype=np.int32)), device)
