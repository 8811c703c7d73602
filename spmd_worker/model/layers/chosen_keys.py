"""Attention of each token to those keys of a cache that an indexer chooses for it.

A token that sees no more keys than are chosen attends to all of them, in the cache. For any other its chosen keys are
copied, in ascending order, into blocks of a call of the same attention kernels: attention to latents reads no
positions. So a token's bits depend on its query, its keys and their scores alone. Scores are computed a tile of keys at
a time, at absolute positions and always of one size, by the product whose rows do not know each other.

T: tokens; S: keys of one sequence; K: keys that are chosen; Hi, Di: heads and head size of the indexer; H, D: heads and
size of attention's queries and keys; N: tokens of one call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.model.layers.choice_bytes import BLOCK, TILE, rows_at_once
from spmd_worker.model_config.layer_config import LatentConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import from_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries [T, Hi, Di] of the model's dtype and weights of heads, float32 [T, Hi], of tokens that choose keys."""

    queries: Tensor
    weights: Tensor

    def of_rows(self, rows: Tensor | slice) -> "IndexQueries":
        """Those of some tokens."""
        return IndexQueries(self.queries[rows], self.weights[rows])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens `start` to `stop` of a step, consecutive ones of a sequence, the first of which is at `position`."""

    sequence: int
    start: int
    stop: int
    position: int


class ChosenKeys:
    """Attention of one layer over its two caches: latents, in the backend's layout, and an indexer's keys."""

    def __init__(self, backend: AttentionBackend, kernels: Kernels, latent: LatentConfig) -> None:
        """`kernels` multiply plain float32."""
        assert latent.indexer is not None, latent
        self._backend, self._kernels, self._latent, self._indexer = backend, kernels, latent, latent.indexer

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: latents [blocks, *block_shape], and [blocks, block size, Di]."""
        key_size, size = self._latent.key_size, self._indexer.head_size
        block_size = layer_cache.shape[1] // (key_size + size)
        latents, keys = layer_cache.split_with_sizes([block_size * key_size, block_size * size], dim=1)
        shape = self._backend.block_shape(1, block_size, key_size, has_values=False)
        return latents.view(len(latents), *shape), keys.view(len(keys), block_size, size)

    def leaves_out(self, metadata: AttentionMetadata) -> bool:
        """Whether any token of a step sees fewer keys than there are."""
        assert metadata.fixed is None, "steps that choose keys are not recorded"
        return max(metadata.context_lengths, default=0) > self._indexer.num_chosen

    def choose(self, choosing: IndexQueries, index_cache: Tensor, metadata: AttentionMetadata) -> list[Tensor]:
        """Positions of the chosen keys, int32 [N, K] ascending, of those tokens that do not see all, N at a time; the
        step's keys are in the cache.
        """
        return [
            self._chosen(
                choosing.of_rows(slice(rows.start, rows.stop)),
                index_cache,
                metadata.block_tables[rows.sequence],
                rows.position,
            )
            for rows in self._divided(metadata)[1]
        ]

    def attend(
        self, query: Tensor, latents: Tensor, metadata: AttentionMetadata, scale: float, chosen: list[Tensor]
    ) -> Tensor:
        """Queries [T, H, D], `chosen` by `choose` for the same step, which is in the cache -> [T, H, value]."""
        value_size = self._latent.rank
        if not self.leaves_out(metadata):
            return self._backend.attend(query, latents, metadata, scale, 0, value_size=value_size)
        assert metadata.is_causal, "keys are chosen in causal attention"
        dense, others = self._divided(metadata)
        output = query.new_empty((*query.shape[:2], value_size))
        if dense:
            places = torch.cat([torch.arange(each.start, each.stop, device=query.device) for each in dense])
            step = _step_of(dense, places, metadata)
            output[places] = self._backend.attend(query[places], latents, step, scale, 0, value_size=value_size)
        scratch = self._backend.of_sequences(self._latent.key_size, BLOCK)
        block_size = latents[0].numel() // self._latent.key_size
        for rows, positions in zip(others, chosen, strict=True):
            taken, table = slice(rows.start, rows.stop), metadata.block_tables[rows.sequence]
            blocks, offsets = _places(table, positions.flatten().long(), block_size)
            keys = self._backend.read_keys(latents, blocks, offsets, query.dtype).unsqueeze(1)
            output[taken] = _attend_apart(scratch, query[taken], keys, scale, value_size)
        return output

    def _divided(self, metadata: AttentionMetadata) -> tuple[list[_Rows], list[_Rows]]:
        """Tokens that see all keys, by sequence, and tokens that choose, by sequence and then in parts."""
        dense, others = [], []
        most = rows_at_once(self._latent)
        for sequence, num_keys in enumerate(metadata.context_lengths):
            start, stop = metadata.query_starts[sequence : sequence + 2]
            position = num_keys - (stop - start)
            first = start + min(max(self._indexer.num_chosen - position, 0), stop - start)
            if first > start:
                dense.append(_Rows(sequence, start, first, position))
            for part in range(first, stop, most):
                others.append(_Rows(sequence, part, min(part + most, stop), position + part - start))
        return dense, others

    def _chosen(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, position: int) -> Tensor:
        """Positions of the chosen keys, int32 [N, K] ascending, of consecutive tokens from `position` on."""
        ends = torch.arange(position + 1, position + 1 + len(choosing.weights), device=table.device)

        def read(positions: Tensor) -> Tensor:
            places = _places(table, positions, index_cache.shape[1])
            return from_cache(index_cache[places], choosing.queries.dtype)

        most = position + len(ends)
        return best_keys(self._kernels, choosing, read, ends, most, self._indexer.num_chosen).int()


def best_keys(
    kernels: Kernels,
    choosing: IndexQueries,
    read: Callable[[Tensor], Tensor],
    num_seen: Tensor,
    num_keys: int,
    num_chosen: int,
) -> Tensor:
    """Positions, int64 [N, K] ascending, of the keys of the highest scores among the first `num_seen`, int64 [N], ties
    by position. `read` gives keys [n, Di] at positions [n], `num_keys` is the largest of `num_seen`, none of which is
    below K.
    """
    device = choosing.queries.device
    scores = torch.cat(list(_scores(kernels, choosing, read, num_keys)), dim=1)
    hidden = torch.arange(scores.shape[1], device=device) >= num_seen.unsqueeze(1)
    # Stable: of equal scores the lower position is first.
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    return order[:, :num_chosen].sort(dim=1).values


def _scores(
    kernels: Kernels, choosing: IndexQueries, read: Callable[[Tensor], Tensor], num_keys: int
) -> Iterator[Tensor]:
    """Scores of a tile of keys after the other, float32 [N, TILE], those behind the last key 0."""
    num_rows, num_heads, size = choosing.queries.shape
    queries = choosing.queries.float().reshape(-1, size)
    for first in range(0, num_keys, TILE):
        positions = torch.arange(first, min(first + TILE, num_keys), device=queries.device)
        tile = queries.new_zeros((TILE, size))
        tile[: len(positions)] = read(positions)
        products = kernels.linear(queries, kernels.pack(tile), None)
        products = products.view(num_rows, num_heads, TILE).relu_()
        total = products[:, 0] * choosing.weights[:, :1]
        for head in range(1, num_heads):
            total += products[:, head] * choosing.weights[:, head : head + 1]
        yield total


def _places(table: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks and offsets, int64, of positions of a sequence with this table."""
    return table[positions // block_size].long(), positions % block_size


def _step_of(parts: list[_Rows], places: Tensor, metadata: AttentionMetadata) -> AttentionMetadata:
    """Metadata of some first tokens of sequences of a step, `places` int64 in the step."""
    starts, lengths = [0], []
    for each in parts:
        starts.append(starts[-1] + each.stop - each.start)
        lengths.append(each.position + each.stop - each.start)
    return AttentionMetadata(
        query_starts=tuple(starts),
        context_lengths=tuple(lengths),
        block_tables=metadata.block_tables[[each.sequence for each in parts]],
        token_blocks=metadata.token_blocks[places],
        token_offsets=metadata.token_offsets[places],
        step_lengths=metadata.step_lengths or metadata.context_lengths,
    )


def _attend_apart(backend: AttentionBackend, query: Tensor, keys: Tensor, scale: float, value_size: int) -> Tensor:
    """Attention of queries [N, H, D], each to K keys of its own, [N * K, 1, D] -> [N, H, value]."""
    num_rows, device = len(query), query.device
    num_keys = len(keys) // num_rows
    num_blocks = -(-num_keys // BLOCK)
    shape = backend.block_shape(1, BLOCK, keys.shape[2], has_values=False)
    cache = keys.new_zeros((num_rows * num_blocks, *shape))
    tables = torch.arange(num_rows * num_blocks, device=device).view(num_rows, num_blocks)
    offsets = torch.arange(num_keys, device=device)
    lengths = (num_keys,) * num_rows
    written = AttentionMetadata(
        query_starts=tuple(range(0, num_rows * num_keys + 1, num_keys)),
        context_lengths=lengths,
        block_tables=tables,
        token_blocks=tables[:, offsets // BLOCK].flatten(),
        token_offsets=(offsets % BLOCK).repeat(num_rows),
    )
    backend.write(keys, None, cache, written)
    last = torch.full((num_rows,), num_keys - 1, device=device)
    step = AttentionMetadata(
        query_starts=tuple(range(num_rows + 1)),
        context_lengths=lengths,
        block_tables=tables,
        token_blocks=tables[:, -1],
        token_offsets=last % BLOCK,
    )
    return backend.attend(query, cache, step, scale, 0, value_size=value_size)
