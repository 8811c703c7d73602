"""Attention of a decoder layer to the rows of an encoder (https://arxiv.org/abs/1706.03762).

Keys and values are projections of the encoder's rows. They are written once to the row's blocks, at the encoder's
positions, and read from there by every token of the decoder.

E: encoder's rows of the step; D: decoder's tokens of the step; Hq, Hkv: query and key-value heads of this rank.
"""

from torch import Tensor, nn

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, kv_head_range
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ranks.topology import shard_range


class CrossAttention(nn.Module):
    """Projections of the decoder's tokens to queries and of the encoder's rows to keys and values, attention without a
    mask, output projection.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        group, size = context.tensor_group, layer.head_size
        start, stop = shard_range(layer.num_heads, group.size, group.rank)
        first, last = kv_head_range(layer.num_kv_heads, group.size, group.rank)
        of_keys = (layer.num_kv_heads * size, first * size, last * size)
        inputs, num_inputs = (start * size, stop * size), layer.num_heads * size
        self._head_size, self._scale, self._backend = size, layer.scale, context.attention
        self.q_proj = ColumnParallelLinear(
            context, hidden_size, (OutputPart("q_proj", num_inputs, *inputs),), layer.has_qkv_bias
        )
        parts = OutputPart("k_proj", *of_keys, layer.has_key_bias), OutputPart("v_proj", *of_keys)
        self.kv_proj = ColumnParallelLinear(context, hidden_size, parts, layer.has_qkv_bias)
        self.o_proj = RowParallelLinear(context, inputs, num_inputs, hidden_size, layer.has_output_bias)

    def write(self, rows: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write keys and values of the encoder's rows [E, hidden]; `metadata` is `CrossStep.written`."""
        heads = self.kv_proj(rows).view(len(rows), 2, -1, self._head_size)
        self._backend.write(heads[:, 0], heads[:, 1], layer_cache, metadata)

    def forward(self, x: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[D, hidden] -> this rank's part of [D, hidden]; `metadata` is `CrossStep.seen`."""
        query = self.q_proj(x).view(len(x), -1, self._head_size)
        attended = self._backend.attend(query, layer_cache, metadata, self._scale, 0)
        output: Tensor = self.o_proj(attended.view(len(x), -1))
        return output
