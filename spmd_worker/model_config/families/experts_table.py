"""Rows of `table.py`: families with experts.

Each row is compared with transformers, and each entry broken, in tests/model/test_expert_rows.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
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
    TextPart,
    Windows,
    Wiring,
    next_to,
)
from spmd_worker.model_config.rope import with_theta_of

_QWEN: Final[dict[str, Any]] = {
    "every_key": "decoder_sparse_step",
    "dense_layers_key": "mlp_only_layers",
}
_SHARED_EXPERTS: Final = {
    f"mlp.shared_expert.{matrix}": f"mlp.shared_experts.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")
}
_MIXTRAL_PARTS: Final = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
}
# https://arxiv.org/abs/2412.19437
_DEEPSEEK_V3: Final[dict[str, Any]] = {
    "count_keys": ("n_routed_experts", "num_local_experts"),
    "first_key": "first_k_dense_replace",
    "score": "sigmoid",
    "has_choice_bias": True,
    "has_groups": True,
    "scaling_key": "routed_scaling_factor",
    "shared_key": "n_shared_experts",
    "counts_shared": True,
}
_GRANITE_EXPERTS: Final[dict[str, Any]] = {
    "default_count": 8,
    "size_key": "intermediate_size",
    "score": "softmax_chosen",
    "renormalises": False,
}
_GRANITE: Final = Family(
    models="Granite 3 with experts: 1B-A400M, 3B-A800M",
    names=Names(
        parts={"mlp.gate": "block_sparse_moe.router.layer"},
        layer_aliases={
            "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
            "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
        },
        stacked=(
            StackedTensor("block_sparse_moe.input_linear.weight", ("gate_proj", "up_proj")),
            StackedTensor("block_sparse_moe.output_linear.weight", ("down_proj",)),
        ),
    ),
    attention=Attention(scale_key="attention_multiplier"),
    feed_forward=FeedForward(bias=False),
    experts=ExpertsFamily(**_GRANITE_EXPERTS),
    wiring=Wiring(residual_multiplier_key="residual_multiplier"),
    embedding=Embedding(multiplier_key="embedding_multiplier"),
    head=Head(divisor_key="logits_scaling"),
    defaults={"eos_token_id": 2, "num_experts_per_tok": 2},
)
_GLM4_NAMES: Final = Names(parts=_SHARED_EXPERTS, ignores_later_layers=True)
_GLM4: Final = Family(
    models="GLM-4.5, 4.6, 4.7",
    names=_GLM4_NAMES,
    attention=Attention(output_bias=False, qk_norm="head", qk_norm_key="use_qk_norm"),
    rope=Rope(may_be_partial=True),
    feed_forward=FeedForward(bias=False),
    experts=ExpertsFamily(default_count=128, **_DEEPSEEK_V3),
    required={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
)

_SARVAM_EXPERTS: Final = {**_DEEPSEEK_V3, "count_keys": ("n_routed_experts", "num_local_experts", "num_experts")}
_SARVAM_ATTENTION: Final = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}
_SARVAM: Final = replace(
    _GLM4,
    models="Sarvam 30B",
    names=Names(
        embedding="model.word_embeddings",
        parts={**_SHARED_EXPERTS, **_SARVAM_ATTENTION, "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"},
        fused={"attention.query_key_value": QKV},
        separate={part: (part,) for part in QKV},
        aliases={"model.embed_tokens.": "model.word_embeddings."},
        layer_aliases={
            **{f"{ours}.": f"{theirs}." for ours, theirs in _SARVAM_ATTENTION.items()},
            "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        },
        ignores_later_layers=True,
    ),
    attention=replace(_GLM4.attention, head_size=64),
    experts=ExpertsFamily(default_count=128, **_SARVAM_EXPERTS),
    older_keys={"n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"},
    required={"score_function": "sigmoid", "use_bias": False, "moe_router_enable_expert_bias": True},
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 8000000.0,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "eos_token_id": 1,
    },
)

_DBRX_ACTIVATION: Final = "ffn_config.ffn_act_fn.name"


def _flat_dbrx(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of DBRX with keys of nested objects behind the object's name."""
    reader, key = ConfigReader(config, path), "moe_normalize_expert_weights"
    parts = {part: reader.object(part) for part in ("attn_config", "ffn_config")}
    # Null is another value than that of a missing key.
    norm = parts["ffn_config"].config.get(key, 1.0)
    if norm not in (None, 1.0):
        raise parts["ffn_config"].error(key, "is not supported, only 1.0 or null")
    flat = {f"{part}.{each}": value for part, nested in parts.items() for each, value in nested.config.items()}
    activation = parts["ffn_config"].object("ffn_act_fn").get("name", "silu")
    return {**config, **flat, "norm_topk_prob": norm is not None, _DBRX_ACTIVATION: activation}


_EXPERT_STACKS: Final = (
    StackedTensor("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), may_be_transposed=True),
    StackedTensor("mlp.experts.down_proj", ("down_proj",), may_be_transposed=True),
)

EXPERT_FAMILIES: Final[dict[str, Family]] = {
    "MixtralForCausalLM": Family(
        models="Mixtral 8x7B, 8x22B",
        names=Names(parts=_MIXTRAL_PARTS, layer_aliases={"mlp.": "block_sparse_moe."}),
        attention=Attention(qkv_bias=False, output_bias=False),
        windows=Windows(rule="always"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=8,
            size_key="intermediate_size",
            renormalises=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        attention=Attention(qkv_bias="qkv_bias", output_bias=False),
        windows=Windows(rule="even_layers"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=60,
            **_QWEN,
            shared_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen3 with experts: 30B-A3B, 235B-A22B, Coder",
        attention=Attention(qk_norm="head"),
        windows=Windows(rule="in_use"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=128, **_QWEN),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        models="Qwen3-VL with experts: 30B-A3B, 235B-A22B",
        vision="qwen3_vl",
        names=next_to(Names(stacked=_EXPERT_STACKS), "visual"),
        attention=Attention(qk_norm="head"),
        rope=Rope(sections=(24, 20, 20), interleaves_sections=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=60, **_QWEN, renormalises=True),
        text=TextPart(),
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        models="MiniMax-M2",
        names=Names(
            parts={
                **_MIXTRAL_PARTS,
                "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
            },
            layer_aliases={"mlp.": "block_sparse_moe."},
        ),
        attention=Attention(qkv_bias=False, output_bias=False, qk_norm="flat", head_size=128),
        rope=Rope(may_be_partial=True, rotary_size_key="rotary_dim"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=256,
            size_key="intermediate_size",
            score="sigmoid",
            renormalises=True,
            has_choice_bias=True,
        ),
        required={"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
        },
    ),
    "OlmoeForCausalLM": Family(
        models="OLMoE",
        attention=Attention(qk_norm="flat", qkv_clip_key="clip_qkv"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=64, size_key="intermediate_size"),
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "num_experts_per_tok": 8,
        },
    ),
    "GptOssForCausalLM": Family(
        models="gpt-oss",
        names=Names(
            parts={"mlp.gate": "mlp.router"},
            stacked=(
                StackedTensor(
                    "mlp.experts.gate_up_proj",
                    ("gate_up_proj",),
                    bias="mlp.experts.gate_up_proj_bias",
                    is_transposed=True,
                ),
                StackedTensor(
                    "mlp.experts.down_proj", ("down_proj",), bias="mlp.experts.down_proj_bias", is_transposed=True
                ),
            ),
        ),
        attention=Attention(head_size=64, has_sinks=True),
        windows=Windows(rule="layer_types", full_every=2),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=128,
            size_key="intermediate_size",
            score="softmax_chosen",
            renormalises=False,
            has_router_bias=True,
            has_bias=True,
            limit_key="swiglu_limit",
        ),
        required={"swiglu_alpha": 1.702},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "num_experts_per_tok": 4,
        },
    ),
    "Glm4MoeForCausalLM": _GLM4,
    "Glm4vMoeForConditionalGeneration": replace(
        _GLM4,
        models="GLM-4.5V, GLM-4.6V with experts",
        vision="glm4v_moe",
        names=next_to(_GLM4_NAMES, "visual"),
        attention=Attention(output_bias=False),
        rope=Rope(may_be_partial=True, sections=(8, 12, 12)),
        text=TextPart(tie="also"),
        defaults={**_GLM4.defaults, "max_position_embeddings": 65536, "attention_bias": True},
    ),
    "SarvamMoEForCausalLM": _SARVAM,
    "Param2MoEForCausalLM": replace(
        _SARVAM,
        models="Param 2 17B-A2.4B",
        experts=ExpertsFamily(default_count=64, **_SARVAM_EXPERTS),
        defaults={
            **_SARVAM.defaults,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rope_theta": 500000.0,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
            "eos_token_id": 3,
        },
    ),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": replace(
        _GRANITE,
        models="Granite with experts and a shared one",
        names=replace(
            _GRANITE.names,
            parts={**_GRANITE.names.parts, "mlp.shared_expert.down_proj": "shared_mlp.output_linear"},
            fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
        ),
        experts=ExpertsFamily(**_GRANITE_EXPERTS, shared_key="shared_intermediate_size"),
    ),
    "DbrxForCausalLM": Family(
        models="DBRX",
        names=Names(
            embedding="transformer.wte",
            layers="transformer.blocks",
            norm="transformer.norm_f",
            norms=("norm_attn_norm.norm_1", "", "norm_attn_norm.norm_2", ""),
            parts={"self_attn.o_proj": "norm_attn_norm.attn.out_proj", "mlp.gate": "ffn.router.layer"},
            fused={"norm_attn_norm.attn.Wqkv": QKV},
            stacked=(
                StackedTensor("ffn.experts.mlp.w1", ("gate_proj",), is_flat=True),
                StackedTensor("ffn.experts.mlp.v1", ("up_proj",), is_flat=True),
                StackedTensor("ffn.experts.mlp.w2", ("down_proj",), is_transposed=True, is_flat=True),
            ),
        ),
        attention=Attention(qkv_bias=False, output_bias=False, qkv_clip_key="attn_config.clip_qkv"),
        rope=Rope(adjust=with_theta_of("attn_config.rope_theta")),
        norms=Norms(kind="layer", eps_key="", eps=1e-5),
        feed_forward=FeedForward(bias=False, activation_key=_DBRX_ACTIVATION),
        experts=ExpertsFamily(
            count_keys=("ffn_config.moe_num_experts",),
            default_count=4,
            chosen_key="ffn_config.moe_top_k",
            size_key="intermediate_size",
        ),
        newer=_flat_dbrx,
        file_keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "max_position_embeddings": "max_seq_len",
            "head_dim": "",
        },
        defaults={
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "attn_config.kv_n_heads": 1,
            "ffn_config.ffn_hidden_size": 3584,
            "ffn_config.moe_top_k": 1,
        },
    ),
    "Dots1ForCausalLM": Family(
        models="dots.llm1",
        names=Names(parts=_SHARED_EXPERTS),
        attention=Attention(qk_norm="head"),
        windows=Windows(rule="late_layers"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(**_DEEPSEEK_V3),
        required={"topk_method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 32,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
        },
    ),
}
