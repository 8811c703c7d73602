"""Choice of the keys that a token sees in a layer of attention, by runs of tokens (Qwen4).

Every token has a key of the indexer, which is cached as it is projected. The last token of a run has that of the run in
its place: the mean of its tokens' keys, normed, and rotated by the position of the first. Score of a run = sum over
heads of relu(query . key), in float32 and in the order of heads. The projections are on every rank, so all ranks choose
the same keys.

T: tokens of the step; E: those that end a run; Hi, Di: heads and head size of the indexer; H, D: heads and head size of
attention on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries, KeptKeys
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.rotary import Angles, RotaryEmbedding
from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.ops.attention.cache_dtype import from_cache, to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.host_copies import to_device


@dataclass(frozen=True, slots=True)
class StepRuns:
    """Runs that end in a step, int64 [E]: `tokens` are their last ones, `sequences` and `ends` these tokens' sequences
    and positions. `angles` of each rope are of the positions of their first tokens.
    """

    tokens: Tensor
    sequences: Tensor
    ends: Tensor
    angles: tuple[Angles, ...]


def step_runs(
    indexer: IndexerConfig,
    metadata: AttentionMetadata,
    rotaries: Sequence[RotaryEmbedding],
    rope_regimes: Tensor,
    dtype: torch.dtype,
    first_positions: Tensor | None,
) -> StepRuns:
    """The runs of a step. `first_positions`, int64 [3, T], turn the first token of each token's run, if tokens have
    three positions.
    """
    starts, lengths = np.array(metadata.query_starts), np.array(metadata.context_lengths)
    counts = np.diff(starts)
    positions = np.arange(starts[-1]) + (lengths - starts[1:]).repeat(counts)
    tokens = np.flatnonzero((positions + 1) % indexer.run_length == 0)
    of_ends = np.stack((tokens, np.arange(len(counts)).repeat(counts)[tokens], positions[tokens]))
    places, sequences, ends = to_device(torch.from_numpy(of_ends), rope_regimes.device)
    firsts = None if first_positions is None else first_positions[:, places].contiguous()
    of_tokens = (ends - (indexer.run_length - 1), rope_regimes[places], dtype, firsts)
    return StepRuns(places, sequences, ends, tuple([rotary.angles(*of_tokens) for rotary in rotaries]))


class RunIndexer(nn.Module):
    """The projection of the indexer, which is not quantised, its part of the cache, and attention to the keys that it
    chooses.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, num_kv_heads: int) -> None:
        super().__init__()
        assert layer.indexer is not None, layer
        self._indexer, self._kernels, self._rope = layer.indexer, context.kernels, layer.rope
        kept = KeptKeys(num_kv_heads, layer.head_size)
        self._chosen = ChosenKeys(context.attention, context.kernels.plain, layer.indexer, kept)
        size = layer.indexer.head_size
        num_outputs = (layer.indexer.num_heads + 1) * size
        self.index_qk_proj = replicated_linear(context.unquantised, "index_qk_proj", hidden_size, num_outputs)
        self.q_layernorm, self.k_layernorm = (new_norm(context, size, layer.norm) for _ in range(2))

    def parts_of(self, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        """`ChosenKeys.parts_of`."""
        return self._chosen.parts_of(layer_cache)

    def attend(
        self,
        tokens: tuple[Tensor, Angles | None, StepRuns],
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Hidden states [T, hidden], angles and runs of `tokens`, and queries [T, H, D], whose keys and values are in
        the first cache -> [T, H, D]. Writes the second cache, then reads.
        """
        (x, angles, runs), (cache, index_cache), indexer = tokens, caches, self._indexer
        queries, keys = self.index_qk_proj(x).split_with_sizes(
            [indexer.num_heads * indexer.head_size, indexer.head_size], dim=1
        )
        index_cache[metadata.token_blocks, metadata.token_offsets] = to_cache(keys, index_cache.dtype)
        if len(runs.tokens):
            self._write_runs(runs, index_cache, metadata, keys.dtype)
        choice: list[Tensor] = []
        if self._chosen.leaves_out(metadata):
            queries = self.q_layernorm(queries.reshape(len(x), indexer.num_heads, -1))
            queries = queries if angles is None else angles.rotate(self._kernels, queries)
            weights = torch.ones((len(x), indexer.num_heads), device=x.device)
            choice = self._chosen.choose(IndexQueries(queries, weights), index_cache, metadata)
        return self._chosen.attend(query, cache, metadata, scale, choice)

    def _write_runs(self, runs: StepRuns, index_cache: Tensor, metadata: AttentionMetadata, dtype: torch.dtype) -> None:
        length, block_size = self._indexer.run_length, index_cache.shape[1]
        total: Tensor | None = None
        for distance in range(length - 1, -1, -1):
            at = runs.ends - distance
            blocks = metadata.block_tables[runs.sequences, at // block_size].long()
            keys = from_cache(index_cache[blocks, at % block_size], dtype).float()
            total = keys if total is None else total + keys
        assert total is not None, "a run has tokens"
        means = self.k_layernorm((total / length).to(dtype))
        if self._rope is not None:
            means = runs.angles[self._rope].rotate(self._kernels, means.unsqueeze(1)).squeeze(1)
        places = metadata.token_blocks[runs.tokens], metadata.token_offsets[runs.tokens]
        index_cache[places] = to_cache(means, index_cache.dtype)
