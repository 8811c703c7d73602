"""Small random checkpoints of Llama 4, Gemma 3n and Gemma 4, written by transformers, and thinned as the hub's are.

As `family_checkpoints`: no weight is what a mistake would leave it at. Knows nothing of the runtime under test.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from family_checkpoints import stir
from made_checkpoints import BASE, Checkpoints, Config
from reference_models import open_reference, without_defaults
from transformers import PreTrainedConfig, PreTrainedModel

_BASE = {**BASE, "max_position_embeddings": 256, "rms_norm_eps": 0.03}
_LLAMA4 = {
    **_BASE,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "floor_scale": 4,
    "attn_scale": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA4 = {
    **_BASE,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
}
_GEMMA3N = {
    **_BASE,
    "rms_norm_eps": 0.01,
    "intermediate_size": [40, 56, 40, 40, 56, 40],
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "final_logit_softcapping": 25.0,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.7, 0.0],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4", _LLAMA4),
    "llama4_other": (
        "Llama4",
        {
            **_LLAMA4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"],
            "rope_parameters": _LLAMA3,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_dense": (
        "Gemma4",
        {**_GEMMA4, "num_hidden_layers": 6, "layer_types": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {
            **{key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"},
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    "gemma4_small": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 100,
        },
    ),
    "gemma3n": ("Gemma3n", _GEMMA3N),
    "gemma3n_other": (
        "Gemma3n",
        {
            **_GEMMA3N,
            "num_hidden_layers": 11,
            "intermediate_size": 40,
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
        },
    ),
}


@cache
def recent_reference(name: str, *, is_thinned: bool = False) -> PreTrainedModel:
    """transformers' model of the folder."""
    return open_reference(thinned_recent_folder(name) if is_thinned else recent_folder(name))


def recent_config(name: str) -> PreTrainedConfig:
    """transformers' config of a case."""
    family, keys = CASES[name]
    config: PreTrainedConfig = getattr(transformers, f"{family}TextConfig")(**keys)
    return config


def _write(folder: Path, name: str) -> None:
    model = getattr(transformers, f"{CASES[name][0]}ForCausalLM")(recent_config(name))
    model = model.float().eval()
    stir(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            # One score larger than the others needs no other expert.
            if name.endswith("router.weight"):
                value.mul_(0.5)
        for number, (name, value) in enumerate(model.named_buffers()):
            if name.endswith("layer_scalar"):
                value.fill_(0.6 + 0.3 * (number % 3))
    model.save_pretrained(folder)


def _thin(config: Config, name: str) -> Config:
    """Without the keys that have the class's default or follow from others."""
    family = CASES[name][0]
    thin = without_defaults(config, getattr(transformers, f"{family}TextConfig")().to_dict())
    _THINNERS[family](thin)
    return thin


def _thin_llama4(config: dict[str, Any]) -> None:
    """Older files have the rope's base apart."""
    if config.get("interleave_moe_layer_step") == 2 and config["moe_layers"] == [1, 3]:
        for key in ("layer_types", "moe_layers"):
            del config[key]
        config["no_rope_layers"] = []
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope


def _thin_gemma4(config: dict[str, Any]) -> None:
    """Files of the hub have the sizes of full layers once, for all."""
    config.pop("per_layer_config")
    config["global_head_dim"] = 32
    if config.get("attention_k_eq_v"):
        config["num_global_key_value_heads"] = 1
    if config["num_hidden_layers"] == 6 and "num_kv_shared_layers" not in config:
        del config["layer_types"]


def _thin_gemma3n(config: dict[str, Any]) -> None:
    """Files of the hub have the bases of the ropes apart."""
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    if config["num_hidden_layers"] == 11:
        for key in ("layer_types", "activation_sparsity_pattern"):
            del config[key]


_THINNERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "Llama4": _thin_llama4,
    "Gemma4": _thin_gemma4,
    "Gemma4Unified": _thin_gemma4,
    "Gemma3n": _thin_gemma3n,
}


_CHECKPOINTS = Checkpoints("recent", _write, _thin)
recent_folder, thinned_recent_folder = _CHECKPOINTS.folder, _CHECKPOINTS.thinned
