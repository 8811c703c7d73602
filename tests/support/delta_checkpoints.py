"""Small random checkpoints of hybrids with gated delta nets, written by transformers with the hub's tensor names, and
what transformers computes with them.

No weight is what a mistake would leave it at: norms are not 1, epsilons not small, decays neither 0 nor 1. Knows
nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from mamba_checkpoints import stir_hybrid
from reference_models import without_defaults
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

VOCAB_SIZE = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_QWEN = {**_BASE, **_LINEAR, "head_dim": 32, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}
MOE = {
    **_QWEN,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_OLMO = {**_BASE, **_LINEAR, "hidden_size": 64}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_OF_MINICPM = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}
SMALL_VISION = {**_VISION, "num_position_embeddings": 16, "patch_size": 4}

DELTA_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN),
    "qwen3_5_images": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {"text_config": _QWEN}),
    "minicpmv4_6": (
        *("MiniCPMV4_6Config", "MiniCPMV4_6ForConditionalGeneration"),
        {"text_config": {"model_type": "qwen3_5_text", **_QWEN}, "vision_config": _OF_MINICPM, "image_token_id": 60}
        | {"insert_layer_id": 0},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", MOE),
    "qwen3_5_moe_images": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", {"text_config": MOE}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", MOE),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_OLMO, "rope_parameters": _ROPE},
    ),
    "olmo_hybrid_no_rope": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_OLMO, "linear_allow_neg_eigval": False, "rope_parameters": None},
    ),
}
"""Classes of configuration and model, and what the configuration is made of."""
PERIOD = "qwen3_5_period"
_PERIOD = {**_QWEN, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_CASES = {**DELTA_CASES, PERIOD: ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _PERIOD)}
"""Besides, the layers between one attention and the next of the hub's models of Qwen3.5."""


@cache
def delta_folder(name: str) -> Path:
    """The checkpoint of a case; written once a run."""
    return made_once(f"delta {name}", lambda folder: _write(folder, name))


@cache
def delta_reference(name: str) -> PreTrainedModel:
    """transformers' model with the weights of the folder."""
    model: PreTrainedModel = getattr(transformers, _CASES[name][1])(delta_config(name)).float().eval()
    stir_hybrid(model)
    return model


def delta_config(name: str) -> Any:
    """transformers' configuration of a case."""
    config_class, _, given = _CASES[name]
    given = {"vision_config": SMALL_VISION, **given} if "text_config" in given else given
    config = getattr(transformers, config_class)(**given)
    for each in (config, config.get_text_config()):
        each._attn_implementation = each._experts_implementation = "eager"
    if given.get("rope_parameters", 0) is None:
        config.rope_parameters = None
    return config


def _write(folder: Path, name: str) -> None:
    model = delta_reference(name)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    if name.startswith("olmo"):
        save_file(_olmo_on_hub(load_file(path), model), path, {"format": "pt"})


def _olmo_on_hub(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors as the hub has them: transformers cuts its convolution into equal parts, and renames the norms of
    full layers as if they were those of linear ones.
    """
    named = {}
    for name, value in tensors.items():
        layer = ".".join(name.split(".")[:3])
        is_full = f"{layer}.self_attn.q_norm.weight" in tensors
        ours = name.replace("feedforward_layer_norm", "post_attention_layernorm") if is_full else name
        if "_conv1d" not in name:
            named[ours] = value
    for name, value in model.named_parameters():
        if "conv1d" in name:
            config = model.config
            key = config.linear_num_key_heads * config.linear_key_head_dim
            parts = value.detach().split([key, key, len(value) - 2 * key])
            named |= {name.replace("conv1d", f"{part}_conv1d"): each.clone() for part, each in zip("qkv", parts)}
    return named


@cache
def thinned_delta_folder(name: str) -> Path:
    """The same, with a config.json as the hub has it: without the defaults of the class, an interval in place of the
    list of layers, and ropes with sections for images, or in the older keys.
    """
    return made_once(f"thinned delta {name}", lambda folder: _thin(folder, name))


def _thin(folder: Path, name: str) -> None:
    shutil.copytree(delta_folder(name), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    defaults = getattr(transformers, DELTA_CASES[name][0])()
    if "text_config" in config:
        text = without_defaults(config["text_config"], defaults.text_config.to_dict())
        config["text_config"] = {**_newer_rope(text), "full_attention_interval": 2}
    else:
        config = without_defaults(config, defaults.to_dict())
        if config["model_type"] == "qwen3_next":
            config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"]}
        if config["model_type"] != "olmo_hybrid":
            config = {**_newer_rope(config), "full_attention_interval": 2}
            config.pop("layer_types", None)
    config.get("text_config", config).pop("norm_topk_prob", None)
    path.write_text(json.dumps(config))


def _newer_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the sections of positions in an image, which are equal for text."""
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    rope = config.get("rope_parameters")
    newer = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters")}
    return config if rope is None else {**newer, "rope_parameters": {**rope, **sections}}
