"""The families with experts that run, by architecture name; as in `table.py`, which joins them with the others.

Each row is compared with transformers, and each entry broken, in tests/model/test_expert_rows.py.
"""

from typing import Any, Final

from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import Family, Names, beside

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
_GRANITE: Final[dict[str, Any]] = {
    "mlp_bias": False,
    "scale_key": "attention_multiplier",
    "embedding_multiplier_key": "embedding_multiplier",
    "residual_multiplier_key": "residual_multiplier",
    "logit_divisor_key": "logits_scaling",
    "defaults": {"eos_token_id": 2, "num_experts_per_tok": 2},
}
_GRANITE_NAMES: Final[dict[str, Any]] = {
    "layer_aliases": {
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    },
    "stacked": (
        StackedTensor("block_sparse_moe.input_linear.weight", ("gate_proj", "up_proj")),
        StackedTensor("block_sparse_moe.output_linear.weight", ("down_proj",)),
    ),
}
_GRANITE_EXPERTS: Final[dict[str, Any]] = {
    "default_count": 8,
    "size_key": "intermediate_size",
    "score": "softmax_chosen",
    "renormalises": False,
}

_TURNED_STACKS: Final = (
    StackedTensor("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), may_be_turned=True),
    StackedTensor("mlp.experts.down_proj", ("down_proj",), may_be_turned=True),
)

EXPERT_FAMILIES: Final[dict[str, Family]] = {
    "MixtralForCausalLM": Family(
        models="Mixtral 8x7B, 8x22B",
        names=Names(parts=_MIXTRAL_PARTS, layer_aliases={"mlp.": "block_sparse_moe."}),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_window="always",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
        },
        experts=ExpertsFamily(
            default_count=8,
            size_key="intermediate_size",
            renormalises=True,
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        qkv_bias="qkv_bias",
        output_bias=False,
        mlp_bias=False,
        sliding_window="even_layers",
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        experts=ExpertsFamily(
            default_count=60,
            **_QWEN,
            shared_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen3 with experts: 30B-A3B, 235B-A22B, Coder",
        mlp_bias=False,
        qk_norm="head",
        sliding_window="in_use",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        experts=ExpertsFamily(default_count=128, **_QWEN),
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        models="Qwen3-VL with experts, the text: 30B-A3B, 235B-A22B",
        names=beside(Names(stacked=_TURNED_STACKS), "visual"),
        mlp_bias=False,
        qk_norm="head",
        is_text_part=True,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        experts=ExpertsFamily(default_count=60, **_QWEN, renormalises=True),
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
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm="flat",
        default_head_size=128,
        may_have_partial_rope=True,
        turned_size_key="rotary_dim",
        required={"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
        },
        experts=ExpertsFamily(
            default_count=256,
            size_key="intermediate_size",
            score="sigmoid",
            renormalises=True,
            has_choice_bias=True,
        ),
    ),
    "OlmoeForCausalLM": Family(
        models="OLMoE",
        mlp_bias=False,
        qk_norm="flat",
        qkv_clip_key="clip_qkv",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "num_experts_per_tok": 8,
        },
        experts=ExpertsFamily(default_count=64, size_key="intermediate_size"),
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
        mlp_bias=False,
        norm_rounds_once=True,
        default_head_size=64,
        sliding_window="layer_types",
        full_attention_every=2,
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
        has_sinks=True,
        experts=ExpertsFamily(
            default_count=128,
            size_key="intermediate_size",
            score="softmax_chosen",
            renormalises=False,
            has_router_bias=True,
            has_bias=True,
            limit_key="swiglu_limit",
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        models="GLM-4.5, 4.6, 4.7",
        names=Names(parts=_SHARED_EXPERTS, ignores_later_layers=True),
        output_bias=False,
        mlp_bias=False,
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        may_have_partial_rope=True,
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
        experts=ExpertsFamily(default_count=128, **_DEEPSEEK_V3),
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        models="GLM-4.5V, GLM-4.6V with experts, the text",
        names=beside(Names(parts=_SHARED_EXPERTS, ignores_later_layers=True), "visual"),
        output_bias=False,
        mlp_bias=False,
        may_have_partial_rope=True,
        is_text_part=True,
        tie_of_text="also",
        required={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        experts=ExpertsFamily(default_count=128, **_DEEPSEEK_V3),
    ),
    "GraniteMoeForCausalLM": Family(
        models="Granite 3 with experts: 1B-A400M, 3B-A800M",
        **_GRANITE,
        names=Names(parts={"mlp.gate": "block_sparse_moe.router.layer"}, **_GRANITE_NAMES),
        experts=ExpertsFamily(**_GRANITE_EXPERTS),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        models="Granite with experts and a shared one",
        **_GRANITE,
        names=Names(
            parts={
                "mlp.gate": "block_sparse_moe.router.layer",
                "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
            },
            fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
            **_GRANITE_NAMES,
        ),
        experts=ExpertsFamily(**_GRANITE_EXPERTS, shared_key="shared_intermediate_size"),
    ),
    "Dots1ForCausalLM": Family(
        models="dots.llm1",
        names=Names(parts=_SHARED_EXPERTS),
        mlp_bias=False,
        qk_norm="head",
        sliding_window="late_layers",
        required={"topk_method": "noaux_tc"},
        defaults={
            "num_key_value_heads": 32,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
        },
        experts=ExpertsFamily(**_DEEPSEEK_V3),
    ),
}
