"""The families that run, by architecture name: what each does differently from Llama.

Each row is compared with transformers on a checkpoint of its own, and each entry set back to Llama's must be noticed
there (tests/model/test_families.py).
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.families.experts_table import EXPERT_FAMILIES
from spmd_worker.model_config.families.family import Family, Names, beside, inside
from spmd_worker.model_config.families.layer_norm_rows import LAYER_NORM_ROWS
from spmd_worker.model_config.families.rms_rows import RMS_ROWS
from spmd_worker.model_config.families.text_part_rows import GLM_NAMES, LANGUAGE_MODEL, OTHER_INPUT, TEXT_PART_ROWS

_QWEN_DEFAULTS: Final = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_MISTRAL_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_GATE_UP: Final = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_GEMMA_SIZES: Final = {
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
_GEMMA_NAMES: Final = Names(
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
)
_GEMMA: Final[dict[str, Any]] = {
    "mlp_bias": False,
    "norm_offset": 1.0,
    "norm_rounds_once": True,
    "default_head_size": 256,
    "sliding_window": "layer_types",
    "scale_root_key": "query_pre_attn_scalar",
    "logit_cap_key": "final_logit_softcapping",
    "activation_key": "hidden_activation",
    "embeds_by_root": True,
    "required": {"use_bidirectional_attention": False},
}
# Its files have a bound for scores too, and transformers makes no use of it.
_GEMMA3: Final[dict[str, Any]] = {
    **_GEMMA,
    "qk_norm": "head",
    "full_attention_every": 6,
    "full_attention_every_key": "sliding_window_pattern",
    "has_local_rope": True,
    "defaults": {
        **_GEMMA_SIZES,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
}
_QWEN_VL: Final[dict[str, Any]] = {
    "names": Names(
        ignored_prefixes=("visual.",), aliases={"model.language_model.": "model.", "model.visual.": "visual."}
    ),
    "qkv_bias": True,
    "output_bias": False,
    "mlp_bias": False,
    "sliding_window": "late_layers",
    "is_text_part": True,
    "tie_of_text": "also",
    "defaults": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
    },
}
_GLM: Final[dict[str, Any]] = {
    "output_bias": False,
    "mlp_bias": False,
    "default_head_size": 128,
    "has_interleaved_rope": True,
    "may_have_partial_rope": True,
    "defaults": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
}

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(defaults={"eos_token_id": 2}),
    "MistralForCausalLM": Family(
        models="Mistral 7B, Mistral Nemo",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_window="always",
        defaults=_MISTRAL_DEFAULTS,
    ),
    "Qwen2ForCausalLM": Family(
        models="Qwen2, Qwen2.5",
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        sliding_window="late_layers",
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3ForCausalLM": Family(
        models="Qwen3, dense",
        mlp_bias=False,
        qk_norm="head",
        default_head_size=128,
        sliding_window="late_layers",
        defaults=_QWEN_DEFAULTS,
    ),
    "SmolLM3ForCausalLM": Family(
        models="SmolLM3",
        rope_layers_key="no_rope_layers",
        rope_interval_key="no_rope_layer_interval",
        required={"use_sliding_window": False},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
    ),
    "SeedOssForCausalLM": Family(
        models="Seed-OSS",
        output_bias="attention_out_bias",
        default_head_size=128,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "eos_token_id": 2,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        models="ERNIE 4.5, dense",
        rope_rounding="result",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        default_head_size=128,
        has_interleaved_rope=True,
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        models="StarCoder2",
        names=Names(parts={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        norm_kind="layer",
        norm_has_bias=True,
        eps_key="norm_epsilon",
        sliding_window="always",
        is_gated=False,
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
    ),
    "GemmaForCausalLM": Family(
        models="Gemma",
        mlp_bias=False,
        norm_offset=1.0,
        norm_rounds_once=True,
        default_head_size=256,
        activation_words={"gelu": "gelu_pytorch_tanh"},
        embeds_by_root=True,
        required={"use_bidirectional_attention": False},
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
    ),
    "Gemma2ForCausalLM": Family(
        **_GEMMA,
        models="Gemma 2",
        names=_GEMMA_NAMES,
        score_cap_key="attn_logit_softcapping",
        full_attention_every=2,
        defaults={
            **_GEMMA_SIZES,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(**_GEMMA3, models="Gemma 3 of text alone: 270M, 1B", names=_GEMMA_NAMES),
    "Gemma3ForConditionalGeneration": Family(
        **_GEMMA3,
        models="Gemma 3, the text of 4B to 27B",
        names=replace(
            inside(_GEMMA_NAMES, "language_model."),
            ignored_prefixes=OTHER_INPUT,
            aliases=LANGUAGE_MODEL,
        ),
        is_text_part=True,
        ties_by_default=True,
    ),
    "Qwen2VLForConditionalGeneration": Family(**_QWEN_VL, models="Qwen2-VL, the text"),
    "Qwen2_5_VLForConditionalGeneration": Family(**_QWEN_VL, models="Qwen2.5-VL, the text"),
    "Qwen3VLForConditionalGeneration": Family(
        models="Qwen3-VL, dense, the text",
        names=beside(Names(), "visual"),
        mlp_bias=False,
        qk_norm="head",
        default_head_size=128,
        is_text_part=True,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000.0},
    ),
    "Phi3ForCausalLM": Family(
        models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        names=Names(
            fused={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), **_GATE_UP}
        ),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_window="always",
        may_have_partial_rope=True,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
    "Olmo2ForCausalLM": Family(
        models="OLMo 2",
        rope_rounding="result",
        names=Names(norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm")),
        mlp_bias=False,
        norm_rounds_once=True,
        qk_norm="flat",
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "GraniteForCausalLM": Family(
        models="Granite 3, dense",
        scale_key="attention_multiplier",
        embedding_multiplier_key="embedding_multiplier",
        residual_multiplier_key="residual_multiplier",
        logit_divisor_key="logits_scaling",
        defaults={"eos_token_id": 2},
    ),
    "GlmForCausalLM": Family(**_GLM, models="GLM-4-9B", names=Names(fused=_GATE_UP)),
    "Glm4ForCausalLM": Family(
        models="GLM-4-0414",
        **_GLM,
        names=GLM_NAMES,
    ),
    "GPT2LMHeadModel": Family(
        models="GPT-2",
        names=Names(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            norms=("ln_1", "", "ln_2", ""),
            parts={"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
            fused={"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
            are_transposed=True,
            optional_prefix="transformer.",
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_kind="layer",
        norm_has_bias=True,
        eps_key="layer_norm_epsilon",
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
            "num_key_value_heads": "",
            "head_dim": "",
        },
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        defaults={
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
    ),
    **TEXT_PART_ROWS,
    **RMS_ROWS,
    **LAYER_NORM_ROWS,
    **EXPERT_FAMILIES,
}

_EXPERTS: Final = "its layers have experts of a form that does not run"
_LATENT: Final = "its layers have experts and attention over a latent cache"
_RECURRENT: Final = "some of its layers have a recurrent state, which is no paged cache"
_ALIBI: Final = "its attention knows positions by biases (alibi)"
_IMAGES: Final = "it takes images; for text alone give the checkpoint of its language model"
_SPEECH: Final = "it takes speech; for text alone give the checkpoint of its language model"
_PREFIX: Final = (
    "tokens of its prompts see those behind them too, and none of its prompts is without an image; for text alone give "
    "the checkpoint of a Gemma"
)
_LOGIT_SCALE: Final = (
    "what its logit_scale does is not the same in all releases of transformers; for text alone give the checkpoint of "
    "its language model"
)
_RELATIVE: Final = "its attention knows positions by their distance, as learned biases"
_HAS_ENCODER: Final = "it is a decoder beside an encoder"

REFUSED: Final[dict[str, tuple[str, ...]]] = {
    _EXPERTS: (*("Llama4ForCausalLM", "PhimoeForCausalLM", "BailingMoeForCausalLM"),),
    _LATENT: ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    _RECURRENT: ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "MambaForCausalLM"),
    _ALIBI: ("MptForCausalLM", "BloomForCausalLM"),
    _IMAGES: (
        *("Gemma4ForConditionalGeneration", "Llama4ForConditionalGeneration", "Ovis2ForConditionalGeneration"),
        *("DeepseekVLHybridForConditionalGeneration", "Cosmos3OmniForConditionalGeneration"),
        *("HunYuanVLForConditionalGeneration", "FastVlmForConditionalGeneration"),
        *("Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"),
        "InstructBlipVideoForConditionalGeneration",
        *("GraniteDoclingForConditionalGeneration", "Granite4VisionForConditionalGeneration"),
        *("Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
        *("PerceptionLMForConditionalGeneration", "QianfanOCRForConditionalGeneration"),
    ),
    _SPEECH: (
        *("Qwen2AudioForConditionalGeneration", "VoxtralForConditionalGeneration", "GlmAsrForConditionalGeneration"),
        *("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        *("FunAsrNanoForConditionalGeneration", "Qwen3ASRForConditionalGeneration"),
        *("VibeVoiceAsrForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration"),
    ),
    _PREFIX: ("PaliGemmaForConditionalGeneration",),
    _LOGIT_SCALE: ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"),
    _RELATIVE: ("MPNetModel", "T5EncoderModel"),
    _HAS_ENCODER: (*("T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration"),),
}
"""Known architectures that do not run, by the reason."""
