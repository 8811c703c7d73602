"""The decoder stack that every family is: embedding, layers, norm, head.

What families do differently is in `model_shape.FAMILIES`, read into `ModelShape`; the modules are named as Hugging Face
names theirs, so checkpoint names and module names are the same words. Knows architecture and nothing else: no
scheduling, no files, no sampling.

T: tokens of the step; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from spmd_worker.attention.metadata import AttentionMetadata
from spmd_worker.layers.attention import Attention
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.layers.feed_forward import FeedForward
from spmd_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from spmd_worker.layers.norm import RMSNorm
from spmd_worker.layers.rotary import RotaryEmbedding
from spmd_worker.layers.weight_slice import PaddingSlice, WeightSlice
from spmd_worker.model_shape import ModelShape


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, on a residual stream."""

    def __init__(self, context: LayerContext, shape: ModelShape, layer_index: int) -> None:
        super().__init__()
        self.self_attn = Attention(context, shape, layer_index)
        self.mlp = FeedForward(context, shape)
        self.input_layernorm = RMSNorm(context, shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(context, shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """The last layer's output and the residual stream it is still to be added to, both [T, hidden]."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, cos, sin, layer_cache, metadata)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class DecoderStack(nn.Module):
    """Token ids -> hidden states."""

    def __init__(self, context: LayerContext, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = VocabularyParallelEmbedding(context, shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(context, shape, index) for index in range(shape.num_layers))
        self.norm = RMSNorm(context, shape.hidden_size, shape.rms_norm_eps)
        self._rotary = RotaryEmbedding(shape.rope, shape.head_size, shape.max_position_embeddings, context.device)
        self._dtype = context.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """int64 [T] ids, positions and lengths of the rows' prompts; `cache` [layers, blocks, ...] -> [T, hidden]."""
        cos, sin = self._rotary.angles(positions, prompt_lengths, self._dtype)
        x, residual = self.embed_tokens(token_ids), None
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, residual = layer(x, residual, cos, sin, layer_cache, metadata)
        assert residual is not None, "a decoder has layers"
        return self.norm.add_and_norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """The whole model of one tensor-parallel rank."""

    def __init__(self, context: LayerContext, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = DecoderStack(context, shape)
        tied_to = self.model.embed_tokens if shape.has_tied_embeddings else None
        self.lm_head = VocabularyParallelHead(context, shape.vocab_size, shape.hidden_size, tied_to)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `DecoderStack.forward`."""
        hidden: Tensor = self.model(token_ids, positions, prompt_lengths, cache, metadata)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> float32 [R, Vs]: this rank's share of the logits."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def weight_slices(self) -> list[WeightSlice]:
        """Which rectangles of which checkpoint tensors this rank holds, and where."""
        return list(_from_layers(self, "weight_slices"))

    def padding_slices(self) -> list[PaddingSlice]:
        """Which parts of parameters no checkpoint fills."""
        return list(_from_layers(self, "padding_slices"))

    def pack_weights(self) -> None:
        """Once the weights are there: every layer that multiplies lets its kernels pack them."""
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabularyParallelHead):
                module.pack_weights()

    def is_ignorable(self, checkpoint_name: str) -> bool:
        """Checkpoint tensors that are derived here: rotary frequencies, and the head when it is the embedding."""
        is_tied_head = self.shape.has_tied_embeddings and checkpoint_name == "lm_head.weight"
        return is_tied_head or checkpoint_name.endswith("rotary_emb.inv_freq")


def _from_layers(model: nn.Module, method: str) -> Iterator[Any]:
    """What each layer that has its own sharding rule says of itself."""
    for name, module in model.named_modules():
        if module is not model and hasattr(module, method):
            yield from getattr(module, method)(name)
