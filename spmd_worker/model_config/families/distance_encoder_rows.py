"""Encoders whose scores also multiply queries and keys by embedded distances (DeBERTa,
https://arxiv.org/abs/2006.03654), by the architecture without a head; rows as in `table.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.family import (
    QKV,
    Attention,
    ClassifierFamily,
    Embedding,
    Encoder,
    Family,
    FeedForward,
    Names,
    Norms,
    Variant,
)
from spmd_worker.model_config.layer_config import DistanceConfig, LayerConfig

_KINDS: Final = ("c2p", "p2c")
"""Queries times embedded distances, and keys times them."""


def _kinds(reader: ConfigReader) -> list[str]:
    """The products with embedded distances, without repetition."""
    given = reader.get("pos_att_type")
    listed = [] if given is None else given
    listed = [each.strip() for each in given.lower().split("|")] if isinstance(given, str) else listed
    is_known = isinstance(listed, list) and all(each in _KINDS for each in listed)
    if not is_known or len(set(listed)) < len(listed):
        raise reader.error("pos_att_type", "must have c2p, p2c or both, as in 'p2c|c2p' or a list")
    return listed


def _number(reader: ConfigReader, key: str) -> int:
    """An integer above 0; 0 for every other one, and if the file has none."""
    return max(0, checked_integer(reader.get(key, -1), reader.where(key), -MAX_INT, MAX_INT))


def _distances(reader: ConfigReader, kinds: list[str], *, has_buckets: bool) -> DistanceConfig:
    most = _number(reader, "max_relative_positions") or reader.count("max_position_embeddings")
    num_buckets = _number(reader, "position_buckets") if has_buckets else 0
    if not kinds:
        raise reader.error("pos_att_type", "is not supported with relative_attention=true: give c2p, p2c or both")
    if num_buckets and not 2 <= num_buckets < 2 * (most - 1):
        key = "max_relative_positions" if _number(reader, "max_relative_positions") else "max_position_embeddings"
        raise reader.error("position_buckets", f"must be from 2 to less than twice {key}={most} less 1")
    norm = reader.get("norm_rel_ebd", "none") if has_buckets else "none"
    if not isinstance(norm, str):
        raise reader.error("norm_rel_ebd", "must be 'layer_norm' or 'none'")
    return DistanceConfig(
        span=num_buckets or most,
        max_distance=most if num_buckets else 0,
        has_keys="c2p" in kinds,
        has_queries="p2c" in kinds,
        shares_projections=has_buckets and reader.flag("share_att_key", False),
        has_norm="layer_norm" in [each.strip() for each in norm.lower().split("|")],
    )


def _with_distances(
    reader: ConfigReader, layers: tuple[LayerConfig, ...], *, has_buckets: bool
) -> tuple[LayerConfig, ...]:
    """Layers with scores of embedded distances, whose scale counts all products."""
    hidden_size, head_size = reader.count("hidden_size"), layers[0].head_size
    if hidden_size != layers[0].num_heads * head_size:
        raise reader.error("num_attention_heads", f"does not divide hidden_size={hidden_size}")
    # Sizes of their own, which transformers cannot compute with, or no released model has.
    equal = {"pooler_hidden_size": hidden_size, "embedding_size": hidden_size}
    equal |= {"attention_head_size": head_size} if has_buckets else {}
    for key, size in equal.items():
        if reader.count(key, size) != size:
            raise reader.error(key, f"is not supported, only {size}, that of the layers")
    # The variant of false is found by its value.
    reader.flag("position_biased_input", True)
    kinds, distances = _kinds(reader), None
    if reader.flag("relative_attention", False):
        distances = _distances(reader, kinds, has_buckets=has_buckets)
    scale = float((head_size * (1 + len(kinds))) ** -0.5)
    return tuple([replace(layer, scale=scale, distances=distances) for layer in layers])


def _without_positions(family: Family) -> Family:
    """The row of files whose input has no positions; those of older releases have their table."""
    names = family.names
    ignored = (*names.ignored, "embeddings.position_embeddings.weight")
    return replace(family, names=replace(names, positions="", ignored=ignored))


def _with_variant(family: Family) -> Family:
    return replace(family, variants=(Variant({"position_biased_input": False}, _without_positions(family)),))


_PARTS: Final[Mapping[str, str]] = {
    "self_attn.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
_NAMES: Final = Names(
    embedding="deberta.embeddings.word_embeddings",
    positions="deberta.embeddings.position_embeddings",
    token_types="deberta.embeddings.token_type_embeddings",
    embedding_norm="deberta.embeddings.LayerNorm",
    distances=("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"),
    layers="deberta.encoder.layer",
    norm="",
    norms=("", "attention.output.LayerNorm", "", "output.LayerNorm"),
    parts={
        **{
            f"self_attn.{ours}_proj": f"attention.self.{theirs}_proj"
            for ours, theirs in zip("qkv", ("query", "key", "value"))
        },
        "self_attn.pos_k_proj": "attention.self.pos_key_proj",
        "self_attn.pos_q_proj": "attention.self.pos_query_proj",
        **_PARTS,
    },
    optional_prefix="deberta.",
    ignored=("embeddings.position_ids",),
    head="cls",
    ignored_prefixes=("cls.", "lm_predictions.", "mask_predictions.", "pooler."),
    head_dense="pooler.dense",
    classifier="classifier",
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "pooler_hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "position_biased_input": True,
}
_V2: Final = Family(
    models="DeBERTa v2 and v3, mDeBERTa: mxbai-rerank v1, zero-shot classifiers, Prompt Guard",
    names=_NAMES,
    attention=Attention(qkv_bias=True, output_bias=True),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps", are_of_sums=True),
    feed_forward=FeedForward(bias=True, is_gated=False),
    embedding=Embedding(has_norm=True),
    encoder=Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily(activation_key="pooler_hidden_act")),
    file_keys={"num_key_value_heads": "", "head_dim": ""},
    # A convolution behind the first layer.
    required={"conv_kernel_size": 0},
    defaults={
        **_DEFAULTS,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
    },
    layers=partial(_with_distances, has_buckets=True),
)
_V1: Final = replace(
    _V2,
    models="DeBERTa v1: nli-deberta-base",
    names=replace(
        _NAMES,
        distances=("deberta.encoder.rel_embeddings", ""),
        parts={
            "self_attn.q_proj.bias": "attention.self.q_bias",
            "self_attn.v_proj.bias": "attention.self.v_bias",
            "self_attn.pos_k_proj": "attention.self.pos_proj",
            "self_attn.pos_q_proj": "attention.self.pos_q_proj",
            **_PARTS,
        },
        fused={"attention.self.in_proj": QKV},
        by_kv_head=("attention.self.in_proj",),
        as_parameters=("self_attn.q_proj.bias", "self_attn.v_proj.bias"),
    ),
    attention=Attention(qkv_bias=True, output_bias=True, has_key_bias=False),
    required={"talking_head": False},
    defaults={
        **_DEFAULTS,
        "vocab_size": 50265,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    layers=partial(_with_distances, has_buckets=False),
)
DISTANCE_ENCODERS: Final[dict[str, Family]] = {
    "DebertaV2Model": _with_variant(_V2),
    "DebertaModel": _with_variant(_V1),
}
