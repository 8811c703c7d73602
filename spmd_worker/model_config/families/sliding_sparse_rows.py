"""Rows of `table.py`: families with experts whose layers take turns between windows and full attention.

Each row is compared with transformers, and each entry broken, in tests/model/test_expert_rows.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import (
    Attention,
    Embedding,
    Family,
    FeedForward,
    Names,
    Norms,
    Rope,
    Windows,
)
from spmd_worker.model_config.families.layer_norm_rows import LAYER_NORM_ROWS
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig, NormConfig

_BIAS: Final = "mlp.gate.e_score_correction_bias"
"""Our name of the bias that decides the choice of experts alone."""
_SHARED_EXPERTS: Final = {
    f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in ("gate_proj", "up_proj", "down_proj")
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Final = "rope_parameters"
_BY_KIND: Final = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"), "")
"""`file_keys` of families whose ropes are in `rope_parameters` alone, by kind of layer."""


def _without_null_ropes(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    del path
    return {key: value for key, value in config.items() if key != _ROPES or value is not None}


def _laguna_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers have numbers of query heads of their own, and gates of outputs that pass through softplus."""
    key, gating = "num_attention_heads_per_layer", reader.choice("gating", (True, "per-head", "per-element"), True)
    listed = reader.get(key, [layer.num_heads for layer in layers])
    if not isinstance(listed, list) or len(listed) != len(layers):
        raise reader.error(key, f"must list {len(layers)} numbers, one for each layer")
    heads = [checked_integer(each, reader.where(key), 1, 1 << 16) for each in listed]
    if any(each % layers[0].num_kv_heads for each in heads):
        raise reader.error(key, f"must list multiples of num_key_value_heads={layers[0].num_kv_heads}")
    gate = "projected" if gating == "per-element" else "head"
    return tuple(
        replace(layer, num_heads=each, output_gate=gate, gate_activation="softplus")
        for layer, each in zip(layers, heads, strict=True)
    )


def _cohere_kinds(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with a kind of attention and of feed-forward for each layer: the first are dense, and take turns by a
    number of their own.
    """
    reader = ConfigReader({**_COHERE_DEFAULTS, **config}, path)
    num_layers = reader.count("num_hidden_layers")
    num_dense = checked_integer(
        reader.get("first_k_dense_replace", 0), reader.where("first_k_dense_replace"), 0, num_layers
    )
    patterns = (reader.count("prefix_dense_sliding_window_pattern"), reader.count("sliding_window_pattern", 4))
    turns = [(layer, patterns[0]) for layer in range(num_dense)]
    turns += [(layer, patterns[1]) for layer in range(num_layers - num_dense)]
    found = {
        "layer_types": [_SLIDING if (layer + 1) % every else _FULL for layer, every in turns],
        "mlp_layer_types": ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)],
    }
    return {**config, **{key: kinds for key, kinds in found.items() if config.get(key) is None}}


def _cohere_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layer norms without, RMS norms with a `rms_norm_eps`. Dense layers have a width of their own, and a rope whatever
    their window, unless they take turns.
    """
    width = reader.count("prefix_dense_intermediate_size", layers[0].intermediate_size)
    is_rotated = reader.count("prefix_dense_sliding_window_pattern") == 1
    if reader.get("rms_norm_eps") is not None:
        layers = tuple([replace(each, norm=NormConfig(eps=reader.number("rms_norm_eps"))) for each in layers])
    return tuple(
        replace(layer, intermediate_size=width, rope=0 if is_rotated else layer.rope)
        if layer.experts is None
        else _with_shared(reader, layer, layer.experts)
        for layer in layers
    )


def _with_shared(reader: ConfigReader, layer: LayerConfig, experts: ExpertsConfig) -> LayerConfig:
    """The layer with the mean, or the sum, of routed and shared experts. A softmax is of the chosen; its sum is 1."""
    if reader.choice("expert_selection_fn", ("softmax", "sigmoid")) == "softmax":
        experts = replace(experts, score="softmax_chosen", renormalises=False)
    strategy = reader.choice("shared_expert_combination_strategy", ("average", "sum"))
    if strategy == "sum" or not experts.shared_size:
        return replace(layer, experts=experts)
    return replace(layer, experts=replace(experts, scaling=0.5), mlp_multipliers=(1.0, 0.5))


def _newer_mimo(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with the newer of two keys where the hub's files have the older: lists of layers, 1 for a window and
    for experts, and a window that does not count the token itself.
    """
    found = {key: value for key, value in config.items() if value is not None or key not in (_ROPES, "rope_theta")}
    reader = ConfigReader({**_MIMO_DEFAULTS, **found}, path)
    num_layers = reader.count("num_hidden_layers")
    slides = [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(num_layers)]
    listed = (
        ("layer_types", "hybrid_layer_pattern", (_FULL, _SLIDING), slides),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse"), [0] + [1] * (num_layers - 1)),
    )
    for newer, older, kinds, by_class in listed:
        given = reader.bits(older, num_layers, by_class)
        if found.get(newer) is None:
            found[newer] = [kinds[each] for each in given]
    if reader.get("sliding_window_size") is not None:
        found["sliding_window"] = reader.count("sliding_window_size") + 1
    if found.get("rms_norm_eps") is None and found.get("layernorm_epsilon") is not None:
        found["rms_norm_eps"] = found["layernorm_epsilon"]
    return found


def _mimo_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers with a window have twice the key-value heads, and sinks; values have heads of their own size."""
    num_kv_heads, size = layers[0].num_kv_heads, reader.count("v_head_dim")
    if layers[0].head_size < size:
        raise reader.error("v_head_dim", f"must be head_dim={layers[0].head_size} or less")
    if layers[0].num_heads % (2 * num_kv_heads):
        raise reader.error("num_attention_heads", f"is not a multiple of twice num_key_value_heads={num_kv_heads}")
    _check_mimo(reader, layers[0])
    multiplier = reader.get("attention_value_scale")
    multiplier = 1.0 if multiplier is None else reader.number("attention_value_scale")
    return tuple(
        replace(
            layer,
            num_kv_heads=num_kv_heads * (1 + (layer.window > 0)),
            has_sinks=layer.window > 0,
            value_size=0 if size == layer.head_size else size,
            value_multiplier=multiplier,
        )
        for layer in layers
    )


def _check_mimo(reader: ConfigReader, layer: LayerConfig) -> None:
    """Reject settings of layers with a window that say something else than the class does."""
    right = {
        "swa_num_attention_heads": layer.num_heads,
        "swa_num_key_value_heads": 2 * layer.num_kv_heads,
        "swa_head_dim": layer.head_size,
        "swa_v_head_dim": reader.get("v_head_dim"),
    }
    for key, value in right.items():
        if reader.get(key, value) != value:
            raise reader.error(key, f"is not supported, only {value} in this model")


_COHERE: Final = LAYER_NORM_ROWS["Cohere2ForCausalLM"]
_COHERE_DEFAULTS: Final[dict[str, Any]] = {
    **_COHERE.defaults,
    "prefix_dense_sliding_window_pattern": 1,
    "num_experts_per_tok": 2,
    "expert_selection_fn": "softmax",
    "shared_expert_combination_strategy": "average",
    "norm_topk_prob": True,
}
_MIMO_DEFAULTS: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000000.0,
    "partial_rotary_factor": 0.334,
    "sliding_window": 129,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "attention_value_scale": 0.707,
}


def _flint_kinds(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with a kind of attention for each layer: the first two, every fourth and the last are full. Null is
    the default list of dense layers.
    """
    config = {key: value for key, value in config.items() if value is not None or key != "mlp_only_layers"}
    if config.get("layer_types") is not None:
        return config
    num_layers = ConfigReader({"num_hidden_layers": 49, **config}, path).count("num_hidden_layers")
    is_full = [layer < 2 or layer % 4 == 1 or layer == num_layers - 1 for layer in range(num_layers)]
    return {**config, "layer_types": [_FULL if each else _SLIDING for each in is_full]}


SLIDING_SPARSE_ROWS: Final[dict[str, Family]] = {
    "AfmoeForCausalLM": Family(
        models="Trinity Nano, Mini and Large",
        names=Names(
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            parts={
                "self_attn.g_proj": "self_attn.gate_proj",
                "mlp.gate": "mlp.router.gate",
                _BIAS: "mlp.expert_bias",
                **_SHARED_EXPERTS,
            },
            as_parameters=(_BIAS,),
        ),
        attention=Attention(qk_norm="head", head_size=128, output_gate="projected"),
        windows=Windows(rule="layer_types", full_every=4, full_every_key="global_attn_every_n_layers"),
        rope=Rope(layers="sliding"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=64,
            first_key="num_dense_layers",
            score="sigmoid",
            renormalises=True,
            has_choice_bias=True,
            scaling_key="route_scale",
            shared_key="num_shared_experts",
            counts_shared=True,
        ),
        embedding=Embedding(root_key="mup_enabled"),
        required={"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1, "num_limited_groups": 1},
        defaults={
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "sliding_window": 1024,
        },
    ),
    "MellumForCausalLM": Family(
        models="Mellum 2",
        names=Names(ignored_prefixes=("mtp.",)),
        attention=Attention(qk_norm="head", head_size=128),
        windows=Windows(rule="layer_types"),
        rope=Rope(has_local=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=64, kinds_key="mlp_layer_types"),
        newer=_without_null_ropes,
        file_keys=_BY_KIND,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            _ROPES: {_FULL: {"rope_theta": 500000.0}, _SLIDING: {"rope_theta": 10000.0}},
        },
    ),
    "LagunaForCausalLM": Family(
        models="Laguna XS and M",
        names=Names(
            parts={_BIAS: "mlp.experts.e_score_correction_bias"},
            layer_aliases={"mlp.shared_experts.": "mlp.shared_expert.", _BIAS: "mlp.experts.e_score_correction_bias"},
            as_parameters=(_BIAS,),
        ),
        attention=Attention(qk_norm="head", head_size=128),
        windows=Windows(rule="layer_types"),
        rope=Rope(has_local=True, may_be_partial=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=256,
            first=1,
            kinds_key="mlp_layer_types",
            score="sigmoid",
            renormalises=True,
            sum_eps=0.0,
            has_choice_bias=True,
            scaling_key="moe_routed_scaling_factor",
            shared_key="shared_expert_intermediate_size",
        ),
        layers=_laguna_layers,
        newer=_without_null_ropes,
        file_keys=_BY_KIND,
        required={"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            _ROPES: {
                _FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                _SLIDING: {"rope_theta": 10000.0},
            },
        },
    ),
    "Cohere2MoeForCausalLM": replace(
        _COHERE,
        models="Command A+, with experts",
        names=replace(_COHERE.names, parts=_SHARED_EXPERTS),
        attention=replace(_COHERE.attention, head_size=128),
        windows=Windows(rule="layer_types"),
        experts=ExpertsFamily(
            default_count=8,
            size_key="intermediate_size",
            kinds_key="mlp_layer_types",
            score="sigmoid",
            sum_eps=0.0,
            shared_key="num_shared_experts",
            counts_shared=True,
        ),
        layers=_cohere_layers,
        newer=_cohere_kinds,
        defaults=_COHERE_DEFAULTS,
    ),
    "MiMoV2FlashForCausalLM": Family(
        models="MiMo-V2-Flash",
        names=Names(
            parts={"self_attn.sinks": "self_attn.attention_sink_bias"},
            layer_aliases={"self_attn.sinks": "self_attn.attention_sink_bias"},
            ignored_prefixes=("model.mtp.",),
        ),
        attention=Attention(output_bias=False, head_size=192),
        windows=Windows(rule="layer_types"),
        rope=Rope(has_local=True, may_be_partial=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            count_keys=("n_routed_experts", "num_local_experts"),
            default_count=256,
            kinds_key="mlp_layer_types",
            score="sigmoid",
            has_choice_bias=True,
            has_groups=True,
            scaling_key="routed_scaling_factor",
        ),
        layers=_mimo_layers,
        newer=_newer_mimo,
        file_keys={"rope_local_base_freq": "swa_rope_theta"},
        required={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_shared_experts": 0,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
        },
        defaults=_MIMO_DEFAULTS,
    ),
    "Kolibri1ForCausalLM": Family(
        models="Kolibri 1",
        names=Names(
            norms=("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm"),
            parts={_BIAS: "moe.router.expert_bias", **_SHARED_EXPERTS},
            layer_aliases={
                "post_self_attn_layernorm.": "post_attn_norm.",
                "post_mlp_layernorm.": "post_ffn_norm.",
                _BIAS: "moe.router.expert_bias",
            },
        ),
        attention=Attention(qkv_bias=False, output_bias=False, head_size=128, qk_norm="head"),
        windows=Windows(rule="layer_types", full_every=5),
        rope=Rope(layers="sliding_or_all"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=384,
            score="sigmoid_chosen",
            has_choice_bias=True,
            shared_key="shared_expert_intermediate_size",
        ),
        # No layer is dense.
        file_keys={"intermediate_size": "moe_intermediate_size"},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "FlintForCausalLM": Family(
        models="Flint",
        names=Names(
            parts={"self_attn.sinks": "self_attn.softmax_offset"},
            layer_aliases={"self_attn.sinks": "self_attn.softmax_offset"},
        ),
        attention=Attention(head_size=128, qk_norm="head", has_sinks=True),
        windows=Windows(rule="layer_types"),
        rope=Rope(layers="sliding"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=256,
            every_key="decoder_sparse_step",
            dense_layers_key="mlp_only_layers",
            score="sigmoid",
            shared_key="shared_expert_intermediate_size",
        ),
        newer=_flint_kinds,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 1],
        },
    ),
}
