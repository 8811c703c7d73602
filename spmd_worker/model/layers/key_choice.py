"""Parts of attention to keys that an indexer chooses: tokens that see all keys, and those that choose, some at a time.

A token that sees no more keys than are chosen attends to all of them, in the cache. For any other its chosen keys are
copied, in ascending order, into blocks of a call of the same attention kernels: attention reads no positions. So a
token's bits depend on its query, its keys and their scores alone. Scores are made of products with a tile of keys at a
time, at absolute positions and always of one size, by the product whose rows do not know each other.

T: tokens; S: keys of one sequence; Hi, Di: heads and head size of the indexer; H, D: heads and size of attention's
queries and keys; N: tokens of one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.model.layers.choice_bytes import BLOCK, TILE
from spmd_worker.model_config.layer_config import IndexerConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import from_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries [T, Hi, Di] of the model's dtype and weights of heads, float32 [T, Hi], of tokens that choose keys;
    without weights each head chooses for itself.
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


class KeyChoice(ABC):
    """Attention of one layer, some of whose tokens choose what they see."""

    def __init__(self, backend: AttentionBackend, kernels: Kernels, indexer: IndexerConfig, max_rows: int) -> None:
        """`kernels` multiply plain float32; `max_rows` tokens choose at one time."""
        self._backend, self._kernels, self._indexer, self._max_rows = backend, kernels, indexer, max_rows

    def leaves_out(self, metadata: AttentionMetadata) -> bool:
        """Whether any token of a step sees fewer keys than there are."""
        assert metadata.fixed is None, "steps that choose keys are not recorded"
        return max(metadata.context_lengths, default=0) > self._indexer.num_seen

    def choose(self, choosing: IndexQueries, index_cache: Tensor, metadata: AttentionMetadata) -> list[Tensor]:
        """The choice of those tokens that do not see all keys, N at a time; the step's keys are in the cache."""
        return [
            self._chosen(
                choosing.of_rows(slice(rows.start, rows.stop)),
                index_cache,
                metadata.block_tables[rows.sequence],
                rows.position,
            )
            for rows in self._divided(metadata)[1]
        ]

    @abstractmethod
    def _chosen(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, position: int) -> Tensor:
        """The choice, int32, of consecutive tokens from `position` on."""

    def _attend(
        self,
        query: Tensor,
        metadata: AttentionMetadata,
        value_size: int,
        chosen: list[Tensor],
        to_all: Callable[[Tensor, AttentionMetadata], Tensor],
        to_chosen: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    ) -> Tensor:
        """Queries [T, H, D] -> [T, H, value]: `to_all` of those tokens that see all keys, `to_chosen` of others' queries
        [N, H, D], block table, choice and first position.
        """
        if not self.leaves_out(metadata):
            return to_all(query, metadata)
        assert metadata.is_causal, "keys are chosen in causal attention"
        dense, others = self._divided(metadata)
        output = query.new_empty((*query.shape[:2], value_size))
        if dense:
            places = torch.cat([torch.arange(each.start, each.stop, device=query.device) for each in dense])
            output[places] = to_all(query[places], _step_of(dense, places, metadata))
        for rows, choice in zip(others, chosen, strict=True):
            taken = slice(rows.start, rows.stop)
            output[taken] = to_chosen(query[taken], metadata.block_tables[rows.sequence], choice, rows.position)
        return output

    def _divided(self, metadata: AttentionMetadata) -> tuple[list[_Rows], list[_Rows]]:
        """Tokens that see all keys, by sequence, and tokens that choose, by sequence and then in parts."""
        dense, others = [], []
        for sequence, num_keys in enumerate(metadata.context_lengths):
            start, stop = metadata.query_starts[sequence : sequence + 2]
            position = num_keys - (stop - start)
            first = start + min(max(self._indexer.num_seen - position, 0), stop - start)
            if first > start:
                dense.append(_Rows(sequence, start, first, position))
            for part in range(first, stop, self._max_rows):
                others.append(_Rows(sequence, part, min(part + self._max_rows, stop), position + part - start))
        return dense, others

    def _products(self, queries: Tensor, index_cache: Tensor, table: Tensor, num_keys: int) -> Iterator[Tensor]:
        """Products of queries [N, Hi, Di] with a tile of keys after the other, float32 [N, Hi, TILE], those behind the
        last key 0.
        """
        num_rows, num_heads, size = queries.shape
        rows = queries.float().reshape(-1, size)
        for first in range(0, num_keys, TILE):
            positions = torch.arange(first, min(first + TILE, num_keys), device=table.device)
            tile = rows.new_zeros((TILE, size))
            places = places_of(table, positions, index_cache.shape[1])
            tile[: len(positions)] = from_cache(index_cache[places], queries.dtype)
            yield self._kernels.linear(rows, self._kernels.pack(tile), None).view(num_rows, num_heads, TILE)


def places_of(table: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
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


def attend_apart(
    backend: AttentionBackend,
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    lengths: list[int],
    scale: float,
    value_size: int = 0,
) -> Tensor:
    """Attention of queries [N, H, D], each to the first `lengths` of K keys and values of its own, [N * K, 1, D]; None:
    values are the first `value_size` numbers of keys -> [N, H, value].
    """
    num_rows, device = len(query), query.device
    num_keys = len(keys) // num_rows
    num_blocks = -(-num_keys // BLOCK)
    shape = backend.block_shape(1, BLOCK, keys.shape[2], has_values=values is not None)
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
    last = torch.tensor(lengths, device=device) - 1
    step = AttentionMetadata(
        query_starts=tuple(range(num_rows + 1)),
        context_lengths=tuple(lengths),
        block_tables=tables,
        token_blocks=tables.gather(1, last.unsqueeze(1) // BLOCK).squeeze(1),
        token_offsets=last % BLOCK,
    )
    return backend.attend(query, cache, step, scale, 0, value_size=value_size)
