"""Number of a layer's parameters on a rank, from sizes: a plan of a run counts weights by them. A test compares them
with the parameters of real models.
"""

from dataclasses import dataclass
from typing import Final

from spmd_worker.model_config.layer_config import LatentConfig, LayerConfig, LayerShare
from spmd_worker.model_config.stream_config import BalancedStreamsConfig

_NUM_NORMS_BESIDE: Final = 3
"""Norms of a dense feed-forward beside experts: two outputs and one input."""


def layer_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of a layer's parameters on a rank with this share of it."""
    linears = sum(each.num_inputs * sum(each.num_outputs) for each in mixer_linears(layer, hidden_size, share))
    others = sum(of_kind(layer, hidden_size, share) for of_kind in _MIXER_OTHERS[layer.mixer])
    others += _cross_biases(layer, hidden_size, share)
    bias = layer.relative_bias
    others += 0 if bias is None else bias.elements(share.num_heads, of_layer=True)
    num_norms = sum(layer.norms) + sum(layer.cross_norms)
    num_norms += _NUM_NORMS_BESIDE * (layer.experts is not None and layer.experts.are_beside_dense)
    norms = num_norms * hidden_size * (layer.norm.has_weight + layer.norm.has_bias)
    inputs = (2 * layer.input_size + 1) * hidden_size if layer.input_size else 0
    inputs += _streams_elements(layer, hidden_size, share)
    return linears + others + _feed_forward_elements(layer, hidden_size, share) + norms + inputs + layer.has_scalar


def float32_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Number of these that are float32 in every dtype."""
    router = 0 if layer.experts is None else layer.experts.router_elements(hidden_size)
    kinds = (layer.mamba1, layer.mamba, layer.delta)
    scans = [each.share(share.num_ranks) for each in kinds if each is not None]
    is_balanced = isinstance(layer.streams, BalancedStreamsConfig)
    router += _streams_elements(layer, hidden_size, share) if is_balanced else 0
    sinks = share.num_heads * (layer.has_sinks and layer.attends)
    indexer = None if layer.latent is None else layer.latent.own_indexer
    sinks += 0 if indexer is None else indexer.num_heads * hidden_size
    sinks += 0 if layer.compressed is None else _float32_of_entries(layer, hidden_size)
    return router + sinks + sum(each.num_float32_elements for each in scans)


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """A linear layer on one rank. `num_outputs` are those of each module of the checkpoint that it merges."""

    num_inputs: int
    num_outputs: tuple[int, ...]


def mixer_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    """Linear layers of a layer's mixers and of its attention to an encoder's rows, on a rank with this share of it."""
    own = tuple([each for of_kind in _MIXER_LINEARS[layer.mixer] for each in of_kind(layer, hidden_size, share)])
    return own + _cross_linears(layer, hidden_size, share)


def _streams_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of what weighs several streams, and of n-grams, of whose table a rank has a share."""
    streams, ngrams = layer.streams, layer.ngrams
    if layer.predicted_streams is not None:
        return layer.predicted_streams.elements(hidden_size)
    if streams is None:
        return 0
    around = 2 * streams.elements(hidden_size)
    if ngrams is None:
        return around
    table = ngrams.rank_rows(share.num_ranks) * ngrams.row_size
    return around + ngrams.elements(hidden_size, streams.num_streams) + table


def _cross_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    if not layer.has_cross_attention:
        return ()
    query, key_value = share.num_heads * layer.head_size, share.num_kv_heads * layer.head_size
    outputs = ((query,), (key_value, key_value))
    return (*[LinearSizes(hidden_size, each) for each in outputs], LinearSizes(query, (hidden_size,)))


def _cross_biases(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Those of keys are held, as zeros, if keys have none."""
    if not layer.has_cross_attention:
        return 0
    num_outputs = (share.num_heads + 2 * share.num_kv_heads) * layer.head_size
    return num_outputs * layer.has_qkv_bias + hidden_size * layer.has_output_bias


def _attention_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    size, value_size = layer.head_size, layer.value_head_size
    num_gates = {"head": 1, "projected": value_size}.get(layer.output_gate, 0) * share.num_heads
    gates = (LinearSizes(hidden_size, (num_gates,)),) if num_gates else ()
    query = share.num_heads * size * (1 + (layer.output_gate == "number"))
    keys = tuple([share.num_kv_heads * each for each in (size, value_size)[: layer.num_key_projections]])
    return (
        LinearSizes(hidden_size, (query, *keys)),
        LinearSizes(share.num_heads * value_size, (hidden_size,)),
        *gates,
        *_distance_linears(layer, hidden_size, share),
        *_head_indexer_linears(layer, hidden_size, share),
    )


def _head_indexer_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    """Queries of this rank's key-value heads, and a key that every rank has."""
    if layer.indexer is None or not layer.indexer.is_by_head:
        return ()
    return (LinearSizes(hidden_size, (share.num_kv_heads * layer.indexer.head_size, layer.indexer.head_size)),)


def _distance_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    """Projections of embedded distances that are not those of tokens."""
    distances = layer.distances
    if distances is None or not distances.num_projections:
        return ()
    return (LinearSizes(hidden_size, (share.num_heads * layer.head_size,) * distances.num_projections),)


def _attention_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of sinks, biases, and norms of queries and keys."""
    size = layer.head_size
    others = share.num_heads * layer.has_sinks + hidden_size * layer.has_output_bias
    projections = _attention_linears(layer, hidden_size, share)[0]
    others += sum(projections.num_outputs) * layer.has_qkv_bias
    for each in _distance_linears(layer, hidden_size, share):
        assert layer.distances is not None, layer
        # Of queries alone, if keys have none; held for both.
        others += sum(each.num_outputs) * (layer.has_key_bias or layer.distances.has_queries)
    if layer.qk_norm in ("head", "head_after_rope"):
        others += (1 + (layer.kv_layer is None)) * size * (layer.norm.has_weight + layer.norm.has_bias)
    elif layer.qk_norm == "each_head":
        others += (share.num_heads + share.num_kv_heads) * size
    elif layer.qk_norm == "flat":
        others += (layer.num_heads + layer.num_kv_heads) * size
    if layer.indexer is not None:
        # Norms of queries and a key, which every rank has, and their projection, if it is not quantised.
        num_projected = 0 if layer.indexer.is_by_head else (layer.indexer.num_heads + 1) * hidden_size
        others += layer.indexer.head_size * (num_projected + 2)
    return others


def _latent_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    assert layer.latent is not None, layer
    latent = layer.latent
    own = (latent.query_rank, latent.key_size * (layer.kv_layer is None))
    latents = tuple([size for size in own if size])
    return (
        *([LinearSizes(hidden_size, latents)] if latents else []),
        LinearSizes(latent.query_rank or hidden_size, (share.num_heads * latent.query_size,)),
        LinearSizes(share.num_heads * latent.value_size, (hidden_size,)),
        *([LinearSizes(hidden_size, (layer.num_heads,))] if layer.output_gate else []),
        *_indexer_linears(latent, hidden_size),
    )


def _indexer_linears(latent: LatentConfig, hidden_size: int) -> tuple[LinearSizes, ...]:
    """Projections to queries and to a key; every rank has them."""
    if latent.own_indexer is None:
        return ()
    num_heads, size = latent.own_indexer.num_heads, latent.own_indexer.head_size
    num_inputs = hidden_size if latent.own_indexer.norms_input else latent.query_rank
    return LinearSizes(num_inputs, (num_heads * size,)), LinearSizes(hidden_size, (size,))


def _latent_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of the projection from latents, which is not quantised, of norms, biases and weights of heads."""
    assert layer.latent is not None, layer
    latent = layer.latent
    projection = share.num_heads * (latent.nope_size + latent.value_size) * latent.rank
    has_latents = layer.kv_layer is None
    biases = (latent.query_rank + latent.key_size * has_latents) * layer.has_qkv_bias
    biases += hidden_size * layer.has_output_bias + 2 * share.num_heads * latent.grows_by_head
    norms = latent.rank * has_latents + latent.query_rank
    indexer = latent.own_indexer
    if indexer is None:
        return projection + norms + biases
    # Weights and growth of its heads, and the norms of its key and its input.
    of_indexer = indexer.num_heads * (hidden_size + 2 * latent.grows_by_head)
    of_indexer += 2 * (indexer.head_size + hidden_size * indexer.norms_input)
    return projection + norms + biases + of_indexer


def _compressed_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    """Latents of queries and keys, queries, outputs, and what entries and their choice are made of; every rank has all
    of the last.
    """
    compressed, size = layer.compressed, layer.head_size
    assert compressed is not None, layer
    rows = compressed.row_size(size) - compressed.row_size(0)
    of_entries = [LinearSizes(hidden_size, (rows // 2, rows // 2))] if compressed.rate else []
    if compressed.indexer is not None:
        half = compressed.row_size(0) // 2
        of_entries.append(LinearSizes(hidden_size, (half, half)))
        num_queries = compressed.indexer.num_heads * compressed.indexer.head_size
        of_entries.append(LinearSizes(compressed.query_rank, (num_queries,)))
    num_groups = compressed.num_groups * share.num_heads // layer.num_heads
    return (
        LinearSizes(hidden_size, (compressed.query_rank, size)),
        LinearSizes(compressed.query_rank, (share.num_heads * size,)),
        LinearSizes(num_groups * compressed.output_rank, (hidden_size,)),
        *of_entries,
    )


def _float32_of_entries(layer: LayerConfig, hidden_size: int) -> int:
    """Biases of gates, and weights of an indexer's heads."""
    compressed = layer.compressed
    assert compressed is not None, layer
    biases = compressed.rate * compressed.row_size(layer.head_size) // 2
    return biases + (0 if compressed.indexer is None else compressed.indexer.num_heads * hidden_size)


def _compressed_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of the projection of groups, which is not quantised, of sinks, norms, and what is float32."""
    compressed, size = layer.compressed, layer.head_size
    assert compressed is not None, layer
    projection = compressed.output_rank * share.num_heads * size
    norms = compressed.query_rank + size + (size + compressed.index_size if compressed.rate else 0)
    return projection + share.num_heads + norms + _float32_of_entries(layer, hidden_size)


def _conv_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    num_channels = hidden_size // share.num_ranks
    return LinearSizes(hidden_size, (3 * num_channels,)), LinearSizes(num_channels, (hidden_size,))


def _conv_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of taps and biases."""
    assert layer.conv is not None, layer
    num_channels = hidden_size // share.num_ranks
    return layer.conv.kernel_size * num_channels + (4 * num_channels + hidden_size) * layer.conv.has_bias


def _mamba_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    assert layer.mamba is not None, layer
    own = layer.mamba.share(share.num_ranks)
    return LinearSizes(hidden_size, (own.num_projected,)), LinearSizes(own.num_columns, (hidden_size,))


def _mamba_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of taps, biases, numbers of heads, and the norm, which has all heads of the rank's groups."""
    full = layer.mamba
    assert full is not None, layer
    own = full.share(share.num_ranks)
    biases = own.num_projected * own.has_bias + hidden_size * own.has_output_bias
    taps = own.num_channels * (own.kernel_size + own.has_conv_bias)
    norm = full.num_columns // full.num_groups * own.num_groups * (own.norm != "none")
    return biases + taps + norm + own.num_float32_elements


def _mamba1_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    assert layer.mamba1 is not None, layer
    own = layer.mamba1.share(share.num_ranks)
    return (
        LinearSizes(hidden_size, (2 * own.num_channels,)),
        LinearSizes(own.num_channels, (own.num_parameters_of_scan,)),
        LinearSizes(own.dt_rank, (own.num_channels,)),
        LinearSizes(own.num_channels, (hidden_size,)),
    )


def _mamba1_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of taps, biases, numbers of channels, and norms."""
    assert layer.mamba1 is not None, layer
    own = layer.mamba1.share(share.num_ranks)
    biases = 2 * own.num_channels * own.has_bias + hidden_size * own.has_output_bias
    taps = own.num_channels * (own.kernel_size + own.has_conv_bias)
    return biases + taps + own.num_parameters_of_scan * (own.norm == "weighted") + own.num_float32_elements


def _delta_linears(layer: LayerConfig, hidden_size: int, share: LayerShare) -> tuple[LinearSizes, ...]:
    assert layer.delta is not None, layer
    own = layer.delta.share(share.num_ranks)
    keys = own.num_key_heads * own.key_size
    gates, rank = (own.num_columns, own.num_steps), own.gate_rank
    first_gates = (rank or own.num_columns, own.num_value_heads, rank or own.num_steps)
    outputs = (keys, keys, own.num_columns, *first_gates)
    expanded = tuple([LinearSizes(rank, (size,)) for size in gates if rank])
    return LinearSizes(hidden_size, outputs), *expanded, LinearSizes(own.num_columns, (hidden_size,))


def _delta_others(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of taps, numbers of heads, and the norm."""
    del hidden_size
    assert layer.delta is not None, layer
    own = layer.delta.share(share.num_ranks)
    return own.num_channels * own.kernel_size + own.num_float32_elements + own.value_size


def _feed_forward_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    if not layer.has_feed_forward:
        return 0
    total = 4 * (layer.activation == "xielu")
    if layer.experts is not None:
        assert share.experts is not None, share
        total += layer.experts.elements(hidden_size, share.experts)
    if not layer.has_dense:
        return total
    num_gates = 1 + layer.is_gated
    biases = num_gates * share.num_columns * layer.has_mlp_bias
    biases += hidden_size * (layer.has_mlp_bias or layer.has_down_bias)
    return (num_gates + 1) * hidden_size * share.num_columns + biases + total


_MIXER_LINEARS: Final = {
    "attention": (_attention_linears,),
    "attention_and_mamba": (_attention_linears, _mamba_linears),
    "latent": (_latent_linears,),
    "compressed": (_compressed_linears,),
    "conv": (_conv_linears,),
    "delta": (_delta_linears,),
    "mamba1": (_mamba1_linears,),
    "mamba": (_mamba_linears,),
    "none": (),
}
"""Linear layers of each kind of mixer (`LayerConfig.mixer`)."""
_MIXER_OTHERS: Final = {
    "attention": (_attention_others,),
    "attention_and_mamba": (_attention_others, _mamba_others),
    "latent": (_latent_others,),
    "compressed": (_compressed_others,),
    "conv": (_conv_others,),
    "delta": (_delta_others,),
    "mamba1": (_mamba1_others,),
    "mamba": (_mamba_others,),
    "none": (),
}
"""Number of their other elements."""
