"""The decoder stack that every family is: embedding, layers, norm, head.

What families do differently is in `model_shape.FAMILIES`, read into `ModelConfig`; the modules are named as Hugging
Face names theirs, so checkpoint names and module names are the same words. Knows architecture and nothing else: no
scheduling, no files, no sampling.

T: tokens of the step; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.attention.backend import JoinedLayers
from spmd_worker.attention.metadata import AttentionMetadata
from spmd_worker.distributed.topology import Stage
from spmd_worker.kernels.api import LayerSizes, LayerWeights
from spmd_worker.layers.attention import Attention
from spmd_worker.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.layers.feed_forward import FeedForward
from spmd_worker.layers.norm import RMSNorm, add_whole
from spmd_worker.layers.rotary import RotaryEmbedding
from spmd_worker.layers.weight_slice import PaddingSlice, WeightSlice
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.models.checkpoint_view import CheckpointView
from spmd_worker.models.held_weights import HeldWeight, check_form, check_tensor, held_weights
from spmd_worker.models.weight_update import WeightUpdate

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, on a residual stream."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = Attention(context, model_config, layer_index)
        self.mlp = FeedForward(context, model_config)
        self.input_layernorm = RMSNorm(context, model_config.hidden_size, model_config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(context, model_config.hidden_size, model_config.rms_norm_eps)

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        is_fused: bool = True,
    ) -> Tensor:
        """The last layer's output, as this rank's part, or None before the first layer of a stage, and the residual
        stream, to which it is added in place -> this layer's output, likewise. All [T, hidden].
        """
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, cos, sin, layer_cache, metadata, is_fused=is_fused)
        x = self.post_attention_layernorm.add_and_norm(x, residual)
        output: Tensor = self.mlp(x, is_fused=is_fused)
        return output

    def weights(self) -> LayerWeights | None:
        """For `AttentionBackend.join_layers`; None where there is more to a layer than those."""
        attention, feed_forward = self.self_attn, self.mlp
        if attention.q_norm is not None:
            return None
        return LayerWeights(
            input_norm=self.input_layernorm.weight,
            qkv=attention.qkv_proj.weight,
            qkv_bias=attention.qkv_proj.bias,
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.own_bias,
            norm=self.post_attention_layernorm.weight,
            gates=feed_forward.gate_up_proj.weight,
            gates_bias=feed_forward.gate_up_proj.bias,
            down=feed_forward.down_proj.weight,
            down_bias=feed_forward.down_proj.own_bias,
            window=attention.window,
        )

    def sizes(self) -> LayerSizes:
        """As this rank has them."""
        attention, norm = self.self_attn, self.input_layernorm
        return LayerSizes(
            hidden_size=norm.size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            intermediate_size=self.mlp.intermediate_size,
            eps=norm.eps,
            scale=attention.scale,
        )


class DecoderStack(nn.Module):
    """Token ids -> hidden states, or a stage of the way there. Layers count from 0 in each stage."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, stage: Stage) -> None:
        super().__init__()
        if stage.is_first:
            self.embed_tokens = VocabularyParallelEmbedding(context, model_config.vocab_size, model_config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(context, model_config, index) for index in range(stage.start, stage.stop)
        )
        if stage.is_last:
            self.norm = RMSNorm(context, model_config.hidden_size, model_config.rms_norm_eps)
        self._stage = stage
        self._rotary = RotaryEmbedding(
            model_config.rope, model_config.head_size, model_config.max_position_embeddings, context.device
        )
        self.dtype, self._group, self._attention = context.dtype, context.tensor_group, context.attention
        self.joined_layers: JoinedLayers | None = None
        """All layers at once, where that can be; None: one by one."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
        *,
        is_fused: bool = True,
    ) -> Tensor:
        """int64 [T] ids, positions and lengths of the rows' prompts; `cache` [layers, blocks, ...] -> [T, hidden].

        `incoming` is what the stage before gave, and every stage but the last gives to the next: the residual stream
        [T, hidden]. It becomes this stage's own.

        If not `is_fused`, every GEMM is written down by itself and what follows it is a call of its own, with the same
        bits: for a step in which something is added to some of them (an adapter). It is all layers' in one call else,
        or attention and gates with what is before them.
        """
        cos, sin = self._rotary.angles(positions, prompt_lengths, self.dtype)
        residual = self.embed_tokens(token_ids) if self._stage.is_first else incoming
        assert residual is not None, "a stage after the first is given the residual stream"
        x = None
        assert len(self.layers) == len(cache), (len(self.layers), cache.shape)
        if is_fused and self.joined_layers is not None:
            x = self.joined_layers.run(residual, (cos, sin), cache, metadata)
        else:
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                x = layer(x, residual, cos, sin, layer_cache, metadata, is_fused=is_fused)
        assert x is not None, "a stage has layers"
        if not self._stage.is_last:
            return add_whole(self._group, x, residual)
        hidden = self.norm.add_and_norm(x, residual)
        # Not memory of the group, which the next step's norms write to.
        return hidden if self._group.fast is None else hidden.clone()

    def join_layers(self) -> None:
        """Once the weights are packed: from now on they stay where they are."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        weights = [each for layer in layers if (each := layer.weights()) is not None]
        self.joined_layers = None
        if weights and len(weights) == len(self.layers):
            self.joined_layers = self._attention.join_layers(weights, layers[0].sizes(), self._group)


class DecoderForCausalLM(nn.Module):
    """The model, or a stage of it, of one tensor-parallel rank."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, stage: Stage) -> None:
        super().__init__()
        self.model_config, self.stage = model_config, stage
        self.weight_update = WeightUpdate()
        self.model = DecoderStack(context, model_config, stage)
        if stage.is_last:
            # A tied head in a later stage than the embedding has a copy of its own.
            tied_to = self.model.embed_tokens if model_config.has_tied_embeddings and stage.is_first else None
            self.lm_head = VocabularyParallelHead(context, model_config.vocab_size, model_config.hidden_size, tied_to)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        prompt_lengths: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
        *,
        is_fused: bool = True,
    ) -> Tensor:
        """See `DecoderStack.forward`."""
        hidden: Tensor = self.model(token_ids, positions, prompt_lengths, cache, metadata, incoming, is_fused=is_fused)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, Vs] of the same dtype: this rank's share of the logits."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def argmax_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden] -> of each row the largest of this rank's logits, float32 [R], and its column, int64 [R]."""
        return self.lm_head.largest(hidden)

    def weight_slices(self) -> list[WeightSlice]:
        """Which rectangles of which checkpoint tensors this rank holds, and where."""
        return [
            replace(piece, checkpoint_name=self._checkpoint_name(piece.checkpoint_name))
            for name, layer in self._checkpoint_layers().items()
            for piece in layer.weight_slices(name)
        ]

    def padding_slices(self) -> list[PaddingSlice]:
        """Which parts of parameters no checkpoint fills."""
        return [piece for name, layer in self._checkpoint_layers().items() for piece in layer.padding_slices(name)]

    def pack_weights(self) -> None:
        """Once the weights are there: every layer that multiplies lets its kernels pack them."""
        for module in self.modules():
            if isinstance(module, PackedLayer):
                module.pack_weights()
        self.model.join_layers()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Make whole checkpoint tensors this rank's weights: any of them, in any order, any number of times.

        One after the other, in place, of any floating-point dtype, from any device; while one is written, there is one
        copy of this rank's slice of it (where oneDNN packs, two of what it is packed with). No collective inside; every
        rank is given the same tensors. The first opens `weight_update`, which has to be committed before a step runs.
        Returns the names of which this rank holds something; those of other stages, and a tied head's, are passed over.

        Raises RuntimeError while requests are being answered, and ValueError, the same on every rank, for a name that
        the model does not have and a tensor that is misshapen, sharded, without data or not finite: that tensor is not
        written, and of a collection, such as a list, no tensor is when a name or a shape is wrong.
        """
        if isinstance(tensors, Collection):
            for name, tensor in tensors:
                if not self._is_derived(name):
                    check_form(name, tensor, self._shape_of(name))
        loaded = set()
        for name, tensor in tensors:
            if self._is_derived(name):
                continue
            check_tensor(name, tensor, self._shape_of(name), self.model.dtype)
            self.weight_update.begin()
            if name in self._held:
                self._held[name].load(tensor)
                loaded.add(name)
            self.weight_update.add(name, tensor)
        return loaded

    @cached_property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every checkpoint tensor of the model, those of other stages too: shapes by name."""
        prefix = f"model.layers.{self.stage.start}."
        own = {piece.checkpoint_name: piece.checkpoint_shape for piece in self.weight_slices()}
        layer = {name.removeprefix(prefix): shape for name, shape in own.items() if name.startswith(prefix)}
        table = (self.model_config.vocab_size, self.model_config.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for index in range(self.model_config.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.model_config.hidden_size,)
        if not self.model_config.has_tied_embeddings:
            shapes["lm_head.weight"] = table
        assert own.items() <= shapes.items(), own.keys() - shapes.keys()
        return shapes

    @contextmanager
    def as_checkpoint(self) -> Iterator[CheckpointView]:
        """This rank's weights under their checkpoint names, to look at and to change. What was changed counts at the
        end, also where that is an exception: some weights are changed at once, and a head must follow its embedding.
        """
        names = {name: name for name in self._held}
        embedding = "model.embed_tokens.weight"
        if self.model_config.has_tied_embeddings and self.stage.is_last:
            names["lm_head.weight"] = embedding
        view = CheckpointView(self._held, names, self.load_weights, model_config=self.model_config, stage=self.stage)
        try:
            yield view
        finally:
            view.write_back()

    @cached_property
    def _held(self) -> dict[str, HeldWeight]:
        return held_weights(self.weight_slices(), self._checkpoint_layers())

    def is_ignorable(self, checkpoint_name: str) -> bool:
        """Checkpoint tensors that are derived here (rotary frequencies, and the head when it is the embedding), and
        those of other stages.
        """
        return self._is_derived(checkpoint_name) or self._is_elsewhere(checkpoint_name)

    def _is_derived(self, checkpoint_name: str) -> bool:
        is_tied_head = self.model_config.has_tied_embeddings and checkpoint_name == "lm_head.weight"
        return is_tied_head or checkpoint_name.endswith("rotary_emb.inv_freq")

    def _shape_of(self, checkpoint_name: str) -> tuple[int, ...]:
        if checkpoint_name not in self.checkpoint_shapes:
            raise ValueError(f"{checkpoint_name}: the model has no such weight: give the names that its checkpoint has")
        return self.checkpoint_shapes[checkpoint_name]

    def _checkpoint_layers(self) -> dict[str, CheckpointLayer]:
        """Layers that have their own sharding rule, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, CheckpointLayer)}

    def _is_elsewhere(self, checkpoint_name: str) -> bool:
        layer = _LAYER.match(checkpoint_name)
        if layer is not None:
            index = int(layer[1])
            return index < self.model_config.num_layers and not self.stage.start <= index < self.stage.stop
        if checkpoint_name == "model.embed_tokens.weight":
            return not self.stage.is_first
        return not self.stage.is_last and checkpoint_name in ("model.norm.weight", "lm_head.weight")

    def _checkpoint_name(self, name: str) -> str:
        """A module's parameter as the checkpoint calls it: layers count through all stages there."""
        layer = _LAYER.match(name)
        if layer is not None:
            return f"model.layers.{int(layer[1]) + self.stage.start}.{name[layer.end() :]}"
        is_tied_head = self.model_config.has_tied_embeddings and name == "lm_head.weight"
        return "model.embed_tokens.weight" if is_tied_head else name
