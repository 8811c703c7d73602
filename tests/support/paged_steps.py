"""Sequences of random keys and values, the steps that put them into a paged cache, and the formula in double precision.

A `Sequence` has a length, its merged projection and a block table; `run` computes it in chunks, `together` computes the
last chunks of several in one batch. Unwritten places of the cache hold NaN throughout.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.distance_scores import DistanceScores


@dataclass(frozen=True)
class Sizes:
    """Heads of the rank and how the cache is cut."""

    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 2
    group_size: int = 4
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    score_cap: float = 0.0
    has_sinks: bool = False
    max_distance: int = 0
    """Above 0: scores have a bias for each distance up to this one."""
    num_embedded: int = 0
    """Above 0: queries and keys have scores with so many embedded distances."""
    sees_later: bool = False
    images: tuple[range, ...] = ()
    """Tokens that see all of their range."""
    num_seen: int = 0
    """Above 0, with `sees_later`: tokens behind the first so many are seen by none."""

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def sinks(self) -> Tensor | None:
        """One score a head, from far below all others to above most."""
        return torch.linspace(-9.0, 3.0, self.num_heads) if self.has_sinks else None

    @property
    def distance_bias(self) -> Tensor | None:
        """[heads, 2 * max_distance + 1], the first heads' the same whatever their number."""
        if not self.max_distance:
            return None
        generator = torch.Generator().manual_seed(self.max_distance)
        return 2 * torch.randn(self.num_heads, 2 * self.max_distance + 1, generator=generator)

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


@dataclass(frozen=True)
class Sequence:
    """`merged` [length, heads + 2 kv heads, head size]: a qkv projection, whose parts are strided views."""

    merged: Tensor
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def length(self) -> int:
        return len(self.merged)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        sizes = [self.sizes.num_heads, self.sizes.num_kv_heads, self.sizes.num_kv_heads]
        query, key, value = self.merged.split(sizes, dim=1)
        return query, key, value

    @property
    def distance_scores(self) -> Tensor:
        """[2, heads, length, embedded distances], of queries and of keys."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(self.length)
        shape = (2, sizes.num_heads, self.length, sizes.num_embedded)
        return (4 * torch.randn(shape, generator=generator)).to(sizes.dtype)


def columns_of(distances: Tensor, num_embedded: int) -> Tensor:
    """Columns of distances, of which the middle ones have one each."""
    most = num_embedded // 2
    far = distances.sign() * (most // 2 + (distances.abs() - most // 2) // 3)
    return (torch.where(distances.abs() > most // 2, far, distances) + most).clamp(0, num_embedded - 1)


def sequence(length: int, sizes: Sizes, seed: int = 0) -> Sequence:
    """Normal numbers, the same for the same arguments whatever the block size."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = sizes.num_heads + 2 * sizes.num_kv_heads
    return Sequence(torch.randn(length, num_heads, sizes.head_size, generator=generator).to(sizes.dtype), sizes)


def last_seen(sizes: Sizes, positions: Tensor) -> Tensor:
    """int32: the position of the last key that each token sees, of its image or its own."""
    if sizes.num_seen:
        return torch.full(positions.shape, sizes.num_seen - 1, dtype=torch.int32)
    ends = {token: image.stop - 1 for image in sizes.images for token in image}
    return torch.tensor([ends.get(token, token) for token in positions.tolist()], dtype=torch.int32)


_KEPT = 64
_formulas: dict[tuple[Sizes, bytes], Tensor] = {}


def formula(one: Sequence) -> Tensor:
    """float64 [length, heads, head size]. The last ones are kept: each instruction set is compared with the same."""
    key = one.sizes, one.merged.contiguous().view(torch.uint8).numpy().tobytes()
    if key not in _formulas:
        if len(_formulas) == _KEPT:
            del _formulas[next(iter(_formulas))]
        _formulas[key] = _formula(one)
    return _formulas[key]


def _formula(one: Sequence) -> Tensor:
    """Written down as it is in the paper."""
    query, key, value = (part.double() for part in one.parts)
    key, value = (part.repeat_interleave(one.sizes.group_size, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * one.sizes.scale
    if one.sizes.score_cap:
        scores = (scores / one.sizes.score_cap).tanh() * one.sizes.score_cap
    positions = torch.arange(one.length)
    distances = positions - positions.unsqueeze(1)
    if one.sizes.distance_bias is not None:
        most = one.sizes.max_distance
        scores += one.sizes.distance_bias.double()[:, distances.clamp(-most, most) + most]
    if one.sizes.num_embedded:
        columns = columns_of(distances, one.sizes.num_embedded)
        of_queries, of_keys = one.distance_scores.double()
        by_key = of_keys.gather(2, columns.t().expand(len(of_keys), -1, -1)).transpose(1, 2)
        scores += (of_queries.gather(2, columns.expand(len(of_keys), -1, -1)) + by_key) * one.sizes.scale
    is_visible = distances <= (one.length if one.sizes.sees_later else 0)
    if one.sizes.num_seen:
        is_visible = is_visible & (positions < one.sizes.num_seen)
    else:
        is_visible |= positions <= last_seen(one.sizes, positions).unsqueeze(1)
    if one.sizes.window < 0:
        quotients = positions // -one.sizes.window
        is_visible &= quotients.unsqueeze(1) == quotients
    elif one.sizes.window:
        is_visible &= (-distances if one.sizes.images else distances.abs()) < one.sizes.window
    scores = scores.masked_fill(~is_visible, -math.inf)
    if one.sizes.sinks is not None:
        sinks = one.sizes.sinks.double().view(-1, 1, 1).expand(-1, one.length, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        # A token that sees no key has zeros.
        weights = scores.softmax(-1).masked_fill(~is_visible, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, value)


def error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((result.double() - expected).abs().max() / expected.abs().max())


def run(backend: AttentionBackend, one: Sequence, chunk: int, order_seed: int = 0) -> Tensor:
    """The sequence alone, `chunk` tokens a step, in blocks whose places `order_seed` chooses."""
    cache, (table,) = _cache(backend, [one], order_seed)
    outputs = [
        _step(backend, cache, [one], [table], [(start, min(one.length, start + chunk))])
        for start in range(0, one.length, chunk)
    ]
    return torch.cat(outputs)


def together(
    backend: AttentionBackend, sequences: list[Sequence], last_chunks: list[int], tables: list[Tensor] | None = None
) -> list[Tensor]:
    """Each sequence but for its last tokens one after another, then the last tokens of all in one batch. `tables` may
    have blocks in common where the sequences have tokens in common; else each sequence has blocks of its own.
    """
    cache, own_tables = _cache(backend, sequences, order_seed=1)
    tables = own_tables if tables is None else tables
    starts = [one.length - chunk for one, chunk in zip(sequences, last_chunks, strict=True)]
    for one, table, start in zip(sequences, tables, starts, strict=True):
        if start:
            _step(backend, cache, [one], [table], [(0, start)])
    ranges = [(start, one.length) for one, start in zip(sequences, starts, strict=True)]
    return list(_step(backend, cache, sequences, tables, ranges).split(last_chunks))


def _cache(backend: AttentionBackend, sequences: list[Sequence], order_seed: int) -> tuple[Tensor, list[Tensor]]:
    sizes = sequences[0].sizes
    counts = [-(-one.length // sizes.block_size) for one in sequences]
    generator = torch.Generator().manual_seed(order_seed)
    num_blocks = sum(counts) + 3
    shape = backend.block_shape(sizes.num_kv_heads, sizes.block_size, sizes.head_size)
    dtype = getattr(backend, "cache_dtype", None) or sizes.dtype
    cache = to_cache(torch.full((num_blocks, *shape), math.nan, dtype=sizes.dtype), dtype)
    return cache, list(torch.randperm(num_blocks, generator=generator)[: sum(counts)].split(counts))


def pieces(backend: AttentionBackend, one: Sequence, ends: list[int]) -> Tensor:
    """The sequence alone, in steps that end there."""
    cache, (table,) = _cache(backend, [one], order_seed=0)
    ranges = list(pairwise([0, *ends, one.length]))
    return torch.cat([_step(backend, cache, [one], [table], [each]) for each in ranges])


def _step(
    backend: AttentionBackend,
    cache: Tensor,
    sequences: list[Sequence],
    tables: list[Tensor],
    ranges: list[tuple[int, int]],
) -> Tensor:
    block_size = sequences[0].sizes.block_size
    positions = [torch.arange(start, end) for start, end in ranges]
    sights = [last_seen(one.sizes, at) for one, at in zip(sequences, positions, strict=True)]
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    metadata = AttentionMetadata(
        query_starts=(0, *accumulate(end - start for start, end in ranges)),
        context_lengths=tuple(end for _, end in ranges),
        block_tables=padded,
        token_blocks=torch.cat([table[at // block_size] for table, at in zip(tables, positions, strict=True)]),
        token_offsets=torch.cat(positions) % block_size,
        sees_later=sequences[0].sizes.sees_later,
        last_visible=torch.cat(sights) if any(one.sizes.images or one.sizes.num_seen for one in sequences) else None,
    )
    merged = torch.cat([one.merged[start:end] for one, (start, end) in zip(sequences, ranges, strict=True)])
    query, key, value = Sequence(merged, sequences[0].sizes).parts
    backend.write(key, value, cache, metadata)
    sizes = sequences[0].sizes
    bounds = (sizes.score_cap, sizes.sinks)
    more: dict[str, Any] = {"distance_bias": sizes.distance_bias}
    if sizes.num_embedded:
        of_queries, of_keys = torch.cat([one.distance_scores for one in sequences], dim=2).transpose(1, 2)
        longest = max(end for _, end in ranges) + 3
        columns = columns_of(torch.arange(1 - longest, longest), sizes.num_embedded).int()
        more["distance_scores"] = DistanceScores(of_queries, of_keys, columns)
    return backend.attend(query, cache, metadata, sizes.scale, sizes.window, *bounds, **more)
