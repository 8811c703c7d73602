"""Small random checkpoints of hybrids with short convolutions, written by transformers, and thinned as files of the hub
are.

As `family_checkpoints`: no weight is what a mistake would leave it at. Knows nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from family_checkpoints import stir
from made_checkpoints import BASE, Checkpoints, Config
from reference_models import open_reference, without_defaults
from transformers import PreTrainedModel

_BASE = {**BASE, "max_position_embeddings": 256, "norm_eps": 0.03}
_LFM2 = {**_BASE, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_WIDTH = {"intermediate_size": 72, "block_multiple_of": 20, "block_ffn_dim_multiplier": 1.1}
_LFM3 = {**_BASE, "num_hidden_layers": 5, "intermediate_size": 48, "head_dim": 16, "sliding_window": 9}
_SMALL_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**_LFM2, **_WIDTH, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "lfm2_biases": (
        "Lfm2",
        {**_LFM2, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "intermediate_size": 40},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **_LFM2,
            "intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.7,
            "num_dense_layers": 1,
        },
    ),
    "lfm2_moe_plain": (
        "Lfm2Moe",
        {
            **_LFM2,
            "intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_vl": ("Lfm2Vl", {**_LFM2, **_WIDTH, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "lfm3": ("Lfm3", {**_LFM3, "rope_parameters": _SMALL_ROPES}),
    "lfm3_plain": (
        "Lfm3",
        {
            **_LFM3,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "conv", "sliding_attention", "conv"],
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "conv_bias": True,
        },
    ),
}

_BESIDE: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"model_type": "siglip2_vision_model", "num_patches": 4, "patch_size": 4},
    "projector_hidden_size": 16,
}
"""What LFM2-VL has beside its text."""


@cache
def conv_reference(name: str, *, is_thinned: bool = False) -> PreTrainedModel:
    """transformers' model of the folder."""
    folder, family = thinned_conv_folder(name) if is_thinned else conv_folder(name), CASES[name][0]
    if family != "Lfm2Vl":
        return open_reference(folder)
    model_class = getattr(transformers, family + conv_suffix(family))
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def conv_config(family: str, keys: dict[str, Any]) -> Any:
    """transformers' config of a case."""
    given = {"text_config": {"model_type": "lfm2", **keys}, **_BESIDE} if family == "Lfm2Vl" else keys
    return getattr(transformers, f"{family}Config")(**given)


def conv_suffix(family: str) -> str:
    """The end of the name of the case's architecture."""
    return "ForConditionalGeneration" if family == "Lfm2Vl" else "ForCausalLM"


def _write(folder: Path, name: str) -> None:
    family, keys = CASES[name]
    config = conv_config(family, keys)
    model = getattr(transformers, family + conv_suffix(family))(config).float().eval()
    stir(model)
    with torch.no_grad():
        for key, value in model.named_buffers():
            if key.endswith("expert_bias"):
                value.copy_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)))
        for key, value in model.named_parameters():
            if ".conv.conv.weight" in key:
                value.mul_(0.7)
    model.save_pretrained(folder)


def _thin(config: Config, name: str) -> Config:
    """The keys of older files, and none that have the class's default."""
    family = CASES[name][0].removesuffix("Vl")
    thin = without_defaults(config, getattr(transformers, f"{family}Config")().to_dict())
    if family == "Lfm2":
        kinds = thin.pop("layer_types")
        thin["full_attn_idxs"] = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        thin |= {"block_ff_dim": thin.pop("intermediate_size"), "intermediate_size": 7}
        rope = thin.pop("rope_parameters", None)
        thin |= {} if rope is None else {"rope_theta": rope["rope_theta"]}
    if family != "Lfm3":
        thin["tie_embedding"] = thin.pop("tie_word_embeddings", True)
    return thin


_CHECKPOINTS = Checkpoints("conv", _write, _thin)
conv_folder, thinned_conv_folder = _CHECKPOINTS.folder, _CHECKPOINTS.thinned
