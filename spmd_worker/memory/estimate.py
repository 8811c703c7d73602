"""Bytes of weights and activations on one rank, by arithmetic alone.

The weights are exact: a test compares them with the parameters of real models. The activations are what this runtime's
forward pass holds at its fullest, rounded up. Knows sizes; needs no torch, so that a plan needs none.
"""

from dataclasses import dataclass

from kv_cache.cache_spec import CacheSpec
from spmd_worker.distributed.topology import RankLayout, shard_range, stage_of, vocabulary_rows
from spmd_worker.model_config.layer_config import layer_elements
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig


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


def weights_bytes(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, device: str) -> int:
    """Bytes of what one rank holds of the weights; `device` is `cpu` or `cuda`.

    On the CPU weights are packed for its matrix products, a tied head's as a copy of the embedding, which is looked up
    in plain rows. Where oneDNN packs (there is no AMX), it pads beyond this what fills no tile of its own.
    """
    sizes, hidden = rank_sizes(model_config, layout, rank), model_config.hidden_size
    stage = stage_of(layout, model_config, rank)
    share = (sizes.num_heads, sizes.num_kv_heads, sizes.num_columns)
    layers = sum(layer_elements(layer, hidden, *share) for layer in model_config.layers[stage.start : stage.stop])
    # A tied head shares the embedding's rows only where one stage has both, and nothing packs.
    shares_rows = model_config.has_tied_embeddings and stage.is_first and stage.is_last and device != "cpu"
    num_tables = stage.is_first + stage.is_last - shares_rows
    tables = (num_tables * sizes.num_vocabulary_rows + stage.is_first * model_config.num_positions) * hidden
    norm = model_config.num_norm_parameters * stage.is_last
    head_bias = sizes.num_vocabulary_rows * model_config.has_head_bias * stage.is_last
    return (tables + layers + norm + head_bias) * DTYPE_BYTES[dtype]


def activation_bytes(
    model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, num_tokens: int, num_rows: int
) -> int:
    """Peak of a step of `num_tokens` tokens of which `num_rows` sample.

    A layer holds the residual stream, its normed copy and either queries, keys, values and their rotated copies, or the
    gated columns and their product; layers that run as one hold all of these at once, each of them once. Heads that are
    turned in part or in pairs, clipped or grown are copied twice more, flat norms hold those of all ranks, and parallel
    layers keep what the feed-forward is given. The sampler holds float32
    logits as shards, gathered and as log-probabilities, and the mass of a draw twice in float64.
    """
    sizes = rank_sizes(model_config, layout, rank)
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    has_copies = any(rope.partial_factor < 1 or rope.is_interleaved or rope.query_growth for rope in model_config.ropes)
    copies = 5 if has_copies or any(layer.qkv_clip for layer in model_config.layers) else 3
    attention = copies * heads * model_config.head_size
    if any(layer.qk_norm == "flat" for layer in model_config.layers):
        attention += 3 * (model_config.num_heads + model_config.num_kv_heads) * model_config.head_size
    num_streams = 4 + any(layer.is_parallel for layer in model_config.layers)
    per_token = num_streams * model_config.hidden_size + max(attention, 4 * sizes.num_columns)
    logits = num_rows * (sizes.num_vocabulary_rows * 4 + model_config.vocab_size * (4 + 4 + 8 + 8))
    return num_tokens * per_token * DTYPE_BYTES[dtype] + logits


def cache_spec(model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, block_size: int) -> CacheSpec:
    """One rank's share of the cache."""
    sizes = rank_sizes(model_config, layout, rank)
    num_layers = stage_of(layout, model_config, rank).num_layers
    return CacheSpec(num_layers, sizes.num_kv_heads, model_config.head_size, DTYPE_BYTES[dtype], block_size)
