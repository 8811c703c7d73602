"""The cases of the rows in `rms_rows.py` and `layer_norm_rows.py`, as those in `family_checkpoints.py` are.

Where a class has constants that are too small to be seen, tables are small too.
"""

from typing import Any, Final

from image_checkpoints import NESTED, NESTED_IN_LAYOUTS

_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
_SHORT = {"num_hidden_layers": 2}
_HYPERCLOVA = {**_SHORT, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.3}
_HYPERCLOVA |= {"attention_multiplier": 0.4}
MINISTRAL3: Final[dict[str, Any]] = {
    "head_dim": 16,
    "sliding_window": 7,
    "rope_parameters": {**_STRETCHED, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
}

DENSE_CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "olmo3": ("Olmo3", {"sliding_window": 5}),
    "olmo3_stretched": (
        "Olmo3",
        {
            **_SHORT,
            "sliding_window": 5,
            "layer_types": _ALTERNATE[:2],
            "rope_parameters": {
                "full_attention": _STRETCHED,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 5}),
    "exaone4_full": ("Exaone4", {**_SHORT, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "arcee": ("Arcee", {**_SHORT, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            **_SHORT,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": ("Ministral3", {**_SHORT, **MINISTRAL3}),
    "helium": ("Helium", {**_SHORT, "head_dim": 16, "mlp_bias": True}),
    "cwm": ("Cwm", {"head_dim": 32, "sliding_window": 5, "num_hidden_layers": 5}),
    "vault_gemma": (
        "VaultGemma",
        {
            **_SHORT,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo": ("Olmo", {**_SHORT, "clip_qkv": 0.8}),
    "nemotron": ("Nemotron", {**_SHORT, "mlp_bias": True}),
    "jais2": ("Jais2", {**_SHORT, "head_dim": 16}),
    "cohere": ("Cohere", {**_SHORT, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "logit_scale": 0.3}),
    "stablelm": ("StableLm", {**_SHORT}),
    "stablelm_parallel": ("StableLm", {**_SHORT, "use_parallel_residual": True, "use_qkv_bias": True}),
    "phi": ("Phi", {**_SHORT}),
    "gpt_neox": ("GPTNeoX", {**_SHORT}),
    "gpt_neox_serial": (
        "GPTNeoX",
        {
            **_SHORT,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "cohere_plus": ("Cohere", {**_SHORT, "use_qk_norm": True, "attention_bias": True}),
    "apertus": ("Apertus", {**_SHORT, "attention_bias": True}),
    "falcon_newer": (
        "Falcon",
        {**_SHORT, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80, "bias": True},
    ),
    "falcon_newer_one_norm": (
        "Falcon",
        {
            **_SHORT,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("Falcon", {**_SHORT, "ffn_hidden_size": 80, "bias": True}),
    "falcon_rw": ("Falcon", {**_SHORT, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    # Heads that are no power of two.
    "bloom": ("Bloom", {**_SHORT, "num_attention_heads": 12, "hidden_size": 192}),
    "mpt": ("Mpt", {**_SHORT, "num_attention_heads": 12, "hidden_size": 192, "attn_config": {"clip_qkv": 0.8}}),
    "gpt_bigcode": ("GPTBigCode", {"n_inner": 80}),
    "opt": ("OPT", {**_SHORT, "ffn_dim": 80}),
    "stablelm_12b": (
        "StableLm",
        {**_SHORT, "qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 2},
    ),
    "stablelm_norms": ("StableLm", {**_SHORT, "qk_layernorm": True, "use_qkv_bias": True}),
    "phi_norms": ("Phi", {**_SHORT, "qk_layernorm": True}),
    "opt_350m": ("OPT", {**_SHORT, "ffn_dim": 80, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt_350m_untied": (
        "OPT",
        {**_SHORT, "ffn_dim": 80, "word_embed_proj_dim": 96, "tie_word_embeddings": False},
    ),
    "opt_without_last_norm": (
        "OPT",
        {**_SHORT, "ffn_dim": 80, "_remove_final_layer_norm": True, "word_embed_proj_dim": 32},
    ),
    "granite_swa": (
        "GraniteSWA",
        {
            "sliding_window": 5,
            "layer_rope_theta": [0, 10000.0, 500.0, 10000.0],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "ministral": ("Ministral", {**_SHORT, "head_dim": 32, "sliding_window": 5, "layer_types": _ALTERNATE[:2]}),
    "hyperclovax": ("HyperCLOVAX", {**_HYPERCLOVA, "mlp_bias": True, "attention_bias": True}),
    "hyperclovax_pre_norm": ("HyperCLOVAX", {**_HYPERCLOVA, "head_dim": 32, "use_post_norm": False}),
    "gptj": ("GPTJ", {"rotary_dim": 8, "n_inner": 80}),
    "gpt_neo": (
        "GPTNeo",
        {"num_hidden_layers": 3, "window_size": 5, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "biogpt": ("BioGpt", _SHORT),
    "xglm": ("XGLM", {**_SHORT, "ffn_dim": 80}),
    "xglm_untied": ("XGLM", {**_SHORT, "scale_embedding": False, "tie_word_embeddings": False}),
    "persimmon": ("Persimmon", _SHORT),
    "persimmon_plain": ("Persimmon", {**_SHORT, "qk_layernorm": False, "hidden_act": "gelu"}),
    "gpt_neox_japanese": (
        "GPTNeoXJapanese",
        {
            **_SHORT,
            "intermediate_multiple_size": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "nanochat": ("NanoChat", {**_SHORT, "final_logit_softcapping": 3.0, "attention_bias": True}),
}
"""Family of transformers, and what its configuration is made with besides the sizes that all have."""

OLDER_DENSE_ROPES: Final = ("olmo3_stretched", "stablelm", "phi", "nemotron", "gpt_neox", "gpt_neox_serial", "hunyuan")
SMALL_TABLES: Final = ("olmo", "opt", "opt_350m", "biogpt", "xglm")
DROPPED_PREFIXES: Final = {"GPT2": "transformer.", "OPT": "model.", "Bloom": "transformer."}
"""Prefix of names, which some files omit."""
MASKS: Final = {
    "GPT2": ("h.{}.attn.bias",),
    "GPTBigCode": ("transformer.h.{}.attn.bias",),
    "GPTNeoX": ("gpt_neox.layers.{}.attention.bias", "gpt_neox.layers.{}.attention.masked_bias"),
    "GPTJ": ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    "GPTNeo": ("transformer.h.{}.attn.attention.bias", "transformer.h.{}.attn.attention.masked_bias"),
    "XGLM": ("model.embed_positions.weights",),
}
"""Tensors of older files that no model reads."""
WITHOUT_KV_HEADS: Final = (
    *("GPTNeoX", "Falcon", "OPT", "GPTBigCode", "GPTJ", "GPTNeo", "BioGpt", "XGLM", "Persimmon", "GPTNeoXJapanese"),
    *("Bloom", "Mpt"),
)

_SEEN_IN_LAYOUTS: Final = (
    *("hunyuan", "ministral3", "olmo", "cohere2"),
    *("cohere_plus", "apertus", "gpt_neox", "opt_350m"),
)
"""One of each kind of layer that others do not have: norms after rotation, growing queries, bounds of projections,
layers without rotation beside others, feed-forwards beside attention, norms with weights of each head, activations that
are learned, tensors by head, positions from the third row on with norms of sums.
"""
VARIANTS: Final = (
    *("stablelm_norms", "opt_350m_untied", "opt_without_last_norm", "vipllava", "idefics3"),
    *("hyperclovax_pre_norm", "xglm_untied", "persimmon_plain"),
    *(name for name in NESTED if name not in NESTED_IN_LAYOUTS),
)
"""Stress tier, except tests of a row's entries and of keys that files omit."""
SIMILAR: Final = (*VARIANTS, *NESTED_IN_LAYOUTS, "llava_next", "llava_onevision", "internvl", "smolvlm")
"""Models whose logits are tested in the layout tier too."""
CAME_LAST: Final = (
    *("cohere_plus", "apertus", "falcon_newer", "falcon_newer_one_norm", "falcon_rw", "mpt"),
    *("stablelm_12b", "phi_norms", "opt_350m", "llava", *SIMILAR),
    *("ministral", "hyperclovax", "gptj", "gpt_neo", "biogpt", "xglm", "persimmon", "gpt_neox_japanese"),
)
"""Cases that are compared in the tier of layouts and not before."""
LIKE_OTHERS: Final = (
    *("mistral3", "mistral3_ministral", "gemma2_head_size", "gemma3_kinds", "gemma_older_word", "smollm3_layers"),
    *("gpt2_inner", "qwen2_vl", "qwen3_vl", "gemma3_images", "seed_oss", "llava"),
    *("gemma", "gemma3", "glm", "granite", "phi3", "starcoder2", "smollm3", "ernie", "qwen2_5_vl"),
    *(name for name in SIMILAR if name not in DENSE_CASES),
    *(name for name in DENSE_CASES if name not in _SEEN_IN_LAYOUTS),
)
"""Cases whose layers have nothing that no other's have: their layouts are in the stress tier."""
_WITH_OWN_TENSORS: Final = (
    *("phi", "falcon", "falcon_newer", "gpt_bigcode", "opt", "glm", "nanochat", "stablelm", "granite_swa"),
    *("gemma3_images", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"),
)
LIKE_OTHERS_IN_FILES: Final = tuple(name for name in LIKE_OTHERS if name not in _WITH_OWN_TENSORS)
"""Cases whose tensors have the names and order of Llama's, or those of another case of the same family: their shards,
stages and views are in the stress tier.
"""
