"""Attention in plain torch: gathers each sequence's blocks for torch's fused attention, on the CPU and on CUDA.

The layout of a block is [2, block size, Hkv, D]: keys, then values, in the order of tokens; of one without values [1,
block size, 1, D]. Torch's fused attention may round a row differently in another chunk; see
docs/internals/determinism.md.

T: tokens; L: keys of one sequence; Hq, Hkv: query and key-value heads of this rank; G = Hq / Hkv; D: head size.
"""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import cache_constants, from_cache, to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.torch_version import torch_version

_MAX_SCORES: Final = 1 << 29
"""Scores of all heads. With a mask torch may materialise them more than once: some GB."""
_MAX_CPU_SCORES: Final = 1 << 24
"""Scores that are materialised here on the CPU: some hundred MB, which no estimate counts."""


class SdpaBackend(AttentionBackend):
    """Implements `attention.backend.AttentionBackend` for caches of the model's dtype or `cache_dtype`, FP8."""

    def __init__(self, cache_dtype: torch.dtype | None = None) -> None:
        self.cache_dtype = cache_dtype

    def numerics(self) -> Region:
        version = f"{torch_version()}, {source_version(__file__)}"
        return Region("torch's fused attention", version, cache_constants(self.cache_dtype))

    def of_sequences(self, head_size: int, block_size: int) -> "SdpaBackend":
        return SdpaBackend()

    def block_shape(
        self, num_kv_heads: int, block_size: int, head_size: int, *, has_values: bool = True
    ) -> tuple[int, ...]:
        return (1 + has_values, block_size, num_kv_heads, head_size)

    def write(self, key: Tensor, value: Tensor | None, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        layer_cache[metadata.token_blocks, 0, metadata.token_offsets] = to_cache(key, layer_cache.dtype)
        if value is not None:
            layer_cache[metadata.token_blocks, 1, metadata.token_offsets] = to_cache(value, layer_cache.dtype)

    def read_keys(self, layer_cache: Tensor, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        return from_cache(layer_cache[blocks, 0, offsets, 0], dtype)

    def read_tokens(
        self,
        layer_cache: Tensor,
        num_kv_heads: int,
        blocks: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
        heads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert layer_cache.shape[3] == num_kv_heads, (layer_cache.shape, num_kv_heads)
        read = slice(None) if heads is None else heads
        keys, values = (from_cache(layer_cache[blocks, part, offsets, read], dtype) for part in (0, 1))
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
        if distance_scores is not None:
            distance_scores.check(query, metadata.query_starts, metadata.context_lengths)
        output = query.new_empty((*query.shape[:2], value_size or query.shape[2]))
        num_later = metadata.num_later_keys(window)
        for index, num_keys in enumerate(metadata.context_lengths):
            rows = slice(metadata.query_starts[index], metadata.query_starts[index + 1])
            first_key = _first_visible_key(num_keys, rows.stop - rows.start, window)
            keys, values, first_key = _gather(
                layer_cache, metadata.block_tables[index], first_key, num_keys, query.dtype
            )
            last = _last_visible(metadata, rows, num_keys)
            arguments = (query[rows], keys, values, first_key, num_keys, scale, window, num_later)
            if value_size:
                assert (score_cap, distance_bias) == (0.0, None), "latents have no caps or biases"
                assert last is None, "latents are seen by causal attention alone"
                output[rows] = _attend_latents(query[rows], keys, first_key, num_keys, scale, window, value_size, sinks)
            elif score_cap > 0 or sinks is not None or distance_bias is not None or distance_scores is not None:
                of_sequence = None if distance_scores is None else _of_distances(distance_scores, rows)
                output[rows] = _attend_unfused(*arguments, score_cap, sinks, last, distance_bias, of_sequence)
            else:
                output[rows] = _attend_fused(*arguments, last)
        return output


def _last_visible(metadata: AttentionMetadata, rows: slice, num_keys: int) -> Tensor | None:
    """Position of the last key that each query of `rows` sees; None if it is that of a step without this tensor, so
    that a row's way to be computed does not depend on others.
    """
    if metadata.last_visible is None:
        return None
    last = metadata.last_visible[rows].long()
    if metadata.sees_later:
        return last if bool((last != num_keys - 1).any()) else None
    own = torch.arange(num_keys - len(last), num_keys, device=last.device)
    return last if bool((last != own).any()) else None


def _first_visible_key(num_keys: int, num_queries: int, window: int) -> int:
    """Position of the earliest key that the first query sees."""
    first_query = num_keys - num_queries
    if window < 0:
        return first_query // -window * -window
    return max(0, first_query - window + 1) if window else 0


def _gather(
    layer_cache: Tensor, table: Tensor, first_key: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, int]:
    """Keys and values [L, Hkv, D] from the block of `first_key` on, and the position of the first one."""
    block_size = layer_cache.shape[2]
    first_block, end_block = first_key // block_size, (num_keys + block_size - 1) // block_size
    blocks = from_cache(layer_cache.index_select(0, table[first_block:end_block]), dtype)
    first_key = first_block * block_size
    keys = blocks[:, 0].flatten(0, 1)[: num_keys - first_key]
    values = blocks[:, -1].flatten(0, 1)[: num_keys - first_key]
    return keys, values, first_key


def _attend_fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_key: int,
    num_keys: int,
    scale: float,
    window: int,
    num_later: int,
    last: Tensor | None = None,
) -> Tensor:
    """One sequence: queries [T, Hq, D] at the end of keys [L, Hkv, D]."""
    num_queries, num_heads, head_size = query.shape
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    if num_queries == 1 and not window:
        # The G queries of a key-value head become rows: torch reads each key once, 5 to 9 times faster than with GQA.
        grouped = query.view(1, k.shape[1], num_heads // k.shape[1], head_size)
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(1, num_heads, head_size)
    q = query.transpose(0, 1).unsqueeze(0)
    if num_queries == num_keys and not window and last is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not num_later, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
    parts = []
    for rows in _query_slices(num_queries, num_heads, keys):
        mask = _mask(rows, num_queries, num_keys, first_key, window, query.device, num_later, last)
        parts.append(F.scaled_dot_product_attention(q[:, :, rows], k, v, mask, scale=scale, enable_gqa=True))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.squeeze(0).transpose(0, 1)


def _attend_unfused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_key: int,
    num_keys: int,
    scale: float,
    window: int,
    num_later: int,
    score_cap: float,
    sinks: Tensor | None,
    last: Tensor | None = None,
    distance_bias: Tensor | None = None,
    distance_scores: Tensor | None = None,
) -> Tensor:
    """`_attend_fused` with capped scores, sinks or what is added by distance, which torch's fused attention does not
    support or would need for all queries: in float32, with the scores of some queries at a time. `distance_scores`
    [Hq, T, T] are of a complete sequence.
    """
    num_queries, num_heads, _ = query.shape
    repeats = num_heads // keys.shape[1]
    k, v = (each.float().repeat_interleave(repeats, 1).transpose(0, 1) for each in (keys, values))
    parts = []
    for rows in _query_slices(num_queries, num_heads, keys, _MAX_CPU_SCORES):
        scores = query[rows].float().transpose(0, 1) @ k.transpose(1, 2) * scale
        if distance_scores is not None:
            scores += distance_scores[:, rows, first_key:] * scale
        if score_cap > 0:
            scores = (scores / score_cap).tanh() * score_cap
        if distance_bias is not None:
            scores += _biases(distance_bias, rows, num_queries, num_keys, first_key)
        mask = _mask(rows, num_queries, num_keys, first_key, window, query.device, num_later, last)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)
        weights = scores.softmax(-1)[..., : len(k[0])]
        if last is not None and num_later:
            # A query that sees no key is zero.
            weights = weights.masked_fill(~mask, 0.0)
        parts.append((weights @ v).transpose(0, 1).to(query.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_latents(
    query: Tensor,
    keys: Tensor,
    first_key: int,
    num_keys: int,
    scale: float,
    window: int,
    value_size: int,
    sinks: Tensor | None,
) -> Tensor:
    """`_attend_fused`, causal, over keys [L, 1, D] whose first elements are the values, in float32: the queries of all
    heads are rows of one matmul.
    """
    num_queries, num_heads, _ = query.shape
    latents, parts = keys[:, 0].float(), []
    for rows in _query_slices(num_queries, num_heads, keys, _MAX_CPU_SCORES):
        scores = query[rows].float().flatten(0, 1) @ latents.t() * scale
        mask = _mask(rows, num_queries, num_keys, first_key, window, query.device, 0)
        scores = scores.view(-1, num_heads, len(latents)).masked_fill(~mask.unsqueeze(1), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(1, -1, 1).expand(len(scores), -1, 1)), -1)
        weights = scores.softmax(-1)[..., : len(latents)].flatten(0, 1)
        parts.append((weights @ latents[:, :value_size]).view(-1, num_heads, value_size).to(query.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _query_slices(num_queries: int, num_heads: int, keys: Tensor, most_on_cpu: int | None = None) -> Iterator[slice]:
    """Slices of queries with a bounded number of scores. On the CPU one slice if possible: there the rounding of a
    matmul's row depends on the number of rows.
    """
    most = most_on_cpu if keys.is_cpu else _MAX_SCORES
    size = num_queries if most is None else max(1, most // (num_heads * len(keys)))
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _biases(distance_bias: Tensor, rows: slice, num_queries: int, num_keys: int, first_key: int) -> Tensor:
    """Float32 [Hq, queries, keys]: the biases of the keys' distances from the queries of `rows`."""
    most, first_query = distance_bias.shape[1] // 2, num_keys - num_queries
    queries = torch.arange(first_query + rows.start, first_query + rows.stop, device=distance_bias.device)
    keys = torch.arange(first_key, num_keys, device=distance_bias.device)
    return distance_bias[:, (keys - queries.unsqueeze(1)).clamp(-most, most) + most]


def _of_distances(scores: DistanceScores, rows: slice) -> Tensor:
    """Float32 [Hq, queries, keys] of a complete sequence, whose tokens are `rows`."""
    most = len(scores.columns) // 2
    at = torch.arange(rows.stop - rows.start, device=scores.columns.device)
    # [queries, keys]
    columns = scores.columns[at - at.unsqueeze(1) + most].long()
    found: list[Tensor] = []
    if scores.of_queries is not None:
        of_queries = scores.of_queries[rows].float().transpose(0, 1)
        found.append(of_queries.gather(2, columns.expand(len(of_queries), -1, -1)))
    if scores.of_keys is not None:
        of_keys = scores.of_keys[rows].float().transpose(0, 1)
        found.append(of_keys.gather(2, columns.t().expand(len(of_keys), -1, -1)).transpose(1, 2))
    return found[0] if len(found) == 1 else found[0] + found[1]


def _mask(
    rows: slice,
    num_queries: int,
    num_keys: int,
    first_key: int,
    window: int,
    device: torch.device,
    num_later: int,
    last: Tensor | None = None,
) -> Tensor:
    """Bool [queries, keys], true if a query of `rows` sees the key; `last` replaces a `num_later` of 0."""
    first_query = num_keys - num_queries
    query_positions = torch.arange(first_query + rows.start, first_query + rows.stop, device=device).unsqueeze(1)
    key_positions = torch.arange(first_key, num_keys, device=device).unsqueeze(0)
    ends = query_positions + num_later
    if last is not None:
        ends = last[rows].unsqueeze(1).clamp(max=ends) if num_later else last[rows].unsqueeze(1)
    mask = key_positions <= ends
    if window < 0:
        return mask & (key_positions >= query_positions // -window * -window)
    return mask & (key_positions > query_positions - window) if window else mask
