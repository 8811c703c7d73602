"""Bytes of weights and activations on one rank, by arithmetic alone.

The weights are exact: a test compares them with the parameters of real models. The activations are what this runtime's
forward pass holds at its fullest, rounded up. Knows sizes; needs no torch, so that a plan needs none.
"""

from collections import Counter
from dataclasses import dataclass, replace

from kv_cache.cache_spec import CacheSpec
from spmd_worker.model_config.int8_format import int8_bytes, screen_bytes
from spmd_worker.model_config.layer_config import float32_elements, layer_elements
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig
from spmd_worker.ranks.topology import RankLayout, Stage, expert_share, shard_range, stage_of, vocabulary_rows


@dataclass(frozen=True, slots=True)
class RankSizes:
    """What one tensor-parallel rank holds of each layer: heads, columns and vocabulary rows."""

    num_heads: int
    num_kv_heads: int
    num_columns: int
    num_vocabulary_rows: int


def rank_sizes(model_config: ModelConfig, layout: RankLayout, rank: int) -> RankSizes:
    """The share of `rank` (global); the layout has been checked against the shape."""
    size, tensor_rank = layout.tensor_parallel_size, layout.tensor_rank(rank)
    start, stop = shard_range(model_config.intermediate_size, size, tensor_rank)
    return RankSizes(
        num_heads=model_config.num_heads // size,
        num_kv_heads=max(model_config.num_kv_heads // size, 1),
        num_columns=stop - start,
        num_vocabulary_rows=vocabulary_rows(model_config.vocab_size, size),
    )


def weights_bytes(
    model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, device: str, quantization: str | None = None
) -> int:
    """Bytes of what one rank holds of the weights; `device` is `cpu` or `cuda`. With `quantization` int8, those of
    weights that are quantised are what they are packed to, once they are.

    On the CPU weights are packed for its matrix products, a tied head's as a copy of the embedding, which is looked up
    in plain rows. Where oneDNN packs (there is no AMX), it pads beyond this what fills no tile of its own. Where
    nothing packs (no compiler, and a CPU on which oneDNN packs no bfloat16), that copy is counted and not made.
    """
    sizes, hidden = rank_sizes(model_config, layout, rank), model_config.hidden_size
    stage = stage_of(layout, model_config, rank)
    layers = _layers_elements(model_config, layout, rank, stage)
    # Beyond what they would take in this dtype.
    float32 = sum(
        float32_elements(layer, hidden, sizes.num_heads) for layer in model_config.layers[stage.start : stage.stop]
    )
    float32_bytes = float32 * (DTYPE_BYTES["float32"] - DTYPE_BYTES[dtype])
    # A tied head shares the embedding's rows only where one stage has both, and nothing packs.
    shares_rows = model_config.has_tied_embeddings and stage.is_first and stage.is_last and device != "cpu"
    has_head = model_config.pooling is None
    num_tables = stage.is_first + (stage.is_last - shares_rows if has_head else 0)
    num_others = stage.is_first * (model_config.num_positions + model_config.num_token_types)
    tables = num_tables * sizes.num_vocabulary_rows * model_config.embedding_size + num_others * hidden
    image_rows = vocabulary_rows(model_config.num_embeddings, layout.tensor_parallel_size) - sizes.num_vocabulary_rows
    tables += stage.is_first * image_rows * model_config.embedding_size
    # Every rank of a group has the whole of a projection, on the stage of its table.
    tables += (stage.is_first + stage.is_last) * model_config.num_projection_parameters
    num_norms = stage.is_last * model_config.has_last_norm + stage.is_first * model_config.has_embedding_norm
    norm = num_norms * model_config.norm_parameters
    if model_config.is_encoder and model_config.pooling is not None and stage.is_last:
        float32_bytes += model_config.pooling.num_float32_elements * DTYPE_BYTES["float32"]
    head_bias = sizes.num_vocabulary_rows * (model_config.has_head_bias and has_head) * stage.is_last
    num_bytes = (tables + layers + norm + head_bias) * DTYPE_BYTES[dtype] + float32_bytes
    if quantization is not None:
        shapes = int8_shapes(model_config, layout, rank)
        plain = sum(count * outputs * inputs for (outputs, inputs, _), count in shapes.items())
        num_bytes -= plain * DTYPE_BYTES[dtype]
        num_bytes += sum(
            count * int8_bytes(outputs, inputs, is_gated=is_gated)
            for (outputs, inputs, is_gated), count in shapes.items()
        )
    return num_bytes


def screen_bytes_of(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, device: str) -> int:
    """Of the screen of a rank's head, where it may have one (`model/layers/head_screen.py`). Where the CPU does not
    multiply bytes faster than bfloat16 it is counted and not made.
    """
    has_head = stage_of(layout, model_config, rank).is_last and model_config.pooling is None
    is_plain = model_config.logit_divisor == 1.0 and not model_config.logit_cap and not model_config.has_head_bias
    if device != "cpu" or dtype != "bfloat16" or not has_head or not is_plain:
        return 0
    return screen_bytes(rank_sizes(model_config, layout, rank).num_vocabulary_rows, model_config.embedding_size)


def int8_shapes(model_config: ModelConfig, layout: RankLayout, rank: int) -> Counter[tuple[int, int, bool]]:
    """How many weights of which outputs and inputs a rank has that are quantised, and whether their rows are gates and
    what these open. The embedding is not; what a tied head multiplies with is a copy of it, on the CPU.
    """
    sizes, hidden = rank_sizes(model_config, layout, rank), model_config.hidden_size
    stage = stage_of(layout, model_config, rank)
    shapes: Counter[tuple[int, int, bool]] = Counter()
    for layer in model_config.layers[stage.start : stage.stop]:
        query, key_value = sizes.num_heads * layer.head_size, sizes.num_kv_heads * layer.head_size
        first = sizes.num_columns * (1 + layer.is_gated)
        shapes[query + 2 * key_value, hidden, False] += 1
        shapes[hidden, query, False] += 1
        shapes[first, hidden, layer.is_gated and layer.activation == "silu"] += 1
        shapes[hidden, sizes.num_columns, False] += 1
    if stage.is_last:
        shapes[sizes.num_vocabulary_rows, model_config.embedding_size, False] += 1
    if model_config.own_embedding_size and stage.is_first:
        shapes[hidden, model_config.own_embedding_size, False] += 1
    if model_config.own_embedding_size and stage.is_last:
        shapes[model_config.own_embedding_size, hidden, False] += 1
    return shapes


def _layers_elements(model_config: ModelConfig, layout: RankLayout, rank: int, stage: Stage) -> int:
    """Of the layers of a stage, as the rank has them. Layers of one kind and share are counted once."""
    sizes, tensor_rank = rank_sizes(model_config, layout, rank), layout.tensor_rank(rank)
    indexed = [
        (layer, expert_share(layout, layer, index, tensor_rank)) for index, layer in enumerate(model_config.layers)
    ]
    kinds = Counter(indexed[stage.start : stage.stop])
    share = (sizes.num_heads, sizes.num_kv_heads, sizes.num_columns)
    return sum(
        count * layer_elements(layer, model_config.hidden_size, *share, experts)
        for (layer, experts), count in kinds.items()
    )


def expert_bytes(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str) -> int:
    """Of them what experts take among which a token chooses."""
    stage, tensor_rank, hidden = (
        stage_of(layout, model_config, rank),
        layout.tensor_rank(rank),
        model_config.hidden_size,
    )
    total = 0
    for index in range(stage.start, stage.stop):
        layer = model_config.layers[index]
        share = expert_share(layout, layer, index, tensor_rank)
        if layer.experts is not None and share is not None:
            routed = replace(share, num_shared_columns=0)
            total += layer.experts.elements(hidden, routed) - layer.experts.router_elements(hidden)
    return total * DTYPE_BYTES[dtype]


def activation_bytes(
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    num_tokens: int,
    num_rows: int,
    quantization: str | None = None,
) -> int:
    """Peak of a step of `num_tokens` tokens of which `num_rows` sample.

    A layer holds the residual stream, its normed copy and either queries, keys, values and their rotated copies, or the
    gated columns and their product; layers that run as one hold all of these at once, each of them once. Heads that are
    turned in part or in pairs, clipped or grown are copied twice more; heads that are normed each with its own weights,
    and the columns of an xIELU, in float32; flat norms hold those of all ranks, and parallel layers keep what the
    feed-forward is given. Sparse layers hold what each of a token's experts gives, and sums in float32. The sampler
    holds float32 logits as shards, gathered and as log-probabilities, and the mass of a draw twice in float64.
    Quantised layers hold their inputs as bytes, and of several ranks the int32 sums of all.
    """
    sizes = rank_sizes(model_config, layout, rank)
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    has_copies = any(rope.partial_factor < 1 or rope.is_interleaved or rope.query_growth for rope in model_config.ropes)
    copies = 5 if has_copies or any(layer.qkv_clip for layer in model_config.layers) else 3
    attention = copies * heads * model_config.head_size
    if any(layer.qk_norm == "flat" for layer in model_config.layers):
        attention += 3 * (model_config.num_heads + model_config.num_kv_heads) * model_config.head_size
    if any(layer.qk_norm == "each_head" for layer in model_config.layers):
        attention += 4 * heads * model_config.head_size
    num_columns = sizes.num_columns * (16 if any(layer.activation == "xielu" for layer in model_config.layers) else 4)
    num_streams = 4 + any(layer.is_parallel for layer in model_config.layers)
    per_token = num_streams * model_config.hidden_size + max(
        attention, num_columns, _sparse_elements(model_config, layout)
    )
    if model_config.is_encoder:
        return num_tokens * per_token * DTYPE_BYTES[dtype]
    logits = num_rows * (sizes.num_vocabulary_rows * 4 + model_config.vocab_size * (4 + 4 + 8 + 8))
    quantised = 0
    if quantization is not None:
        quantised = max(model_config.hidden_size, num_columns)
        if layout.tensor_parallel_size > 1:
            quantised += 4 * (layout.tensor_parallel_size + 1) * model_config.hidden_size
    return num_tokens * (per_token * DTYPE_BYTES[dtype] + quantised) + logits


def _sparse_elements(model_config: ModelConfig, layout: RankLayout) -> int:
    """Of one token in the largest sparse layer; at most all tokens are an expert's."""
    size, hidden = layout.tensor_parallel_size, model_config.hidden_size
    each = [layer.experts for layer in dict.fromkeys(model_config.layers) if layer.experts is not None]
    columns = [experts.intermediate_size // (1 if layout.experts is not None else size) + 1 for experts in each]
    return max(
        (
            (experts.num_chosen + 8) * hidden
            + (12 if experts.limit > 0 else 10) * width
            + 4 * experts.shared_size
            + 12 * experts.num_experts
            for experts, width in zip(each, columns, strict=True)
        ),
        default=0,
    )


def cache_spec(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, block_size: int) -> CacheSpec:
    """One rank's share of the cache. Layers of an encoder, which keep nothing, share that of a step."""
    sizes = rank_sizes(model_config, layout, rank)
    num_layers = 1 if model_config.is_encoder else stage_of(layout, model_config, rank).num_layers
    return CacheSpec(num_layers, sizes.num_kv_heads, model_config.head_size, DTYPE_BYTES[dtype], block_size)
