"""Choice of the keys that a token sees in a layer of attention, by runs of tokens and for each key-value head
(MiniMax-M3).

Every token has a key of the indexer; score of a run = the best product of the head's query with a key of it that the
token sees, in float32. The key is on every rank, queries where their key-value heads are.

T: tokens of the step; Hi, Di: heads of the indexer on this rank, and their size.
"""

from torch import Tensor, nn

from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries, KeptKeys
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, kv_head_range
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.run_indexer import StepRuns
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.cache_dtype import to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters


class HeadIndexer(nn.Module):
    """The projections of the indexer, its part of the cache, and what it chooses, `chosen`."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, num_kv_heads: int) -> None:
        super().__init__()
        group, indexer = context.tensor_group, layer.indexer
        assert indexer is not None, layer
        assert indexer.num_heads == layer.num_kv_heads, "each key-value head has a query of its own"
        start, stop = kv_head_range(layer.num_kv_heads, group.size, group.rank)
        self._size, self._kernels = indexer.head_size, context.kernels
        kept = KeptKeys(num_kv_heads, layer.head_size)
        self.chosen = ChosenKeys(context.attention, context.kernels.plain, indexer, kept)
        parts = (
            OutputPart("q_proj", indexer.num_heads * self._size, start * self._size, stop * self._size),
            OutputPart("k_proj", self._size, 0, self._size),
        )
        self.qk_proj = ColumnParallelLinear(context, hidden_size, parts, has_bias=False)
        self.q_norm, self.k_norm = (new_norm(context, self._size, layer.norm) for _ in range(2))

    def write(
        self,
        tokens: tuple[Tensor, Angles | None, StepRuns | None],
        index_cache: Tensor,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
    ) -> IndexQueries | None:
        """Write the keys of hidden states [T, hidden] and angles of a step -> its queries [T, Hi, Di], None if all
        tokens see all keys.
        """
        x, angles, _ = tokens
        projected = self.qk_proj(x, adapters).unflatten(1, (-1, self._size))
        keys = self._rotated(self.k_norm(projected[:, -1:]), angles)
        index_cache[metadata.token_blocks, metadata.token_offsets] = to_cache(keys.squeeze(1), index_cache.dtype)
        if not self.chosen.leaves_out(metadata):
            return None
        return IndexQueries(self._rotated(self.q_norm(projected[:, :-1]), angles))

    def _rotated(self, x: Tensor, angles: Angles | None) -> Tensor:
        return x if angles is None else angles.rotate(self._kernels, x)
