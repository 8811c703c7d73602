"""What encoders have that decoders have not: norms of the stream with what is added to it, types of tokens, a norm of
embeddings.

T: tokens of the step.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.attention.metadata import AttentionMetadata
from spmd_worker.layers.attention import Attention
from spmd_worker.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.experts import new_feed_forward
from spmd_worker.layers.norm import new_norm
from spmd_worker.layers.rotary import Angles
from spmd_worker.layers.weight_slice import WeightSlice, whole
from spmd_worker.model_config.layer_config import LayerConfig


class PostNormLayer(nn.Module):
    """Attention and feed-forward, each followed by a norm of the stream with what it gives (BERT,
    https://arxiv.org/abs/1810.04805). The stream is whole on every rank.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        assert layer.norms == (False, True, False, True), layer.norms
        assert (layer.is_parallel, layer.residual_multiplier) == (False, 1.0), layer
        self.self_attn = Attention(context, layer, hidden_size)
        self.mlp = new_feed_forward(context, layer, hidden_size)
        self.attention_output_norm = new_norm(context, hidden_size, layer.norm)
        self.mlp_output_norm = new_norm(context, hidden_size, layer.norm)
        self._group = context.tensor_group

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        is_fused: bool = True,
    ) -> None:
        """See `DecoderLayer.forward`: the stream, [T, hidden], becomes what it is behind this layer."""
        assert x is None, "layers of one model are of one kind"
        part = self._group.all_reduce(self.self_attn(residual, ropes, layer_cache, metadata, is_fused=is_fused))
        residual.copy_(self.attention_output_norm(residual.add_(part)))
        part = self._group.all_reduce(self.mlp(residual, is_fused=is_fused))
        residual.copy_(self.mlp_output_norm(residual.add_(part)))


class TokenTypeEmbedding(CheckpointLayer):
    """Types of tokens: int64 [T] -> [T, hidden_size]. Whole on every rank."""

    def __init__(self, context: LayerContext, num_types: int, hidden_size: int) -> None:
        super().__init__()
        self.num_types, self.hidden_size = num_types, hidden_size
        self.weight = context.parameter(num_types, hidden_size)

    def forward(self, token_types: Tensor) -> Tensor:
        """Types are below the number of them."""
        return F.embedding(token_types, self.weight)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield whole(f"{prefix}.weight", (self.num_types, self.hidden_size), f"{prefix}.weight")
