"""Rows of `table.py`: dense families with RMS norms, newer than those there."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
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
from spmd_worker.model_config.rope import with_alpha, with_query_growth

_AFTER: Final = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_LLAMA3_STRETCH: Final = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GEMMA: Final = Family(
    models="Gemma",
    attention=Attention(head_size=256),
    norms=Norms(offset=1.0, rounds_once=True),
    feed_forward=FeedForward(bias=False, activation_words={"gelu": "gelu_pytorch_tanh"}),
    embedding=Embedding(by_root=True),
    required={"use_bidirectional_attention": False},
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
GEMMA2_SIZES: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
GEMMA2: Final = replace(
    GEMMA,
    models="Gemma 2",
    names=Names(
        norms=(
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    ),
    attention=Attention(head_size=256, scale_root_key="query_pre_attn_scalar", score_cap_key="attn_logit_softcapping"),
    windows=Windows(rule="layer_types", full_every=2),
    feed_forward=FeedForward(bias=False, activation_key="hidden_activation"),
    head=Head(cap_key="final_logit_softcapping"),
    defaults={
        **GEMMA2_SIZES,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_HYPERCLOVA: Final = Family(
    models="HyperCLOVA X SEED Think 14B",
    names=Names(norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
    attention=Attention(scale_key="attention_multiplier", scale_root_key="head_dim"),
    wiring=Wiring(residual_multiplier_key="residual_multiplier"),
    embedding=Embedding(multiplier_key="embedding_multiplier"),
    head=Head(multiplier_key="logits_scaling"),
    required={"use_post_norm": True},
    defaults={"eos_token_id": 2},
)
_EXAONE_PARTS: Final = {
    **{f"self_attn.{each}_proj": f"attn.attention.{each}_proj" for each in "qkv"},
    "self_attn.o_proj": "attn.attention.out_proj",
    **{f"mlp.{ours}_proj": f"mlp.c_{theirs}" for ours, theirs in (("gate", "fc_0"), ("up", "fc_1"), ("down", "proj"))},
}
_EXAONE_NORMS: Final = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_EXAONE: Final = Family(
    models="EXAONE 3.0, 3.5 and Deep",
    names=Names(
        embedding="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        norms=("ln_1", "", "ln_2", ""),
        parts=_EXAONE_PARTS,
        ignored=("rotary.inv_freq",),
        aliases={
            "model.embed_tokens.": "transformer.wte.",
            "model.layers.": "transformer.h.",
            "model.norm.": "transformer.ln_f.",
        },
        layer_aliases={f"{ours}.": f"{theirs}." for ours, theirs in (_EXAONE_PARTS | _EXAONE_NORMS).items()},
    ),
    older_keys={
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 361,
    },
)
RMS_ROWS: Final[dict[str, Family]] = {
    "ExaoneForCausalLM": _EXAONE,
    "Olmo3ForCausalLM": Family(
        models="OLMo 3",
        names=Names(norms=_AFTER),
        attention=Attention(qk_norm="flat"),
        windows=Windows(rule="layer_types", full_every=4),
        rope=Rope(rounding="result", has_local=True),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
            "eos_token_id": 50279,
        },
    ),
    "Exaone4ForCausalLM": Family(
        models="EXAONE 4.0",
        names=Names(norms=_AFTER),
        attention=Attention(qkv_bias=False, output_bias=False, qk_norm="head"),
        windows=Windows(rule="layer_types", full_every=4, full_every_key="sliding_window_pattern"),
        rope=Rope(layers="sliding_or_all"),
        feed_forward=FeedForward(bias=False),
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    "ArceeForCausalLM": Family(
        models="Arcee AFM",
        feed_forward=FeedForward(is_gated=False),
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "eos_token_id": 128001,
        },
    ),
    "ApertusForCausalLM": Family(
        models="Apertus",
        names=Names(norms=("attention_layernorm", "", "feedforward_layernorm", "")),
        attention=Attention(qk_norm="head"),
        feed_forward=FeedForward(bias=False, is_gated=False),
        defaults={
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "hidden_act": "xielu",
            "rope_theta": 12000000.0,
            "rope_parameters": {**_LLAMA3_STRETCH, "factor": 8.0},
            "eos_token_id": 2,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        models="Hunyuan, dense: 0.5B to 7B",
        names=Names(
            parts={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
        ),
        attention=Attention(qk_norm="head_after_rope"),
        rope=Rope(adjust=with_alpha),
        feed_forward=FeedForward(bias=False),
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2},
    ),
    "Ministral3ForCausalLM": Family(
        models="Ministral 3, text alone",
        attention=Attention(qkv_bias=False, output_bias=False, head_size=128),
        windows=Windows(rule="always"),
        rope=Rope(adjust=with_query_growth),
        feed_forward=FeedForward(bias=False),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "eos_token_id": 2,
        },
    ),
    "HyperCLOVAXForCausalLM": replace(
        _HYPERCLOVA,
        variants=(Variant({"use_post_norm": False}, replace(_HYPERCLOVA, names=Names(), required={})),),
    ),
    "HeliumForCausalLM": Family(
        models="Helium",
        attention=Attention(output_bias=False),
        rope=Rope(is_interleaved=True),
        norms=Norms(rounds_once=True),
        defaults={
            "num_key_value_heads": 20,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "eos_token_id": 2,
        },
    ),
    "CwmForCausalLM": Family(
        models="CWM",
        attention=Attention(qkv_bias=False, output_bias=False, head_size=128),
        windows=Windows(rule="layer_types", full_every=4, is_full_first=True),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_theta": 1000000.0,
            "rope_parameters": _LLAMA3_STRETCH,
            "eos_token_id": [128001, 128008, 128009],
        },
    ),
    "VaultGemmaForCausalLM": replace(
        GEMMA2,
        models="VaultGemma",
        names=Names(norms=("input_layernorm", "", "pre_feedforward_layernorm", "")),
        required={},
    ),
    "GraniteSWAForCausalLM": Family(
        models="Granite with windows and a rope for each layer",
        attention=Attention(scale_key="attention_multiplier", has_sinks=True),
        windows=Windows(rule="layer_types", full_every=4, is_full_first=True),
        rope=Rope(thetas_key="layer_rope_theta"),
        wiring=Wiring(residual_multiplier_key="residual_multiplier"),
        embedding=Embedding(multiplier_key="embedding_multiplier"),
        head=Head(divisor_key="logits_scaling"),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "tie_word_embeddings": True,
            "eos_token_id": 100257,
        },
    ),
    "NanoChatForCausalLM": Family(
        models="nanochat",
        names=Names(parts={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
        attention=Attention(qk_norm="head_after_rope"),
        rope=Rope(is_backward=True),
        norms=Norms(rounds_once=True, has_weight=False),
        feed_forward=FeedForward(bias=False, is_gated=False),
        embedding=Embedding(has_norm=True),
        head=Head(cap_key="final_logit_softcapping"),
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0, "eos_token_id": 1},
    ),
}
