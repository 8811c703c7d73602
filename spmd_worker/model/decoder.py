"""The stack that every family is, decoder or encoder: embedding, layers, norm, head.

What families do differently is in `model_config/families/`, read into `ModelConfig` and one `LayerConfig` a layer; the
modules are named as Llama's are, and `CheckpointNames` has what a family's checkpoint calls them. Knows architecture
and nothing else: no scheduling, no files, no sampling.

T: tokens of the step; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.model.encoder import TokenTypeEmbedding
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import PositionEmbedding, VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.model.layers.experts import SparseFeedForward, new_feed_forward
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import ReplicatedLinear
from spmd_worker.model.layers.norm import Norm, RMSNorm, add_whole, new_norm
from spmd_worker.model.layers.rotary import Angles, RotaryEmbedding
from spmd_worker.model.layers.weight_slice import HeldSlice, PaddingSlice, Place, WeightSlice
from spmd_worker.model.pooler import Pooler
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.checkpoint_view import CheckpointView
from spmd_worker.model.weights.held_weights import HeldWeight, check_form, check_pair, check_tensor, held_weights
from spmd_worker.model.weights.weight_update import WeightUpdate
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
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
        self.model_config, self.stage, self._context = model_config, stage, context
        self._allows_nonfinite = allows_nonfinite
        self._names = CheckpointNames(model_config, stage)
        self.weight_update = WeightUpdate(self.tied_tensors())
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

    def weight_slices(self) -> list[WeightSlice]:
        """Which rectangles of which checkpoint tensors this rank holds, and where."""
        return [
            named
            for name, layer in self._checkpoint_layers().items()
            for piece in layer.weight_slices(name)
            for named in self._names.pieces(piece)
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
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Make whole checkpoint tensors this rank's weights: any of them, in any order, any number of times.

        One after the other, in place, of any floating-point dtype, from any device; while one is written, there is one
        copy of this rank's slice of it (where oneDNN packs, two of what it is packed with). No collective inside; every
        rank is given the same tensors. The first opens `weight_update`, which has to be committed before a step runs.
        Returns the names of which this rank holds something; those of other stages, and a tied head's, are passed over.
        At the commit such a head has to have been equal to its embedding.

        Raises RuntimeError while requests are being answered, and ValueError, the same on every rank, for a name that
        the model does not have and a tensor that is misshapen, sharded, without data or, unless such weights are
        allowed, not finite: that tensor is not written, and of a collection, such as a list, no tensor is when a name
        or a shape is wrong. Raises TypeError for what is not a name and a tensor.
        """
        if isinstance(weights, Collection):
            for name, tensor in self._separate(weights):
                check_form(name, tensor, self._shape_of(name, tensor))
        loaded = set()
        for name, tensor in self._separate(weights):
            # A tied head is compared with the embedding, elements and all.
            if self._allows_nonfinite or self._is_tied_head(name):
                check_form(name, tensor, self._shape_of(name, tensor))
            else:
                check_tensor(name, tensor, self._shape_of(name, tensor), self.model.dtype)
            # A tensor is written and noted, or neither.
            with deferred_signals():
                self.weight_update.begin()
                if self._is_tied_head(name):
                    self.weight_update.add_tied_head(tensor)
                    continue
                if name in self._held:
                    self._held[name].load(tensor)
                    loaded.add(name)
                self.weight_update.add(name, tensor)
        return loaded

    def _separate(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With the checkpoint's names, without what is derived but for a tied head, and experts apart where the
        checkpoint has them so.
        """
        for given_name, tensor in tensors:
            check_pair(given_name, tensor)
            name = self._own_name(given_name, tensor.shape)
            if self._names.is_derived(name) and not self._is_tied_head(name):
                continue
            parts = self._names.in_memory(name, tensor.shape)
            if not parts:
                yield name, tensor.transpose(1, 2) if self._names.is_turned(name, tensor.shape) else tensor
                continue
            check_form(name, tensor, tuple(tensor.shape))
            for part, number, (start, stop) in parts:
                yield part, tensor[number, start:stop]

    def _own_name(self, given_name: str, shape: Sequence[int]) -> str:
        """The checkpoint's name of a tensor that transformers may call otherwise, or files without their prefix."""
        name = self._names.canonical(given_name)
        whole_name = self._names.prefixed(name)
        if name in self.checkpoint_shapes or self._names.is_derived(name):
            return name
        is_whole = whole_name in self.checkpoint_shapes or self._names.is_derived(whole_name)
        return whole_name if is_whole or self._names.in_memory(whole_name, shape) else name

    @cached_property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every checkpoint tensor of the model, those of other stages too: shapes by name."""
        own = {piece.checkpoint_name: piece.checkpoint_shape for piece in self.weight_slices()}
        layers = self._layer_pieces.items()
        like = {index: {name: each.checkpoint_shape for name, each in pieces.items()} for index, pieces in layers}
        return self._names.shapes_of_all_stages(own, like)

    @cached_property
    def buffer_names(self) -> frozenset[str]:
        """Checkpoint tensors of the model that are buffers (`WeightSlice.is_buffer`), those of other stages too. In an
        update they may be left out, and `sleep(level=2)` keeps them.
        """
        return frozenset(
            self._names.layer_prefix(index) + name
            for index, pieces in self._layer_pieces.items()
            for name, piece in pieces.items()
            if piece.is_buffer
        )

    @property
    def buffer_parameters(self) -> frozenset[str]:
        """Names of the parameters that hold those of this stage."""
        held = [self._held[name] for name in self.buffer_names if name in self._held]
        return frozenset(each.piece.parameter_name for weight in held for each in weight.pieces)

    @cached_property
    def _layer_pieces(self) -> dict[int, dict[str, WeightSlice]]:
        """Of each layer of the model, a slice of each tensor of a layer of its kind, by name within the layer. There
        are dense ones and sparse ones, and some lack a norm; of a kind that this stage does not have, one is made
        without memory.
        """
        layers, stage, own = self.model_config.layers, self.stage, self.weight_slices()
        of_kind: dict[tuple[ExpertsConfig | None, tuple[bool, ...]], dict[str, WeightSlice]] = {}
        kinds = [(layer.experts, layer.norms) for layer in layers]
        for index in (*range(stage.start, stage.stop), *range(len(layers))):
            if kinds[index] in of_kind:
                continue
            is_own = stage.start <= index < stage.stop
            pieces, prefix = own if is_own else self._slices_without_memory(index), self._names.layer_prefix(index)
            of_kind[kinds[index]] = {
                piece.checkpoint_name.removeprefix(prefix): piece
                for piece in pieces
                if piece.checkpoint_name.startswith(prefix)
            }
        return {index: of_kind[kind] for index, kind in enumerate(kinds)}

    def _slices_without_memory(self, index: int) -> list[WeightSlice]:
        context = replace(self._context, device=torch.device("meta"))
        stage = Stage(index, index + 1, is_first=False, is_last=False)
        return DecoderForCausalLM(context, self.model_config, stage).weight_slices()

    @contextmanager
    def as_checkpoint(self) -> Iterator[CheckpointView]:
        """This rank's weights under their checkpoint names, to look at and to change. What was changed counts at the
        end, also where that is an exception: some weights are changed at once, and a head must follow its embedding.
        Raises ValueError for changes that are refused, which `weight_update` notes: other ranks may have made theirs.
        """
        self.weight_update.num_calls += 1
        # It may be changed in here.
        self.weight_update.embedding_digest = ""
        names = {name: name for name in self._held}
        if self._names.embedding in self._held and self._names.has_tied_head and self.stage.is_last:
            names[self._names.head] = self._names.embedding
        view = CheckpointView(self._held, names, self.load_weights, model_config=self.model_config, stage=self.stage)
        try:
            yield view
        finally:
            try:
                view.write_back()
            except ValueError:
                self.weight_update.refused_calls.append(self.weight_update.num_calls)
                raise

    def held_slices(self) -> list[tuple[str, str, HeldSlice]]:
        """Of each checkpoint tensor of which this rank has something: the module that has it, its name, and which part
        of it that is.
        """
        return [(held.module_name, name, held.held_slice) for name, held in self._held.items()]

    @cached_property
    def _held(self) -> dict[str, HeldWeight]:
        return held_weights(self.weight_slices(), self._checkpoint_layers())

    def layer_prefix_of(self, checkpoint_name: str) -> str:
        """How the name of a layer's tensor begins; "" where it is no layer's."""
        prefixes = map(self._names.layer_prefix, range(len(self.model_config.layers)))
        return next((prefix for prefix in prefixes if checkpoint_name.startswith(prefix)), "")

    def tied_tensors(self) -> dict[str, str]:
        """By the name of a tensor that of another which is the same here: the head, where it is the embedding."""
        return {self._names.embedding: self._names.head} if self._names.has_tied_head else {}

    def expert_loads(self) -> dict[int, list[int]]:
        """By the number of each sparse layer of this stage, how many tokens have met each of its experts."""
        layers = enumerate(self.model.layers, self.stage.start)
        return {index: layer.mlp.num_tokens for index, layer in layers if isinstance(layer.mlp, SparseFeedForward)}

    @property
    def optional_prefix(self) -> tuple[str, tuple[str, ...]]:
        """What names in files may lack, and how those begin that have it nowhere."""
        return self._names.optional_prefix, self._names.besides

    def places(self, checkpoint_name: str, shape: tuple[int, ...]) -> dict[str, Place]:
        """See `CheckpointNames.places`."""
        return self._names.places(checkpoint_name, shape)

    def is_ignorable(self, checkpoint_name: str) -> bool:
        """See `CheckpointNames.is_ignorable`."""
        return self._names.is_ignorable(checkpoint_name)

    def _is_tied_head(self, checkpoint_name: str) -> bool:
        return self._names.has_tied_head and checkpoint_name == self._names.head

    def _shape_of(self, checkpoint_name: str, tensor: Tensor) -> tuple[int, ...]:
        """That a tensor of this name has to have. Of a tied head any, until the commit compares it."""
        if self._is_tied_head(checkpoint_name):
            return tuple(tensor.shape)
        if checkpoint_name not in self.checkpoint_shapes:
            raise ValueError(f"{checkpoint_name}: the model has no such weight: give the names that its checkpoint has")
        return self.checkpoint_shapes[checkpoint_name]

    def _checkpoint_layers(self) -> dict[str, CheckpointLayer]:
        """Layers that have their own sharding rule, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, CheckpointLayer)}
