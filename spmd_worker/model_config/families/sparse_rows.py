"""Rows of `table.py`: families with experts, newer than those of `experts_table.py`.

Each row is compared with transformers, and each entry broken, in tests/model/test_expert_rows.py.
"""

from typing import Any, Final

from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import (
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
)
from spmd_worker.model_config.families.step_files import newer_step
from spmd_worker.model_config.rope import with_alpha, with_mscales

_BIAS: Final = "mlp.gate.e_score_correction_bias"
"""Our name of the bias that decides the choice of experts alone."""


def _shared(module: str) -> dict[str, str]:
    """Names of the shared expert's matrices, in this module of a layer."""
    return {f"mlp.shared_expert.{each}": f"{module}.{each}" for each in ("gate_proj", "up_proj", "down_proj")}


# https://arxiv.org/abs/2412.19437
_V3: Final[dict[str, Any]] = {"score": "sigmoid", "has_choice_bias": True, "counts_shared": True}
_WITH_GROUPS: Final[dict[str, Any]] = {**_V3, "has_groups": True, "scaling_key": "routed_scaling_factor"}

_MINICPM5: Final = Family(
    models="MiniCPM5, with experts: 15B-A2.5B",
    names=Names(
        parts=_shared("mlp.shared_experts"),
        layer_aliases={"self_attn.q_gate_proj.": "self_attn.q_proj."},
        ignores_later_layers=True,
    ),
    attention=Attention(head_size=128, output_gate="number"),
    feed_forward=FeedForward(bias=False),
    experts=ExpertsFamily(
        **_WITH_GROUPS,
        count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
        default_count=160,
        first_key="first_k_dense_replace",
        kinds_key="mlp_layer_types",
        shared_key="n_shared_experts",
    ),
    required={"use_gated_attention": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 524288,
        "rope_theta": 5000000.0,
        "num_experts_per_tok": 16,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 3.66,
        "eos_token_id": [1, 130073],
    },
)
SPARSE_ROWS: Final[dict[str, Family]] = {
    "GraniteMoeSWAForCausalLM": Family(
        models="Granite with experts, windows and a rope for each layer",
        names=Names(
            parts={
                "mlp.gate": "block_sparse_moe.router",
                "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
            },
            fused={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
            stacked=(
                StackedTensor("block_sparse_moe.experts.gate_up_proj", ("gate_proj", "up_proj")),
                StackedTensor("block_sparse_moe.experts.down_proj", ("down_proj",)),
            ),
        ),
        attention=Attention(scale_key="attention_multiplier", has_sinks=True),
        windows=Windows(rule="layer_types", full_every=4, is_full_first=True),
        rope=Rope(thetas_key="layer_rope_theta"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=8,
            size_key="intermediate_size",
            score="softmax_chosen",
            renormalises=False,
            shared_key="shared_intermediate_size",
        ),
        wiring=Wiring(residual_multiplier_key="residual_multiplier"),
        embedding=Embedding(multiplier_key="embedding_multiplier"),
        head=Head(divisor_key="logits_scaling"),
        defaults={"sliding_window": 128, "num_experts_per_tok": 2, "eos_token_id": 2},
    ),
    "HYV3ForCausalLM": Family(
        models="Hunyuan 3",
        names=Names(
            parts={
                "mlp.gate": "mlp.router.gate",
                _BIAS: "mlp.expert_bias",
                **_shared("mlp.shared_mlp"),
            },
            layer_aliases={
                "mlp.gate.weight": "mlp.router.gate.weight",
                "mlp.e_score_correction_bias": "mlp.expert_bias",
                "mlp.shared_experts.": "mlp.shared_mlp.",
            },
            ignores_later_layers=True,
        ),
        attention=Attention(qk_norm="head", head_size=128),
        experts=ExpertsFamily(
            **_V3,
            default_count=192,
            first=1,
            kinds_key="mlp_layer_types",
            renormalises=True,
            scaling_key="router_scaling_factor",
            shared_key="num_shared_experts",
            shared_bias="mlp_bias",
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
        },
    ),
    "ExaoneMoeForCausalLM": Family(
        models="K-EXAONE",
        names=Names(
            parts={_BIAS: "mlp.e_score_correction_bias", **_shared("mlp.shared_experts")},
            layer_aliases={_BIAS: "mlp.e_score_correction_bias"},
            ignored_prefixes=("mtp.",),
        ),
        attention=Attention(qkv_bias=False, output_bias=False, qk_norm="head"),
        windows=Windows(rule="layer_types", full_every=4, full_every_key="sliding_window_pattern"),
        rope=Rope(layers="sliding_or_all"),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            **_WITH_GROUPS,
            default_count=64,
            first_key="first_k_dense_replace",
            kinds_key="mlp_layer_types",
            shared_key="num_shared_experts",
        ),
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "eos_token_id": 53,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        models="ERNIE 4.5 with experts: 21B-A3B, 300B-A47B",
        names=Names(
            parts={_BIAS: "mlp.moe_statics.e_score_correction_bias", **_shared("mlp.shared_experts")},
            layer_aliases={"mlp.gate.moe_statics.": "mlp.moe_statics."},
            as_rows=(_BIAS,),
            ignored_prefixes=("mtp", "model.mtp"),
        ),
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias"),
        rope=Rope(rounding="result", is_interleaved=True),
        feed_forward=FeedForward(bias="use_bias"),
        experts=ExpertsFamily(
            count_keys=("moe_num_experts", "num_experts"),
            default_count=64,
            chosen_key="moe_k",
            first_key="moe_layer_start_index",
            last_key="moe_layer_end_index",
            every_key="moe_layer_interval",
            renormalises=True,
            min_sum_key="moe_norm_min",
            has_choice_bias=True,
            shared_key="moe_num_shared_experts",
            counts_shared=True,
            shared_bias="use_bias",
        ),
        head=Head(has_bias="use_bias"),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
        },
    ),
    "SolarOpenForCausalLM": Family(
        models="Solar Open 100B",
        names=Names(parts=_shared("mlp.shared_experts")),
        attention=Attention(output_bias=False, head_size=128),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            **_WITH_GROUPS,
            count_keys=("n_routed_experts", "num_local_experts"),
            default_count=128,
            shared_key="n_shared_experts",
        ),
        # No layer is dense.
        file_keys={"intermediate_size": "moe_intermediate_size"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    "MiniCPM5MoeForCausalLM": _MINICPM5,
    "MiniCPM5MoEForCausalLM": _MINICPM5,
    "HunYuanMoEV1ForCausalLM": Family(
        models="Hunyuan A13B",
        names=Names(
            parts={
                "self_attn.q_norm": "self_attn.query_layernorm",
                "self_attn.k_norm": "self_attn.key_layernorm",
                "mlp.gate": "mlp.gate.wg",
                **_shared("mlp.shared_mlp"),
            }
        ),
        attention=Attention(qk_norm="head_after_rope"),
        rope=Rope(adjust=with_alpha),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=1,
            chosen_key="moe_topk",
            may_be_lists=True,
            size_key="intermediate_size",
            renormalises=True,
            shared_key="intermediate_size",
        ),
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2, "moe_topk": 1},
    ),
    "FlexOlmoForCausalLM": Family(
        models="FlexOlmo",
        names=Names(norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm")),
        attention=Attention(qk_norm="flat"),
        rope=Rope(rounding="result"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=7, size_key="intermediate_size"),
        defaults={
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "eos_token_id": 100257,
            "num_experts_per_tok": 5,
        },
    ),
    "PhimoeForCausalLM": Family(
        models="Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
        names=Names(
            parts={
                "mlp.gate": "block_sparse_moe.gate",
                "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
                "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
                "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
            },
            layer_aliases={"mlp.router.": "block_sparse_moe.gate.", "mlp.": "block_sparse_moe."},
        ),
        windows=Windows(rule="always"),
        rope=Rope(adjust=with_mscales),
        norms=Norms(kind="layer", has_bias=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            default_count=16,
            size_key="intermediate_size",
            score="sparsemixer",
            renormalises=False,
            jitter_key="router_jitter_noise",
        ),
        head=Head(has_bias="lm_head_bias"),
        required={"num_experts_per_tok": 2},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
        },
    ),
    "Step3p7ForConditionalGeneration": Family(
        models="Step 3.7 Flash, the text",
        names=Names(
            parts={
                "mlp.gate": "moe.gate",
                _BIAS: "moe.router_bias",
                **_shared("share_expert"),
            },
            stacked=tuple(
                StackedTensor(f"moe.{each}.weight", (each,)) for each in ("gate_proj", "up_proj", "down_proj")
            ),
            joined={"mlp.experts.gate_up_proj": ("moe.gate_proj.weight", "moe.up_proj.weight")},
            ignored_prefixes=("vision_model.", "vit_large_projector."),
            aliases={
                "model.language_model.": "model.",
                "model.vision_model.": "vision_model.",
                "model.multi_modal_projector.": "vit_large_projector.",
            },
            layer_aliases={
                "mlp.gate.weight": "moe.gate.weight",
                _BIAS: "moe.router_bias",
                "mlp.experts.down_proj": "moe.down_proj.weight",
                "mlp.shared_experts.": "share_expert.",
            },
            ignores_later_layers=True,
        ),
        attention=Attention(
            qk_norm="head",
            head_size=128,
            scale_root_key="query_pre_attn_scalar",
            sliding_heads_key="num_sliding_attention_heads",
            output_gate="head",
        ),
        windows=Windows(rule="layer_types"),
        rope=Rope(has_local=True, may_be_partial=True),
        norms=Norms(offset=1.0, rounds_once=True),
        feed_forward=FeedForward(bounds_key="swiglu_limits_shared"),
        experts=ExpertsFamily(
            count_keys=("n_routed_experts",),
            default_count=288,
            first=3,
            kinds_key="mlp_layer_types",
            score="sigmoid",
            renormalises=True,
            has_choice_bias=True,
            scaling_key="moe_router_scaling_factor",
            bounds_key="swiglu_limits",
            shared_key="share_expert_dim",
            shared_bias="mlp_bias",
        ),
        text=TextPart(),
        newer=newer_step,
        # Its class uses silu, whatever a file says.
        file_keys={"hidden_act": ""},
        required={"gating": True, "use_bidirectional_attention": False},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
        },
    ),
}
