"""Models without weights, one of each kind of layer, whose row-parallel products are cut into 8 leaves, or fewer.

config.json alone, written by transformers: dummy weights are the same on any number of ranks.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

from run_folder import made_once

BASE: Final[dict[str, Any]] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
_SHARED: Final = {"shared_expert_intermediate_size": 288, "norm_topk_prob": True}
_V3: Final = {**_EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
_GROUPS: Final = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
_LATENT: Final = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
_LATENT_HEADS: Final = {"v_head_dim": 32, "num_key_value_heads": 8}
_SCALES: Final = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
_WINDOW: Final = {"sliding_window": 9}
_KINDS: Final = {"layer_types": ["sliding_attention", "full_attention"]}
_GPT2: Final = {"hidden_size": 256, "n_layer": 2, "n_head": 8, "n_positions": 128, "n_inner": 256}
# Heads of 32: transformers takes hidden / heads where a family has no head_dim.
_WIDE: Final = {"hidden_size": 256}
_DELTA: Final = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
_STREAMS: Final = {
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 60,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_MAMBA: Final = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 8,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_expand": 32,
    "mamba_chunk_size": 32,
}
_NEMOTRON: Final = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 16,
    "n_groups": 8,
    "ssm_state_size": 16,
    "chunk_size": 32,
    "moe_shared_expert_intermediate_size": 256,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "n_group": 1,
    "topk_group": 1,
}

Case = tuple[str, dict[str, Any]]

DENSE: Final[dict[str, Case]] = {
    "llama": ("Llama", {}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 1003}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {**_WIDE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 8}),
    "mistral": ("Mistral", {**_WINDOW}),
    "gemma2": (
        "Gemma2",
        {**_WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", {**_WINDOW, **_KINDS, "query_pre_attn_scalar": 24}),
    "granite": ("Granite", {**_WIDE, **_SCALES, "logits_scaling": 2.0, "mlp_bias": True, "attention_bias": True}),
    "olmo2": ("Olmo2", {**_WIDE, "num_key_value_heads": 8}),
    "olmo2_shared_keys": ("Olmo2", {**_WIDE, "num_key_value_heads": 2}),
    "phi3": ("Phi3", {**_WIDE, **_WINDOW}),
    "gpt2": ("GPT2", _GPT2),
    "cohere": ("Cohere", {**_WIDE, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**_WIDE, **_WINDOW, "logit_scale": 0.3}),
    "starcoder2": ("Starcoder2", {**_WIDE, **_WINDOW, "use_bias": True}),
    "nemotron": ("Nemotron", {**_WIDE, "mlp_bias": True}),
    "apertus": ("Apertus", {**_WIDE, "attention_bias": True}),
    "stablelm_parallel": ("StableLm", {**_WIDE, "use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt_neox": ("GPTNeoX", {**_WIDE}),
    "falcon": ("Falcon", {**_WIDE, "ffn_hidden_size": 256, "bias": True, "new_decoder_architecture": True}),
    "opt": ("OPT", {**_WIDE, "ffn_dim": 256, "do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    "gemma4": (
        "Gemma4Text",
        {**_WINDOW, **_KINDS, "global_head_dim": 64, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0}
        | {"vocab_size_per_layer_input": 331},
    ),
    "gemma3n": (
        "Gemma3nText",
        {**_WINDOW, **_KINDS, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0, "laurel_rank": 32}
        | {"vocab_size_per_layer_input": 331, "activation_sparsity_pattern": [0.6, 0.0]},
    ),
    "unequal_leaves": ("Llama", {"intermediate_size": 1408}),
    "more_unequal_leaves": ("Llama", {"intermediate_size": 2880, "num_hidden_layers": 1}),
}
EXPERTS: Final[dict[str, Case]] = {
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**_WIDE, **_EXPERTS, **_SHARED, "mlp_only_layers": [1]}),
    "gpt_oss": ("GptOss", {**_EXPERTS, **_WINDOW, **_KINDS}),
    "mixtral": ("Mixtral", {**_EXPERTS, **_WINDOW}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_V3, **_LATENT, **_LATENT_HEADS, "attention_bias": True, "mlp_bias": True, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", {**_V3, **_GROUPS, **_LATENT, **_LATENT_HEADS}),
    "deepseek_v4": (
        "DeepseekV4",
        {**_V3, **_WINDOW, "num_hidden_layers": 3, "q_lora_rank": 32, "o_groups": 8, "o_lora_rank": 32, "hc_mult": 2}
        | {
            "index_n_heads": 4,
            "index_head_dim": 32,
            "index_topk": 3,
            "num_hash_layers": 2,
            "partial_rotary_factor": 0.5,
        }
        | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12}},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**_LATENT, **_LATENT_HEADS, "head_dim": 16, "num_hidden_layers": 4, "ffn_hidden_size": 256}
        | {"expert_ffn_hidden_size": 256, "n_routed_experts": 8, "zero_expert_num": 3, "moe_topk": 4},
    ),
    "glm4_moe": ("Glm4Moe", {**_V3, **_GROUPS, "use_qk_norm": True}),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {**_WIDE, **_EXPERTS, **_SCALES, "logits_scaling": 2.0, "shared_intermediate_size": 256},
    ),
    "llama4": (
        "Llama4Text",
        {**_EXPERTS, "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2, "attention_chunk_size": 32},
    ),
    "gemma4_moe": (
        "Gemma4Text",
        {**_WINDOW, **_KINDS, **_EXPERTS, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "top_k_experts": 2, "num_kv_shared_layers": 0},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {**_EXPERTS, "moe_topk": 2}),
    "dots1": ("Dots1", {**_V3, "n_group": 2, "topk_group": 1}),
    "unequal_experts": ("Qwen3Moe", {**_EXPERTS, "moe_intermediate_size": 352, "norm_topk_prob": True}),
}
STATES: Final[dict[str, Case]] = {
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_EXPERTS, **_SHARED}),
    "qwen3_5": ("Qwen3_5Text", {**_DELTA}),
    "qwen4": ("Qwen4ExpText", {**_DELTA, **_EXPERTS, **_SHARED, **_STREAMS}),
    "olmo_hybrid": ("OlmoHybrid", {**_WIDE, **_DELTA, "num_key_value_heads": 8}),
    "falcon_h1": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 2048, "key_multiplier": 0.6, "embedding_multiplier": 2.1}
        | {"mlp_multipliers": [0.9, 0.7], "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.8, 0.7, 1.1, 0.9, 1.2], "ssm_in_multiplier": 1.3, "lm_head_multiplier": 0.8},
    ),
    "falcon_h1_norm": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 2048, "mamba_rms_norm": True, "mamba_n_groups": 1, "projectors_bias": True},
    ),
    "bamba": ("Bamba", {**_WIDE, **_MAMBA, "mamba_expand": 8, "attn_layer_indices": [1]}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {**_WIDE, **_MAMBA, **_SCALES, **_EXPERTS, "mamba_expand": 8, "logits_scaling": 2.0, "intermediate_size": 256}
        | {"shared_intermediate_size": 256, "layer_types": ["mamba", "attention"]},
    ),
    "nemotron_h": ("NemotronH", {**_NEMOTRON, **_EXPERTS, "n_routed_experts": 8}),
    "lfm2": ("Lfm2", {**_WIDE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", {**_WIDE, **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "bailing_hybrid": (
        "BailingHybrid",
        {**_LATENT, **_LATENT_HEADS, **_GROUPS, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 256, "n_shared_experts": 1, "layer_group_size": 2, "first_k_dense_replace": 1},
    ),
    "kimi_linear": (
        "KimiLinear",
        {**_LATENT, **_LATENT_HEADS, **_GROUPS, "q_lora_rank": None, "model_max_length": 128, "num_experts": 8}
        | {"linear_num_heads": 8, "linear_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts_per_token": 2}
        | {"moe_intermediate_size": 256, "num_shared_experts": 1, "num_expert_group": 4}
        | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    ),
}
ODD: Final[dict[str, Case]] = {
    "14_heads": ("Qwen2", {"hidden_size": 448, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "14_key_heads": ("Llama", {"hidden_size": 448, "num_attention_heads": 14, "num_key_value_heads": 14}),
    "10_heads": ("Llama", {"hidden_size": 320, "num_attention_heads": 10, "num_key_value_heads": 10}),
    "12_heads": ("Llama", {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 2}),
    "9_heads": ("Llama", {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "two_groups": (
        "DeepseekV4",
        {
            **_V3,
            **_WINDOW,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 64,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    "three_granules": ("Qwen3Moe", {**_EXPERTS, "moe_intermediate_size": 96}),
    "narrow_heads": ("Llama", {"head_dim": 16}),
    "hidden_of_no_granule": ("Llama", {"hidden_size": 72}),
    "columns_of_no_granule": ("Llama", {"intermediate_size": 200}),
}
"""Models of fewer leaves than 8."""
CASES: Final[dict[str, Case]] = {**DENSE, **EXPERTS, **STATES, **ODD}


@cache
def leaf_folder(name: str) -> Path:
    """Folder with a config.json."""
    return made_once(f"leaves {name}", lambda folder: _write(folder, *CASES[name]))


def _write(folder: Path, family: str, keys: dict[str, Any]) -> None:
    # Here, because it takes seconds.
    import transformers

    drops_head = "hidden_size" in keys and "head_dim" not in keys and keys["hidden_size"] == 256
    given = {key: value for key, value in BASE.items() if not (drops_head and key == "head_dim")}
    if "kv_lora_rank" in keys:
        given.pop("head_dim")
    if family == "NemotronH":
        given.pop("num_hidden_layers")
        keys = {key: value for key, value in keys.items() if key != "num_hidden_layers"}
    config = getattr(transformers, f"{family}Config")(**{**given, **keys})
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [known[config.model_type]]
    config.save_pretrained(folder)
