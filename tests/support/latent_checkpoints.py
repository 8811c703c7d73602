"""Small random checkpoints of the families with latent attention, written by transformers, and thinned as files of the
hub are.

As `family_checkpoints`: no weight is what a mistake would leave it at. Sizes fit the compiled kernels. Knows nothing of
the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any

import transformers
from expert_checkpoints import open_experts, stir
from kimi_names import restore_layers
from made_checkpoints import BASE, Checkpoints, Config
from reference_models import without_defaults
from transformers import PreTrainedModel

LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 48, "num_hidden_layers": 3, "hidden_size": 64}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN |= {"beta_fast": 8.0, "beta_slow": 0.5}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
_LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0, 2.1, 2.5]}
_LONG |= {"long_factor": [2.0, 3.0, 3.5, 4.0, 6.0, 8.0, 9.0, 9.5]}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 12}
_GROUPS = {"n_group": 4, "topk_group": 2}
_VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_K2 = {**LATENT, **_EXPERTS, "model_type": "deepseek_v3", "q_lora_rank": 32, "n_group": 1, "topk_group": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**LATENT, **_EXPERTS, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.7}
        | {"first_k_dense_replace": 1, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**LATENT, **_EXPERTS, **_GROUPS, "q_lora_rank": 32, "topk_method": "group_limited_greedy"}
        | {"first_k_dense_replace": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, **_EXPERTS, **_GROUPS, "q_lora_rank": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.3}
        | {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    # Fewer keys than tokens; heads so many that hardly a score is zero.
    "deepseek_v32": (
        "DeepseekV32",
        {**LATENT, **_EXPERTS, **_GROUPS, **_INDEXER, "q_lora_rank": 32, "first_k_dense_replace": 1}
        | {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**LATENT, **_EXPERTS, **_INDEXER, "q_lora_rank": 32, "v_head_dim": 64, "index_head_dim": 24}
        | {"first_k_dense_replace": 2, "attention_bias": True},
    ),
    "glm_moe_dsa_shared": (
        "GlmMoeDsa",
        {**LATENT, **_EXPERTS, **_INDEXER, "q_lora_rank": 32, "num_hidden_layers": 4}
        | {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **_EXPERTS, "q_lora_rank": 32, "v_head_dim": 64}),
    "mistral4": (
        "Mistral4",
        {**LATENT, **_EXPERTS, **_GROUPS, "q_lora_rank": 32, "routed_scaling_factor": 1.3, "first_k_dense_replace": 1}
        | {
            "qk_rope_head_dim": 32,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 0.5},
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {**LATENT, "q_lora_rank": 32, "scale_depth": 1.1, "dim_model_base": 24, "attention_bias": True}
        | {"v_head_dim": None, "rope_parameters": _LONG},
    ),
    "minicpm3_plain": (
        "MiniCPM3",
        {**LATENT, "q_lora_rank": None, "scale_depth": None, "dim_model_base": None, "mlp_bias": True},
    ),
    # Its class would make the row of a padding token zero, in the tied head too.
    "youtu": ("Youtu", {**LATENT, "q_lora_rank": 32, "attention_bias": True, "pad_token_id": None}),
    "mistral3_mistral4": (
        "Mistral3",
        {**LATENT, **_EXPERTS, "model_type": "mistral4", "q_lora_rank": 32}
        | {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    # Latents with and without a rope, which other layers read; keys of two indexers are beside layer 0's.
    "mistral_large4": (
        "MistralLarge4",
        {**LATENT, **_EXPERTS, **_GROUPS, **_INDEXER, "num_hidden_layers": 6, "routed_scaling_factor": 1.3}
        | {"no_rope_layers": [1, 0, 1, 0, 1, 1], "kv_source_layers": [0, 1, 0, 1, 0, 5]}
        | {"indexer_types": ["full", "full", "full", "shared", "shared", "full"], "attention_bias": True}
        | {
            "final_logit_softcapping": 4.0,
            "rope_parameters": {**_YARN, "mscale_all_dim": 0.2, "attention_factor": 1.1},
        },
    ),
    "mistral_large4_plain": (
        "MistralLarge4",
        {**LATENT, **_EXPERTS, **_INDEXER, "num_hidden_layers": 4, "first_k_dense_replace": 2},
    ),
    # Experts 8 to 12 are identities.
    "longcat_flash": (
        "LongcatFlash",
        {
            **LATENT,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "q_lora_rank": 32,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 32,
        }
        | {"n_routed_experts": 8, "zero_expert_num": 5, "moe_topk": 5, "routed_scaling_factor": 3.0},
    ),
    "longcat_flash_yarn": (
        "LongcatFlash",
        {
            **LATENT,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "q_lora_rank": 48,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 48,
        }
        | {"n_routed_experts": 8, "zero_expert_num": 2, "moe_topk": 2, "attention_bias": True}
        | {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "kimi_k25": (
        "Kimi_K25",
        {**_K2, "first_k_dense_replace": 1, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "Mistral3": {
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
        "tie_word_embeddings": False,
    },
    "MistralLarge4": {
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14}
    },
    "Kimi_K25": {
        "vision_config": {**_VISION, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
}
"""Beside `text_config`, by family."""


@cache
def latent_reference(name: str, *, is_thinned: bool = False) -> PreTrainedModel:
    """transformers' model of the folder, expert by expert."""
    return open_experts(thinned_latent_folder(name) if is_thinned else latent_folder(name))


def _write(folder: Path, name: str) -> None:
    family, overrides = CASES[name]
    # The usual 1e-6 is too small for a wrong one to be seen.
    text, kind = {**BASE, **overrides, "rms_norm_eps": 0.03}, "ForCausalLM"
    if family in WITH_IMAGES:
        text, kind = {"text_config": text, **WITH_IMAGES[family]}, "ForConditionalGeneration"
    config = getattr(transformers, f"{family}Config")(**text)
    model = getattr(transformers, f"{family}{kind}")(config).float().eval()
    stir(model)
    model.save_pretrained(folder)
    restore_layers(folder / "model.safetensors")


def _thin(config: Config, name: str) -> Config:
    """Without the keys that have the class's default, and with the rope keys of older files."""
    families = {"mistral4": "Mistral4", "deepseek_v3": "DeepseekV3", "mistral_large4_text": "MistralLarge4Text"}
    family = families.get(config["model_type"], CASES[name][0])
    defaults = getattr(transformers, f"{family}Config")().to_dict()
    thin = without_defaults(config, defaults, "rope_parameters", "q_lora_rank")
    rope = dict(thin.pop("rope_parameters"))
    thin["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    if kind != "default":
        thin["rope_scaling"] = {"type": kind, **rope}
    if name in ("glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_shared"):
        thin.pop("mlp_layer_types", None)
    if name.startswith("glm_moe_dsa") and thin.pop("indexer_types", ["full"])[1:2] == ["shared"]:
        thin |= {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    return thin


_CHECKPOINTS = Checkpoints("latent", _write, _thin)
latent_folder, thinned_latent_folder = _CHECKPOINTS.folder, _CHECKPOINTS.thinned
