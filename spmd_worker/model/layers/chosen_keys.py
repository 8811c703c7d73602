"""Attention of each token to those latents of a cache that an indexer chooses for it (`key_choice.py`).

T: tokens; S: keys of one sequence; K: keys that are chosen; Hi, Di: heads and head size of the indexer; H, D: heads and
size of attention's queries and keys; N: tokens of one call.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model.layers.choice_bytes import BLOCK, rows_at_once
from spmd_worker.model.layers.key_choice import IndexQueries, KeyChoice, attend_apart, places_of
from spmd_worker.model_config.layer_config import LatentConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import Kernels


class ChosenKeys(KeyChoice):
    """Attention of one layer over its two caches: latents, in the backend's layout, and an indexer's keys. A choice has
    positions of keys, int32 [N, K] ascending.
    """

    def __init__(self, backend: AttentionBackend, kernels: Kernels, latent: LatentConfig) -> None:
        """`kernels` multiply plain float32."""
        assert latent.indexer is not None, latent
        super().__init__(backend, kernels, latent.indexer, rows_at_once(latent.indexer, latent.key_size))
        self._latent = latent

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: latents [blocks, *block_shape], and [blocks, block size, Di]."""
        key_size, size = self._latent.key_size, self._indexer.head_size
        block_size = layer_cache.shape[1] // (key_size + size)
        latents, keys = layer_cache.split_with_sizes([block_size * key_size, block_size * size], dim=1)
        shape = self._backend.block_shape(1, block_size, key_size, has_values=False)
        return latents.view(len(latents), *shape), keys.view(len(keys), block_size, size)

    def attend(
        self, query: Tensor, latents: Tensor, metadata: AttentionMetadata, scale: float, chosen: list[Tensor]
    ) -> Tensor:
        """Queries [T, H, D], `chosen` by `choose` for the same step, which is in the cache -> [T, H, value]."""
        value_size, scratch = self._latent.rank, self._backend.of_sequences(self._latent.key_size, BLOCK)
        block_size = latents[0].numel() // self._latent.key_size

        def to_all(query: Tensor, step: AttentionMetadata) -> Tensor:
            return self._backend.attend(query, latents, step, scale, 0, value_size=value_size)

        def to_chosen(query: Tensor, table: Tensor, positions: Tensor, first: int) -> Tensor:
            del first
            places = places_of(table, positions.flatten().long(), block_size)
            keys = self._backend.read_keys(latents, *places, query.dtype).unsqueeze(1)
            lengths = [positions.shape[1]] * len(query)
            return attend_apart(scratch, query, keys, None, lengths, scale, value_size)

        return self._attend(query, metadata, value_size, chosen, to_all, to_chosen)

    def _chosen(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, position: int) -> Tensor:
        ends = torch.arange(position, position + len(choosing.queries), device=table.device).unsqueeze(1)
        scores = torch.cat(list(self._scores(choosing, index_cache, table, position + len(ends))), dim=1)
        hidden = torch.arange(scores.shape[1], device=table.device) > ends
        # Stable: of equal scores the lower position is first.
        order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        return order[:, : self._indexer.num_chosen].sort(dim=1).values.int()

    def _scores(self, choosing: IndexQueries, index_cache: Tensor, table: Tensor, num_keys: int) -> Iterator[Tensor]:
        """Scores of a tile of keys after the other, float32 [N, TILE], those behind the last key 0."""
        weights = choosing.weights
        assert weights is not None, "heads are weighed"
        for products in self._products(choosing.queries, index_cache, table, num_keys):
            products.relu_()
            total = products[:, 0] * weights[:, :1]
            for head in range(1, products.shape[1]):
                total += products[:, head] * weights[:, head : head + 1]
            yield total
