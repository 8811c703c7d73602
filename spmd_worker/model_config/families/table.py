"""The supported families, by architecture name: differences from Llama.

Each row is compared with transformers on a checkpoint of its own, which must detect each entry that is reset to Llama's
(tests/model/test_families.py).
"""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.alibi_rows import ALIBI_ROWS
from spmd_worker.model_config.families.bailing_rows import BAILING_ROWS
from spmd_worker.model_config.families.compressed_rows import COMPRESSED_ROWS
from spmd_worker.model_config.families.conv_rows import CONV_ROWS
from spmd_worker.model_config.families.delta_rows import DELTA_ROWS
from spmd_worker.model_config.families.encoder_decoder_rows import ENCODER_DECODER_ROWS
from spmd_worker.model_config.families.experts_table import EXPERT_FAMILIES
from spmd_worker.model_config.families.family import (
    GATE_UP,
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
from spmd_worker.model_config.families.gemma3n_rows import GEMMA3N_ROWS
from spmd_worker.model_config.families.gemma4_rows import GEMMA4_ROWS
from spmd_worker.model_config.families.kimi_rows import KIMI_ROWS
from spmd_worker.model_config.families.latent_rows import LATENT_ROWS
from spmd_worker.model_config.families.layer_norm_rows import LAYER_NORM_ROWS
from spmd_worker.model_config.families.llama4_rows import LLAMA4_ROWS
from spmd_worker.model_config.families.longcat_rows import LONGCAT_ROWS
from spmd_worker.model_config.families.mamba1_rows import MAMBA1_ROWS
from spmd_worker.model_config.families.mamba_rows import MAMBA_ROWS
from spmd_worker.model_config.families.minimax_rows import MINIMAX_ROWS
from spmd_worker.model_config.families.mistral_large_rows import MISTRAL_LARGE_ROWS
from spmd_worker.model_config.families.older_rows import OLDER_ROWS
from spmd_worker.model_config.families.omni_rows import OMNI_ROWS
from spmd_worker.model_config.families.qwen4_rows import QWEN4_ROWS
from spmd_worker.model_config.families.rms_rows import GEMMA, GEMMA2, GEMMA2_SIZES, RMS_ROWS
from spmd_worker.model_config.families.sliding_sparse_rows import SLIDING_SPARSE_ROWS
from spmd_worker.model_config.families.sparse_rows import SPARSE_ROWS
from spmd_worker.model_config.families.text_part_rows import GLM_NAMES, TEXT_PART_ROWS, inside_language_model

_MISTRAL: Final = Family(
    models="Mistral 7B, Mistral Nemo",
    attention=Attention(qkv_bias=False, output_bias=False),
    windows=Windows(rule="always"),
    feed_forward=FeedForward(bias=False),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
_QWEN2: Final = Family(
    models="Qwen2, Qwen2.5",
    attention=Attention(qkv_bias=True, output_bias=False),
    windows=Windows(rule="late_layers"),
    feed_forward=FeedForward(bias=False),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
)
_QWEN2_VL: Final = replace(
    _QWEN2,
    models="Qwen2-VL",
    vision="qwen2_vl",
    names=Names(ignored_prefixes=("visual.",), aliases={"model.language_model.": "model.", "model.visual.": "visual."}),
    rope=Rope(sections=(16, 24, 24)),
    text=TextPart(tie="also"),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
    },
)
_GEMMA3: Final = replace(
    GEMMA2,
    models="Gemma 3 of text alone: 270M, 1B",
    # Its files have a bound for scores too, which transformers does not use.
    attention=replace(GEMMA2.attention, score_cap_key="", qk_norm="head"),
    windows=Windows(rule="layer_types", full_every=6, full_every_key="sliding_window_pattern"),
    rope=Rope(has_local=True),
    defaults={
        **GEMMA2_SIZES,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    },
)
_STARCODER: Final = LAYER_NORM_ROWS["GPTBigCodeForCausalLM"]
_GLM: Final = Family(
    models="GLM-4-9B",
    names=Names(fused={"mlp.gate_up_proj": GATE_UP}),
    attention=Attention(output_bias=False, head_size=128),
    rope=Rope(is_interleaved=True, may_be_partial=True),
    feed_forward=FeedForward(bias=False),
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
)

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(defaults={"eos_token_id": 2}),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": replace(_MISTRAL, models="Ministral 8B 2410"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(_QWEN2, models="Qwen3, dense", attention=Attention(qk_norm="head", head_size=128)),
    "SmolLM3ForCausalLM": Family(
        models="SmolLM3",
        rope=Rope(layers="listed"),
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
        attention=Attention(output_bias="attention_out_bias", head_size=128),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "eos_token_id": 2,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        models="ERNIE 4.5, dense",
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias", head_size=128),
        rope=Rope(rounding="result", is_interleaved=True),
        feed_forward=FeedForward(bias="use_bias"),
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
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias"),
        windows=Windows(rule="always"),
        norms=Norms(kind="layer", has_bias=True, eps_key="norm_epsilon"),
        feed_forward=FeedForward(bias="use_bias", is_gated=False),
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
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        models="Gemma 3: 4B to 27B",
        vision="gemma3",
        names=inside_language_model(_GEMMA3.names),
        text=TextPart(ties_by_default=True),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2_VL, models="Qwen2.5-VL", vision="qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": Family(
        models="Qwen3-VL, dense",
        vision="qwen3_vl",
        names=next_to(Names(), "visual"),
        attention=Attention(qk_norm="head", head_size=128),
        rope=Rope(sections=(24, 20, 20), interleaves_sections=True),
        feed_forward=FeedForward(bias=False),
        text=TextPart(),
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000.0},
    ),
    "Phi3ForCausalLM": Family(
        models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        names=Names(fused={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
        attention=Attention(qkv_bias=False, output_bias=False),
        windows=Windows(rule="always"),
        rope=Rope(may_be_partial=True),
        feed_forward=FeedForward(bias=False),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
    "Olmo2ForCausalLM": Family(
        models="OLMo 2",
        names=Names(norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm")),
        attention=Attention(qk_norm="flat"),
        rope=Rope(rounding="result"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "GraniteForCausalLM": Family(
        models="Granite 3, dense",
        attention=Attention(scale_key="attention_multiplier"),
        wiring=Wiring(residual_multiplier_key="residual_multiplier"),
        embedding=Embedding(multiplier_key="embedding_multiplier"),
        head=Head(divisor_key="logits_scaling"),
        defaults={"eos_token_id": 2},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, models="GLM-4-0414", names=GLM_NAMES),
    "GPT2LMHeadModel": replace(
        _STARCODER,
        models="GPT-2",
        names=replace(_STARCODER.names, are_transposed=True, optional_prefix="transformer."),
        attention=Attention(qkv_bias=True, output_bias=True),
        file_keys={**_STARCODER.file_keys, "num_key_value_heads": ""},
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        defaults={**_STARCODER.defaults, "activation_function": "gelu_new"},
    ),
    **TEXT_PART_ROWS,
    **RMS_ROWS,
    **LAYER_NORM_ROWS,
    **ALIBI_ROWS,
    **OLDER_ROWS,
    **EXPERT_FAMILIES,
    **OMNI_ROWS,
    **LATENT_ROWS,
    **COMPRESSED_ROWS,
    **MISTRAL_LARGE_ROWS,
    **LONGCAT_ROWS,
    **SPARSE_ROWS,
    **SLIDING_SPARSE_ROWS,
    **CONV_ROWS,
    **DELTA_ROWS,
    **QWEN4_ROWS,
    **KIMI_ROWS,
    **BAILING_ROWS,
    **MAMBA_ROWS,
    **MAMBA1_ROWS,
    **LLAMA4_ROWS,
    **MINIMAX_ROWS,
    **GEMMA3N_ROWS,
    **GEMMA4_ROWS,
    **ENCODER_DECODER_ROWS,
}

CLASSES_OF_OTHERS: Final[dict[str, tuple[str, str]]] = {
    "exaone": ("LlamaForCausalLM", "ExaoneForCausalLM"),
    "sarvam_moe": ("Glm4MoeForCausalLM", "SarvamMoEForCausalLM"),
    "param2moe": ("Glm4MoeForCausalLM", "Param2MoEForCausalLM"),
    "sarvam_mla": ("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),
}
"""Classes of another family by which transformers 5.25 builds and saves models of a `model_type`, whose defaults and
tensor names these have all the same, each with the row that runs them.
"""

_EXPERTS: Final = "its layers have experts of a form that does not run"
_RECURRENT: Final = "some of its layers have a recurrent state of a kind that does not run"
_MASKS_KEYS: Final = "its attention leaves out keys by what they hold"
_OF_HEADS: Final = "its attention has experts, each with queries of its own"
_TERNARY: Final = "its weights are ternary, multiplied with activations that are quantised in each layer"
_IMAGES: Final = "it accepts images; for text alone use the checkpoint of its language model"
_SPEECH: Final = "it accepts speech; for text alone use the checkpoint of its language model"
_PREFIX: Final = (
    "tokens of its prompts see those behind them too, and none of its prompts is without an image; for text alone give "
    "the checkpoint of a Gemma"
)
_TASKS: Final = (
    "its adapters of tasks are parts of its weights, which its authors' code selects; give transformers' form of it, "
    "such as jina-embeddings-v3-hf, and adapters in PEFT's format"
)
_HAS_ENCODER: Final = "it is an encoder-decoder model of a form that does not run"

UNSUPPORTED: Final[dict[str, tuple[str, ...]]] = {
    _EXPERTS: ("BailingMoeForCausalLM",),
    _RECURRENT: (
        *("ZambaForCausalLM", "Zamba2ForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM"),
        "MiniMaxForCausalLM",
    ),
    _MASKS_KEYS: ("DogeForCausalLM",),
    _OF_HEADS: ("JetMoeForCausalLM",),
    _TERNARY: ("BitNetForCausalLM",),
    _IMAGES: (
        "Ovis2ForConditionalGeneration",
        *("DeepseekVLHybridForConditionalGeneration", "Cosmos3OmniForConditionalGeneration"),
        *("HunYuanVLForConditionalGeneration", "FastVlmForConditionalGeneration"),
        *("Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"),
        "InstructBlipVideoForConditionalGeneration",
        "Granite4VisionForConditionalGeneration",
        *("PerceptionLMForConditionalGeneration", "QianfanOCRForConditionalGeneration"),
        "Lfm3VlForConditionalGeneration",
        *("Florence2ForConditionalGeneration", "MiniCPMOcrForConditionalGeneration"),
        "MiniCPMV4_7ForConditionalGeneration",
        *("NemotronH_Omni_Reasoning_V3", "FuyuForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    ),
    _SPEECH: (
        *("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        "FunAsrNanoForConditionalGeneration",
        *("VibeVoiceAsrForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration"),
        "Nemotron3_5TranscribeForConditionalGeneration",
    ),
    _PREFIX: ("PaliGemmaForConditionalGeneration",),
    _TASKS: ("XLMRobertaLoRA",),
    _HAS_ENCODER: (
        *("BlenderbotSmallForConditionalGeneration", "ProphetNetForConditionalGeneration"),
        *("LEDForConditionalGeneration", "LongT5ForConditionalGeneration", "FSMTForConditionalGeneration"),
        *("BigBirdPegasusForConditionalGeneration", "SwitchTransformersForConditionalGeneration"),
        *("NllbMoeForConditionalGeneration", "T5GemmaForConditionalGeneration", "EncoderDecoderModel"),
    ),
}
"""Known but unsupported architectures, by the reason."""
