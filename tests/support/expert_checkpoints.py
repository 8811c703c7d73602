"""Small random checkpoints of the families with experts, written by transformers, and thinned as files of the hub are.

As `family_checkpoints`: no weight is what a mistake would leave it at. Knows nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from made_checkpoints import BASE, Checkpoints, Config
from reference_models import without_defaults
from transformers import PreTrainedModel

EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
V3 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN |= {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_interval": 2, "head_dim": 16}
PHIMOE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0, 2.1, 2.5],
    "long_factor": [2.0, 3.0, 3.5, 4.0, 6.0, 8.0, 9.0, 9.5],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
}
_KINDS = ["full_attention", "sliding_attention"]
MINIMAX_M3: dict[str, Any] = {**EXPERTS, "intermediate_size": 32, "head_dim": 32, "routed_scaling_factor": 1.7}
MINIMAX_M3 |= {"dense_intermediate_size": 48, "shared_intermediate_size": 40, "swiglu_limit": 2.0, "rotary_dim": 16}
MINIMAX_M3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
MINIMAX_M3 |= {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_n_heads": 2, "index_head_dim": 16}
MINIMAX_M3 |= {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "index_block_size": 4, "index_topk_blocks": 2}
_SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4, "logits_scaling": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**EXPERTS, "intermediate_size": 32, "sliding_window": 5}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "num_key_value_heads": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": [2]},
    ),
    "qwen2_moe_window": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_sparse_step": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "head_dim": 32,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **EXPERTS,
            "moe_intermediate_size": 40,
            "head_dim": 32,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 500.0},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **EXPERTS,
            "intermediate_size": 32,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    # Fewer keys than tokens: two of blocks of four, the last of which is a token's own.
    "minimax_m3": ("MiniMaxM3VL", MINIMAX_M3),
    "minimax_m3_text": (
        "MiniMaxM3VLText",
        {**MINIMAX_M3, "index_local_blocks": 2, "index_topk_blocks": 3, "index_block_size": 2, "swiglu_limit": 0.7}
        | {"layer_types": ["minimax_m3_sparse"] * 4, "mlp_layer_types": None},
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 32, "clip_qkv": 0.8}),
    "gpt_oss": (
        "GptOss",
        {**EXPERTS, "intermediate_size": 32, "head_dim": 16, "sliding_window": 5, "rope_parameters": _YARN},
    ),
    "gpt_oss_limit": ("GptOss", {**EXPERTS, "intermediate_size": 32, "head_dim": 32, "swiglu_limit": 0.5}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **V3,
            "head_dim": 16,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4_moe_plain": ("Glm4Moe", {**V3, "attention_bias": True, "norm_topk_prob": False}),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            **V3,
            "head_dim": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
        },
    ),
    "granite_moe": ("GraniteMoe", {**EXPERTS, **_SCALES, "intermediate_size": 32}),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {**EXPERTS, **_SCALES, "intermediate_size": 32, "shared_intermediate_size": 48, "attention_bias": True},
    ),
    "dbrx": (
        "Dbrx",
        {
            # Its class derives sizes of experts from these words alone.
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 3},
        },
    ),
    "dots1": (
        "Dots1",
        {**V3, "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.0, "sliding_window": 5}
        | {"max_window_layers": 2, "n_group": 2},
    ),
    "granite_moe_swa": (
        "GraniteMoeSWA",
        {**EXPERTS, **_SCALES, "intermediate_size": 32, "shared_intermediate_size": 48, "sliding_window": 5}
        | {"layer_rope_theta": [0, 10000.0, 500.0, 10000.0]},
    ),
    "granite_moe_swa_plain": ("GraniteMoeSWA", {**EXPERTS, **_SCALES, "intermediate_size": 32, "attention_bias": True}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 16, "router_scaling_factor": 1.7, "num_shared_experts": 2}),
    "hy_v3_biases": (
        "HYV3",
        {**EXPERTS, "head_dim": 16, "mlp_bias": True, "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
    ),
    "exaone_moe": ("ExaoneMoe", {**EXPERTS, "n_group": 4, "topk_group": 2, "sliding_window": 5}),
    "exaone_moe_kinds": (
        "ExaoneMoe",
        {**EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "num_shared_experts": 2}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 5, "norm_topk_prob": False},
    ),
    "ernie_moe": ("Ernie4_5_Moe", {**ERNIE, "use_bias": True}),
    "ernie_moe_untied": (
        "Ernie4_5_Moe",
        {**ERNIE, "moe_layer_interval": 1, "moe_layer_end_index": 2, "moe_norm_min": 0.5, "moe_num_shared_experts": 0}
        | {"tie_word_embeddings": False},
    ),
    "solar_open": (
        "SolarOpen",
        {**V3, "head_dim": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    "afmoe": (
        "Afmoe",
        {
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 5,
            "route_scale": 1.7,
            "mup_enabled": True,
            "num_dense_layers": 2,
        },
    ),
    "afmoe_pattern": (
        "Afmoe",
        {**EXPERTS, "head_dim": 32, "sliding_window": 7, "global_attn_every_n_layers": 2, "attention_bias": True}
        | {"num_shared_experts": 1},
    ),
    "mellum": (
        "Mellum",
        {**EXPERTS, "head_dim": 16, "sliding_window": 5, "layer_types": _KINDS * 2}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "attention_bias": True},
    ),
    "laguna": (
        "Laguna",
        {**EXPERTS, "head_dim": 16, "sliding_window": 5, "layer_types": _KINDS * 2, "moe_routed_scaling_factor": 1.7}
        | {"shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [4, 8, 2, 4]},
    ),
    "laguna_per_element": (
        "Laguna",
        {**EXPERTS, "head_dim": 32, "gating": "per-element", "attention_bias": True},
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {**EXPERTS, "head_dim": 16, "intermediate_size": 32, "sliding_window": 5, "logit_scale": 0.3}
        | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80, "num_shared_experts": 2}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": None, "layer_norm_eps": 0.03},
    ),
    "cohere2_moe_sum": (
        "Cohere2Moe",
        {**EXPERTS, "head_dim": 32, "intermediate_size": 32, "sliding_window": 5, "sliding_window_pattern": 2}
        | {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2, "num_shared_experts": 1}
        | {"shared_expert_combination_strategy": "sum", "attention_bias": True},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**V3, "head_dim": 32, "v_head_dim": 16, "sliding_window": 5, "n_group": 4, "topk_group": 2}
        | {"attention_bias": True, "routed_scaling_factor": 1.7},
    ),
    "mimo_v2_flash_equal": (
        "MiMoV2Flash",
        {**V3, "head_dim": 32, "v_head_dim": 32, "sliding_window": 5, "attention_value_scale": None}
        | {"layer_types": _KINDS * 2, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "kolibri1": (
        "Kolibri1",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 6},
    ),
    "kolibri1_full": (
        "Kolibri1",
        {**EXPERTS, "head_dim": 32, "sliding_window": 7, "layer_types": ["full_attention"] * 4}
        | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "flint": (
        "Flint",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 6},
    ),
    "flint_kinds": (
        "Flint",
        {**EXPERTS, "head_dim": 32, "sliding_window": 7, "layer_types": _KINDS * 2, "attention_bias": True}
        | {"mlp_only_layers": [2], "norm_topk_prob": False},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": [3, 2, 3, 1], "intermediate_size": 32, "head_dim": 16},
    ),
    "flex_olmo": ("FlexOlmo", {**EXPERTS, "intermediate_size": 32}),
    "phimoe": (
        "Phimoe",
        {**EXPERTS, "intermediate_size": 32, "num_experts_per_tok": 2, "router_jitter_noise": 0.4, "lm_head_bias": True}
        | {"attention_bias": True, "sliding_window": 7},
    ),
    "phimoe_long": (
        "Phimoe",
        {**EXPERTS, "intermediate_size": 32, "num_experts_per_tok": 2, "router_jitter_noise": 0.2}
        | {"rope_parameters": PHIMOE_LONG},
    ),
    "step3p7": (
        "Step3p7",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "share_expert_dim": 48,
            "head_dim": 16,
            "sliding_window": 5,
            "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 1.7,
            "query_pre_attn_scalar": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "swiglu_limits": [None, None, 0.7, None],
            "swiglu_limits_shared": [None, 0.6, None, 0.5],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
}

_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
WITH_IMAGES = {
    "Qwen3VLMoe": {"vision_config": {**_VISION, "deepstack_visual_indexes": [0]}},
    "Glm4vMoe": {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}},
    "MiniMaxM3VL": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14},
        "projector_hidden_size": 24,
    },
    "Step3p7": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14, "mlp_ratio": 1.0},
    },
}
"""Beside `text_config`, by family."""
CLASSES = {"MiniMaxM3VL": "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLText": "MiniMaxM3VLForCausalLM"}
"""Classes with other names than their configs."""


@cache
def expert_reference(name: str, *, is_thinned: bool = False) -> PreTrainedModel:
    """transformers' model of the folder, expert by expert."""
    return open_experts(thinned_expert_folder(name) if is_thinned else expert_folder(name))


def open_experts(folder: Path) -> PreTrainedModel:
    """transformers' model of a folder, expert by expert."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.get_text_config()._experts_implementation = config._experts_implementation = "eager"
    return (
        getattr(transformers, config.architectures[0])
        .from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def _write(folder: Path, name: str) -> None:
    family, overrides = CASES[name]
    # The usual 1e-6 is too small for a wrong one to be seen.
    text, kind = {**BASE, "rms_norm_eps": 0.03, **overrides}, "ForCausalLM"
    if family in WITH_IMAGES:
        text, kind = {"text_config": text, **WITH_IMAGES[family]}, "ForConditionalGeneration"
    config = getattr(transformers, f"{family}Config")(**text)
    model = getattr(transformers, CLASSES.get(family, f"{family}{kind}"))(config).float().eval()
    stir(model)
    model.save_pretrained(folder)


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    """`family_checkpoints.stir` for stacked experts; routers get clear decisions."""
    generator = torch.Generator().manual_seed(7)
    are_saved = ("correction_bias", "rotary_emb.alpha")
    buffers = [(name, value) for name, value in model.named_buffers() if name.endswith(are_saved)]
    for name, value in sorted([*model.named_parameters(), *buffers]):
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim < 2 or name.endswith("_bias"):
            value.add_(0.3 * noise)
            continue
        is_table = any(word in name for word in ("embed", "lm_head"))
        fan_in = value.shape[-2 if model.config.model_type == "gpt_oss" and "experts" in name else -1]
        is_score = any(word in name for word in ("q_proj", "k_proj", "gate.weight", "router"))
        value.copy_(noise * (0.5 if is_table else (2.0 if is_score else 1.4) * fan_in**-0.5))


def _thin(config: Config, name: str) -> Config:
    """Without the keys that have the class's default, and with the hub's word for the number of experts."""
    defaults = getattr(transformers, f"{CASES[name][0]}Config")().get_text_config().to_dict()
    thin = without_defaults(config, defaults)
    if name == "minimax_m2":
        thin |= {"rope_theta": thin.pop("rope_parameters")["rope_theta"], "rotary_dim": 16}
    if name == "qwen3_moe":
        thin["num_experts"] = thin.pop("num_local_experts", thin.get("num_experts"))
    if name in ("mixtral", "gpt_oss"):
        rope = thin.pop("rope_parameters", None) or {"rope_theta": config["rope_parameters"]["rope_theta"]}
        thin["rope_theta"] = rope.pop("rope_theta")
        thin["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if CASES[name][1].get("layer_types") is None:
        thin.pop("layer_types", None)
    if name == "minimax_m3":
        thin = _hub_minimax(thin)
    if name == "step3p7":
        thin = _older_step(thin)
    if CASES[name][0] == "Cohere2Moe":
        del thin["mlp_layer_types"]
        thin["first_k_dense_replace"] = CASES[name][1]["first_k_dense_replace"]
    if name == "mimo_v2_flash":
        thin = _hub_mimo(thin)
    return thin


def _hub_minimax(thin: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers for kinds of layers, and the indexer in an object."""
    kinds, feed_forwards = MINIMAX_M3["layer_types"], MINIMAX_M3["mlp_layer_types"]
    sparse = {
        "sparse_attention_freq": [int(each == "minimax_m3_sparse") for each in kinds],
        "use_sparse_attention": True,
    }
    sparse |= {"sparse_num_index_heads": thin.pop("index_n_heads"), "sparse_index_dim": thin.pop("index_head_dim")}
    sparse |= {"sparse_block_size": thin.pop("index_block_size"), "sparse_topk_blocks": thin.pop("index_topk_blocks")}
    sparse |= {"sparse_local_block": 1, "sparse_init_block": 0, "sparse_score_type": "max"}
    rope = thin.pop("rope_parameters")
    of_rope = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    of_hub = {"hidden_act": "swigluoai", "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_head"}
    del thin["mlp_layer_types"]
    thin.pop("layer_types", None)
    freq = [int(each == "sparse") for each in feed_forwards]
    return {**thin, **of_rope, **of_hub, "sparse_attention_config": sparse, "moe_layer_freq": freq}


def _hub_mimo(thin: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers for kinds of layers, a window that does not count the token itself, and what the class says."""
    del thin["mlp_layer_types"]
    return {
        **thin,
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": thin.pop("sliding_window") - 1,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
    }


def _older_step(thin: dict[str, Any]) -> dict[str, Any]:
    """Older names, lists that go on for a layer that speculates, and ropes layer by layer."""
    ropes, kinds = thin.pop("rope_parameters"), [*thin["layer_types"], "full_attention"]
    for key in ("num_sliding_attention_heads", "mlp_layer_types", "per_layer_config"):
        del thin[key]
    thin |= {key: [*thin[key], None] for key in ("swiglu_limits", "swiglu_limits_shared")}
    names = {
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "share_expert_dim": "share_expert_dims",
    }
    thin |= {
        theirs: thin.pop(ours) for ours, theirs in (*names.items(), ("num_key_value_heads", "num_attention_groups"))
    }
    return {
        **thin,
        "num_nextn_predict_layers": 1,
        "layer_types": kinds,
        "moe_layers_enum": "2,3",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
        "rope_theta": [ropes[kind]["rope_theta"] for kind in kinds],
        "partial_rotary_factors": [ropes[kind].get("partial_rotary_factor", 1.0) for kind in kinds],
    }


_CHECKPOINTS = Checkpoints("experts", _write, _thin)
expert_folder, thinned_expert_folder = _CHECKPOINTS.folder, _CHECKPOINTS.thinned
