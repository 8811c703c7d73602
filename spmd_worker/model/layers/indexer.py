"""Choice of the keys that a token sees in a layer of latent attention (https://arxiv.org/abs/2512.02556), or of blocks of
keys in a layer of other attention.

In latent attention: score of a key = sum over heads of weight * relu(query . key), in float32 and in the order of heads. Factors that are
the same for all keys are left out. FP8 and the rotation that prepares for it are left out too: they change no product
but by roundings. The projections are on every rank, so all ranks choose the same keys. In other attention a rank has the
queries of its key-value heads, which choose for themselves.

T: tokens of the step; Hi, Di: heads and head size of the indexer; H: heads of attention on this rank; C + R: numbers of
a latent key; C: of its value.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.chosen_blocks import ChosenBlocks
from spmd_worker.model.layers.chosen_keys import ChosenKeys
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.key_choice import IndexQueries
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, kv_head_range, replicated_linear
from spmd_worker.model.layers.norm import FullNorm, new_norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.layer_config import LatentConfig, LayerConfig, NormConfig
from spmd_worker.ops.attention.cache_dtype import to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.adapters import StepAdapters

_NORM = NormConfig("layer", eps=1e-6, has_bias=True)
"""The norm of an indexer's keys."""


class HeadWeights(PackedLayer):
    """Weights of the indexer's heads, in float32: [T, hidden] -> [T, Hi]. Replicated."""

    is_float32 = True

    def __init__(self, context: LayerContext, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self._kernels = context.kernels.plain
        self.weight = replace(context, dtype=torch.float32).parameter(num_heads, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x.float(), self.weight, None)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield replicated(f"{prefix}.weight", self.shape_of("weight"), f"{prefix}.weight")


class Indexer(nn.Module):
    """Projections of the indexer, its part of the cache, and the choice."""

    def __init__(self, context: LayerContext, latent: LatentConfig, hidden_size: int, chosen: ChosenKeys) -> None:
        super().__init__()
        assert latent.indexer is not None, latent
        indexer = latent.indexer
        self._indexer, self._kernels, self._chosen = indexer, context.kernels, chosen
        self.wq_b = replicated_linear(context, "wq_b", latent.query_rank, indexer.num_heads * indexer.head_size)
        self.wk = replicated_linear(context, "wk", hidden_size, indexer.head_size)
        self.k_norm = FullNorm(context, indexer.head_size, _NORM)
        self.weights_proj = HeadWeights(context, indexer.num_heads, hidden_size)

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: latents in the backend's layout, and [blocks, block size, Di]."""
        return self._chosen.parts_of(layer_cache)

    def write(
        self,
        x: Tensor,
        angles: Angles | None,
        index_cache: Tensor,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
    ) -> None:
        """Write the keys of this step's hidden states [T, hidden]."""
        keys = self._rotated(self.k_norm(self.wk(x, adapters)).unsqueeze(1), angles).squeeze(1)
        index_cache[metadata.token_blocks, metadata.token_offsets] = to_cache(keys, index_cache.dtype)

    def choose(
        self,
        tokens: tuple[Tensor, Tensor, Angles | None],
        index_cache: Tensor,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """The choice (`ChosenKeys.choose`) of this step's `tokens`: hidden states [T, hidden], normed latents of
        queries and angles; of some `rows`, int64, to which `metadata` belongs, or of all.
        """
        if not self._chosen.leaves_out(metadata):
            return []
        x, query_latents, angles = tokens
        queries = self.wq_b(query_latents, adapters).view(len(x), self._indexer.num_heads, -1)
        choosing = IndexQueries(self._rotated(queries, angles), self.weights_proj(x))
        return self._chosen.choose(choosing if rows is None else choosing.of_rows(rows), index_cache, metadata)

    def _rotated(self, x: Tensor, angles: Angles | None) -> Tensor:
        """[T, heads, Di], whose first numbers are rotated."""
        if angles is None:
            return x
        return replace(angles, is_interleaved=self._indexer.is_interleaved).rotate(self._kernels, x)


class BlockIndexer(nn.Module):
    """Projections of an indexer of blocks, its part of the cache, and attention to the choice. The key is on every rank,
    queries where their key-value heads are.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        group, indexer = context.tensor_group, layer.indexer
        assert indexer is not None, layer
        assert indexer.num_heads == layer.num_kv_heads, "each key-value head has a query of its own"
        start, stop = kv_head_range(layer.num_kv_heads, group.size, group.rank)
        self._size, self._kernels = indexer.head_size, context.kernels
        self._chosen = ChosenBlocks(context.attention, context.kernels.plain, layer, stop - start)
        parts = (
            OutputPart("q_proj", *(each * self._size for each in (indexer.num_heads, start, stop))),
            OutputPart("k_proj", self._size, 0, self._size),
        )
        self.qk_proj = ColumnParallelLinear(context, hidden_size, parts, has_bias=False)
        self.q_norm, self.k_norm = (new_norm(context, self._size, layer.norm) for _ in range(2))

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a cache [blocks, block elements]: keys and values, and the indexer's keys."""
        return self._chosen.parts_of(layer_cache)

    def write(
        self,
        x: Tensor,
        angles: Angles | None,
        index_cache: Tensor,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Write the keys of this step's hidden states [T, hidden] -> queries [T, Hi, Di]."""
        projected = self.qk_proj(x, adapters).unflatten(1, (-1, self._size))
        queries, keys = self.q_norm(projected[:, :-1]), self.k_norm(projected[:, -1:])
        if angles is not None:
            queries, keys = (angles.rotate(self._kernels, each) for each in (queries, keys))
        index_cache[metadata.token_blocks, metadata.token_offsets] = to_cache(keys.squeeze(1), index_cache.dtype)
        return queries

    def attend(
        self,
        query: Tensor,
        choosing: Tensor,
        caches: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        wanted: WantedTokens | None,
    ) -> Tensor:
        """Queries [T, H, D], of the `wanted` tokens if there are any such, to which `metadata` belongs, and those that
        choose, of all tokens [T, Hi, Di] -> [T, H, D].
        """
        chosen: list[Tensor] = []
        if self._chosen.leaves_out(metadata):
            queries = IndexQueries(choosing if wanted is None else choosing[wanted.rows])
            chosen = self._chosen.choose(queries, caches[1], metadata)
        return self._chosen.attend(query, caches[0], metadata, scale, chosen)
