"""Rows of `table.py`: models that accept images too, whose text model is one of several families.

Tensor names are those of the hub's files, which transformers writes too.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.families.audio_rows import THINKER_NAMES, opened_thinker
from spmd_worker.model_config.families.family import (
    GATE_UP,
    Attention,
    Family,
    FeedForward,
    ImageLayers,
    Names,
    Rope,
    TextPart,
    next_to,
)
from spmd_worker.model_config.families.latent_rows import DEEPSEEK_V3_NAMES, LATENT_ROWS, MISTRAL4_NAMES
from spmd_worker.model_config.families.rms_rows import RMS_ROWS

_LANGUAGE_MODEL: Final = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
    "lm_head.": "language_model.lm_head.",
}
"""Beginnings of names since transformers 4.52 -> those before."""
_OTHER_INPUT: Final = ("vision_tower.", "multi_modal_projector.")


def inside_language_model(names: Names, *ignored_prefixes: str) -> Names:
    """The names of a model in `language_model.`, its head included; the prefixes are of modules for other input."""
    tops = {name: f"language_model.{getattr(names, name)}" for name in ("embedding", "layers", "norm", "head")}
    ignored = ignored_prefixes or _OTHER_INPUT
    return replace(names, **tops, ignored_prefixes=ignored, aliases=_LANGUAGE_MODEL)  # type: ignore[arg-type]  # texts


_LLAMA_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_EXAONE: Final = ("Exaone4ForCausalLM", {**_LLAMA_SIZES, "vocab_size": 102400, "intermediate_size": 16384})
_QWEN_SIZES: Final = {**_LLAMA_SIZES, "vocab_size": 151936, "intermediate_size": 22016}
_COHERE_SIZES: Final = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
}
_TEXTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA_SIZES),
    "mistral": ("MistralForCausalLM", {**_LLAMA_SIZES, "intermediate_size": 14336}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN_SIZES),
    "qwen3": ("Qwen3ForCausalLM", _QWEN_SIZES),
    "exaone4": _EXAONE,
    "cohere": ("CohereForCausalLM", _COHERE_SIZES),
    "cohere2": ("Cohere2ForCausalLM", _COHERE_SIZES),
    "granite_docling_text": (
        "GraniteForCausalLM",
        {
            "vocab_size": 133800,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 100257,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
        },
    ),
    # The name in the first files of EXAONE 4.5.
    "exaone4_5_text": _EXAONE,
}
"""Kind of text -> its architecture, and the defaults of its class, which files of these models leave out."""


def _text_of(
    models: str,
    names: Names,
    *kinds: str,
    tie_of_text: str = "never",
    ties_by_default: bool = False,
    defaults: Mapping[str, Any] | None = None,
    vision: str = "",
    opened: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] | None = None,
) -> Family:
    """A model whose text is of one of these kinds, the first if a file has none. `defaults` are of every kind."""
    return Family(
        models=models,
        names=names,
        vision=vision,
        text=TextPart(
            tie=tie_of_text,
            ties_by_default=ties_by_default,
            families={kind: _TEXTS[kind][0] for kind in kinds},
            defaults={kind: {**_TEXTS[kind][1], **(defaults or {})} for kind in kinds},
            opened=opened,
        ),
    )


_LLAVA_NAMES: Final = inside_language_model(Names(), *_OTHER_INPUT, "image_newline")
_SMOLVLM_NAMES: Final = Names(
    embedding="model.text_model.embed_tokens",
    layers="model.text_model.layers",
    norm="model.text_model.norm",
    ignored_prefixes=("model.vision_model.", "model.connector."),
)
_AUDIO_NAMES: Final = replace(
    _LLAVA_NAMES,
    ignored_prefixes=("audio_tower.", "multi_modal_projector."),
    aliases={**_LANGUAGE_MODEL, "model.audio_tower.": "audio_tower."},
)
_VIDEO_LLAVA_NAMES: Final = replace(
    _LLAVA_NAMES,
    ignored_prefixes=("image_tower.", "video_tower.", "multi_modal_projector."),
    aliases={**_LANGUAGE_MODEL, "model.image_tower.": "image_tower.", "model.video_tower.": "video_tower."},
)
_TIED: Final[dict[str, Any]] = {"ties_by_default": True, "defaults": {"tie_word_embeddings": True}}
_VOXTRAL_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000.0,
}
_GLM_ASR_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 59264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "eos_token_id": [59246, 59253, 59255],
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GLM_NAMES: Final = Names(
    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    fused={"mlp.gate_up_proj": GATE_UP},
)
"""Names of GLM-4-0414, and of the text of GLM that accepts images."""


_KIMI_NAMES: Final = inside_language_model(DEEPSEEK_V3_NAMES, *_OTHER_INPUT, "mm_projector.")
_KIMI: Final = replace(
    LATENT_ROWS["DeepseekV3ForCausalLM"],
    models="Kimi K2.5, K2.6",
    vision="kimi_k25",
    names=replace(
        _KIMI_NAMES,
        # transformers 5.23 writes layers of the text by the name of the tower's.
        aliases={
            **_LANGUAGE_MODEL,
            "model.mm_projector.": "mm_projector.",
            "language_model.model.blocks.": "language_model.model.layers.",
        },
    ),
    text=TextPart(ties_by_default=True),
)
_LIGHTON: Final = _text_of(
    "LightOnOCR",
    next_to(Names(), "vision_encoder", "vision_projection"),
    "qwen3",
    vision="lighton_ocr",
    **_TIED,
)

TEXT_PART_ROWS: Final[dict[str, Family]] = {
    "Mistral3ForConditionalGeneration": Family(
        models="Mistral Small 3.1, 3.2 and 4, Ministral 3",
        vision="mistral3",
        # Only Mistral Small 4 has experts.
        names=inside_language_model(MISTRAL4_NAMES),
        text=TextPart(
            ties_by_default=True,
            families={
                "mistral": "MistralForCausalLM",
                "ministral3": "Ministral3ForCausalLM",
                "mistral4": "Mistral4ForCausalLM",
            },
        ),
    ),
    "LlavaForConditionalGeneration": _text_of(
        "LLaVA 1.5, Pixtral",
        _LLAVA_NAMES,
        *("llama", "mistral", "qwen2", "qwen3"),
        tie_of_text="also",
        vision="llava",
    ),
    "LlavaNextForConditionalGeneration": _text_of(
        "LLaVA 1.6 (NeXT)", _LLAVA_NAMES, "llama", "mistral", "qwen2", "qwen3", vision="llava_next"
    ),
    "LlavaOnevisionForConditionalGeneration": _text_of(
        "LLaVA-OneVision",
        _LLAVA_NAMES,
        *("qwen2", "qwen3", "llama"),
        tie_of_text="also",
        vision="llava_onevision",
    ),
    "Qwen2AudioForConditionalGeneration": _text_of("Qwen2-Audio", _AUDIO_NAMES, "qwen2", vision="qwen2_audio"),
    "Qwen3ASRForConditionalGeneration": _text_of(
        "Qwen3-ASR, in its own form and transformers'",
        replace(next_to(Names(), "audio_tower", "multi_modal_projector"), aliases=THINKER_NAMES),
        "qwen3",
        vision="qwen3_asr",
        opened=opened_thinker,
        **_TIED,
    ),
    "VoxtralForConditionalGeneration": _text_of(
        "Voxtral", _AUDIO_NAMES, "llama", vision="voxtral", defaults=_VOXTRAL_SIZES
    ),
    "GlmAsrForConditionalGeneration": _text_of(
        "GLM-ASR", _AUDIO_NAMES, "llama", vision="glmasr", ties_by_default=True, defaults=_GLM_ASR_SIZES
    ),
    "AudioFlamingo3ForConditionalGeneration": _text_of(
        "Audio Flamingo 3", _AUDIO_NAMES, "qwen2", vision="audioflamingo3"
    ),
    "VipLlavaForConditionalGeneration": _text_of("ViP-LLaVA, the text", _LLAVA_NAMES, "llama", "mistral"),
    "InternVLForConditionalGeneration": _text_of(
        "InternVL 3 and 3.5, dense, in transformers' form",
        _LLAVA_NAMES,
        "qwen2",
        "qwen3",
        "llama",
        ties_by_default=True,
        vision="internvl",
    ),
    "Idefics3ForConditionalGeneration": _text_of("Idefics3", _SMOLVLM_NAMES, "llama", vision="idefics3"),
    "SmolVLMForConditionalGeneration": _text_of("SmolVLM, SmolVLM2", _SMOLVLM_NAMES, "llama", vision="smolvlm"),
    "LlavaNextVideoForConditionalGeneration": _text_of(
        "LLaVA-NeXT-Video, the text", _LLAVA_NAMES, "llama", "mistral", "qwen2", tie_of_text="also"
    ),
    "VideoLlavaForConditionalGeneration": _text_of("Video-LLaVA, the text", _VIDEO_LLAVA_NAMES, "llama"),
    "Idefics2ForConditionalGeneration": _text_of("Idefics2, the text", _SMOLVLM_NAMES, "mistral"),
    "VideoLlama3ForConditionalGeneration": _text_of(
        "VideoLLaMA 3, the text", next_to(Names(), "vision_model", "projector"), "qwen2", tie_of_text="also"
    ),
    "LightOnOcrForConditionalGeneration": _LIGHTON,
    # The name in the hub's files, as vLLM has it.
    "LightOnOCRForConditionalGeneration": _LIGHTON,
    "GotOcr2ForConditionalGeneration": _text_of(
        "GOT-OCR 2, the text",
        inside_language_model(Names()),
        "qwen2",
        **_TIED,
    ),
    "JanusForConditionalGeneration": _text_of(
        "Janus, Janus-Pro, the text",
        next_to(
            Names(),
            *("vision_model", "aligner", "vqmodel"),
            *("generation_embeddings", "generation_aligner", "generation_head"),
        ),
        "llama",
        **_TIED,
    ),
    "DeepseekVLForConditionalGeneration": _text_of(
        "DeepSeek-VL 1.3B", next_to(Names(), "vision_model", "aligner"), "llama", vision="deepseek_vl", **_TIED
    ),
    "Exaone4_5_ForConditionalGeneration": _text_of(
        "EXAONE 4.5",
        replace(next_to(RMS_ROWS["Exaone4ForCausalLM"].names, "visual"), ignored_prefixes=("model.visual.", "mtp.")),
        "exaone4",
        "exaone4_5_text",
        vision="exaone4_5",
    ),
    "Glm4vForConditionalGeneration": Family(
        models="GLM-4.1V, GLM-4.6V-Flash",
        vision="glm4v",
        names=next_to(GLM_NAMES, "visual"),
        attention=Attention(qkv_bias=True, output_bias=False),
        rope=Rope(is_interleaved=True, may_be_partial=True, sections=(8, 12, 12)),
        feed_forward=FeedForward(bias=False),
        text=TextPart(tie="also"),
        # The heads share the hidden size, whatever a file says.
        file_keys={"head_dim": ""},
        defaults={"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    ),
    "Glm46VForConditionalGeneration": Family(
        models="GLM-4.6V, dense, of the class of that name",
        vision="glm4v",
        names=next_to(GLM_NAMES, "visual"),
        text=TextPart(families={"glm4v_text": "Glm4vForConditionalGeneration"}),
    ),
    "GlmOcrForConditionalGeneration": Family(
        models="GLM-OCR",
        vision="glm_ocr",
        names=replace(next_to(GLM_NAMES, "visual"), ignores_later_layers=True),
        attention=Attention(qkv_bias=False, output_bias=False),
        rope=Rope(is_interleaved=True, may_be_partial=True, sections=(8, 12, 12)),
        feed_forward=FeedForward(bias=False),
        text=TextPart(tie="also"),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ),
    "PaddleOCRVLForConditionalGeneration": Family(
        models="PaddleOCR-VL",
        vision="paddleocr_vl",
        names=Names(
            ignored_prefixes=("visual.", "mlp_AR."),
            aliases={
                "model.language_model.": "model.",
                "model.visual.": "visual.",
                "model.projector.": "mlp_AR.",
            },
        ),
        attention=Attention(qkv_bias="use_bias", output_bias="use_bias", head_size=128),
        rope=Rope(sections=(16, 24, 24)),
        feed_forward=FeedForward(bias="use_bias"),
        text=TextPart(tie="also", ties_by_default=True),
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
    ),
    "GraniteDoclingForConditionalGeneration": _text_of(
        "Granite-Docling, 500M and 2B",
        # Files may have heads for speculative decoding.
        replace(_SMOLVLM_NAMES, ignored_prefixes=("model.vision_model.", "model.density_router.", "mtp.")),
        "granite_docling_text",
        vision="granite_docling",
        **_TIED,
    ),
    "AyaVisionForConditionalGeneration": _text_of(
        "Aya Vision, 8B and 32B",
        inside_language_model(Names()),
        "cohere2",
        "cohere",
        vision="aya_vision",
        **_TIED,
    ),
    "Cohere2VisionForConditionalGeneration": _text_of(
        "Command A Vision",
        next_to(Names(), "vision_tower", "multi_modal_projector"),
        "cohere2",
        vision="cohere2_vision",
        **_TIED,
    ),
    "MllamaForConditionalGeneration": Family(
        models="Llama 3.2 Vision, the text, which passes by the layers that look at images",
        names=replace(
            inside_language_model(Names(), "vision_model.", "multi_modal_projector."),
            aliases={
                "model.language_model.": "language_model.model.",
                "model.vision_model.": "vision_model.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "lm_head.": "language_model.lm_head.",
            },
        ),
        attention=Attention(qkv_bias=False, output_bias=False),
        feed_forward=FeedForward(bias=False),
        text=TextPart(),
        images=ImageLayers(key="cross_attention_layers", num_embeddings=8),
        # Its head is never tied to the embedding, which has more rows; the heads share the hidden size.
        file_keys={"head_dim": "", "tie_word_embeddings": ""},
        defaults={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "eos_token_id": 128001,
        },
    ),
    "Kimi_K25ForConditionalGeneration": _KIMI,
    # The name in the hub's files.
    "KimiK25ForConditionalGeneration": _KIMI,
}
