"""Attention of each token to those blocks of keys that an indexer chooses for each of its key-value heads
(`key_choice.py`): blocks of `IndexerConfig.block_size` positions, which are other ones than the cache's.

Score of a block = the best product of the head's query with a key of the block that the token sees, in float32. The
token's own block, which may be incomplete, is the last of the chosen ones.

T: tokens; S: keys of one sequence; B: blocks that are chosen; Hq, Hkv: query and key-value heads of this rank; Di: head
size of the indexer, which has Hkv heads; D: head size; N: tokens of one call.
"""

import torch
from torch import Tensor

from spmd_worker.model.layers.choice_bytes import BLOCK, TILE, key_elements, rows_at_once
from spmd_worker.model.layers.key_choice import IndexQueries, KeyChoice, attend_apart, places_of
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import Kernels


class ChosenBlocks(KeyChoice):
    """Attention of one layer over its two caches: keys and values, in the backend's layout, and an indexer's keys. A
    choice has numbers of blocks, int32 [N, Hkv, B] ascending.
    """

    def __init__(self, backend: AttentionBackend, kernels: Kernels, layer: LayerConfig, num_kv_heads: int) -> None:
        """`kernels` multiply plain float32."""
        assert layer.indexer is not None, layer
        super().__init__(backend, kernels, layer.indexer, rows_at_once(layer.indexer, key_elements(layer)))
        self._num_kv_heads, self._head_size = num_kv_heads, layer.head_size

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: keys and values, and [blocks, block size, Di]."""
        num_numbers, size = 2 * self._num_kv_heads * self._head_size, self._indexer.head_size
        block_size = layer_cache.shape[1] // (num_numbers + size)
        own, keys = layer_cache.split_with_sizes([block_size * num_numbers, block_size * size], dim=1)
        shape = self._backend.block_shape(self._num_kv_heads, block_size, self._head_size)
        return own.view(len(own), *shape), keys.view(len(keys), block_size, size)

    def attend(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, chosen: list[Tensor]
    ) -> Tensor:
        """Queries [T, Hq, D], `chosen` by `choose` for the same step, which is in the cache -> [T, Hq, D]."""
        scratch = self._backend.of_sequences(self._head_size, BLOCK)

        def to_all(query: Tensor, step: AttentionMetadata) -> Tensor:
            return self._backend.attend(query, cache, step, scale, 0)

        def to_chosen(query: Tensor, table: Tensor, blocks: Tensor, first: int) -> Tensor:
            return self._attend_to_blocks(scratch, query, cache, table, blocks, first, scale)

        return self._attend(query, metadata, self._head_size, chosen, to_all, to_chosen)

    def _attend_to_blocks(
        self,
        scratch: AttentionBackend,
        query: Tensor,
        cache: Tensor,
        table: Tensor,
        blocks: Tensor,
        first: int,
        scale: float,
    ) -> Tensor:
        """Queries [N, Hq, D] of tokens from position `first` on, `blocks` [N, Hkv, B] -> [N, Hq, D]."""
        num_rows, num_kv_heads, _ = blocks.shape
        ends = torch.arange(first, first + num_rows, device=query.device).view(-1, 1, 1)
        in_block = torch.arange(self._indexer.block_size, device=query.device)
        positions = (blocks.long().unsqueeze(-1) * self._indexer.block_size + in_block).flatten(2)
        lengths = (positions <= ends).sum(-1).flatten().tolist()
        # Keys behind the token are copies of its own, which nothing sees.
        positions = positions.minimum(ends)
        heads = torch.arange(num_kv_heads, device=query.device).view(1, -1, 1).expand_as(positions).flatten()
        block_size = cache[0].numel() // (2 * num_kv_heads * self._head_size)
        places = places_of(table, positions.flatten(), block_size)
        found = self._backend.read_heads(cache, heads, places, self._head_size, query.dtype)
        keys, values = (each.unsqueeze(1) for each in found)
        queries = query.reshape(num_rows * num_kv_heads, -1, self._head_size)
        return attend_apart(scratch, queries, keys, values, lengths, scale).reshape(query.shape)

    def _chosen(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, position: int) -> Tensor:
        queries, size = choosing.queries, self._indexer.block_size
        ends = torch.arange(position, position + len(queries), device=table.device).view(-1, 1)
        num_keys = position + len(queries)
        num_blocks = -(-num_keys // size)
        scores = queries.new_full((*queries.shape[:2], num_blocks), -torch.inf, dtype=torch.float32)
        for tile, products in enumerate(self._products(queries, index_cache, table, num_keys)):
            keys = torch.arange(tile * TILE, (tile + 1) * TILE, device=table.device)
            products = products.masked_fill_((keys > ends).unsqueeze(1), -torch.inf)
            blocks = (keys // size).clamp(max=num_blocks - 1).expand_as(products)
            scores.scatter_reduce_(2, blocks, products, "amax")
        numbers, own = torch.arange(num_blocks, device=table.device), ends // size
        is_local = (numbers <= own) & (numbers > own - self._indexer.num_local)
        scores = scores.masked_fill(is_local.unsqueeze(1), torch.inf)
        # Stable: of equal scores the lower number is first.
        order = scores.sort(dim=2, descending=True, stable=True).indices[..., : self._indexer.num_chosen]
        return order.sort(dim=2).values.int()
