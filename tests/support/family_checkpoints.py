"""Small random checkpoints of each family of the table, written by transformers, and thinned as files of the hub are.

No weight is what a mistake would leave it at: norms are not 1, biases not 0, epsilon not small. Sizes fit the compiled
attention. Knows nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from dense_checkpoints import (
    DENSE_CASES,
    DROPPED_PREFIXES,
    MASKS,
    MINISTRAL3,
    OLDER_DENSE_ROPES,
    SMALL_TABLES,
    WITHOUT_KV_HEADS,
)
from image_checkpoints import NESTED
from logit_scales import scale_logits
from reference_models import open_reference, without_defaults
from run_folder import made_once
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "eos_token_id": 2}
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps")
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0],
    "long_factor": [2.0, 3.0, 3.5, 4.0, 6.0, 8.0],
}
_KINDS = ["sliding_attention", "full_attention"] * 2

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2_head_size": ("Gemma2", {"head_dim": 32, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
    "gemma3_kinds": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": _KINDS,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3_layers": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "mlp_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma_older_word": ("Gemma", {"head_dim": 16, "hidden_act": "gelu"}),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phi3_long": (
        "Phi3",
        {"original_max_position_embeddings": 32, "num_key_value_heads": 4, "rope_parameters": _LONG},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
            "mlp_bias": True,
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "gpt2": ("GPT2", {}),
    "gpt2_inner": ("GPT2", {"n_inner": 80, "tie_word_embeddings": False}),
    **DENSE_CASES,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_TEXT = {"num_hidden_layers": 2}
_CLIP = {**_VISION, "image_size": 28, "patch_size": 14, "projection_dim": 32}
_OF_CLIP = {"vision_config": {**_CLIP, "model_type": "clip_vision_model"}}
_OF_SIGLIP = {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 500.0}}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3_images": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
        {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 2},
        {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14}},
    ),
    "mistral3_ministral": (
        "Mistral3",
        {"num_hidden_layers": 2, "model_type": "ministral3", **MINISTRAL3},
        {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14}},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {**_SECTIONS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {**_SECTIONS}, {"vision_config": _QWEN_VISION, "tie_word_embeddings": True}),
    "qwen3_vl": (
        "Qwen3VL",
        {**_SECTIONS, "head_dim": 32},
        {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
    "llava": ("Llava", {**_TEXT, "model_type": "llama", "attention_bias": True}, _OF_CLIP),
    "llava_next": ("LlavaNext", {**_TEXT, "model_type": "mistral", "head_dim": 32, "sliding_window": 5}, _OF_CLIP),
    "llava_onevision": ("LlavaOnevision", {**_TEXT, "model_type": "qwen2"}, _OF_SIGLIP),
    "vipllava": (
        "VipLlava",
        {**_TEXT, "model_type": "llama"},
        {"vision_config": {**_CLIP, "num_hidden_layers": 2}, "vision_feature_layer": [-1, 0]},
    ),
    "internvl": (
        "InternVL",
        {**_TEXT, "model_type": "qwen3", "head_dim": 32},
        {"vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "idefics3": (
        "Idefics3",
        {**_TEXT, "model_type": "llama"},
        {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}},
    ),
    "smolvlm": (
        "SmolVLM",
        {**_TEXT, "model_type": "llama"},
        {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}, "tie_word_embeddings": True},
    ),
    **NESTED,
}
"""Models that take images: family, `text_config`, and what is beside it."""

ALL_CASES = (*CASES, *WITH_IMAGES)

OLDER_ROPES = ("gemma2", "gemma3_kinds", "phi3", "phi3_long", "granite", "glm4", *OLDER_DENSE_ROPES)
"""Written once more with the keys that were before `rope_parameters`."""


@cache
def family_folder(name: str) -> Path:
    """The checkpoint of a case, with every key in its config.json; written once a run."""
    if name in WITH_IMAGES:
        return made_once(f"family {name}", lambda folder: _write_with_images(folder, *WITH_IMAGES[name]))
    return made_once(f"family {name}", lambda folder: _write(folder, *CASES[name]))


@cache
def thinned_folder(name: str) -> Path:
    """The same without the keys that have the class's default, with older rope keys where the case has them, and, of
    GPT-2, names without a prefix beside masks.
    """
    thin = _thin_with_images if name in WITH_IMAGES else _thin
    return made_once(f"thinned {name}", lambda folder: thin(family_folder(name), folder, name))


@cache
def family_reference(name: str, *, is_thinned: bool = False) -> PreTrainedModel:
    """transformers' model of the folder."""
    folder = thinned_folder(name) if is_thinned else family_folder(name)
    if name not in WITH_IMAGES:
        # The eager attention of Falcon's class adds slopes twice.
        return open_reference(folder, "sdpa" if name == "falcon_rw" else "eager")
    model_class = getattr(transformers, f"{WITH_IMAGES[name][0]}ForConditionalGeneration")
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return scale_logits(model)


def config_class(name: str) -> Any:
    """transformers' configuration class of a case."""
    family = CASES[name][0]
    return getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")


def _write(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    name = next(each for each, case in CASES.items() if case == (family, overrides))
    config = config_class(name)(**{**_base(family), **overrides})
    for key in _EPSILONS:
        if hasattr(config, key):
            # The usual 1e-6 is too small for a wrong one to be seen.
            setattr(config, key, 0.03)
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + suffix)(config).float().eval()
    stir(model)
    if name in SMALL_TABLES:
        for tensor_name, value in model.named_parameters():
            value.data.mul_(0.01 if "embed" in tensor_name else 1.0)
    model.save_pretrained(folder)


def _base(family: str) -> dict[str, Any]:
    if family in ("GPT2", "GPTBigCode", "GPTJ"):
        return GPT2
    return {key: value for key, value in BASE.items() if key != "num_key_value_heads" or family not in WITHOUT_KV_HEADS}


def _write_with_images(folder: Path, family: str, text: dict[str, Any], beside: dict[str, Any]) -> None:
    # A window is only known to layers that are listed.
    config = getattr(transformers, f"{family}Config")(
        text_config={**BASE, "rms_norm_eps": 0.03, **text}, eos_token_id=2, **beside
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    stir(model)
    model.save_pretrained(folder)


def _thin_with_images(full: Path, folder: Path, name: str) -> None:
    """Keys placed as in the hub's files: few in `text_config`, or none for Qwen2.5-VL and PaddleOCR-VL."""
    shutil.copytree(full, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kind = config["text_config"]["model_type"]
    defaults = getattr(transformers, f"{WITH_IMAGES[name][0]}Config")().text_config.to_dict()
    if defaults["model_type"] != kind:
        defaults = transformers.AutoConfig.for_model(kind).to_dict()
    text = {key: value for key, value in config["text_config"].items() if value != defaults.get(key)}
    text.pop("layer_types", None)
    if "mrope_section" in config["text_config"]["rope_parameters"]:
        rope = text.pop("rope_parameters")
        kind = {"type": "mrope"} if name in ("qwen2_vl", "qwen2_5_vl") else {"rope_type": "default"}
        kind |= {"mrope_interleaved": True} if name == "qwen3_vl" else {}
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {**kind, "mrope_section": rope["mrope_section"]}}
        text |= {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    del config["text_config"]
    whole = (
        {**config, **text}
        if name in ("qwen2_5_vl", "paddleocr_vl")
        else {**config, "text_config": {**text, "model_type": text.get("model_type", defaults["model_type"])}}
    )
    path.write_text(json.dumps({**whole, "model_type": config["model_type"]}))


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    """Matrices large enough that softmax and caps are bent, everything else moved from 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    # Apertus has numbers of its activation that are not learned.
    learned_not = [(name, value) for name, value in model.named_buffers() if name.endswith("act_fn.beta")]
    for name, value in sorted([*model.named_parameters(), *learned_not]):
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim < 2:
            value.add_(0.3 * noise)
            continue
        is_table = any(word in name for word in ("embed", "wte", "wpe", "lm_head"))
        fan_in = value.shape[0] if "c_" in name else value.shape[1]
        is_score = any(word in name for word in ("q_proj", "k_proj", "qkv", "c_attn", "query_key_value"))
        value.copy_(noise * (0.5 if is_table else (2.0 if is_score else 1.4) * fan_in**-0.5))


def _thin(full: Path, folder: Path, name: str) -> None:
    shutil.copytree(full, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    defaults = config_class(name)().to_dict()
    thin = without_defaults(config, defaults)
    if name in OLDER_ROPES:
        _older_ropes(thin, config)
    if "layer_types" in thin and CASES[name][1].get("layer_types") is None:
        del thin["layer_types"]
    if name == "falcon_newer":
        del thin["num_ln_in_parallel_attn"]
    if name == "gemma_older_word":
        thin["hidden_act"] = "gelu"
    path.write_text(json.dumps(thin))
    family = CASES[name][0]
    if family in {**DROPPED_PREFIXES, **MASKS}:
        _rewrite_older(folder / "model.safetensors", DROPPED_PREFIXES.get(family, ""), MASKS.get(family, ()))


def _older_ropes(thin: dict[str, Any], config: dict[str, Any]) -> None:
    thin.pop("rope_parameters", None)
    ropes = dict(config["rope_parameters"])
    if "full_attention" in ropes:
        if config["model_type"] != "olmo3":
            thin["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = dict(ropes["full_attention"])
    thin["rope_theta"] = ropes.pop("rope_theta")
    partial = ropes.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        thin["rotary_emb_base"] = thin.pop("rope_theta")
        thin |= {} if partial == 0.25 else {"rotary_pct": partial}
    # GLM's files leave it out.
    if partial is not None and config["model_type"] == "phi3":
        thin["partial_rotary_factor"] = partial
    if "original_max_position_embeddings" in config:
        ropes.pop("original_max_position_embeddings", None)
    # The files of Gemma 3 and OLMo 3 have the newer word inside the older key.
    word = "rope_type" if "full_attention" in config["rope_parameters"] else "type"
    ropes[word] = ropes.pop("rope_type")
    thin["rope_scaling"] = ropes if ropes[word] != "default" else None


def _rewrite_older(path: Path, prefix: str, masks: tuple[str, ...]) -> None:
    tensors = {key.removeprefix(prefix): value for key, value in load_file(path).items()}
    unread = {name.format(index): torch.ones(1, 1, 4, 4) for name in masks for index in range(2)}
    save_file({**tensors, **unread}, path, {"format": "pt"})
