"""Rows of `table.py`: families with layer norms, some with attention and feed-forward in parallel."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
    QKV,
    Attention,
    Embedding,
    Family,
    FeedForward,
    Head,
    Names,
    Norms,
    Rope,
    Variant,
    Windows,
    Wiring,
)

_ONE_NORM: Final = ("input_layernorm", "", "", "")
_LAYER_NORM_NORMS: Final = Norms(kind="layer", eps_key="layer_norm_eps")
_COHERE_DEFAULTS: Final = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}

_COHERE_ROPE: Final = Rope(is_interleaved=True, rounding="angles")
_COHERE: Final = Family(
    models="Command R, Command R+, Aya",
    names=Names(norms=_ONE_NORM),
    attention=Attention(qk_norm="each_head", qk_norm_key="use_qk_norm"),
    rope=_COHERE_ROPE,
    norms=_LAYER_NORM_NORMS,
    feed_forward=FeedForward(bias=False),
    wiring=Wiring(is_parallel=True),
    head=Head(multiplier_key="logit_scale"),
    defaults={**_COHERE_DEFAULTS, "rope_theta": 500000.0},
)

_NEW_FALCON: Final = Family(
    names=Names(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        norms=("ln_attn", "", "ln_mlp", ""),
        parts={
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused={"self_attention.query_key_value": QKV},
        by_kv_head=("self_attention.query_key_value",),
        ignored=("rotary_emb.inv_freq",),
        token_classifier="classifier",
    ),
    attention=Attention(qkv_bias="bias", output_bias="bias"),
    norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_epsilon"),
    feed_forward=FeedForward(bias="bias", activation_key="activation", is_gated=False, size_factor=4),
    wiring=Wiring(is_parallel=True),
    file_keys={"head_dim": "", "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
    required={"alibi": False, "parallel_attn": True, "num_ln_in_parallel_attn": 2},
    defaults={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "eos_token_id": 11,
    },
)

FALCON_RW: Final = replace(
    _NEW_FALCON,
    names=replace(_NEW_FALCON.names, norms=("input_layernorm", "", "post_attention_layernorm", "")),
    attention=replace(_NEW_FALCON.attention, alibi="scaled"),
    rope=None,
    wiring=Wiring(),
    file_keys={"head_dim": "", "intermediate_size": "ffn_hidden_size", "num_key_value_heads": ""},
    required={"new_decoder_architecture": False},
)
_OPT: Final = Family(
    models="OPT: 125M to 66B",
    names=Names(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        norms=("self_attn_layer_norm", "", "final_layer_norm", ""),
        parts={"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
        optional_prefix="model.",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    ),
    attention=Attention(qkv_bias="enable_bias", output_bias="enable_bias"),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="", eps=1e-5),
    feed_forward=FeedForward(bias="enable_bias", activation_key="activation_function", is_gated=False),
    embedding=Embedding(position_offset=2, size_key="word_embed_proj_dim"),
    file_keys={"intermediate_size": "ffn_dim", "num_key_value_heads": "", "head_dim": ""},
    required={
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
    },
    defaults={
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
)
_OPT_VARIANT: Final = replace(_OPT, required={"layer_norm_elementwise_affine": True})

LAYER_NORM_ROWS: Final[dict[str, Family]] = {
    "OlmoForCausalLM": Family(
        models="OLMo 1",
        attention=Attention(qkv_clip_key="clip_qkv"),
        rope=Rope(rounding="result"),
        norms=Norms(kind="layer", has_weight=False, eps_key="", eps=1e-5),
        feed_forward=FeedForward(bias=False),
        defaults={"eos_token_id": 50279},
    ),
    "NemotronForCausalLM": Family(
        models="Nemotron-4, Minitron",
        rope=Rope(may_be_partial=True),
        norms=Norms(kind="layer", offset=1.0, has_bias=True, eps_key="norm_eps"),
        feed_forward=FeedForward(is_gated=False),
        defaults={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
        },
    ),
    "Jais2ForCausalLM": Family(
        models="Jais 2",
        norms=replace(_LAYER_NORM_NORMS, has_bias=True),
        feed_forward=FeedForward(is_gated=False),
        defaults={
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "attention_bias": True,
            "mlp_bias": True,
            "eos_token_id": 150024,
        },
    ),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        models="Command R7B, Command A",
        attention=Attention(),
        windows=Windows(rule="layer_types", full_every=4, full_every_key="sliding_window_pattern"),
        rope=replace(_COHERE_ROPE, layers="sliding"),
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
    ),
    "StableLmForCausalLM": Family(
        models="StableLM 3B, StableLM 2",
        names=Names(
            parts={
                "self_attn.q_norm": "self_attn.q_layernorm.norms.{}",
                "self_attn.k_norm": "self_attn.k_layernorm.norms.{}",
            }
        ),
        attention=Attention(
            qkv_bias="use_qkv_bias", output_bias=False, qk_norm="each_head", qk_norm_key="qk_layernorm"
        ),
        rope=Rope(may_be_partial=True),
        norms=replace(_LAYER_NORM_NORMS, has_bias=True),
        feed_forward=FeedForward(bias=False),
        wiring=Wiring(is_parallel="use_parallel_residual", has_one_norm_in_parallel=True),
        file_keys={"head_dim": ""},
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "eos_token_id": 0,
        },
    ),
    "PhiForCausalLM": Family(
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
        attention=Attention(qkv_bias=True, output_bias=True, qk_norm="head", qk_norm_key="qk_layernorm"),
        rope=Rope(may_be_partial=True),
        norms=replace(_LAYER_NORM_NORMS, has_bias=True),
        feed_forward=FeedForward(bias=True, is_gated=False),
        wiring=Wiring(is_parallel=True),
        head=Head(has_bias=True),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
        },
    ),
    "GPTNeoXForCausalLM": Family(
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
            fused={"attention.query_key_value": QKV},
            by_kv_head=("attention.query_key_value",),
            ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
            aliases={"lm_head.": "embed_out."},
            token_classifier="classifier",
        ),
        rope=Rope(may_be_partial=True),
        norms=replace(_LAYER_NORM_NORMS, has_bias=True),
        feed_forward=FeedForward(bias=True, is_gated=False),
        wiring=Wiring(is_parallel="use_parallel_residual"),
        file_keys={
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
    "FalconForCausalLM": replace(
        _NEW_FALCON,
        models="Falcon 7B, 40B, 180B, RW, Falcon 2 11B",
        names=replace(_NEW_FALCON.names, norms=_ONE_NORM, by_kv_head=()),
        attention=replace(_NEW_FALCON.attention, num_kv_heads=1),
        file_keys={"head_dim": "", "intermediate_size": "ffn_hidden_size"},
        required={"alibi": False, "multi_query": True, "parallel_attn": True, "num_ln_in_parallel_attn": 1},
        variants=(
            Variant(
                {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
                replace(
                    _NEW_FALCON,
                    names=replace(_NEW_FALCON.names, norms=_ONE_NORM),
                    required={"alibi": False, "parallel_attn": True},
                ),
            ),
            Variant({"new_decoder_architecture": True}, _NEW_FALCON),
            Variant({"alibi": True, "multi_query": False, "parallel_attn": False}, FALCON_RW),
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
            fused={"attn.c_attn": QKV},
            ignored=(".attn.bias", ".attn.masked_bias"),
            token_classifier="classifier",
        ),
        attention=Attention(qkv_bias=True, output_bias=True, num_kv_heads=1),
        rope=None,
        norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_epsilon"),
        feed_forward=FeedForward(bias=True, activation_key="activation_function", is_gated=False, size_factor=4),
        file_keys={
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
    "OPTForCausalLM": replace(
        _OPT,
        variants=(
            Variant(
                {"do_layer_norm_before": False},
                replace(
                    _OPT_VARIANT,
                    names=replace(_OPT.names, norm="", norms=("", "self_attn_layer_norm", "", "final_layer_norm")),
                    norms=replace(_OPT.norms, are_of_sums=True),
                ),
            ),
            Variant({"_remove_final_layer_norm": True}, replace(_OPT_VARIANT, names=replace(_OPT.names, norm=""))),
        ),
    ),
}
