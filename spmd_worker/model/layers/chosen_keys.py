"""Attention of each token to those keys of a cache that an indexer chooses for it.

A token that sees no more keys than are chosen attends to all of them, in the cache. For any other its chosen keys are
copied, in ascending order, into blocks of a call of the same attention kernels, which read no positions. So a token's
bits depend on its query, its keys and their scores alone. Scores are computed a tile of keys at a time, at absolute
positions and always of one size, by the product whose rows do not know each other.

If keys are chosen by runs of tokens, the key of a run is at its last token, and tokens behind the last complete run are
seen too. If each key-value head chooses for itself, the score of a run is the best of its keys' products with the
head's query, and a token's own run is seen up to the token.

T: tokens; S: keys of one sequence; K: keys that a token sees at most; Hi, Di: heads and head size of the indexer; H, D:
heads and size of attention's queries and keys, Hkv: key-value heads; N: tokens of one call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.model.layers.choice_bytes import BLOCK, TILE, rows_at_once
from spmd_worker.model_config.layer_config import IndexerConfig, LatentConfig, LayerConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import from_cache, to_cache
from spmd_worker.ops.attention.listed import ListKeys
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.group_keys import GroupKeys
from spmd_worker.ops.kernels.host_copies import to_device


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries [T, Hi, Di] of the model's dtype and weights of heads, float32 [T, Hi], of tokens that choose keys; no
    weights if heads choose for themselves.
    """

    queries: Tensor
    weights: Tensor | None = None

    def of_rows(self, rows: Tensor | slice) -> "IndexQueries":
        """Those of some tokens."""
        return IndexQueries(self.queries[rows], None if self.weights is None else self.weights[rows])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens `start` to `stop` of a step, consecutive ones of a sequence, the first of which is at `position`."""

    sequence: int
    start: int
    stop: int
    position: int


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """Keys of a layer's cache on this rank, `num_kv_heads` of `key_size`, with values of the same size, or keys alone
    whose first `latent_size` numbers are the values.
    """

    num_kv_heads: int
    key_size: int
    latent_size: int = 0

    @property
    def token_size(self) -> int:
        """Numbers of a token."""
        return self.num_kv_heads * self.key_size * (1 if self.latent_size else 2)


def lists_keys(layer: LayerConfig) -> bool:
    """Whether the keys that its indexer chooses can be listed on the device: latents, one by one."""
    return layer.latent is not None and layer.latent.indexer is not None and _lists(layer.latent.indexer)


def _lists(indexer: IndexerConfig) -> bool:
    return indexer.run_length == 1 and not indexer.is_by_head


def latent_keys(latent: LatentConfig) -> KeptKeys:
    """Those of latent attention."""
    return KeptKeys(1, latent.key_size, latent.rank)


class ChosenKeys:
    """Attention of one layer over its two caches: keys, in the backend's layout, and an indexer's keys."""

    def __init__(self, backend: AttentionBackend, kernels: Kernels, indexer: IndexerConfig, kept: KeptKeys) -> None:
        """`kernels` multiply plain float32."""
        self._backend, self._kernels, self._indexer, self._kept = backend, kernels, indexer, kept
        self._listed: ListKeys | None = None
        if kept.latent_size and _lists(indexer):
            self._listed = backend.listed_keys()

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: keys [blocks, *block_shape], and [blocks, block size, Di], those
        of the layer's own indexer, if it has one.
        """
        kept, size, slot = self._kept, self._indexer.cached_size, self._indexer.slot
        block_size = layer_cache.shape[1] // (kept.token_size + size)
        keys, of_indexers = layer_cache.split_with_sizes([block_size * kept.token_size, block_size * size], dim=1)
        has_values = not kept.latent_size
        shape = self._backend.block_shape(kept.num_kv_heads, block_size, kept.key_size, has_values=has_values)
        of_slots = of_indexers.view(len(of_indexers), block_size, self._indexer.num_slots, -1)
        return keys.view(len(keys), *shape), of_slots[:, :, slot]

    def leaves_out(self, metadata: AttentionMetadata) -> bool:
        """Whether any token of a step sees fewer keys than there are."""
        assert metadata.fixed is None or self._listed is not None, "steps that choose keys on the host are not recorded"
        return metadata.longest > self._indexer.most_seen

    def write(self, keys: Tensor, index_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write the keys [T, Di] of an indexer of this step."""
        if self._listed is not None:
            block_size = index_cache.shape[1]
            self._listed(metadata, block_size).write(keys, index_cache, block_size)
        else:
            index_cache[metadata.token_blocks, metadata.token_offsets] = to_cache(keys, index_cache.dtype)

    def choose(self, choosing: IndexQueries, index_cache: Tensor, metadata: AttentionMetadata) -> list[Tensor]:
        """Positions of the keys seen, int32 [N, K] ascending, or [N * Hkv, K] of heads that choose for themselves, of
        those tokens that do not see all, N at a time; the step's keys are in the cache. Of runs, the last positions of
        a token that are behind its own do not count. Where keys are listed on the device, of all tokens, one tensor
        [T, K].
        """
        if self._listed is not None:
            assert choosing.weights is not None, "heads choose together"
            block_size, num_chosen = index_cache.shape[1], self._indexer.num_chosen
            given = (choosing.queries, choosing.weights, index_cache)
            return [self._listed(metadata, block_size).choose(*given, block_size, num_chosen)]
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
        self, query: Tensor, keys: Tensor, metadata: AttentionMetadata, scale: float, chosen: list[Tensor]
    ) -> Tensor:
        """Queries [T, H, D], `chosen` by `choose` for the same step, which is in the cache -> [T, H, value]."""
        value_size = self._kept.latent_size
        if not self.leaves_out(metadata):
            return self._backend.attend(query, keys, metadata, scale, 0, value_size=value_size)
        assert metadata.is_causal, "keys are chosen in causal attention"
        if self._listed is not None:
            groups = GroupKeys(keys[:, 0, 0], 1, self._indexer.num_chosen, chosen[0])
            return self._listed(metadata, keys.shape[3]).attend(query, keys, scale, value_size, groups)
        dense, others = self._divided(metadata)
        output = query.new_empty((*query.shape[:2], value_size or self._kept.key_size))
        if dense:
            places = torch.cat([torch.arange(each.start, each.stop, device=query.device) for each in dense])
            step = _step_of(dense, places, metadata)
            output[places] = self._backend.attend(query[places], keys, step, scale, 0, value_size=value_size)
        scratch = self._backend.of_sequences(self._kept.key_size, BLOCK)
        for rows, positions in zip(others, chosen, strict=True):
            taken, table = slice(rows.start, rows.stop), metadata.block_tables[rows.sequence]
            copied, counts = self._read(keys, table, positions, query.dtype), self._counts(rows)
            queries = query[taken].reshape(len(positions), -1, query.shape[2])
            found = _attend_apart(scratch, queries, copied, counts, scale, value_size)
            output[taken] = found.view(len(counts) // self._num_choices, *output.shape[1:])
        return output

    def attend_by(
        self,
        choosing: IndexQueries | None,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`attend` from queries [T, H, D] in the caches of `parts_of`, after `choose`; `choosing` is of a step of which
        `query` and `metadata` are of some `rows`, int64, or of all; None if all its tokens see all keys.
        """
        chosen: list[Tensor] = []
        if choosing is not None:
            chosen = self.choose(choosing if rows is None else choosing.of_rows(rows), caches[1], metadata)
        return self.attend(query, caches[0], metadata, scale, chosen)

    @property
    def _num_choices(self) -> int:
        return self._kept.num_kv_heads if self._indexer.is_by_head else 1

    def _read(self, keys: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Keys and values of `positions`, [N * K, Hkv, D] or [N * Hkv * K, 1, D], no values of latents."""
        kept, (num_rows, num_keys) = self._kept, positions.shape
        places = _places(table, positions.flatten().long(), keys[0].numel() // kept.token_size)
        if kept.latent_size:
            return self._backend.read_keys(keys, *places, dtype).unsqueeze(1), None
        if not self._indexer.is_by_head:
            return self._backend.read_tokens(keys, kept.num_kv_heads, *places, dtype)
        heads = torch.arange(kept.num_kv_heads, device=keys.device).repeat(num_rows // kept.num_kv_heads)
        of_heads = self._backend.read_tokens(keys, kept.num_kv_heads, *places, dtype, heads.repeat_interleave(num_keys))
        return of_heads[0].unsqueeze(1), of_heads[1].unsqueeze(1)

    def _counts(self, rows: _Rows) -> tuple[int, ...]:
        """Keys that each token, or head, sees."""
        length, first = self._indexer.run_length, rows.position + 1
        ends = range(first, first + rows.stop - rows.start)
        if self._indexer.is_by_head:
            others = self._indexer.num_chosen - length
            return tuple([others + (end - 1) % length + 1 for end in ends for _ in range(self._num_choices)])
        return tuple([self._indexer.num_chosen + end % length for end in ends])

    def _divided(self, metadata: AttentionMetadata) -> tuple[list[_Rows], list[_Rows]]:
        """Tokens that see all keys, by sequence, and tokens that choose, by sequence and then in parts."""
        dense, others = [], []
        most = rows_at_once(self._indexer, self._kept.token_size)
        for sequence, num_keys in enumerate(metadata.context_lengths):
            start, stop = metadata.query_starts[sequence : sequence + 2]
            position = num_keys - (stop - start)
            first = start + min(max(self._indexer.most_seen - position, 0), stop - start)
            if first > start:
                dense.append(_Rows(sequence, start, first, position))
            for part in range(first, stop, most):
                others.append(_Rows(sequence, part, min(part + most, stop), position + part - start))
        return dense, others

    def _chosen(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, position: int) -> Tensor:
        """The part of `choose` of consecutive tokens from `position` on."""
        length, device = self._indexer.run_length, table.device
        # Heads score each key, and an indexer the last one of each run.
        step = 1 if self._indexer.is_by_head else length

        def read(numbers: Tensor) -> Tensor:
            places = _places(table, numbers * step + step - 1, index_cache.shape[1])
            return from_cache(index_cache[places], choosing.queries.dtype)

        if self._indexer.is_by_head:
            return self._chosen_by_heads(choosing.queries, read, position)
        ends = torch.arange(position + 1, position + 1 + len(choosing.queries), device=device).unsqueeze(1)
        num_runs = (position + len(ends)) // length
        runs = best_keys(self._kernels, choosing, read, ends // length, num_runs, self._indexer.num_runs)
        if length == 1:
            return runs.int()
        inside = torch.arange(length, device=device)
        chosen = (runs.unsqueeze(2) * length + inside).flatten(1)
        # Positions behind a token's own are not read: any that have a block will do.
        behind = torch.minimum(ends // length * length + inside[:-1], ends - 1)
        return torch.cat((chosen, behind), dim=1).int()

    def _chosen_by_heads(self, queries: Tensor, read: Callable[[Tensor], Tensor], position: int) -> Tensor:
        """`_chosen` for each head of `queries` [N, Hi, Di]. Positions behind a token are the token's own."""
        length, num_keys = self._indexer.run_length, position + len(queries)
        own = torch.arange(position, num_keys, device=queries.device).unsqueeze(1)
        num_runs = TILE // length
        step, num_tiles = num_runs * length, -(-num_keys // (num_runs * length))
        scores = queries.new_empty((*queries.shape[:2], num_tiles * num_runs), dtype=torch.float32)
        for tile, products in enumerate(_products(self._kernels, queries, read, num_keys, step)):
            keys = torch.arange(tile * step, (tile + 1) * step, device=queries.device)
            of_tile = products[..., :step].masked_fill_((keys > own).unsqueeze(1), -torch.inf)
            scores[..., tile * num_runs : (tile + 1) * num_runs] = torch.unflatten(of_tile, 2, (-1, length)).amax(3)
        distances = own // length - torch.arange(scores.shape[2], device=queries.device)
        is_local = (distances >= 0) & (distances < self._indexer.num_local)
        scores = scores.masked_fill_(is_local.unsqueeze(1), torch.inf)
        order = scores.sort(dim=2, descending=True, stable=True).indices
        runs = order[..., : self._indexer.num_runs].sort(dim=2).values
        positions = (runs.unsqueeze(3) * length + torch.arange(length, device=queries.device)).flatten(2)
        return torch.minimum(positions, own.unsqueeze(2)).flatten(0, 1).int()


def best_keys(
    kernels: Kernels,
    choosing: IndexQueries,
    read: Callable[[Tensor], Tensor],
    num_seen: Tensor,
    num_keys: int,
    num_chosen: int,
) -> Tensor:
    """Numbers, int64 [N, `num_chosen`] ascending, of the keys of the highest scores among the first `num_seen`, int64
    [N, 1], ties by number. `read` gives keys [n, Di] of numbers [n]; `num_keys` is the largest of `num_seen`, none of
    which is below `num_chosen`.
    """
    scores = torch.cat(list(_scores(kernels, choosing, read, num_keys)), dim=1)
    hidden = torch.arange(scores.shape[1], device=scores.device) >= num_seen
    # Stable: of equal scores the lower number is first.
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    return order[:, :num_chosen].sort(dim=1).values


def _scores(
    kernels: Kernels, choosing: IndexQueries, read: Callable[[Tensor], Tensor], num_keys: int
) -> Iterator[Tensor]:
    """Scores of a tile of keys after the other, float32 [N, TILE], those behind the last key 0."""
    assert choosing.weights is not None, "heads choose together"
    for products in _products(kernels, choosing.queries, read, num_keys, TILE):
        products.relu_()
        total = products[:, 0] * choosing.weights[:, :1]
        for head in range(1, products.shape[1]):
            total += products[:, head] * choosing.weights[:, head : head + 1]
        yield total


def _products(
    kernels: Kernels, queries: Tensor, read: Callable[[Tensor], Tensor], num_keys: int, step: int
) -> Iterator[Tensor]:
    """Products of queries [N, Hi, Di] with a tile of `step` keys after the other, float32 [N, Hi, TILE], those behind
    the last key 0.
    """
    num_rows, num_heads, size = queries.shape
    rows = queries.float().reshape(-1, size)
    for first in range(0, num_keys, step):
        numbers = torch.arange(first, min(first + step, num_keys), device=queries.device)
        tile = rows.new_zeros((TILE, size))
        tile[: len(numbers)] = read(numbers)
        yield kernels.linear(rows, kernels.pack(tile), None).view(num_rows, num_heads, TILE)


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


def _attend_apart(
    backend: AttentionBackend,
    query: Tensor,
    kept: tuple[Tensor, Tensor | None],
    counts: tuple[int, ...],
    scale: float,
    value_size: int,
) -> Tensor:
    """Attention of queries [N, H, D], each to the first of K keys of its own, `counts` of them, of keys and values
    [N * K, Hkv, D] -> [N, H, value].
    """
    (keys, values), num_rows, device = kept, len(query), query.device
    num_keys = len(keys) // num_rows
    num_blocks = -(-num_keys // BLOCK)
    shape = backend.block_shape(*(keys.shape[1], BLOCK, keys.shape[2]), has_values=values is not None)
    cache = keys.new_zeros((num_rows * num_blocks, *shape))
    tables = torch.arange(num_rows * num_blocks, device=device).view(num_rows, num_blocks)
    offsets = torch.arange(num_keys, device=device)
    written = AttentionMetadata(
        query_starts=tuple(range(0, num_rows * num_keys + 1, num_keys)),
        context_lengths=(num_keys,) * num_rows,
        block_tables=tables,
        token_blocks=tables[:, offsets // BLOCK].flatten(),
        token_offsets=(offsets % BLOCK).repeat(num_rows),
    )
    backend.write(keys, values, cache, written)
    last = to_device(torch.tensor(counts), device) - 1
    step = AttentionMetadata(
        query_starts=tuple(range(num_rows + 1)),
        context_lengths=counts,
        block_tables=tables,
        token_blocks=tables[torch.arange(num_rows, device=device), last // BLOCK],
        token_offsets=last % BLOCK,
    )
    return backend.attend(query, cache, step, scale, 0, value_size=value_size)
