"""Small random checkpoints of hybrids with Mamba2, written by transformers with the hub's tensor names, what it
computes with them, and config.json as the hub's files have it.

No weight is what a mistake would leave it at: norms are not 1, epsilons not small, decays neither 0 nor 1. Knows
nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from made_checkpoints import BASE, Checkpoints, Config
from reference_models import without_defaults
from transformers import PreTrainedModel

_BASE = {**BASE, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 512}
_ALONE = ("Mamba2", "Mamba", "FalconMamba")
"""Families without attention."""
_OF_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    # Prompts of transformers bound dt by it, its decode does not, and nor do we.
    "time_step_min": 1e-12,
}
_GRANITE = {
    **_MAMBA,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA1 = {"state_size": 12, "expand": 2, "time_step_rank": 6}
_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_dt_rank": 6,
}
_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 12, "expand": 2, "chunk_size": 32}
_FALCON = {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16, "num_hidden_layers": 2}

MAMBA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_latent": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_latent_size": 20,
            "norm_topk_prob": False,
            "use_bias": True,
        },
    ),
    "granite": ("GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite_dense": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "time_step_limit": [0.05, 0.4],
        },
    ),
    "falcon": (
        "FalconH1",
        {
            **_FALCON,
            "key_multiplier": 0.6,
            "embedding_multiplier": 2.1,
            "lm_head_multiplier": 0.8,
            "mlp_multipliers": [0.9, 0.7],
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.2,
            "ssm_multipliers": [0.8, 0.7, 1.1, 0.9, 1.2],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon_norm": (
        "FalconH1",
        {**_FALCON, "mamba_rms_norm": True, "mamba_conv_bias": False, "projectors_bias": True},
    ),
    "falcon_norm_last": (
        "FalconH1",
        {**_FALCON, "mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "mamba2": ("Mamba2", {**_MAMBA2, "n_groups": 2}),
    "mamba2_tied": (
        "Mamba2",
        {**_MAMBA2, "n_groups": 1, "tie_word_embeddings": True, "use_bias": True, "time_step_limit": [0.05, 0.4]},
    ),
    "mamba1": ("Mamba", _MAMBA1),
    "mamba1_biases": (
        "Mamba",
        {
            "state_size": 16,
            "expand": 3,
            "intermediate_size": 160,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    # The size that wins over `expand`, as in Falcon Mamba 7B.
    "falcon_mamba": (
        "FalconMamba",
        {**_MAMBA1, "expand": 16, "intermediate_size": 128, "tie_word_embeddings": False, "mixer_rms_eps": 0.05},
    ),
    "jamba": ("Jamba", {**_JAMBA, "num_experts": 6}),
    "jamba_dense": ("Jamba", {**_JAMBA, "num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True}),
}


@cache
def mamba_reference(name: str) -> PreTrainedModel:
    """transformers' model of a case."""
    model_class = getattr(transformers, f"{MAMBA_CASES[name][0]}ForCausalLM")
    model: PreTrainedModel = model_class(mamba_config(name)).float().eval()
    stir_hybrid(model, ("gate.weight", "router"))
    return model


def mamba_config(name: str) -> Any:
    """transformers' configuration of a case."""
    family, given = MAMBA_CASES[name]
    without = {"NemotronH": ("num_hidden_layers",)}.get(family, _OF_ATTENTION if family in _ALONE else ())
    base = {key: value for key, value in _BASE.items() if key not in without}
    config = getattr(transformers, f"{family}Config")(**{**base, **given})
    # The usual epsilons are too small for a wrong one to be seen.
    setattr(config, "layer_norm_epsilon" if family in ("NemotronH", *_ALONE) else "rms_norm_eps", 0.03)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def open_mamba(folder: Path) -> PreTrainedModel:
    """transformers' model of a folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model_class = getattr(transformers, config.architectures[0])
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    model: PreTrainedModel = model_class.from_pretrained(folder, **options).eval()
    return model


@torch.no_grad()
def stir_hybrid(model: PreTrainedModel, scores: tuple[str, ...] = ()) -> None:
    """Numbers that differ from those of a new model in every parameter; clear decisions of routers, whose weights have
    one of the names of `scores`.
    """
    generator = torch.Generator().manual_seed(7)
    buffers = [(name, value) for name, value in model.named_buffers() if scores and "correction_bias" in name]
    for name, value in sorted([*model.named_parameters(), *buffers]):
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("A_log"):
            value.copy_(noise * 0.8 - 1.0)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            value.copy_(noise - 1.0)
        elif value.ndim == 3 and "conv" in name:
            value.copy_(noise * 0.6)
        elif value.ndim >= 2:
            is_score = any(word in name for word in scores)
            value.copy_(noise * (1.0 if "embed" in name else (2.0 if is_score else 1.4) * value.shape[-1] ** -0.5))
        else:
            value.add_(0.3 * noise)


def _write(folder: Path, name: str) -> None:
    mamba_reference(name).save_pretrained(folder)


def _thin(config: Config, name: str) -> Config:
    """Without the keys that have the class's default, and with the hub's older keys."""
    family, given = MAMBA_CASES[name]
    thin = without_defaults(config, getattr(transformers, f"{family}Config")().to_dict())
    thin.pop("rope_parameters", None)
    if family == "NemotronH":
        letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
        pattern = "".join(letters[kind] for kind in thin.pop("layers_block_type"))
        thin |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    if family == "GraniteMoeHybrid":
        words = {"linear_attention": "mamba", "full_attention": "attention"}
        thin["layer_types"] = [words[kind] for kind in thin["layer_types"]]
        thin["position_embedding_type"] = given.get("position_embedding_type", "nope")
    if family not in ("NemotronH", *_ALONE):
        thin["rope_theta"] = 10000.0
    return thin


_CHECKPOINTS = Checkpoints("mamba", _write, _thin)
mamba_folder, thinned_mamba_folder = _CHECKPOINTS.folder, _CHECKPOINTS.thinned
