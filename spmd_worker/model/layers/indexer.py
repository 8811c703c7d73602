"""Choice of the keys that a token sees in a layer of latent attention (https://arxiv.org/abs/2512.02556).

Score of a key = sum over heads of weight * relu(query . key), in float32 and in the order of heads. Factors that are
the same for all keys are left out. FP8 and the rotation that prepares for it are left out too: they change no product
but by roundings. The projections are on every rank, so all ranks choose the same keys.

T: tokens of the step; Hi, Di: heads and head size of the indexer; H: heads of attention on this rank; C + R: numbers of
a latent key; C: of its value.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.head_growth import HeadGrowth
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import FullNorm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.layer_config import LatentConfig, NormConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters

_NORM = NormConfig("layer", eps=1e-6, has_bias=True)
"""The norm of an indexer's keys, and of its input."""


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
        num_inputs = hidden_size if indexer.norms_input else latent.query_rank
        self.wq_b = replicated_linear(context, "wq_b", num_inputs, indexer.num_heads * indexer.head_size)
        self.q_input_norm = FullNorm(context, hidden_size, _NORM) if indexer.norms_input else None
        self.softmax_scaling: HeadGrowth | None = None
        if latent.grows_by_head:
            self.softmax_scaling = HeadGrowth(context, indexer.num_heads, (0, indexer.num_heads))
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
        self._chosen.write(keys, index_cache, metadata)

    def choose(
        self,
        tokens: tuple[Tensor, Tensor, Angles | None, Tensor | None],
        index_cache: Tensor,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """The choice (`ChosenKeys.choose`) of this step's `tokens`: hidden states [T, hidden], normed latents of
        queries, angles and logarithms of lengths, float32 [T, 1], where queries grow; of some `rows`, int64, to which
        `metadata` belongs, or of all.
        """
        if not self._chosen.leaves_out(metadata):
            return []
        x, query_latents, angles, log_lengths = tokens
        inputs = query_latents if self.q_input_norm is None else self.q_input_norm(x)
        queries = self.wq_b(inputs, adapters).view(len(x), self._indexer.num_heads, -1)
        if self.softmax_scaling is not None:
            queries = queries * self.softmax_scaling(log_lengths)
        choosing = IndexQueries(self._rotated(queries, angles), self.weights_proj(x))
        return self._chosen.choose(choosing if rows is None else choosing.of_rows(rows), index_cache, metadata)

    def _rotated(self, x: Tensor, angles: Angles | None) -> Tensor:
        """[T, heads, Di], whose first numbers are rotated."""
        if angles is None:
            return x
        return replace(angles, is_interleaved=self._indexer.is_interleaved).rotate(self._kernels, x)
