"""The stack that every family is, decoder or encoder: embedding, layers, norm, head.

What families do differently is in `model_config/families/`, read into `ModelConfig` and one `LayerConfig` a layer; the
modules are named as Llama's are, and `CheckpointNames` has what a family's checkpoint calls them. Knows architecture
and nothing else: no scheduling, no files, no sampling.

T: tokens of the step; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import (
    PositionEmbedding,
    TokenTypeEmbedding,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from spmd_worker.model.layers.experts import SparseFeedForward, new_feed_forward
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import ReplicatedLinear
from spmd_worker.model.layers.norm import Norm, RMSNorm, add_whole, new_norm
from spmd_worker.model.layers.rotary import Angles, RotaryEmbedding
from spmd_worker.model.layers.weight_slice import WeightSlice
from spmd_worker.model.pooler import Pooler
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.checkpoint_view import CheckpointView
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.backend import JoinedLayers
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.api import LayerSizes, LayerWeights
from spmd_worker.ranks.topology import Stage


class DecoderLayer(nn.Module):
    """Attention and feed-forward on a residual stream, with norms in any of four places: before and after each.

    A layer that `defers` has plain norms before both and no others: what a part gives is added with the next norm, in
    one call, and summed over ranks there. Otherwise it is summed and added at once.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        super().__init__()
        assert layer.is_plain_wiring or not defers, layer
        self.config, self.hidden_size = layer, hidden_size
        self._group, self._defers, self._multiplier = context.parts_group, defers, layer.residual_multiplier
        self.self_attn = Attention(context, layer, hidden_size)
        self.mlp = new_feed_forward(context, layer, hidden_size)
        norms = [new_norm(context, hidden_size, layer.norm) if is_there else None for is_there in layer.norms]
        self.input_layernorm, self.attention_output_norm, self.post_attention_layernorm, self.mlp_output_norm = norms

    def forward(
        self,
        part: Tensor | None,
        residual: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        wanted: WantedTokens | None = None,
        *,
        is_fused: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """The last layer's output, as this rank's part, or None where nothing is still to be added, and the residual
        stream, to which it is added in place -> this layer's output, likewise, and the stream. All [T, hidden]. With
        `wanted`, where it `takes_wanted`, both are [W, hidden]: of other tokens only keys and values are computed.
        """
        x = _normed(self.input_layernorm, part, residual)
        beside = self._beside_attention(x, residual) if self.config.is_parallel else None
        part = self.self_attn(x, ropes, layer_cache, metadata, wanted, is_fused=is_fused)
        if wanted is not None:
            residual = residual[wanted.rows]
            if not len(residual):
                return part, residual
        part = self._added(part, self.attention_output_norm, residual)
        x = _normed(self.post_attention_layernorm, part, residual) if beside is None else beside
        return self._added(self.mlp(x, is_fused=is_fused), self.mlp_output_norm, residual), residual

    @property
    def takes_wanted(self) -> bool:
        """Whether tokens can be left out: where each is computed by itself, and no tokens of experts are counted."""
        return self._defers and isinstance(self.mlp, FeedForward)

    def _beside_attention(self, x: Tensor, residual: Tensor) -> Tensor:
        """A parallel feed-forward's input, before attention is added; `x` is attention's."""
        assert x is not residual, "attention has a norm before it where the feed-forward is beside it"
        return x if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)

    def _added(self, part: Tensor, norm: Norm | None, residual: Tensor) -> Tensor | None:
        """The part, scaled, where it is still to be added; None where it was added here."""
        if self._defers:
            return part if self._multiplier == 1.0 else part.mul_(self._multiplier)
        x, norms_sums = self._group.all_reduce(part), self.config.norms_sums
        x = x if norm is None or norms_sums else norm(x)
        residual.add_(x if self._multiplier == 1.0 else x * self._multiplier)
        if norm is not None and norms_sums:
            residual.copy_(norm(residual))
        return None

    def weights(self) -> LayerWeights:
        """See `api.JoinableLayer`."""
        attention, feed_forward = self.self_attn, self.mlp
        norms = [norm for norm in (self.input_layernorm, self.post_attention_layernorm) if isinstance(norm, RMSNorm)]
        assert isinstance(feed_forward, FeedForward), "a sparse layer is not joined"
        assert len(norms) == 2, "nor is one with other norms"
        return LayerWeights(
            input_norm=norms[0].weight,
            qkv=attention.qkv_proj.weight,
            qkv_bias=attention.qkv_proj.bias,
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.own_bias,
            norm=norms[1].weight,
            gates=feed_forward.gate_up_proj.weight,
            gates_bias=feed_forward.gate_up_proj.bias,
            down=feed_forward.down_proj.weight,
            down_bias=feed_forward.down_proj.own_bias,
            window=attention.window,
        )

    def sizes(self) -> LayerSizes:
        """See `api.JoinableLayer`."""
        attention, feed_forward = self.self_attn, self.mlp
        assert isinstance(feed_forward, FeedForward), "a sparse layer is not joined"
        return LayerSizes(
            hidden_size=self.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            intermediate_size=feed_forward.intermediate_size,
            eps=self.config.norm.eps,
            scale=attention.scale,
        )


def _normed(norm: Norm | None, part: Tensor | None, residual: Tensor) -> Tensor:
    """The norm, where there is one, of the residual stream, to which a part that is left of before is added."""
    if part is not None:
        assert isinstance(norm, RMSNorm), "only plain norms leave something to add"
        return norm.add_and_norm(part, residual)
    return residual if norm is None else norm(residual)


class DecoderStack(nn.Module):
    """Token ids -> hidden states, or a stage of the way there. Layers count from 0 in each stage."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, stage: Stage) -> None:
        super().__init__()
        hidden_size = model_config.hidden_size
        if stage.is_first:
            self.embed_tokens = VocabularyParallelEmbedding(
                context, model_config.num_embeddings, model_config.embedding_size
            )
            self._multiplier = _embedding_multiplier(model_config, context.dtype)
            if model_config.num_positions:
                self.embed_positions = PositionEmbedding(
                    context,
                    model_config.num_positions,
                    hidden_size,
                    model_config.position_offset,
                    model_config.unplaced_token,
                )
            self._add_embeddings_of_encoder(context, model_config)
        self.layers = nn.ModuleList(_new_layer(context, model_config, each) for each in range(stage.start, stage.stop))
        has_norm = stage.is_last and model_config.has_last_norm
        self.norm = new_norm(context, hidden_size, model_config.norm) if has_norm else None
        self.project_in, self.project_out = _projections(context, model_config, stage)
        self._stage, self._has_positions = stage, model_config.num_positions > 0
        self._rotaries = tuple(
            RotaryEmbedding(rope, model_config.head_size, model_config.max_position_embeddings, context.device)
            for rope in model_config.ropes
        )
        self.dtype, self._group, self._attention = context.dtype, context.parts_group, context.attention
        self._sums_in_layers = context.parts_group.size != context.tensor_group.size
        self.joined_layers: JoinedLayers | None = None
        """All layers at once, where that can be; None: one by one."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rope_regimes: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
        *,
        is_fused: bool = True,
        token_types: Tensor | None = None,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """int64 [T] ids, positions and their rows' regimes (`Request.rope_regime`); `cache` [layers, blocks, ...] ->
        [T, hidden]. `token_types`, int64 [T], where the model has types; None: all of the first. With `wanted`, where
        it `takes_wanted`, [W, hidden]: the last layer leaves out what nobody reads.

        `incoming` is what the stage before gave, and every stage but the last gives to the next: the residual stream
        [T, hidden]. It becomes this stage's own.

        If not `is_fused`, every GEMM is written down by itself and what follows it is a call of its own, with the same
        bits: for a step in which something is added to some of them (an adapter). It is all layers' in one call else,
        or attention and gates with what is before them.
        """
        ropes = tuple([rotary.angles(positions, rope_regimes, self.dtype) for rotary in self._rotaries])
        residual = self._embed(token_ids, positions, token_types) if self._stage.is_first else incoming
        assert residual is not None, "a stage after the first is given the residual stream"
        assert len(self.layers) == len(cache), (len(self.layers), cache.shape)
        joined = self.joined_layers if is_fused else None
        # A last layer that leaves tokens out runs by itself.
        num_joined = 0 if joined is None else len(cache) - (wanted is not None)
        part = None
        if joined is not None and num_joined:
            part = joined.run(residual, (ropes[0].cos, ropes[0].sin), cache[:num_joined], metadata)
        for index in range(num_joined, len(cache)):
            leaves_out = wanted if index == len(cache) - 1 else None
            layer = self.layers[index]
            part, residual = layer(part, residual, ropes, cache[index], metadata, leaves_out, is_fused=is_fused)
        if not self._stage.is_last:
            return residual if part is None else add_whole(self._group, part, residual)
        hidden = _normed(self.norm, part, residual)
        if part is not None and self._group.fast is not None:
            # Symmetric memory is overwritten by the next step.
            hidden = hidden.clone()
        return hidden if self.project_out is None else self.project_out(hidden)

    @property
    def takes_wanted(self) -> bool:
        """Whether the last layer can leave tokens out: where nothing is summed over ranks, whose shares of the residual
        stream are by rows.
        """
        return self._group.size == 1 and self._stage.is_last and bool(self.layers[-1].takes_wanted)

    def _add_embeddings_of_encoder(self, context: LayerContext, model_config: ModelConfig) -> None:
        hidden_size, num_types = model_config.hidden_size, model_config.num_token_types
        self.embed_token_types = TokenTypeEmbedding(context, num_types, hidden_size) if num_types else None
        has_norm = model_config.has_embedding_norm
        self.embedding_norm = new_norm(context, hidden_size, model_config.norm) if has_norm else None

    def _embed(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        if self._multiplier != 1.0:
            x = x * self._multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_token_types is not None:
            x = x + self.embed_token_types(torch.zeros_like(token_ids) if token_types is None else token_types)
        x = x + self.embed_positions(positions, token_ids) if self._has_positions else x
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def join_layers(self) -> None:
        """Once the weights are packed: from now on they stay where they are."""
        is_plain = len(self._rotaries) == 1 and self._rotaries[0].is_plain(self.dtype) and not self._sums_in_layers
        self.joined_layers = self._attention.join_layers([*self.layers], self._group) if is_plain else None


def _new_layer(context: LayerContext, model_config: ModelConfig, index: int) -> DecoderLayer:
    """The layers of one model add what they compute in one way."""
    defers = all(layer.is_plain_wiring for layer in model_config.layers)
    context = replace(context, layer=index)
    return DecoderLayer(context, model_config.layers[index], model_config.hidden_size, defers=defers)


def _projections(
    context: LayerContext, model_config: ModelConfig, stage: Stage
) -> tuple[ReplicatedLinear | None, ReplicatedLinear | None]:
    """Before the layers of the first stage and after those of the last, where embeddings are of another size."""
    size, hidden_size = model_config.own_embedding_size, model_config.hidden_size
    first = ReplicatedLinear(context, size, hidden_size) if size and stage.is_first else None
    return first, ReplicatedLinear(context, hidden_size, size) if size and stage.is_last else None


def _embedding_multiplier(model_config: ModelConfig, dtype: torch.dtype) -> float:
    value = model_config.embedding_multiplier
    return float(torch.tensor(value, dtype=dtype)) if model_config.rounds_multiplier else value


class DecoderForCausalLM(nn.Module):
    """The model, or a stage of it, of one tensor-parallel rank."""

    def __init__(
        self, context: LayerContext, model_config: ModelConfig, stage: Stage, *, allows_nonfinite: bool = False
    ) -> None:
        super().__init__()
        self.model_config, self.stage = model_config, stage
        self.model = DecoderStack(context, model_config, stage)
        self.pooler: Pooler | None = None
        """In place of the head for tokens, on the last stage of a model that pools."""
        if stage.is_last and model_config.pooling is not None:
            self.pooler = Pooler(context, model_config.pooling, model_config.vocab_size)
        elif stage.is_last:
            # A tied head in a later stage than the embedding has a copy of its own.
            tied_to = self.model.embed_tokens if model_config.has_tied_embeddings and stage.is_first else None
            self.lm_head = VocabularyParallelHead(
                context,
                model_config.vocab_size,
                model_config.embedding_size,
                tied_to,
                divisor=model_config.logit_divisor,
                cap=model_config.logit_cap,
                has_bias=model_config.has_head_bias,
            )
        names, layers = CheckpointNames(model_config, stage), _checkpoint_layers(self)
        self.weights = WeightStore(
            names,
            layers,
            context.dtype,
            partial(_slices_like, context, model_config),
            allows_nonfinite=allows_nonfinite,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rope_regimes: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
        *,
        is_fused: bool = True,
        token_types: Tensor | None = None,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """See `DecoderStack.forward`."""
        inputs = (token_ids, positions, rope_regimes, cache, metadata, incoming)
        hidden: Tensor = self.model(*inputs, is_fused=is_fused, token_types=token_types, wanted=wanted)
        return hidden

    @property
    def takes_wanted(self) -> bool:
        """See `DecoderStack.takes_wanted`."""
        return not self.model_config.is_encoder and self.model.takes_wanted

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, Vs] of the same dtype: this rank's share of the logits."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def argmax_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden] -> of each row the largest of this rank's logits, float32 [R], and its column, int64 [R]."""
        return self.lm_head.largest(hidden)

    def pack_weights(self) -> None:
        """Pack the weights, once they are filled, and join the layers."""
        self.weights.pack()
        self.model.join_layers()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Trainers put new weights here: see `WeightStore.load`."""
        return self.weights.load(weights)

    def as_checkpoint(self) -> AbstractContextManager[CheckpointView]:
        """The weights to look at and to change: see `WeightStore.as_checkpoint`."""
        return self.weights.as_checkpoint(model_config=self.model_config, stage=self.stage)

    def expert_loads(self) -> dict[int, list[int]]:
        """By the number of each sparse layer of this stage, how many tokens have met each of its experts."""
        layers = enumerate(self.model.layers, self.stage.start)
        return {index: layer.mlp.num_tokens for index, layer in layers if isinstance(layer.mlp, SparseFeedForward)}


def _slices_like(context: LayerContext, model_config: ModelConfig, index: int) -> list[WeightSlice]:
    """Slices of the model's layer of that index, which is made without memory."""
    layer = _new_layer(replace(context, device=torch.device("meta")), model_config, index)
    names = CheckpointNames(model_config, Stage(index, index + 1, is_first=False, is_last=False))
    return names.slices(_checkpoint_layers(layer, "model.layers.0."))


def _checkpoint_layers(module: nn.Module, prefix: str = "") -> dict[str, CheckpointLayer]:
    """Layers that have their own sharding rule, by name."""
    return {prefix + name: each for name, each in module.named_modules() if isinstance(each, CheckpointLayer)}
