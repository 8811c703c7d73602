"""Model configs with something changed in every layer, every rope or every norm. Knows nothing of what is tested."""

from dataclasses import replace
from typing import Any

import pytest

from spmd_worker.model_config.families.layer_norm_rows import LAYER_NORM_ROWS
from spmd_worker.model_config.families.older_rows import OLDER_ROWS
from spmd_worker.model_config.families.rms_rows import RMS_ROWS
from spmd_worker.model_config.families.text_part_rows import TEXT_PART_ROWS
from spmd_worker.model_config.model_config import FAMILIES, ModelConfig

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 128001,
}
"""Llama 3's of 8 billion parameters."""
LIKE_OTHERS = (
    *("MinistralForCausalLM", "HyperCLOVAXForCausalLM", "MiniCPM3ForCausalLM", "AfmoeForCausalLM"),
    *("MellumForCausalLM", "LagunaForCausalLM", "Cohere2MoeForCausalLM", *OLDER_ROWS),
)
"""Architectures whose weights are cut as those of others."""


def families(*quick: str) -> list[Any]:
    """All architectures of decoders alone as parameters of a test. But for `quick` ones those that came last are in the
    tier of layouts, and text parts that are rows of others, without the first two, in that of stress.
    """
    sparse = {name for name, family in FAMILIES.items() if family.experts} - {"Qwen2MoeForCausalLM"}
    first, second, *others = TEXT_PART_ROWS
    marks = dict.fromkeys([*RMS_ROWS, *LAYER_NORM_ROWS, *sparse, first, second], pytest.mark.matrix)
    marks |= dict.fromkeys([*others, "Glm4vMoeForConditionalGeneration", *LIKE_OTHERS], pytest.mark.stress)
    marks |= {"Lfm2ForCausalLM": pytest.mark.matrix}
    return [
        pytest.param(each, marks=() if each in quick else marks.get(each, ()))
        for each, row in FAMILIES.items()
        if row.encoder_part is None
    ]


def spelled(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json in the family's own words, without keys that it does not have. What is turned in
    part of a head of 6 would be odd.
    """
    words = FAMILIES[architecture].file_keys
    # Perhaps of one kind of layers.
    is_partial = "partial_rotary_factor" in str(FAMILIES[architecture].defaults)
    given = {**config, "head_dim": 8} if is_partial and config.get("head_dim") == 6 else config
    own = {words.get(key, key): value for key, value in given.items() if words.get(key) not in ("", *given)}
    if FAMILIES[architecture].encoder_part is not None:
        own = {key.replace("decoder_", "encoder_"): value for key, value in own.items()} | own
    return {"architectures": [architecture], **_few_experts(architecture), **_mixed_layers(architecture, own), **own}


def _mixed_layers(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Layers of LFM2 that are convolutions: without such a list it has none, or no default. Kinds of GPT-Neo's. Heads
    of Mamba that are its columns.
    """
    num_layers = config.get("num_hidden_layers", 32)
    if architecture == "Lfm2ForCausalLM":
        return {"full_attn_idxs": [*range(1, num_layers, 2)]}
    if architecture == "Lfm2MoeForCausalLM":
        return {"layer_types": [("conv", "full_attention")[layer % 2] for layer in range(num_layers)]}
    if architecture in ("KimiLinearForCausalLM", "BailingHybridForCausalLM"):
        return {"layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(num_layers)]}
    if architecture == "GPTNeoForCausalLM":
        return {"attention_types": [[["global"], config["num_layers"]]]} if "num_layers" in config else {}
    if architecture == "Mamba2ForCausalLM":
        num_heads = config.get("num_heads", 128)
        return {"head_dim": 2 * config.get("hidden_size", 4096) // num_heads, "n_groups": 2, "num_heads": num_heads}
    # Parts of heads that are small here.
    small = {"GPTJForCausalLM": {"rotary_dim": 4}, "MiMoV2FlashForCausalLM": {"v_head_dim": 4}}
    return {**small, "DeepseekV4ForCausalLM": {"qk_rope_head_dim": 4}}.get(architecture, {})


def _few_experts(architecture: str) -> dict[str, Any]:
    """Of sizes that four ranks can share."""
    experts = FAMILIES[architecture].experts
    if experts is None:
        return {}
    shared = {experts.shared_key: 1 if experts.counts_shared else 40} if experts.shared_key else {}
    shared |= {"n_group": 1, "topk_group": 1} if experts.has_groups else {}
    given = {experts.count_keys[0]: 4, experts.chosen_key: 2, "moe_intermediate_size": 24, **shared}
    return {FAMILIES[architecture].file_keys.get(key, key): value for key, value in given.items()}


def with_layers(model_config: ModelConfig, **changes: Any) -> ModelConfig:
    """Every layer with other fields."""
    return replace(model_config, layers=tuple(replace(layer, **changes) for layer in model_config.layers))


def with_indexers(model_config: ModelConfig, **changes: Any) -> ModelConfig:
    """The indexer of every layer that has one with other fields."""
    layers = [
        layer if layer.indexer is None else replace(layer, indexer=replace(layer.indexer, **changes))
        for layer in model_config.layers
    ]
    return replace(model_config, layers=tuple(layers))


def with_delta(model_config: ModelConfig, **changes: Any) -> ModelConfig:
    """Every gated delta net with other fields."""
    layers = [
        layer if layer.delta is None else replace(layer, delta=replace(layer.delta, **changes))
        for layer in model_config.layers
    ]
    return replace(model_config, layers=tuple(layers))


def with_windows(model_config: ModelConfig, *windows: int) -> ModelConfig:
    """A window for each layer."""
    layers = zip(model_config.layers, windows, strict=True)
    return replace(model_config, layers=tuple(replace(layer, window=window) for layer, window in layers))


def with_ropes(model_config: ModelConfig, **changes: Any) -> ModelConfig:
    """Every rope with other fields."""
    return replace(model_config, ropes=tuple(replace(rope, **changes) for rope in model_config.ropes))


def with_norms(model_config: ModelConfig, **changes: Any) -> ModelConfig:
    """Every norm with other fields, those of queries and keys included."""
    norm = replace(model_config.norm, **changes)
    return replace(with_layers(model_config, norm=norm), norm=norm)


def windows_of(model_config: ModelConfig) -> tuple[int, ...]:
    """A layer type for each layer."""
    return tuple(layer.window for layer in model_config.layers)
