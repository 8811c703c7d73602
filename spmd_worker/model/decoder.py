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

from spmd_worker.model.encoder import TokenTypeEmbedding
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import PositionEmbedding, VocabularyParallelEmbedding, VocabularyParallelHead
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
    """Attention and feed-forward, each with a norm before it, on a residual stream."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(context, layer, hidden_size)
        self.mlp = new_feed_forward(context, layer, hidden_size)
        self.input_layernorm = RMSNorm(context, hidden_size, layer.norm.eps)
        self.post_attention_layernorm = RMSNorm(context, hidden_size, layer.norm.eps)
        self._multiplier = layer.residual_multiplier

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        is_fused: bool = True,
    ) -> Tensor | None:
        """The last layer's output, as this rank's part, or None where nothing is still to be added, and the residual
        stream, to which it is added in place -> this layer's output, likewise. All [T, hidden].
        """
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add_and_norm(x, residual)
        x = self._scaled(self.self_attn(x, ropes, layer_cache, metadata, is_fused=is_fused))
        x = self.post_attention_layernorm.add_and_norm(x, residual)
        return self._scaled(self.mlp(x, is_fused=is_fused))

    def forward_wanted(
        self,
        x: Tensor | None,
        residual: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        wanted: WantedTokens,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, of a group of one: output and residual stream of the wanted tokens, [W, hidden] each. Of the
        others keys and values are all that is computed.
        """
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add_and_norm(x, residual)
        x = self._scaled(self.self_attn.forward_wanted(x, ropes, layer_cache, metadata, wanted))
        residual = residual[wanted.rows]
        if not len(residual):
            return x, residual
        x = self.post_attention_layernorm.add_and_norm(x, residual)
        return self._scaled(self.mlp(x)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._multiplier == 1.0 else x.mul_(self._multiplier)

    def weights(self) -> LayerWeights | None:
        """For `AttentionBackend.join_layers`; None where there is more to a layer than those."""
        attention, feed_forward = self.self_attn, self.mlp
        if not isinstance(feed_forward, FeedForward) or not attention.is_plain or self._multiplier != 1.0:
            return None
        if not feed_forward.is_gated or feed_forward.activation != "silu":
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
        attention, norm, feed_forward = self.self_attn, self.input_layernorm, self.mlp
        assert isinstance(feed_forward, FeedForward), "as of `weights`"
        return LayerSizes(
            hidden_size=norm.size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            intermediate_size=feed_forward.intermediate_size,
            eps=norm.eps,
            scale=attention.scale,
        )


class SandwichLayer(nn.Module):
    """Attention and feed-forward with norms in any of the four places, of any kind, on a residual stream that is whole
    on every rank.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(context, layer, hidden_size)
        self.mlp = new_feed_forward(context, layer, hidden_size)
        norms = [new_norm(context, hidden_size, layer.norm) if is_there else None for is_there in layer.norms]
        self.input_layernorm, self.attention_output_norm, self.post_attention_layernorm, self.mlp_output_norm = norms
        self._multiplier, self._group = layer.residual_multiplier, context.parts_group
        self._is_parallel, self._norms_sums = layer.is_parallel, layer.norms_sums

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
        """See `DecoderLayer.forward`: what this layer gives is added before it returns."""
        assert x is None, "layers of one model are of one kind"
        x = _normed(self.input_layernorm, residual)
        beside = self._beside_attention(x, residual) if self._is_parallel else None
        x = self.self_attn(x, ropes, layer_cache, metadata, is_fused=is_fused)
        self._add(x, self.attention_output_norm, residual)
        x = _normed(self.post_attention_layernorm, residual) if beside is None else beside
        self._add(self.mlp(x, is_fused=is_fused), self.mlp_output_norm, residual)

    def _beside_attention(self, x: Tensor, residual: Tensor) -> Tensor:
        """What a parallel feed-forward is given, before attention is added; `x` is what attention is given."""
        assert x is not residual, "attention has a norm before it where the feed-forward is beside it"
        return x if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)

    def _add(self, part: Tensor, norm: Norm | None, residual: Tensor) -> None:
        x = self._group.all_reduce(part)
        x = x if self._norms_sums else _normed(norm, x)
        residual.add_(x if self._multiplier == 1.0 else x * self._multiplier)
        if self._norms_sums:
            residual.copy_(_normed(norm, residual))


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


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
        new_layer = _layer_class(model_config)
        self.layers = nn.ModuleList(
            new_layer(replace(context, layer=index), model_config.layers[index], hidden_size)
            for index in range(stage.start, stage.stop)
        )
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
        x = None
        assert len(self.layers) == len(cache), (len(self.layers), cache.shape)
        # Layers that compute all tokens.
        whole = cache if wanted is None else cache[:-1]
        if is_fused and self.joined_layers is not None and len(whole):
            x = self.joined_layers.run(residual, (ropes[0].cos, ropes[0].sin), whole, metadata)
        else:
            for layer, layer_cache in zip(self.layers, whole):
                x = layer(x, residual, ropes, layer_cache, metadata, is_fused=is_fused)
        if wanted is not None:
            last = self.layers[-1]
            assert isinstance(last, DecoderLayer), "looked at by `takes_wanted`"
            x, residual = last.forward_wanted(x, residual, ropes, cache[-1], metadata, wanted)
        if not self._stage.is_last:
            return residual if x is None else add_whole(self._group, x, residual)
        if x is None:
            hidden = _normed(self.norm, residual)
            return hidden if self.project_out is None else self.project_out(hidden)
        assert isinstance(self.norm, RMSNorm), "only plain norms leave something to add"
        hidden = self.norm.add_and_norm(x, residual)
        # Not memory of the group, which the next step's norms write to.
        return hidden if self._group.fast is None else hidden.clone()

    @property
    def takes_wanted(self) -> bool:
        """Whether the last layer can leave tokens out: where nothing is summed over ranks, whose shares of the residual
        stream are by rows, and no tokens of experts are counted.
        """
        last = self.layers[-1]
        is_alone = self._group.size == 1 and self._stage.is_last
        return is_alone and isinstance(last, DecoderLayer) and isinstance(last.mlp, FeedForward)

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
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        weights = [each for layer in layers if (each := layer.weights()) is not None]
        self.joined_layers = None
        is_plain = len(self._rotaries) == 1 and self._rotaries[0].is_plain(self.dtype) and not self._sums_in_layers
        if weights and is_plain and len(weights) == len(self.layers):
            self.joined_layers = self._attention.join_layers(weights, layers[0].sizes(), self._group)


def _layer_class(model_config: ModelConfig) -> type[DecoderLayer | SandwichLayer]:
    return DecoderLayer if all(layer.is_plain_wiring for layer in model_config.layers) else SandwichLayer


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
        """Once the weights are there."""
        self.weights.pack()
        self.model.join_layers()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `WeightStore.load`: this is where trainers put new weights."""
        return self.weights.load(weights)

    def as_checkpoint(self) -> AbstractContextManager[CheckpointView]:
        """See `WeightStore.as_checkpoint`."""
        return self.weights.as_checkpoint(model_config=self.model_config, stage=self.stage)

    def expert_loads(self) -> dict[int, list[int]]:
        """By the number of each sparse layer of this stage, how many tokens have met each of its experts."""
        layers = enumerate(self.model.layers, self.stage.start)
        return {index: layer.mlp.num_tokens for index, layer in layers if isinstance(layer.mlp, SparseFeedForward)}


def _slices_like(context: LayerContext, model_config: ModelConfig, index: int) -> list[WeightSlice]:
    """Of the model's layer of that index, which is made without memory."""
    context = replace(context, layer=index, device=torch.device("meta"))
    layer = _layer_class(model_config)(context, model_config.layers[index], model_config.hidden_size)
    names = CheckpointNames(model_config, Stage(index, index + 1, is_first=False, is_last=False))
    return names.slices(_checkpoint_layers(layer, "model.layers.0."))


def _checkpoint_layers(module: nn.Module, prefix: str = "") -> dict[str, CheckpointLayer]:
    """Layers that have their own sharding rule, by name."""
    return {prefix + name: each for name, each in module.named_modules() if isinstance(each, CheckpointLayer)}
