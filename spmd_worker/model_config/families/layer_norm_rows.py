"""Rows of the table: families with layer norms, some with the feed-forward beside attention. See `table.py`."""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.families.family import Family, Form, Names

_ONE_NORM: Final = ("input_layernorm", "", "", "")
_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER_NORM: Final[dict[str, Any]] = {"norm_kind": "layer", "eps_key": "layer_norm_eps"}
_COHERE: Final[dict[str, Any]] = {
    **_LAYER_NORM,
    "mlp_bias": False,
    "is_parallel": True,
    "has_interleaved_rope": True,
    "logit_multiplier_key": "logit_scale",
}
_COHERE_DEFAULTS: Final = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}

_FALCON_NAMES: Final = Names(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    norms=_ONE_NORM,
    parts={
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused={"self_attention.query_key_value": _QKV},
    ignored=("rotary_emb.inv_freq",),
)
_FALCON: Final[dict[str, Any]] = {
    "norm_kind": "layer",
    "norm_has_bias": True,
    "eps_key": "layer_norm_epsilon",
    "qkv_bias": "bias",
    "output_bias": "bias",
    "mlp_bias": "bias",
    "is_parallel": True,
    "activation_key": "activation",
    "is_gated": False,
    "intermediate_factor": 4,
    "defaults": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "eos_token_id": 11,
    },
}
_NEWER_FALCON: Final[dict[str, Any]] = {
    **_FALCON,
    "spelled": {"head_dim": "", "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
}
_NEWER_FALCON_NAMES: Final = replace(_FALCON_NAMES, by_kv_head=("self_attention.query_key_value",))

_OPT_NAMES: Final = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    norms=("self_attn_layer_norm", "", "final_layer_norm", ""),
    parts={"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
    optional_prefix="model.",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
)
_OPT: Final[dict[str, Any]] = {
    "qkv_bias": "enable_bias",
    "output_bias": "enable_bias",
    "mlp_bias": "enable_bias",
    "norm_kind": "layer",
    "norm_has_bias": True,
    "eps_key": "",
    "eps": 1e-5,
    "has_rope": False,
    "position_offset": 2,
    "activation_key": "activation_function",
    "is_gated": False,
    "spelled": {"intermediate_size": "ffn_dim", "num_key_value_heads": "", "head_dim": ""},
    "embedding_size_key": "word_embed_proj_dim",
    "defaults": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
}
_OPT_REQUIRED: Final = {"layer_norm_elementwise_affine": True}

LAYER_NORM_ROWS: Final[dict[str, Family]] = {
    "OlmoForCausalLM": Family(
        models="OLMo 1",
        mlp_bias=False,
        norm_kind="layer",
        norm_has_weight=False,
        eps_key="",
        eps=1e-5,
        qkv_clip_key="clip_qkv",
        defaults={"eos_token_id": 50279},
    ),
    "NemotronForCausalLM": Family(
        models="Nemotron-4, Minitron",
        norm_kind="layer",
        norm_offset=1.0,
        norm_has_bias=True,
        eps_key="norm_eps",
        may_have_partial_rope=True,
        is_gated=False,
        defaults={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
        },
    ),
    "Jais2ForCausalLM": Family(
        **_LAYER_NORM,
        models="Jais 2",
        norm_has_bias=True,
        is_gated=False,
        defaults={
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "attention_bias": True,
            "mlp_bias": True,
            "eos_token_id": 150024,
        },
    ),
    "CohereForCausalLM": Family(
        **_COHERE,
        models="Command R, Command R+, Aya",
        names=Names(norms=_ONE_NORM),
        qk_norm="each_head",
        qk_norm_key="use_qk_norm",
        defaults={**_COHERE_DEFAULTS, "rope_theta": 500000.0},
    ),
    "Cohere2ForCausalLM": Family(
        **_COHERE,
        models="Command R7B, Command A",
        names=Names(norms=_ONE_NORM),
        sliding_window="layer_types",
        full_attention_every=4,
        full_attention_every_key="sliding_window_pattern",
        rope_layers="sliding",
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
    ),
    "StableLmForCausalLM": Family(
        **_LAYER_NORM,
        models="StableLM 3B, StableLM 2",
        names=Names(
            parts={
                "self_attn.q_norm": "self_attn.q_layernorm.norms.{}",
                "self_attn.k_norm": "self_attn.k_layernorm.norms.{}",
            }
        ),
        norm_has_bias=True,
        qkv_bias="use_qkv_bias",
        output_bias=False,
        mlp_bias=False,
        is_parallel="use_parallel_residual",
        has_one_norm_in_parallel=True,
        may_have_partial_rope=True,
        spelled={"head_dim": ""},
        qk_norm="each_head",
        qk_norm_key="qk_layernorm",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "eos_token_id": 0,
        },
    ),
    "PhiForCausalLM": Family(
        **_LAYER_NORM,
        models="Phi-1, Phi-1.5, Phi-2",
        names=Names(
            norm="model.final_layernorm",
            norms=_ONE_NORM,
            parts={
                "self_attn.o_proj": "self_attn.dense",
                "self_attn.q_norm": "self_attn.q_layernorm",
                "self_attn.k_norm": "self_attn.k_layernorm",
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
            },
        ),
        norm_has_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        is_parallel=True,
        is_gated=False,
        may_have_partial_rope=True,
        has_head_bias=True,
        qk_norm="head",
        qk_norm_key="qk_layernorm",
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        **_LAYER_NORM,
        models="GPT-NeoX, Pythia",
        names=Names(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            parts={
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            fused={"attention.query_key_value": _QKV},
            by_kv_head=("attention.query_key_value",),
            ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
            aliases={"lm_head.": "embed_out."},
        ),
        norm_has_bias=True,
        mlp_bias=True,
        is_parallel="use_parallel_residual",
        is_gated=False,
        may_have_partial_rope=True,
        spelled={
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
            "num_key_value_heads": "",
            "head_dim": "",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "attention_bias": True,
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "eos_token_id": 2,
        },
    ),
    "FalconForCausalLM": Family(
        **_FALCON,
        models="Falcon 7B, 40B, 180B, Falcon 2 11B",
        names=_FALCON_NAMES,
        num_kv_heads=1,
        spelled={"head_dim": "", "intermediate_size": "ffn_hidden_size"},
        required={"alibi": False, "multi_query": True, "parallel_attn": True, "num_ln_in_parallel_attn": 1},
        forms=(
            Form(
                {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
                Family(**_NEWER_FALCON, names=_NEWER_FALCON_NAMES, required={"alibi": False, "parallel_attn": True}),
            ),
            Form(
                {"new_decoder_architecture": True},
                Family(
                    **_NEWER_FALCON,
                    names=replace(_NEWER_FALCON_NAMES, norms=("ln_attn", "", "ln_mlp", "")),
                    required={"alibi": False, "parallel_attn": True, "num_ln_in_parallel_attn": 2},
                ),
            ),
        ),
    ),
    "GPTBigCodeForCausalLM": Family(
        models="StarCoder",
        names=Names(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            norms=("ln_1", "", "ln_2", ""),
            parts={"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
            fused={"attn.c_attn": _QKV},
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_kind="layer",
        norm_has_bias=True,
        eps_key="layer_norm_epsilon",
        num_kv_heads=1,
        has_rope=False,
        activation_key="activation_function",
        is_gated=False,
        intermediate_factor=4,
        spelled={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "head_dim": "",
        },
        required={"multi_query": True, "scale_attn_weights": True, "add_cross_attention": False},
        defaults={
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
    ),
    "OPTForCausalLM": Family(
        **_OPT,
        models="OPT: 125M to 66B",
        names=_OPT_NAMES,
        required={**_OPT_REQUIRED, "do_layer_norm_before": True, "_remove_final_layer_norm": False},
        forms=(
            Form(
                {"do_layer_norm_before": False},
                Family(
                    **_OPT,
                    names=replace(_OPT_NAMES, norm="", norms=("", "self_attn_layer_norm", "", "final_layer_norm")),
                    norms_sums=True,
                    required=_OPT_REQUIRED,
                ),
            ),
            Form(
                {"_remove_final_layer_norm": True},
                Family(**_OPT, names=replace(_OPT_NAMES, norm=""), required=_OPT_REQUIRED),
            ),
        ),
    ),
}
