"""Rows of `table.py`: Qwen4, a hybrid of gated delta nets and of attention to keys that an indexer chooses, with
several residual streams and embedded n-grams.

Tensor names are those of the hub's files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.delta_rows import DELTA_ROWS, beside_images, layer_types, qwen_delta
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.model_config.stream_config import (
    ID_DIGITS,
    MAX_IDS,
    MAX_TABLE_ROWS,
    GatedStreamsConfig,
    NgramConfig,
    multipliers,
    primes_from,
)

_LINEAR: Final = "linear_attention"
_INDEXED: Final = "indexed_attention"
"""transformers' word for what files call full attention."""
_MOST_STREAMS: Final = 64
_MOST_NGRAM_HEADS: Final = 1024
_MOST_TOKENS: Final = 64
"""Bounds of counts that no model has, whose tables would be computed for long."""


def _qwen4_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    kinds, norm = layer_types(reader, len(layers), _INDEXED), layers[0].norm
    gate = reader.choice("output_gate_type", ("silu", "swish", "sigmoid"), layers[0].activation)
    delta = replace(qwen_delta(reader, norm.eps), gate_activation="sigmoid" if gate == "sigmoid" else "silu")
    indexer = _indexer(reader, layers[0].head_size) if set(kinds) != {_LINEAR} else None
    streams, ngrams = _streams(reader), _ngrams(reader, kinds)
    return tuple(
        replace(
            layer,
            streams=streams,
            mixer="delta",
            delta=delta,
            rope=None,
            output_gate="",
            ngrams=ngrams.get(index),
        )
        if kind == _LINEAR
        else replace(layer, streams=streams, indexer=indexer)
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True))
    )


def _streams(reader: ConfigReader) -> GatedStreamsConfig:
    num_streams = checked_integer(reader.get("hc_count", 4), reader.where("hc_count"), 2, _MOST_STREAMS)
    return GatedStreamsConfig(num_streams, reader.count("hc_lowrank", 320))


def _indexer(reader: ConfigReader, head_size: int) -> IndexerConfig:
    reader.choice("indexer_kv_heads", (1,))
    run_length, num_chosen = reader.count("indexer_compress_ratio"), reader.count("indexer_budget")
    if num_chosen % run_length:
        raise reader.error("indexer_budget", f"must be a multiple of indexer_compress_ratio, {run_length}")
    size, rope = reader.count("indexer_head_dim"), reader.object("rope_parameters")
    share = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if int(head_size * share) > size:
        raise reader.error("indexer_head_dim", f"must be at least the rotated part of a head, {int(head_size * share)}")
    return IndexerConfig(
        num_heads=reader.count("indexer_n_heads"),
        head_size=size,
        num_chosen=num_chosen,
        is_interleaved=False,
        run_length=run_length,
    )


def _ngrams(reader: ConfigReader, kinds: Sequence[str]) -> dict[int, NgramConfig]:
    """N-grams of layers that have some, by index."""
    numbers = _numbers(reader, kinds)
    if not numbers:
        return {}
    size = checked_integer(reader.get("ngram_size", 3), reader.where("ngram_size"), 2, _MOST_TOKENS)
    num_heads = (size - 1) * reader.count("heads_per_ngram", 8)
    embed_size = reader.count("ple_embed_dim", reader.count("hidden_size"))
    if num_heads * len(numbers) > _MOST_NGRAM_HEADS:
        raise reader.error("heads_per_ngram", f"must be fewer: layers have {num_heads * len(numbers)} heads together")
    if embed_size % num_heads:
        raise reader.error("ple_embed_dim", f"must be a multiple of the {num_heads} heads of all n-grams")
    key, base = "ngram_vocab_size_base", reader.get("ngram_vocab_size_base", 20_000_000)
    base = checked_integer(base, reader.where(key), 1, MAX_TABLE_ROWS)
    primes = primes_from(base, 0, num_heads * len(numbers))
    num_parts = checked_integer(reader.get("split_ngram_parts", 512), reader.where("split_ngram_parts"), 1, 1 << 16)
    divisor, num_taps = (
        checked_integer(reader.get(name, default), reader.where(name), least, 1 << 16)
        for name, default, least in (("make_ngram_vocab_size_divisible_by", 128, 1), ("ple_conv_kernel_size", 4, 2))
    )
    vocab_size, end = reader.count("vocab_size"), _end_token(reader)
    if vocab_size > MAX_IDS:
        raise reader.error("vocab_size", f"must be at most {MAX_IDS}: ids of n-grams are cached in {ID_DIGITS} bytes")
    seed = checked_integer(reader.get("seed", 1234), reader.where("seed"), -MAX_INT, MAX_INT)
    found = {}
    for number, index in enumerate(numbers):
        head_rows = primes[number * num_heads : (number + 1) * num_heads]
        found[index] = NgramConfig(
            multipliers=multipliers(vocab_size, size, number, seed),
            head_rows=head_rows,
            num_rows=-(-sum(head_rows) // divisor) * divisor,
            embed_size=embed_size,
            num_taps=num_taps,
            end_token=end,
            num_parts=num_parts,
        )
    return found


def _numbers(reader: ConfigReader, kinds: Sequence[str]) -> list[int]:
    """Indices of layers with n-grams, which files count from 1."""
    key, listed = "ple_layer_ids", reader.get("ple_layer_ids", [])
    if not isinstance(listed, list):
        raise reader.error(key, "must list layers, counted from 1")
    numbers = sorted({checked_integer(each, reader.where(key), 1, len(kinds)) - 1 for each in listed})
    if any(kinds[each] != _LINEAR for each in numbers):
        raise reader.error(key, f"must list layers of {_LINEAR} alone, counted from 1")
    return numbers


def _end_token(reader: ConfigReader) -> int:
    """The first token that ends a text: n-grams do not go beyond one."""
    key, ends = "eos_token_id", reader.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    return checked_integer(end, reader.where(key), 0, MAX_INT)


_MOE: Final = DELTA_ROWS["Qwen3_5MoeForCausalLM"]
_ENDINGS: Final = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_DEFAULTS: Final[dict[str, Any]] = {"num_experts_per_tok": 10, "norm_topk_prob": True}


def _experts(row: Family) -> Family:
    assert row.experts is not None, row
    return replace(row, experts=replace(row.experts, default_count=512, renormalises="norm_topk_prob"))


_QWEN4: Final = replace(
    _experts(_MOE),
    models="Qwen4, of text alone",
    names=replace(
        _MOE.names,
        norms=("", "", "", ""),
        norm="model.hyper_connection_mixer",
        ignored=(*_MOE.names.ignored, *(f"ple.ple_embedding.{each}" for each in _ENDINGS)),
    ),
    layers=_qwen4_layers,
    layer="streams_layer",
    defaults={**_MOE.defaults, **_DEFAULTS},
)
_WITH_IMAGES: Final = beside_images(_QWEN4, "Qwen4")

QWEN4_ROWS: Final[dict[str, Family]] = {
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": replace(
        _WITH_IMAGES,
        names=replace(_WITH_IMAGES.names, norm="model.language_model.hyper_connection_mixer"),
    ),
}
