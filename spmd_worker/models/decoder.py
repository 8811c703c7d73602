"""The decoder stack that every family is: embedding, layers, norm, head.

What families do differently is in `model_shape.FAMILIES`, read into `ModelShape`; the modules are named as Hugging Face
names theirs, so checkpoint names and module names are the same words. Knows architecture and nothing else: no
scheduling, no files, no sampling.

T: tokens of the step; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
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
from spmd_worker.parallel.layout import Stage

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


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
    """Token ids -> hidden states, or a stage of the way there. Layers count from 0 in each stage."""

    def __init__(self, context: LayerContext, shape: ModelShape, stage: Stage) -> None:
        super().__init__()
        if stage.is_first:
            self.embed_tokens = VocabularyParallelEmbedding(context, shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(context, shape, index) for index in range(stage.start, stage.stop))
        if stage.is_last:
            self.norm = RMSNorm(context, shape.hidden_size, shape.rms_norm_eps)
        self._stage = stage
        self._rotary = RotaryEmbedding(shape.rope, shape.head_size, shape.max_position_embeddings, context.device)
        self._dtype = context.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
    ) -> Tensor:
        """int64 [T] ids, positions and lengths of the rows' prompts; `cache` [layers, blocks, ...] -> [T, hidden].

        `incoming` is what the stage before gave, and every stage but the last gives to the next: [2, T, hidden], the
        last layer's output and the residual stream it is still to be added to.
        """
        cos, sin = self._rotary.angles(positions, prompt_lengths, self._dtype)
        if self._stage.is_first:
            x, residual = self.embed_tokens(token_ids), None
        else:
            assert incoming is not None, "a stage after the first is given hidden states"
            x, residual = incoming[0], incoming[1]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, residual = layer(x, residual, cos, sin, layer_cache, metadata)
        assert residual is not None, "a decoder has layers"
        if not self._stage.is_last:
            return torch.stack((x, residual))
        return self.norm.add_and_norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """The model, or a stage of it, of one tensor-parallel rank."""

    def __init__(self, context: LayerContext, shape: ModelShape, stage: Stage) -> None:
        super().__init__()
        self.shape, self.stage = shape, stage
        self.model = DecoderStack(context, shape, stage)
        if stage.is_last:
            # A tied head in a later stage than the embedding has a copy of its own.
            tied_to = self.model.embed_tokens if shape.has_tied_embeddings and stage.is_first else None
            self.lm_head = VocabularyParallelHead(context, shape.vocab_size, shape.hidden_size, tied_to)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
    ) -> Tensor:
        """See `DecoderStack.forward`."""
        hidden: Tensor = self.model(token_ids, positions, prompt_lengths, cache, metadata, incoming)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, Vs] of the same dtype: this rank's share of the logits."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def weight_slices(self) -> list[WeightSlice]:
        """Which rectangles of which checkpoint tensors this rank holds, and where."""
        slices: Iterator[WeightSlice] = _from_layers(self, "weight_slices")
        return [replace(piece, checkpoint_name=self._checkpoint_name(piece.checkpoint_name)) for piece in slices]

    def padding_slices(self) -> list[PaddingSlice]:
        """Which parts of parameters no checkpoint fills."""
        return list(_from_layers(self, "padding_slices"))

    def pack_weights(self) -> None:
        """Once the weights are there: every layer that multiplies lets its kernels pack them."""
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabularyParallelHead):
                module.pack_weights()

    def is_ignorable(self, checkpoint_name: str) -> bool:
        """Checkpoint tensors that are derived here (rotary frequencies, and the head when it is the embedding), and
        those of other stages.
        """
        is_tied_head = self.shape.has_tied_embeddings and checkpoint_name == "lm_head.weight"
        return is_tied_head or checkpoint_name.endswith("rotary_emb.inv_freq") or self._is_elsewhere(checkpoint_name)

    def _is_elsewhere(self, checkpoint_name: str) -> bool:
        layer = _LAYER.match(checkpoint_name)
        if layer is not None:
            index = int(layer[1])
            return index < self.shape.num_layers and not self.stage.start <= index < self.stage.stop
        if checkpoint_name == "model.embed_tokens.weight":
            return not self.stage.is_first
        return not self.stage.is_last and checkpoint_name in ("model.norm.weight", "lm_head.weight")

    def _checkpoint_name(self, name: str) -> str:
        """A module's parameter as the checkpoint calls it: layers count through all stages there."""
        layer = _LAYER.match(name)
        if layer is not None:
            return f"model.layers.{int(layer[1]) + self.stage.start}.{name[layer.end() :]}"
        is_tied_head = self.shape.has_tied_embeddings and name == "lm_head.weight"
        return "model.embed_tokens.weight" if is_tied_head else name


def _from_layers(model: nn.Module, method: str) -> Iterator[Any]:
    """What each layer that has its own sharding rule says of itself."""
    for name, module in model.named_modules():
        if module is not model and hasattr(module, method):
            yield from getattr(module, method)(name)
