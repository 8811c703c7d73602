"""The one stack of all families, decoders and encoders: embedding, layers, norm, head.

Differences of families are data (`model_config/families/`), read into `ModelConfig` and one `LayerConfig` per layer;
modules have Llama's names, which `CheckpointNames` maps to those of the checkpoint. Knows no scheduling, files or
sampling.

T: tokens of the step; W: tokens of `WantedTokens`; R: rows that sample; Vs: token ids of this rank's vocabulary shard.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final

import torch
from torch import Tensor, nn

from kv_cache.cache_engine import LayerCaches
from kv_cache.layer_states import LayerStates
from spmd_worker.model.decoder_layer import DecoderLayer, normed
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.balanced_streams import StreamHead
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer, is_as_built
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.distances import DistanceEmbeddings
from spmd_worker.model.layers.embedding import (
    PositionEmbedding,
    SinusoidalPositions,
    StepMedia,
    TokenRows,
    TokenTypeEmbedding,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.gated_streams import StreamMixer
from spmd_worker.model.layers.layer_inputs import LayerInputs
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.linear import ColumnParallelLinear, GatedLinear, RowParallelLinear, replicated_linear
from spmd_worker.model.layers.norm import FullNorm, Norm, RMSNorm, add_without_norm, new_norm
from spmd_worker.model.layers.predicted_streams import StreamProjections
from spmd_worker.model.layers.relative_bias import AlibiTable, RelativeBiasTable
from spmd_worker.model.layers.rotary import RopeFactors, RotaryEmbedding
from spmd_worker.model.layers.run_indexer import step_runs
from spmd_worker.model.layers.weight_slice import WeightSlice
from spmd_worker.model.module_watch import ModuleWatch
from spmd_worker.model.pooler import Pooler
from spmd_worker.model.towers.new_tower import new_encoder, new_tower
from spmd_worker.model.towers.tower import Tower
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.checkpoint_view import CheckpointView
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.stored_format import EXPERTS
from spmd_worker.model_config.stream_config import BalancedStreamsConfig, GatedStreamsConfig
from spmd_worker.ops.attention.backend import JoinedLayers
from spmd_worker.ops.attention.metadata import AttentionMetadata, CrossStep, WantedTokens
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ranks.stored_weights import stored_tensors
from spmd_worker.ranks.topology import Stage

_JOINABLE: Final = (
    *(DecoderLayer, Attention, FeedForward, ColumnParallelLinear, GatedLinear, RowParallelLinear, RMSNorm, FullNorm),
)
"""Classes of the modules of layers that can be joined."""


class DecoderStack(nn.Module):
    """Token ids -> hidden states, or a pipeline stage of it. `layers` are indexed from 0 in each stage."""

    def __init__(
        self,
        context: LayerContext,
        model_config: ModelConfig,
        stage: Stage,
        embedding: VocabularyParallelEmbedding | None = None,
    ) -> None:
        """`embedding` is that of another stack, which this one has too."""
        super().__init__()
        hidden_size, size = model_config.hidden_size, model_config.own_embedding_size
        sum_size, self._projects_sum = model_config.sum_size, model_config.projects_sum
        num_types = model_config.num_token_types
        self._has_positions = model_config.num_positions > 0 or model_config.sinusoid != ""
        if stage.is_first:
            self.embed_tokens = embedding or VocabularyParallelEmbedding(
                context.of_head, model_config.num_embeddings, model_config.embedding_size
            )
            self._multiplier = model_config.embedding_multiplier
            # As transformers does: Gemma's embedding includes the multiplier, Granite applies it to any rows.
            self._multiplies_rows = not model_config.rounds_multiplier
            if model_config.rounds_multiplier:
                self._multiplier = float(torch.tensor(self._multiplier, dtype=context.dtype))
            self.embed_positions: PositionEmbedding | SinusoidalPositions
            if model_config.sinusoid:
                self.embed_positions = SinusoidalPositions(context, model_config)
            elif self._has_positions:
                offset, padding_token = model_config.position_offset, model_config.unplaced_token
                num_positions = model_config.num_positions
                self.embed_positions = PositionEmbedding(context, num_positions, sum_size, offset, padding_token)
            self.embed_token_types = TokenTypeEmbedding(context, num_types, sum_size) if num_types else None
            has_norm = model_config.has_embedding_norm
            self.embedding_norm = new_norm(context, sum_size, model_config.norm) if has_norm else None
        self.layers = nn.ModuleList(_new_layers(context, model_config, stage))
        first_layer = model_config.layers[0]
        has_norm, streams = stage.is_last and model_config.has_last_norm, first_layer.streams
        self.norm: Norm | StreamMixer | None = None
        if has_norm and isinstance(streams, GatedStreamsConfig):
            self.norm = StreamMixer(context.unquantised, streams, hidden_size, model_config.norm, injects=False)
        elif has_norm:
            self.norm = new_norm(context, hidden_size, model_config.norm)
        self._num_streams = first_layer.num_streams
        self.altup_projections: StreamProjections | None = None
        self.altup_unembed_projections: StreamProjections | None = None
        if (predicted := first_layer.predicted_streams) is not None:
            outer = partial(StreamProjections, context.unquantised, predicted, hidden_size)
            self.altup_projections = outer() if stage.is_first else None
            self.altup_unembed_projections = outer() if has_norm else None
        self.stream_head: StreamHead | None = None
        if stage.is_last and isinstance(streams, BalancedStreamsConfig):
            self.stream_head = StreamHead(context, streams, hidden_size)
        self._reads_ids = streams is not None
        self._indexer = next(
            (each.indexer for each in model_config.layers if each.indexer and not each.indexer.is_by_head), None
        )
        # Embeddings of another size are projected to the hidden size, and back before the head.
        self.project_in = self.project_out = None
        if size and stage.is_first:
            has_bias = self._projects_sum
            self.project_in = replicated_linear(context, "project_in", size, hidden_size, has_bias=has_bias)
        if size and stage.is_last and not self._projects_sum:
            self.project_out = replicated_linear(context, "project_out", hidden_size, size)
        # Every stage has the only table, of which each rank has its heads; layers with tables of their own have them.
        first, self.relative_bias = model_config.layers[0], None
        if first.relative_bias is not None and not first.relative_bias.is_of_layer:
            bias = (first.relative_bias, first.num_heads)
            self.relative_bias = RelativeBiasTable(context, *bias, sees_later=model_config.is_encoder)
        self.distances: DistanceEmbeddings | None = None
        self.distance_norm: Norm | None = None
        if first.distances is not None:
            self.distances = DistanceEmbeddings(context, first.distances, hidden_size)
            self.distance_norm = new_norm(context, hidden_size, first.norm) if first.distances.has_norm else None
        self._alibi: AlibiTable | None = None
        if first.alibi:
            self._alibi = AlibiTable(context, first.alibi, first.num_heads, model_config.max_position_embeddings)
        self.layer_inputs: LayerInputs | None = None
        if model_config.num_layer_inputs and stage.is_first:
            self.layer_inputs = LayerInputs(context, model_config)
        self._carries_outputs = any(each.experts and each.experts.skips_layer for each in model_config.layers)
        self._shares_choice = any(layer.takes_choice for layer in model_config.layers)
        self._has_window = [layer.window != 0 for layer in model_config.layers[stage.start : stage.stop]]
        vision = model_config.vision
        self._sees_in_windows = vision is not None and vision.sees_in_windows
        self._input_token = 0 if vision is None else vision.input_token_id
        self._stage = stage
        self._cache_of = [
            index if layer.kv_layer is None else layer.kv_layer - stage.start
            for index, layer in enumerate(model_config.layers[stage.start : stage.stop])
        ]
        own = model_config.layers[stage.start : stage.stop]
        with_entries = [index for index, each in enumerate(own) if each.has_entries]
        self._entries_of = {index: len(self.layers) + place for place, index in enumerate(with_entries)}
        self.rope_factors: RopeFactors | None = None
        if any(rope.has_learned_factors for rope in model_config.ropes):
            assert len(model_config.ropes) == 1, "one rope has learned factors"
            self.rope_factors = RopeFactors(context, model_config.ropes[0])
        max_positions = model_config.max_position_embeddings
        self._rotaries = tuple(
            RotaryEmbedding(rope, max_positions, context.device, self.rope_factors) for rope in model_config.ropes
        )
        self.dtype, self._group, self._attention = context.dtype, context.parts_group, context.attention
        self._sums_in_layers = context.parts_group.size != context.tensor_group.size
        self.adapter_kernels = context.kernels.adapter_kernels()
        self.joined_layers: JoinedLayers | None = None
        """All layers as one call; None if they are called one by one."""
        self._has_moved = False

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rope_regimes: Tensor,
        cache: LayerCaches,
        metadata: AttentionMetadata,
        incoming: Tensor | None = None,
        *,
        is_fused: bool = True,
        token_types: Tensor | None = None,
        wanted: WantedTokens | None = None,
        adapters: StepAdapters | None = None,
        given: TokenRows | None = None,
        states: Sequence[LayerStates | None] = (),
        rope_positions: Tensor | None = None,
        media: StepMedia | None = None,
        routes: list[Tensor] | None = None,
        streams: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Ids, positions and the regimes of their rows (`Request.rope_regime`), int64 [T]; `cache` of each layer
        [blocks, ...], perhaps with parts of layers behind all of them (`CacheSpec.part_of`) -> [T, hidden].
        `token_types`: int64 [T], if the model has types; None: all 0. With `wanted`, if `supports_wanted`, [W, hidden]:
        the last layer computes no other tokens. `given` are input embeddings, as transformers takes them
        (`inputs_embeds`): the first stage computes with them in place of their tokens' own.

        `incoming` is the residual stream [T, hidden] of the previous stage, changed in place; every stage but the last
        returns it for the next.

        `states` are those of each layer, if any layer has them.

        `rope_positions` int64 [3, T] turn queries and keys in place of `positions`, which address the cache; three more
        rows are those of the first tokens of runs, in a model that chooses keys by runs of several. `media`
        are rows of images, on the first stage: tokens' own ids there, perhaps beyond the vocabulary, do not count, and
        `media.added` is added to the stream behind the first layers. The same bits in any chunks.

        Each sparse layer appends the experts of all tokens to `routes`, int64 [T, k], largest weight first.
        `streams`, by number of a layer of this stage, are replaced by copies of the residual stream before it; the
        number after the last layer's is that of the stream behind it.

        `adapters` of the step's rows add to outputs of linear layers, which are stored therefore; other rows keep their
        bits. If not `is_fused`, every GEMM is a call whose outputs are stored, with the same bits. Else all layers may
        be one call, or attention and gates one with the GEMM before.
        """
        if metadata.cross is not None:
            tokens = (token_ids, positions, rope_regimes)
            return self._forward_with_encoder(*tokens, cache, metadata.cross, incoming, media, is_fused=is_fused)
        own_positions = None if rope_positions is None else rope_positions[:3]
        of_tokens = (positions, rope_regimes, self.dtype, own_positions)
        ropes = tuple([rotary.angles(*of_tokens) for rotary in self._rotaries])
        residual = incoming
        if self._stage.is_first:
            residual = self._embed(token_ids, positions, token_types, adapters, given, media)
        assert residual is not None, "a stage after the first needs the residual stream"
        inputs = None
        if self.layer_inputs is not None:
            ids = token_ids if media is None else token_ids.index_fill(0, media.places, self._input_token)
            inputs = self.layer_inputs(ids, residual, adapters)
        if self._stage.is_first and self._num_streams > 1:
            residual = self._split(residual)
        num_layers, has_parts = len(self.layers), len(cache) > len(self.layers)
        assert len(cache) == num_layers + has_parts * len(self._entries_of), (num_layers, len(cache))
        added = () if media is None else media.added
        assert len(added) <= len(self.layers), (len(added), len(self.layers))
        # Joined layers are causal, and nothing is added between them, nor to sums over ranks.
        joins = is_fused and not added and metadata.is_causal
        joins = joins and not streams and (adapters is None or self._group.size == 1)
        if self._has_moved:
            self.join_layers()
        joined = self.joined_layers if joins else None
        # A last layer that leaves tokens out runs by itself.
        num_joined = 0 if joined is None else num_layers - (wanted is not None)
        causal = metadata.without_sight() if self._sees_in_windows else metadata
        step = LayerStep(
            ropes,
            None,
            metadata,
            adapters=adapters,
            is_fused=is_fused,
            token_ids=token_ids if self._reads_ids else None,
            routes=routes,
            choice=[] if self._shares_choice else None,
            carried=[] if self._carries_outputs else None,
            **self._biases(metadata),
        )
        if self._indexer is not None:
            firsts = None if rope_positions is None else rope_positions[-3:]
            step.runs = step_runs(self._indexer, metadata, self._rotaries, rope_regimes, self.dtype, firsts)
        part = None
        if joined is not None and num_joined:
            angles = [(rope.cos, rope.sin) for rope in ropes]
            feed = partial(self._fed_experts, residual, step)
            part = joined.run(residual, angles, cache[:num_joined], metadata, adapters, feed)
        for index in range(num_joined, num_layers):
            self._copy_stream(streams, index, part, residual)
            step.cache = cache[self._cache_of[index]]
            step.metadata = (metadata if self._has_window[index] else causal).of_layer(index)
            step.wanted = wanted if index == num_layers - 1 and index >= len(added) else None
            step.states = states[index] if states else None
            step.inputs = None if inputs is None else inputs[:, index]
            step.entries = None
            if has_parts and index in self._entries_of:
                place = self._entries_of[index]
                step.entries = cache[place], metadata.of_layer(place)
            part, residual = self.layers[index](part, residual, step)
            if media is not None and index < len(added):
                residual.index_add_(0, media.places, added[index])
        if wanted is not None and len(added) == num_layers:
            part, residual = None if part is None else part[wanted.rows], residual[wanted.rows]
        self._copy_stream(streams, num_layers, part, residual)
        if not self._stage.is_last:
            return residual if part is None else add_without_norm(self._group, part, residual)
        if self.altup_unembed_projections is not None:
            residual = self.altup_unembed_projections.joined(residual)
        if self.stream_head is not None:
            residual = self.stream_head(residual)
        hidden = normed(self.norm, part, residual)
        if part is not None and self._group.fast is not None:
            # Symmetric memory is overwritten by the next step.
            hidden = hidden.clone()
        if self.project_out is None:
            return hidden
        projected: Tensor = self.project_out(hidden, adapters if wanted is None else wanted.adapters)
        return projected

    def _fed_experts(self, residual: Tensor, step: LayerStep, index: int, x: Tensor) -> Tensor | None:
        """Implements `FeedExperts` for layers of the stage."""
        layer: Any = self.layers[index]
        output: Tensor | None = layer.fed_forward(x, residual, step)
        return output

    def _split(self, embedded: Tensor) -> Tensor:
        """Embeddings [T, hidden] -> all streams of each token, in one row."""
        if self.altup_projections is not None:
            return self.altup_projections.split(embedded)
        return embedded.repeat(1, self._num_streams)

    def _copy_stream(
        self, streams: dict[int, Tensor] | None, index: int, part: Tensor | None, residual: Tensor
    ) -> None:
        """Copy the stream before a layer of the stage, if it is wanted; part and residual are left as they are."""
        number = self._stage.start + index
        if streams and number in streams:
            copy = residual.clone()
            streams[number] = copy if part is None else add_without_norm(self._group, part.clone(), copy)

    def _forward_with_encoder(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rope_regimes: Tensor,
        cache: LayerCaches,
        step: CrossStep,
        incoming: Tensor | None,
        media: StepMedia | None,
        *,
        is_fused: bool,
    ) -> Tensor:
        """`forward` of a decoder with an encoder: layers compute the decoder's tokens, and take the encoder's rows as
        they are. The stream [T, hidden] has both, so that rows reach every stage; padding is zeros there.
        """
        places, stream = step.decoder_rows, incoming
        if self._stage.is_first:
            stream = self._embed_with_encoder(token_ids, positions, step, media)
        assert stream is not None, "a stage after the first needs the residual stream"
        rows, residual = stream[step.encoder_rows], stream[places]
        of_tokens = (positions[places], rope_regimes[places], self.dtype)
        ropes = tuple([rotary.angles(*of_tokens) for rotary in self._rotaries])
        of_layers = LayerStep(ropes, None, step.own, is_fused=is_fused, seen=step.seen, **self._biases(step.own))
        assert len(self.layers) == len(cache), (len(self.layers), len(cache))
        for layer, layer_cache in zip(self._decoder_layers, cache, strict=True):
            of_layers.cache = layer_cache
            if len(rows) and layer.cross_attn is not None:
                layer.cross_attn.write(rows, of_layers.key_cache, step.written)
            if len(residual):
                _, residual = layer(None, residual, of_layers)
        if self.norm is not None and len(residual):
            residual = self.norm(residual)
        return stream.index_copy_(0, places, residual)

    def _embed_with_encoder(
        self, token_ids: Tensor, positions: Tensor, step: CrossStep, media: StepMedia | None
    ) -> Tensor:
        """The stream [T, hidden] before the layers, of the decoder's tokens and the encoder's rows."""
        places, size = step.decoder_rows, self.embed_tokens.hidden_size
        stream = torch.zeros((len(token_ids), size), dtype=self.dtype, device=token_ids.device)
        if media is not None:
            stream.index_copy_(0, media.places, media.rows)
        if len(places):
            stream.index_copy_(0, places, self._embed(token_ids[places], positions[places], None, None, None, None))
        return stream

    @property
    def _decoder_layers(self) -> list[DecoderLayer]:
        return [each for each in self.layers if isinstance(each, DecoderLayer)]

    def _biases(self, metadata: AttentionMetadata) -> dict[str, Any]:
        """Fields of `LayerStep` for layers whose attention has the bias, or the embedded distances, of all layers."""
        if self.distances is not None:
            return {"distances": self.distances.of_step(max(metadata.context_lengths, default=1), self.distance_norm)}
        table = self.relative_bias or self._alibi
        return {} if table is None else {"distance_bias": table.table()}

    @property
    def supports_wanted(self) -> bool:
        """Whether the last layer can leave tokens out: not if ranks sum outputs, by rows of the stream."""
        return self._group.size == 1 and self._stage.is_last and bool(self.layers[-1].supports_wanted)

    def _embed(
        self,
        token_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None,
        adapters: StepAdapters | None,
        given: TokenRows | None,
        media: StepMedia | None,
    ) -> Tensor:
        if media is not None:
            token_ids = token_ids.index_fill(0, media.places, 0)
        x: Tensor = self.embed_tokens(token_ids, given)
        if self._multiplier != 1.0:
            rows = None if given is None or self._multiplies_rows else x[given.places]
            x = x * self._multiplier
            if given is not None and rows is not None:
                x = x.index_copy_(0, given.places, rows)
        if self.project_in is not None and not self._projects_sum:
            x = self.project_in(x, adapters)
        if media is not None:
            is_scaled = self._multiplier != 1.0 and self._multiplies_rows
            x = x.index_copy_(0, media.places, media.rows * self._multiplier if is_scaled else media.rows)
        if self.embed_token_types is not None:
            x = x + self.embed_token_types(torch.zeros_like(token_ids) if token_types is None else token_types)
        x = x + self.embed_positions(positions, token_ids) if self._has_positions else x
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return self.project_in(x, adapters) if self.project_in is not None and self._projects_sum else x

    def join_layers(self) -> None:
        """Join the layers into one call if possible. The weights are packed and keep their addresses from now on."""
        self._has_moved = False
        is_plain = bool(self._rotaries) and all(rotary.is_plain(self.dtype) for rotary in self._rotaries)
        is_plain = is_plain and not self._sums_in_layers
        is_plain = is_plain and all(
            type(layer) is DecoderLayer
            and is_as_built(layer, _JOINABLE, None if layer.config.experts is None else layer.mlp)
            for layer in self.layers
        )
        self.joined_layers = self._attention.join_layers([*self.layers], self._group) if is_plain else None

    def forget_addresses(self) -> None:
        """Have the next step join the layers again: weights may be in other memory, or modules have hooks."""
        self._has_moved = True


def _new_layers(context: LayerContext, model_config: ModelConfig, stage: Stage) -> list[DecoderLayer]:
    """Layers of the stage, which may all be the same."""
    if model_config.shares_layers:
        return [_new_layer(context, model_config, stage.start)] * stage.num_layers if stage.num_layers else []
    return [_new_layer(context, model_config, each) for each in range(stage.start, stage.stop)]


def _new_layer(context: LayerContext, model_config: ModelConfig, index: int) -> DecoderLayer:
    """The model's layer of this index. Either all layers defer or none does."""
    defers = all(layer.is_plain_wiring for layer in model_config.layers)
    name = model_config.layer
    layer_class = resolve_name(f"{__package__}.{name}:Layer") if name else DecoderLayer
    layer: DecoderLayer = layer_class(
        replace(context, layer=index), model_config.layers[index], model_config.hidden_size, defers=defers
    )
    bias = layer.config.relative_bias
    if bias is not None and bias.is_of_layer:
        heads = layer.config.num_heads
        layer.relative_bias = RelativeBiasTable(context, bias, heads, sees_later=model_config.is_encoder)
    # Experts hold theirs themselves.
    stored = {name: each for name, each in context.stored.get(index, {}).items() if name != EXPERTS}
    panels = context.kernels.stored_panels(context.dtype) if stored else None
    for name, each in stored.items():
        linear = layer.get_submodule(name)
        assert isinstance(linear, PackedLayer), name
        assert panels is not None, "only kernels with panels take such weights"
        linear.hold_as_stored(each, panels)
    return layer


class DecoderForCausalLM(nn.Module):
    """The model, or a stage of it, of one tensor-parallel rank."""

    def __init__(
        self, context: LayerContext, model_config: ModelConfig, stage: Stage, *, allows_nonfinite: bool = False
    ) -> None:
        super().__init__()
        self.model_config, self.stage = model_config, stage
        self.model = DecoderStack(context, model_config, stage)
        self.tower: Tower | None = _tower(context, model_config, self.model) if stage.is_first else None
        """Makes the rows of images, or of an encoder's input, on the first stage of a model that takes them."""
        self.pooler: Pooler | None = None
        """Replaces the token head on the last stage of a pooling model."""
        if stage.is_last and model_config.pooling is not None:
            self.pooler = Pooler(context, model_config.pooling, model_config.vocab_size)
        elif stage.is_last:
            # A tied head in another stage than the embedding has its own copy.
            tied_to = self.model.embed_tokens if model_config.has_tied_embeddings and stage.is_first else None
            self.lm_head = VocabularyParallelHead(
                context.of_head,
                model_config.vocab_size,
                model_config.output_size,
                tied_to,
                divisor=model_config.logit_divisor,
                cap=model_config.logit_cap,
                has_bias=model_config.has_head_bias,
            )
        self.weights = WeightStore(
            CheckpointNames(model_config, stage),
            {name: each for name, each in self.named_modules() if isinstance(each, CheckpointLayer)},
            context.dtype,
            partial(_stage_slices, context, model_config),
            allows_nonfinite=allows_nonfinite,
            stored_tensors=stored_tensors(model_config, context.stored),
            can_dequantise=context.kernels.stored_panels(context.dtype) is not None,
            stored_experts={index: each[EXPERTS] for index, each in context.stored.items() if EXPERTS in each},
        )
        self._is_on_cpu = context.device.type == "cpu"
        self._is_held = False
        self._watch: ModuleWatch | None = None

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """`DecoderStack.forward`, whose arguments these are."""
        if self._is_held and (self._watch is None or self._watch.has_changed()):
            self.forget_addresses()
            self._watch = ModuleWatch(self)
        hidden: Tensor = self.model(*inputs, **options)
        return hidden

    @property
    def supports_wanted(self) -> bool:
        return not self.model_config.is_encoder and self.model.supports_wanted

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> this rank's logits [R, Vs], of its dtype, or float32 (`LayerContext.has_float32_head`)."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def argmax_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden] -> the maximum of this rank's logits of each row, float32 [R], and its column, int64 [R]."""
        return self.lm_head.argmax(hidden)

    def pack_weights(self) -> None:
        """Pack the weights, after they are filled, and join the layers."""
        self.weights.pack()
        self.forget_addresses()
        self.model.join_layers()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights by a trainer's: see `WeightStore.load`."""
        return self.weights.load(weights)

    def as_checkpoint(self) -> AbstractContextManager[CheckpointView]:
        """A view of the weights by checkpoint name: see `WeightStore.as_checkpoint`."""
        return self.weights.as_checkpoint(model_config=self.model_config, stage=self.stage)

    @property
    def sparse_layers(self) -> dict[int, SparseFeedForward]:
        """This stage's, by index of the layer."""
        layers = enumerate(self.model.layers, self.stage.start)
        return {index: layer.mlp for index, layer in layers if isinstance(layer.mlp, SparseFeedForward)}

    def expert_loads(self) -> dict[int, list[int]]:
        """Tokens of each expert so far, by index of this stage's sparse layers."""
        return {index: layer.num_tokens for index, layer in self.sparse_layers.items()}

    def hold(self) -> None:
        """A caller has the modules from now on, and may change them between any two steps. On the CPU each step looks
        for changes; on other devices, whose steps may be graphs, the next one alone.
        """
        self._is_held = self._is_on_cpu
        self.forget_addresses()

    def forget_addresses(self) -> None:
        """Parameters may have been given other memory: what joins, stacks or copies them is made again."""
        self._watch = None
        self.model.forget_addresses()
        if isinstance(head := getattr(self, "lm_head", None), VocabularyParallelHead):
            head.forget_copies()
        for layer in self.sparse_layers.values():
            layer.forget_addresses()


def _tower(context: LayerContext, model_config: ModelConfig, stack: DecoderStack) -> Tower | None:
    """The tower beside the first stage's stack."""
    vision, part = model_config.vision, model_config.encoder_part
    if part is not None:
        # A rank that has all of the table, as it is, needs it once.
        shares = part.shares_embedding and context.tensor_group.size == 1 and context.quantised is None
        return new_encoder(context, part, partial(DecoderStack, embedding=stack.embed_tokens if shares else None))
    if vision is None or vision.tower is None:
        return None
    return new_tower(context, vision, model_config.embedding_size)


def _stage_slices(context: LayerContext, model_config: ModelConfig, stage: Stage) -> list[WeightSlice]:
    """Slices of a stage of the model, which is built without memory."""
    return DecoderForCausalLM(replace(context, device=torch.device("meta")), model_config, stage).weights.slices
