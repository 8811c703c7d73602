"""Rows of `table.py`: hybrids of attention and gated short convolutions (LFM2, https://arxiv.org/abs/2511.23404)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import (
    Attention,
    Family,
    FeedForward,
    Names,
    Norms,
    Rope,
    TextPart,
    Windows,
    next_to,
)
from spmd_worker.model_config.layer_config import ConvConfig, ExpertsConfig, LayerConfig

_CONV: Final = "conv"
_MAX_TAPS: Final = 64
"""Each tap is a row of every state: a count that no model has must not become a state of that length."""


def _conv_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers of `layer_types` conv mix tokens by a convolution."""
    kinds, known = reader.get("layer_types"), ("full_attention", _CONV)
    if not isinstance(kinds, list) or len(kinds) != len(layers) or any(each not in known for each in kinds):
        raise reader.error("layer_types", f"must list {len(layers)} of {', '.join(known)}")
    return _mixed(reader, layers)


def _mixed(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    num_taps = checked_integer(reader.get("conv_L_cache"), reader.where("conv_L_cache"), 2, _MAX_TAPS)
    conv = ConvConfig(num_taps, reader.flag("conv_bias", False))
    return tuple(
        replace(layer, mixer=_CONV, conv=conv, rope=None, output_gate="") if kind == _CONV else layer
        for kind, layer in zip(reader.get("layer_types"), layers, strict=True)
    )


def _moe_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Experts are chosen after a bias, in files that do not say otherwise."""
    has_bias = reader.flag("use_expert_bias", True)
    return tuple(
        replace(layer, experts=None if layer.experts is None else _with_bias(layer.experts, has_bias))
        for layer in _conv_layers(reader, layers)
    )


def _with_bias(experts: ExpertsConfig, has_bias: bool) -> ExpertsConfig:
    return replace(experts, has_choice_bias=has_bias)


def _lfm3_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Norms after a part, and gates of attention, are in files that do not say otherwise."""
    norms = layers[0].norms if reader.flag("use_sandwich_norm", True) else (True, False, True, False)
    gate = "head" if reader.flag("use_attention_gate", True) else ""
    return _mixed(reader, tuple(replace(layer, norms=norms, output_gate=gate) for layer in layers))


def _newer_lfm2(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with `layer_types`, `intermediate_size` and `tie_word_embeddings` of the keys of older files."""
    reader = ConfigReader({**_LFM2_DEFAULTS, **config}, path)
    found = _tied(config, path)
    if reader.get("layer_types") is None:
        found["layer_types"] = _listed_layers(reader)
    found["intermediate_size"] = _width(reader)
    return found


def _tied(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config with `tie_word_embeddings`, which `tie_embedding` overrides."""
    del path
    tie = config.get("tie_embedding")
    return {**config, **({} if tie is None else {"tie_word_embeddings": tie})}


def _listed_layers(reader: ConfigReader) -> list[str]:
    """Layers in `full_attn_idxs` have attention; all, if there is no such list."""
    num_layers, listed = reader.count("num_hidden_layers"), reader.get("full_attn_idxs")
    if listed is None:
        return ["full_attention"] * num_layers
    if not isinstance(listed, list):
        raise reader.error("full_attn_idxs", "must be a list of layers, from 0 on")
    full = [checked_integer(each, reader.where("full_attn_idxs"), 0, MAX_INT) for each in listed]
    return ["full_attention" if layer in full else _CONV for layer in range(num_layers)]


def _width(reader: ConfigReader) -> int:
    """Columns of the feed-forward: two thirds of the given number, times a factor, up to a multiple."""
    key = "intermediate_size" if reader.get("block_ff_dim") is None else "block_ff_dim"
    width = reader.count(key)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in reader.config and reader.config["block_ffn_dim_multiplier"] is None:
        return width
    multiple = reader.count("block_multiple_of", 256)
    width = math.ceil(int(reader.number("block_ffn_dim_multiplier", 1.0) * width) / multiple) * multiple
    return checked_integer(width, f"{reader.where(key)}={reader.get(key)}, adjusted,", 1, MAX_INT)


def _with_lfm3_layers(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with the `layer_types` that its class has: full, conv, sliding and conv layers in turns."""
    if config.get("layer_types") is not None:
        return config
    num_layers = ConfigReader({**_LFM3_DEFAULTS, **config}, path).count("num_hidden_layers")
    kinds = ("sliding_attention", _CONV, "full_attention", _CONV)
    return {**config, "layer_types": [kinds[layer % 4] if layer else _CONV for layer in range(num_layers)]}


_NAMES: Final = Names(
    norm="model.embedding_norm",
    norms=("operator_norm", "", "ffn_norm", ""),
    parts={
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
)
_LFM2_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_LFM2: Final = Family(
    models="LFM2: 350M, 700M, 1.2B, 2.6B",
    names=_NAMES,
    attention=Attention(qkv_bias=False, output_bias=False, qk_norm="head"),
    norms=Norms(eps_key="norm_eps", eps=1e-5),
    # Its class uses silu, whatever a file says.
    feed_forward=FeedForward(bias=False),
    layers=_conv_layers,
    newer=_newer_lfm2,
    file_keys={"hidden_act": ""},
    defaults=_LFM2_DEFAULTS,
)
_LFM3_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "sliding_window": 256,
    "conv_L_cache": 7,
    "tie_word_embeddings": True,
    "eos_token_id": 124900,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    },
}

CONV_ROWS: Final[dict[str, Family]] = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        models="LFM2 with experts: 8B-A1B, 24B-A2B",
        names=replace(
            _NAMES,
            parts={
                **_NAMES.parts,
                "mlp.gate": "feed_forward.gate",
                "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
                "mlp.experts.{}.gate_proj": "feed_forward.experts.{}.w1",
                "mlp.experts.{}.up_proj": "feed_forward.experts.{}.w3",
                "mlp.experts.{}.down_proj": "feed_forward.experts.{}.w2",
            },
        ),
        experts=ExpertsFamily(
            count_keys=("num_experts",),
            default_count=32,
            first_key="num_dense_layers",
            first=2,
            score="sigmoid",
            sum_eps=1e-6,
            scaling_key="routed_scaling_factor",
        ),
        layers=_moe_layers,
        newer=_tied,
        defaults={
            **_LFM2_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "Lfm2VlForConditionalGeneration": replace(
        _LFM2,
        models="LFM2-VL: 450M, 1.6B, 3B",
        vision="lfm2_vl",
        names=replace(
            next_to(_NAMES, "vision_tower", "multi_modal_projector"), norm="model.language_model.embedding_norm"
        ),
        text=TextPart(ties_by_default=True),
    ),
    "Lfm3ForCausalLM": Family(
        models="LFM3: 1.7B",
        names=Names(
            norm="model.embedding_norm",
            norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
            parts={
                **{ours: name for ours, name in _NAMES.parts.items() if ours.startswith("mlp.")},
                "self_attn.g_proj": "self_attn.gate_proj",
            },
            layer_aliases={"self_attn.g_proj.": "self_attn.gate_proj."},
        ),
        attention=Attention(qk_norm="head", head_size=128),
        windows=Windows(rule="layer_types", others=(_CONV,)),
        rope=Rope(has_local=True, rounding="result"),
        norms=Norms(eps_key="norm_eps", eps=1e-5),
        feed_forward=FeedForward(bias=False),
        layers=_lfm3_layers,
        newer=_with_lfm3_layers,
        file_keys={"hidden_act": ""},
        defaults=_LFM3_DEFAULTS,
    ),
}
