"""Bytes of weights and activations on one rank, computed from sizes without torch.

The weights are exact: a test compares them with the parameters of real models. The activations are the peak of this
runtime's forward pass, rounded up.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kv_cache.cache_spec import BlockLayer, CacheSpec, StateLayer
from kv_cache.state_slots import snapshot_interval
from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model_config.byte_rows import byte_rows_bytes
from spmd_worker.model_config.int8_format import int8_bytes
from spmd_worker.model_config.layer_config import ExpertsConfig, ExpertShare, IndexerConfig, LayerConfig, LayerShare
from spmd_worker.model_config.layer_elements import float32_elements, layer_elements, mixer_linears
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig
from spmd_worker.model_config.stored_format import EXPERTS
from spmd_worker.model_config.stream_config import BalancedStreamsConfig
from spmd_worker.model_config.tower_elements import encoder_activations
from spmd_worker.ops.kernels.cpu.argmax_bytes import argmax_bytes
from spmd_worker.ranks.stored_weights import NOTHING_STORED, StoredWeights, stored_linears
from spmd_worker.ranks.topology import RankLayout, Stage, expert_share, layer_share, stage_of, vocabulary_rows
from spmd_worker.worker.memory.tower_memory import tower_activations

OPERATIONS_PER_BYTE: Final = {"cpu": 150.0, "cuda": 8000.0}
"""Prefill operations of a device per byte moved between it and the host: about 1 TFLOP/s to 7 GB/s in host memory, 400
TFLOP/s to 50 GB/s of PCIe 5. Only the order of magnitude matters (docs/internals/cache.md).
"""

_RANK_STEP: Final = 16
"""Kernels pad the ranks of adapters to a multiple of it."""

Shapes = Counter[tuple[int, int, bool]]
"""Numbers of weights by (outputs, inputs, whether the rows are gate and up projections)."""


def rank_layers(model_config: ModelConfig, layout: RankLayout, rank: int) -> list[tuple[LayerConfig, LayerShare]]:
    """The layers of global rank `rank`'s stage and its share of each; the layout has been checked against the model."""
    stage, tensor_rank = stage_of(layout, model_config, rank), layout.tensor_rank(rank)
    layers = model_config.layers
    return [(layers[index], layer_share(layout, layers[index], index, tensor_rank)) for index in stage.indices]


def rank_vocabulary_rows(model_config: ModelConfig, layout: RankLayout) -> int:
    """Rows of each rank's shard of the vocabulary."""
    return vocabulary_rows(model_config.vocab_size, layout.tensor_parallel_size)


def weights_bytes(
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    device: str,
    quantization: str | None = None,
    stored: StoredWeights = NOTHING_STORED,
) -> int:
    """Bytes of one rank's weights, quantised weights as packed; `device` is `cpu` or `cuda`. `stored` are those
    that stay as the checkpoint has them.

    On the CPU weights are packed for its GEMMs, a tied head as a copy of the embedding, which is looked up by row.
    oneDNN's packing (without AMX) pads incomplete tiles beyond this. If nothing packs (no compiler, and a CPU on which
    oneDNN does not pack bfloat16), that copy is counted but not made.
    """
    num_rows, hidden = rank_vocabulary_rows(model_config, layout), model_config.hidden_size
    stage, kinds = stage_of(layout, model_config, rank), Counter(_held_layers(model_config, layout, rank))
    layers = sum(count * layer_elements(layer, hidden, share) for (layer, share), count in kinds.items())
    # Bytes in addition to those in this dtype.
    float32 = sum(count * float32_elements(layer, hidden, share) for (layer, share), count in kinds.items())
    float32_bytes = float32 * (DTYPE_BYTES["float32"] - DTYPE_BYTES[dtype])
    # A tied head shares the embedding's rows only if one stage has both and nothing packs.
    packs = device == "cpu" or quantization == "int8"
    shares_rows = model_config.has_tied_embeddings and stage.is_first and stage.is_last and not packs
    has_head = model_config.pooling is None
    num_tables = stage.is_first + (stage.is_last - shares_rows if has_head else 0)
    num_others = stage.is_first * (model_config.num_positions + model_config.num_token_types)
    tables = num_tables * num_rows * model_config.embedding_size + num_others * model_config.sum_size
    image_rows = vocabulary_rows(model_config.num_embeddings, layout.tensor_parallel_size) - num_rows
    tables += stage.is_first * image_rows * model_config.embedding_size
    if model_config.num_layer_inputs:
        # Layers of every stage would need them: there is one stage.
        input_rows = vocabulary_rows(model_config.num_layer_inputs, layout.tensor_parallel_size)
        tables += input_rows * model_config.layer_inputs_size + model_config.num_layer_input_parameters
    tables += model_config.num_outer_stream_parameters
    for (layer, share), _ in [*kinds.items()][:1]:
        # One table of all layers, if they share it, on every stage.
        tables += 0 if layer.relative_bias is None else layer.relative_bias.elements(share.num_heads)
        tables += 0 if layer.distances is None else layer.distances.elements(hidden)
    float32_bytes += model_config.num_rope_parameters * DTYPE_BYTES["float32"]
    # Every rank of a group has the complete projection, on the stage of its table.
    tables += _num_projections(model_config, stage) * model_config.num_projection_parameters
    norm = stage.is_last * model_config.has_last_norm * model_config.norm_parameters
    norm += stage.is_first * model_config.embedding_norm_parameters
    float32_bytes += stage.is_last * model_config.num_stream_head_parameters * DTYPE_BYTES["float32"]
    has_classifier = model_config.is_encoder or model_config.encoder_part is not None
    if has_classifier and model_config.pooling is not None and stage.is_last:
        float32_bytes += model_config.pooling.num_float32_elements * DTYPE_BYTES["float32"]
    head_bias = num_rows * (model_config.has_head_bias and has_head) * stage.is_last
    tower = model_config.num_tower_parameters
    part = model_config.encoder_part
    if part is not None and part.shares_embedding and (layout.tensor_parallel_size > 1 or quantization is not None):
        # The rank has a part of the table, or other numbers, and the encoder all of it.
        tower += vocabulary_rows(part.stack.vocab_size, 1) * part.stack.embedding_size
    tower *= stage.is_first
    num_bytes = (tables + layers + norm + head_bias + tower) * DTYPE_BYTES[dtype] + float32_bytes
    num_bytes -= _bytes_saved(model_config, layout, rank, dtype, stored, only_experts=False)
    if quantization is not None:
        shapes = quantised_shapes(model_config, layout, rank, has_head=quantization == "int8")
        num_bytes -= _quantised_bytes_saved(shapes, dtype, device)
    return num_bytes


def adapter_bytes(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, limits: AdapterLimits) -> int:
    """Bytes of one rank's LoRA adapters if as many are loaded as `limits` allow, of the largest rank, with matrices for
    all linear layers, of experts only if it may have some. Of modules that a checkpoint fuses, which share A, less is
    needed.
    """
    stage, hidden, total = stage_of(layout, model_config, rank), model_config.hidden_size, 0
    for layer, share in _held_layers(model_config, layout, rank):
        columns = share.num_columns if layer.has_dense else 0
        columns = columns if share.experts is None else columns + share.experts.num_shared_columns
        linears = mixer_linears(layer, hidden, share)
        modules = [(each.num_inputs, outputs) for each in linears for outputs in each.num_outputs]
        if columns and layer.has_feed_forward:
            modules += [(hidden, columns)] * (1 + layer.is_gated) + [(columns, hidden)]
        if layer.experts is not None and layer.experts.latent_size:
            modules += [(hidden, layer.experts.latent_size), (layer.experts.latent_size, hidden)]
        if layer.experts is not None:
            total += _router_outputs(layer.experts, hidden) * DTYPE_BYTES["float32"] // DTYPE_BYTES[dtype]
            if limits.of_experts and share.experts is not None:
                size, width = layer.experts.latent_size or hidden, share.experts.num_columns
                of_expert = (1 + layer.experts.is_gated) * (size + width) + width + size
                total += share.experts.num_experts * of_expert
        rank_of_residual = 0 if layer.predicted_streams is None else layer.predicted_streams.rank
        for size in filter(None, (layer.input_size, rank_of_residual)):
            modules += [(hidden, size), (size, hidden)]
        total += sum(inputs + outputs for inputs, outputs in modules)
    total += _num_projections(model_config, stage) * (hidden + model_config.own_embedding_size)
    total += (hidden + model_config.layer_inputs_size) * (model_config.layer_inputs_size > 0)
    padded_rank = -(-limits.max_lora_rank // _RANK_STEP) * _RANK_STEP
    return total * padded_rank * limits.max_cpu_loras * DTYPE_BYTES[dtype]


def _router_outputs(experts: ExpertsConfig, hidden: int) -> int:
    """Inputs and outputs, which kernels pad, of a router and of a shared expert's gate."""
    outputs = (experts.num_choices, *[1] * experts.has_shared_gate)
    return sum(hidden - (-each // _RANK_STEP) * _RANK_STEP for each in outputs)


def _held_layers(model_config: ModelConfig, layout: RankLayout, rank: int) -> list[tuple[LayerConfig, LayerShare]]:
    """Those of `rank_layers` that have weights of their own."""
    return rank_layers(model_config, layout, rank)[: 1 if model_config.shares_layers else None]


def _num_projections(model_config: ModelConfig, stage: Stage) -> int:
    """Projections between embeddings, or logits, and layers of another size, on this stage."""
    if not model_config.own_embedding_size:
        return 0
    return stage.is_first + (stage.is_last and not model_config.projects_sum)


def _quantised_bytes_saved(shapes: Shapes, dtype: str, device: str) -> int:
    """Bytes that weights of these shapes take less, quantised, than in this dtype."""
    return sum(
        count * (outputs * inputs * DTYPE_BYTES[dtype] - _packed_bytes(outputs, inputs, is_gated, dtype, device))
        for (outputs, inputs, is_gated), count in shapes.items()
    )


def _packed_bytes(num_outputs: int, num_inputs: int, is_gated: bool, dtype: str, device: str) -> int:
    """Bytes of a quantised weight, int8 or FP8."""
    if device == "cpu":
        return int8_bytes(num_outputs, num_inputs, is_gated=is_gated)
    return byte_rows_bytes(num_outputs, num_inputs, DTYPE_BYTES[dtype])


def head_argmax_bytes(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, device: str) -> int:
    """Bytes that kernels may keep alongside a rank's head to find its argmax faster."""
    has_head = stage_of(layout, model_config, rank).is_last and model_config.pooling is None
    is_plain = model_config.logit_divisor == 1.0 and not model_config.logit_cap and not model_config.has_head_bias
    if not has_head or not is_plain:
        return 0
    return argmax_bytes(rank_vocabulary_rows(model_config, layout), model_config.embedding_size, dtype, device)


def quantised_shapes(model_config: ModelConfig, layout: RankLayout, rank: int, *, has_head: bool) -> Shapes:
    """A rank's quantised weights. The embedding is not quantised; a tied head that is, if it `has_head`, is a copy of
    it.
    """
    stage, hidden = stage_of(layout, model_config, rank), model_config.hidden_size
    shapes = Shapes()
    for layer, share in _held_layers(model_config, layout, rank):
        for each in mixer_linears(layer, hidden, share):
            shapes[sum(each.num_outputs), each.num_inputs, False] += 1
        if layer.input_size:
            shapes[layer.input_size, hidden, False] += 1
            shapes[hidden, layer.input_size, False] += 1
        shapes += _expert_shapes(layer, hidden, share.experts)
        if not layer.has_dense:
            continue
        first = share.num_columns * (1 + layer.is_gated)
        shapes[first, hidden, layer.pairs_gates] += 1
        shapes[hidden, share.num_columns, False] += 1
    if stage.is_last and has_head:
        shapes[rank_vocabulary_rows(model_config, layout), model_config.embedding_size, False] += 1
    if model_config.layer_inputs_size:
        shapes[model_config.layer_inputs_size, hidden, False] += 1
    if model_config.own_embedding_size and stage.is_first:
        shapes[hidden, model_config.own_embedding_size, False] += 1
    if model_config.own_embedding_size and stage.is_last and not model_config.projects_sum:
        shapes[model_config.own_embedding_size, hidden, False] += 1
    return shapes


def unquantised_part_bytes(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str) -> int:
    """Bytes that a rank's weights take more while they are loaded on CPUs: parts of rows, which are quantised when all
    ranks have theirs.
    """
    hidden, shapes = model_config.hidden_size, Shapes()
    if layout.tensor_parallel_size == 1:
        return 0
    for layer, share in rank_layers(model_config, layout, rank):
        for each in mixer_linears(layer, hidden, share):
            if each.num_outputs == (hidden,):
                shapes[hidden, each.num_inputs, False] += 1
        if layer.input_size:
            shapes[hidden, layer.input_size, False] += 1
        if layer.has_dense:
            shapes[hidden, share.num_columns, False] += 1
    return _quantised_bytes_saved(shapes, dtype, "cpu")


def _expert_shapes(layer: LayerConfig, hidden: int, share: ExpertShare | None) -> Shapes:
    """`quantised_shapes` of a rank's share of a sparse layer, whose router is not quantised."""
    shapes, experts = _routed_shapes(layer, hidden, share), layer.experts
    if experts is None or share is None:
        return shapes
    if experts.latent_size:
        shapes[experts.latent_size, hidden, False] += 1
        shapes[hidden, experts.latent_size, False] += 1
    if share.num_shared_columns:
        shapes[share.num_shared_columns * (1 + layer.is_gated), hidden, layer.pairs_gates] += 1
        shapes[hidden, share.num_shared_columns, False] += 1
    return shapes


def _routed_shapes(layer: LayerConfig, hidden: int, share: ExpertShare | None) -> Shapes:
    """`quantised_shapes` of a rank's routed experts."""
    shapes, experts = Shapes(), layer.experts
    if experts is not None and share is not None:
        inputs, bounds = experts.latent_size or hidden, experts.limit or experts.bound
        is_in_pairs = experts.is_gated and layer.activation == "silu" and not bounds
        shapes[share.num_columns * (1 + experts.is_gated), inputs, is_in_pairs] += share.num_experts
        shapes[inputs, share.num_columns, False] += share.num_experts
    return shapes


def _bytes_saved(
    model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, stored: StoredWeights, *, only_experts: bool
) -> int:
    """Bytes that a rank's weights, or its experts', that stay as they are stored take less than in this dtype."""
    total, tensor_rank = 0, layout.tensor_rank(rank)
    for index in stage_of(layout, model_config, rank).indices:
        formats = stored.formats.get(index, {})
        for each in stored_linears(model_config, layout, index, tensor_rank) if formats else ():
            if each.name in formats and (each.name == EXPERTS or not only_experts):
                shape = each.num_outputs, each.num_inputs
                held = formats[each.name].num_bytes(*shape, is_in_panels=stored.are_panels)
                total += each.count * (shape[0] * shape[1] * DTYPE_BYTES[dtype] - held)
    return total


def expert_bytes(
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    stored: StoredWeights = NOTHING_STORED,
    quantization: str | None = None,
    device: str = "cpu",
) -> int:
    """Bytes of a rank's routed experts, quantised as on a `device`."""
    stage, hidden, total, shapes = stage_of(layout, model_config, rank), model_config.hidden_size, 0, Shapes()
    for index in range(stage.start, stage.stop):
        layer = model_config.layers[index]
        share = expert_share(layout, layer, index, layout.tensor_rank(rank))
        if layer.experts is not None and share is not None:
            total += layer.experts.routed_elements(hidden, share)
            shapes += Shapes() if quantization is None else _routed_shapes(layer, hidden, share)
    saved = _bytes_saved(model_config, layout, rank, dtype, stored, only_experts=True)
    saved += _quantised_bytes_saved(shapes, dtype, device)
    return total * DTYPE_BYTES[dtype] - saved


def activation_bytes(
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    num_tokens: int,
    num_rows: int,
    quantization: str | None = None,
    num_tower_rows: Sequence[int] = (),
    *,
    adds_by_tree: bool = False,
    most_drafts: int = 0,
) -> int:
    """Peak bytes of a step of `num_tokens` tokens, of which `num_rows` are sampled, or of the towers for an image
    or a recording of `num_tower_rows`, which precede it on the first stage. Rows have `most_drafts` drafts at most.

    A layer holds the residual stream, its normed copy and either queries, keys, values and their rotated copies, or the
    gate and up columns and their product; fused layers hold one of each at the same time. Heads with partial or
    interleaved rotation, clipping or query growth are copied twice more; heads with individual norm weights, and xIELU
    columns, in float32. Bounded gates and ups are copied. Flat norms hold the heads of all ranks; parallel layers keep
    the feed-forward's input. Sparse layers hold the outputs of a token's experts and sums in float32. The sampler holds
    float32 logits as shards, gathered and as logprobs, and the fixed-point probability weights twice in float64.
    Quantised layers hold their inputs as bytes and, with several ranks, the int32 sums of all. Ranks that add by a tree
    (`GroupHandle.has_tree`) hold float32 parts: their own, those of all, and two sums of them. Recurrences over drafts
    have two copies of their inputs and one of their outputs, also those of the tokens that rows lag by. Tokens choose
    keys, and attend to them, some at a time.
    """
    kinds = list(dict.fromkeys(rank_layers(model_config, layout, rank)))
    attention = max(_mixer_elements(model_config, layer, share) for layer, share in kinds)
    num_columns = max(share.num_columns * _column_copies(layer) + _full_rows(layer) for layer, share in kinds)
    # Of a decoder with an encoder the complete stream, and the encoder's rows of it.
    num_streams = 4 + any(layer.is_parallel for layer in model_config.layers)
    num_streams += 2 * (model_config.encoder_part is not None)
    per_token = num_streams * model_config.hidden_size + max(
        attention, num_columns, _sparse_elements(model_config, layout)
    )
    # Projected, looked up, normed and added; a layer's own are copied.
    per_token += 5 * model_config.layer_inputs_size
    others = 0
    if model_config.stream_size > model_config.hidden_size:
        # Streams, normed, their gates, and products, or streams, predictions and corrections; norms, gates, products
        # and mixed streams are float32 until they are rounded, in up to four copies. Keys of n-grams, or gated values,
        # and inputs and outputs of their convolution.
        has_ngrams = any(layer.ngrams is not None for layer, _ in kinds)
        is_mixed = isinstance(model_config.layers[0].streams, BalancedStreamsConfig)
        per_token += (4 + 2 * has_ngrams) * model_config.stream_size
        others = (3 + is_mixed) * DTYPE_BYTES["float32"] * model_config.stream_size
    if quantization is not None:
        others += max(model_config.hidden_size, num_columns)
        if layout.tensor_parallel_size > 1 and quantization == "int8":
            others += 4 * (layout.tensor_parallel_size + 1) * model_config.hidden_size
    elif layout.tensor_parallel_size > 1 and adds_by_tree:
        others += DTYPE_BYTES["float32"] * (layout.tensor_parallel_size + 3) * model_config.hidden_size
    of_step = num_tokens * (per_token * DTYPE_BYTES[dtype] + others)
    of_step += choice_bytes(model_config, DTYPE_BYTES[dtype], layout.tensor_parallel_size)
    if any(layer.alibi for layer, _ in kinds):
        # A number of each head for each distance, for all layers and steps.
        num_distances = 2 * model_config.max_position_embeddings + 1
        of_step += max(share.num_heads for _, share in kinds) * num_distances * DTYPE_BYTES["float32"]
    if most_drafts:
        states = [state_layer(layer, model_config.hidden_size, share, most_drafts) for layer, share in kinds]
        width = max([max(each.saved[1], each.second_saved[1]) for each in states if each is not None], default=0)
        of_step += 3 * width * (num_tokens + num_rows * most_drafts) * DTYPE_BYTES[dtype]
    if model_config.is_encoder:
        return of_step
    of_tower = tower_bytes(model_config, dtype, *num_tower_rows) if stage_of(layout, model_config, rank).is_first else 0
    num_shard_rows = rank_vocabulary_rows(model_config, layout)
    logits = num_rows * (num_shard_rows * 4 + model_config.vocab_size * (4 + 4 + 8 + 8))
    return max(of_step + logits, of_tower)


def tower_bytes(model_config: ModelConfig, dtype: str, *num_rows: int) -> int:
    """Peak bytes of the towers, for an image or a recording of so many tokens each (`ResolvedRun.most_tower_rows`), or
    of an encoder for an input of so many rows; 0 without one.
    """
    if model_config.encoder_part is not None:
        return encoder_activations(model_config.encoder_part, max(num_rows, default=0)) * DTYPE_BYTES[dtype]
    parts = () if model_config.vision is None else model_config.vision.parts
    sizes = [tower_activations(*each, model_config.hidden_size) for each in zip(parts, num_rows)]
    # One image or recording at a time.
    return max([each * DTYPE_BYTES[dtype] + float32 * DTYPE_BYTES["float32"] for each, float32 in sizes], default=0)


def _mixer_elements(model_config: ModelConfig, layer: LayerConfig, share: LayerShare) -> int:
    """Elements per token of what the mixers of one layer compute."""
    # Three projections, the input and the output of the convolution, and their product.
    elements = 6 * model_config.hidden_size // share.num_ranks if layer.mixer == "conv" else 0
    if layer.mamba is not None:
        # Projected, twice if scaled, convolved, scanned, gathered with its gate, and gated.
        mamba = layer.mamba.share(share.num_ranks)
        elements += 2 * mamba.num_projected + mamba.num_channels + 2 * mamba.num_columns
        elements += 6 * layer.mamba.num_columns // layer.mamba.num_groups * mamba.num_groups
    if layer.mamba1 is not None:
        # Projected, convolved, scanned, joined with its gate, and gated; dt, as float32 too; dt, B and C joined.
        own = layer.mamba1.share(share.num_ranks)
        elements += 10 * own.num_channels + 3 * own.num_parameters_of_scan
    if layer.delta is not None:
        # Projected, convolved, scanned and gated.
        delta = layer.delta.share(share.num_ranks)
        elements += delta.num_projected + delta.num_channels + 2 * delta.num_columns
    if layer.compressed is not None:
        elements += _compressed_elements(layer, share)
    if layer.latent is not None:
        elements += _latent_elements(layer, share)
    indexer = layer.chooser
    if indexer is not None and indexer.most_seen < model_config.max_model_len:
        # The choice, int32, of each head perhaps; queries and outputs of tokens that see all keys, beside others.
        value_size = layer.head_size if layer.latent is None else layer.latent.rank
        num_choices = share.num_kv_heads if indexer.is_by_head else 1
        elements += 2 * num_choices * indexer.most_seen + share.num_heads * (layer.head_size + value_size)
        elements += model_config.hidden_size * indexer.norms_input
    return elements + (_attention_elements(model_config, layer, share) if layer.has_attention else 0)


def _latent_elements(layer: LayerConfig, share: LayerShare) -> int:
    """Elements per token of queries as projected and five copies of their parts, absorbed queries, latents, their
    weighted sums, and values; of an indexer's queries and keys, and copies of both.
    """
    assert layer.latent is not None, layer
    latent = layer.latent
    of_head = 6 * latent.query_size + layer.head_size + latent.rank + 2 * latent.value_size
    elements = share.num_heads * of_head + 2 * latent.query_rank + 4 * latent.key_size
    return elements + _indexer_elements(latent.own_indexer)


def _indexer_elements(indexer: IndexerConfig | None) -> int:
    """Elements per token of an indexer's queries and key, and of copies of both."""
    return 0 if indexer is None else 4 * (indexer.num_heads + 1) * indexer.head_size


def _compressed_elements(layer: LayerConfig, share: LayerShare) -> int:
    """Elements per token of queries, projected, normed, rotated and attended, with copies of their parts, latents,
    keys, rows of entries, and what groups of outputs are projected to; of an indexer's queries.
    """
    compressed, size = layer.compressed, layer.head_size
    assert compressed is not None, layer
    num_groups = compressed.num_groups * share.num_heads // layer.num_heads
    elements = 9 * share.num_heads * size + 2 * num_groups * compressed.output_rank
    elements += 3 * compressed.query_rank + 4 * size + compressed.row_size(size)
    if compressed.indexer is not None:
        # Queries in float32 too; positions of entries, int64, are at most as many bytes.
        elements += 6 * compressed.indexer.num_heads * compressed.indexer.head_size + 8 * compressed.indexer.num_chosen
    return elements


def _attention_elements(model_config: ModelConfig, layer: LayerConfig, share: LayerShare) -> int:
    """Elements per token of queries, keys and values and of their copies in one layer."""
    size, heads = layer.head_size, share.num_heads + 2 * share.num_kv_heads
    has_copies = any(rope.partial_factor < 1 or rope.is_interleaved or rope.query_growth for rope in model_config.ropes)
    has_copies = has_copies or layer.qkv_clip > 0 or layer.key_multiplier != 1.0 or layer.norms_values
    has_copies = has_copies or layer.value_size > 0 or layer.value_multiplier != 1.0
    elements = (5 if has_copies else 3) * heads * size
    if layer.qk_norm == "flat":
        elements += 3 * (layer.num_heads + layer.num_kv_heads) * size
    if layer.qk_norm == "each_head":
        elements += 4 * heads * size
    if layer.output_gate:
        # Gates of numbers are projected too; they are float32, and rounded.
        elements += (2 if layer.output_gate == "head" else 8) * share.num_heads * size
    elements += _indexer_elements(layer.indexer)
    if layer.distances is not None:
        columns = layer.distances.num_columns(model_config.max_position_embeddings)
        elements += layer.distances.num_products * share.num_heads * columns
    return elements


def _column_copies(layer: LayerConfig) -> int:
    """Elements per token and column of a dense feed-forward."""
    if layer.activation == "xielu":
        return 16
    return 7 if layer.bound else 4


def _full_rows(layer: LayerConfig) -> int:
    """Elements per token of gates with a cutoff: all ranks', and float32 copies of them and of their squares."""
    return 0 if layer.gate_cutoff is None else 8 * layer.intermediate_size


def _sparse_elements(model_config: ModelConfig, layout: RankLayout) -> int:
    """Elements per token of the largest sparse layer, if all tokens are routed to one expert."""
    size = 1 if layout.experts is not None else layout.tensor_parallel_size
    counts = [
        (experts.num_chosen * (1 + experts.weighs_inputs) + 8 + 6 * (experts.are_beside_dense or experts.skips_layer))
        * model_config.hidden_size
        + (12 if experts.limit > 0 or experts.bound else 10) * (experts.intermediate_size // size + 1)
        + _column_copies(layer) * experts.shared_size
        + 12 * experts.num_choices
        for layer in dict.fromkeys(model_config.layers)
        if (experts := layer.experts) is not None
    ]
    return max(counts, default=0)


def cache_spec(
    model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, block_size: int, most_drafts: int = 0
) -> CacheSpec:
    """One rank's share of the cache, in a run whose rows have up to `most_drafts` drafts. Layers of an encoder, which
    has no cache, share one step's buffer.
    """
    layers = tuple([block_layer(*each, block_size) for each in rank_layers(model_config, layout, rank)])
    if model_config.is_encoder:
        assert len(dict.fromkeys(layers)) == 1, f"layers of an encoder are alike: {layers}"
        layers = layers[:1]
    states: tuple[StateLayer | None, ...] = ()
    if model_config.has_states:
        hidden_size = model_config.hidden_size
        states = tuple(
            [
                state_layer(layer, hidden_size, share, most_drafts)
                for layer, share in rank_layers(model_config, layout, rank)
            ]
        )
    return CacheSpec(layers, DTYPE_BYTES[dtype], block_size, states)


def state_layer(layer: LayerConfig, hidden_size: int, share: LayerShare, most_drafts: int = 0) -> StateLayer | None:
    """Recurrent state that a rank with this share of a layer keeps, and what it saves of `most_drafts` drafts; None if
    it keeps none. Key heads and groups of which there are fewer than ranks are on several.
    """
    size = share.num_ranks
    shape: tuple[int, ...] = ()
    # A draft's inputs of the recurrence are those of the convolution, and the numbers that gate its step.
    num_gates = 0
    if layer.conv is not None:
        num_taps, num_channels = layer.conv.kernel_size, hidden_size // size
    elif layer.delta is not None:
        delta = layer.delta.share(size)
        shape = (delta.num_value_heads, delta.key_size, delta.value_size)
        num_taps, num_channels, num_gates = delta.kernel_size, delta.num_channels, shape[0] + delta.num_steps
    elif layer.mamba1 is not None:
        of_channels = layer.mamba1.share(size)
        shape = (of_channels.num_channels, of_channels.state_size)
        num_taps, num_channels = of_channels.kernel_size, of_channels.num_channels
    elif layer.mamba is not None:
        mamba = layer.mamba.share(size)
        shape = (mamba.num_heads, mamba.head_size, mamba.state_size)
        num_taps, num_channels, num_gates = mamba.kernel_size, mamba.num_channels, mamba.num_heads
    else:
        return None
    saved = (most_drafts, num_channels + num_gates) if most_drafts else (0, 0)
    ngrams = layer.ngrams
    if ngrams is None or layer.streams is None:
        return StateLayer(shape, (num_taps - 1, num_channels), saved)
    # Every rank has all channels of this one.
    second = ngrams.num_channels(layer.streams.num_streams * hidden_size)
    of_ngrams = (ngrams.num_inputs_kept, second), (most_drafts, second) if most_drafts else (0, 0)
    return StateLayer(shape, (num_taps - 1, num_channels), saved, *of_ngrams)


def block_layer(layer: LayerConfig, share: LayerShare, block_size: int) -> BlockLayer | None:
    """Keys and values that a rank with this share of a layer keeps, in blocks of so many tokens; None if it keeps none
    of its own.
    """
    if not layer.attends or layer.kv_layer is not None:
        return None
    if layer.latent is not None:
        return BlockLayer(1, layer.latent.key_size, 0, layer.latent.index_size)
    if layer.compressed is not None:
        return BlockLayer(1, layer.head_size, 0, layer.compressed.beside_key(layer.head_size, block_size))
    index_size = 0 if layer.indexer is None else layer.indexer.cached_size
    return BlockLayer(share.num_kv_heads, layer.head_size, layer.head_size, index_size)


def parts_of_entries(layer: LayerConfig, block_size: int) -> tuple[BlockLayer, BlockLayer] | None:
    """`block_layer` of a layer with compressed entries in two: keys and rows, which later tokens need for a while, and
    entries, which all of them may see. None of other layers.
    """
    compressed, size = layer.compressed, layer.head_size
    if compressed is None or not layer.has_entries:
        return None
    entries = BlockLayer(1, 0, 0, compressed.entry_share(size, block_size))
    return BlockLayer(1, size, 0, compressed.row_size(size)), entries


def block_copy_tokens(
    model_config: ModelConfig, dtype: str, block_size: int, device: str, block_dtype_bytes: int = 0
) -> float:
    """Tokens that could be computed while one block is swapped out and in: two operations per weight and token, without
    attention, which underestimates recomputation in long sequences. `device` is "cpu" or "cuda", `block_dtype_bytes`
    as in `CacheSpec`.

    Replicas decide by it, so it depends on sizes and constants, not on measurements. The tensor-parallel size cancels
    out: each rank computes its share of the tokens and moves its share of the block.
    """
    spec = replace(_complete_spec(model_config, dtype, block_size), block_dtype_bytes=block_dtype_bytes)
    return _copy_tokens(model_config, spec.block_bytes, device)


def slot_copy_tokens(model_config: ModelConfig, dtype: str, device: str) -> float:
    """`block_copy_tokens` of one sequence's recurrent states."""
    return _copy_tokens(model_config, _complete_spec(model_config, dtype, 1).slot_bytes, device)


def model_snapshot_interval(model_config: ModelConfig, dtype: str, block_dtype_bytes: int = 0) -> int:
    """`snapshot_interval` of a model; 0, only at the end of a prompt, without states or without keys and values."""
    spec = replace(_complete_spec(model_config, dtype, 1), block_dtype_bytes=block_dtype_bytes)
    return snapshot_interval(spec.slot_bytes, spec.block_bytes) if spec.slot_bytes and spec.block_bytes else 0


def _complete_spec(model_config: ModelConfig, dtype: str, block_size: int) -> CacheSpec:
    return cache_spec(model_config, RankLayout(1, 1, 1), 0, dtype, block_size)


def _copy_tokens(model_config: ModelConfig, num_bytes: int, device: str) -> float:
    return 2 * num_bytes * OPERATIONS_PER_BYTE[device] / (2 * model_config.num_parameters)
