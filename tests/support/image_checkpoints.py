"""The cases of models that take images too, as those of `family_checkpoints.py`: the sizes of what is beside the text.

Images are never looked at: what they go through is as small as its class allows.
"""

from typing import Any, Final

_TEXT = {"num_hidden_layers": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SMALL = {**_VISION, "image_size": 28, "patch_size": 14}
_OF_CLIP = {"vision_config": {**_SMALL, "projection_dim": 32, "model_type": "clip_vision_model"}}
_OF_SIGLIP = {"vision_config": {**_SMALL, "model_type": "siglip_vision_model"}}
_OF_GLM = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
}
_WHISPER = {**_VISION, "intermediate_size": 128}
_HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}

NESTED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "glm4v": ("Glm4v", {**_TEXT, "rope_parameters": _HALF}, {"vision_config": _OF_GLM}),
    "glm46v": (
        "Glm46V",
        {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _HALF},
        {"vision_config": {**_OF_GLM, "model_type": "glm4v_vision"}, "tie_word_embeddings": True},
    ),
    "glm_ocr": ("GlmOcr", {**_TEXT, "head_dim": 16, "rope_parameters": _HALF}, {"vision_config": _OF_GLM}),
    "paddleocr_vl": (
        "PaddleOCRVL",
        {
            **_TEXT,
            "head_dim": 16,
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 700.0},
        },
        {"vision_config": _SMALL},
    ),
    "mllama": (
        "Mllama",
        {"num_hidden_layers": 5, "cross_attention_layers": [0, 3]},
        {
            "vision_config": {
                "hidden_size": 32,
                "attention_heads": 2,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "intermediate_size": 32,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [1],
                "image_size": 28,
                "patch_size": 14,
            }
        },
    ),
    "llava_next_video": ("LlavaNextVideo", {**_TEXT, "model_type": "llama"}, _OF_CLIP),
    "video_llava": ("VideoLlava", {**_TEXT, "model_type": "llama"}, _OF_CLIP),
    "idefics2": (
        "Idefics2",
        {**_TEXT, "model_type": "mistral", "sliding_window": 5},
        {
            "vision_config": _SMALL,
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
                "resampler_n_latents": 4,
            },
        },
    ),
    "video_llama_3": (
        "VideoLlama3",
        {**_TEXT, "model_type": "qwen2"},
        {"vision_config": {**_VISION, "patch_size": 14}},
    ),
    "lighton_ocr": (
        "LightOnOcr",
        {**_TEXT, "model_type": "qwen3", "head_dim": 32},
        {"vision_config": {**_SMALL, "model_type": "pixtral", "head_dim": 16}},
    ),
    "got_ocr2": (
        "GotOcr2",
        {**_TEXT, "model_type": "qwen2"},
        {
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 16,
                "mlp_dim": 32,
                "global_attn_indexes": [0],
                "window_size": 2,
            }
        },
    ),
    "janus": (
        "Janus",
        {**_TEXT, "model_type": "llama"},
        {
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 16,
                "projection_dim": 64,
                "num_image_tokens": 4,
            },
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 8,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "image_token_embed_dim": 64,
                "projection_dim": 64,
                "num_hidden_layers": 1,
            },
        },
    ),
    "qwen2_audio": (
        "Qwen2Audio",
        {**_TEXT, "model_type": "qwen2"},
        {
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 8,
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "max_source_positions": 50,
            }
        },
    ),
    "qwen3_asr": (
        "Qwen3ASR",
        {**_TEXT, "model_type": "qwen3", "head_dim": 32},
        {
            "audio_config": {
                "model_type": "qwen3_asr_encoder",
                "num_mel_bins": 8,
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "downsample_hidden_size": 16,
                "output_dim": 64,
            }
        },
    ),
    "voxtral": (
        "Voxtral",
        {**_TEXT, "model_type": "llama", "head_dim": 16},
        {"audio_config": {"model_type": "voxtral_encoder", "num_mel_bins": 8, **_WHISPER, "max_source_positions": 50}},
    ),
    "glmasr": (
        "GlmAsr",
        {**_TEXT, "model_type": "llama"},
        {"audio_config": {"model_type": "glmasr_encoder", "num_mel_bins": 8, **_WHISPER}},
    ),
    "audioflamingo3": (
        "AudioFlamingo3",
        {**_TEXT, "model_type": "qwen2"},
        {
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "num_mel_bins": 8,
                **_WHISPER,
                "max_source_positions": 50,
            }
        },
    ),
    "granite_docling": (
        "GraniteDocling",
        {**_TEXT, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "pad_token_id": 0},
        {
            "vision_config": {
                **_VISION,
                "image_size": 56,
                "patch_size": 14,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            }
        },
    ),
    "aya_vision": (
        "AyaVision",
        {"model_type": "cohere2", "layer_norm_eps": 0.03, "sliding_window": 5, "logit_scale": 0.3},
        _OF_SIGLIP,
    ),
    "aya_vision_of_cohere": (
        "AyaVision",
        {**_TEXT, "model_type": "cohere", "layer_norm_eps": 0.03, "logit_scale": 0.3, "use_qk_norm": True},
        _OF_SIGLIP,
    ),
    "cohere2_vision": (
        "Cohere2Vision",
        {"layer_norm_eps": 0.03, "sliding_window": 5, "logit_scale": 0.3},
        {**_OF_SIGLIP, "alignment_intermediate_size": 16},
    ),
    "deepseek_vl": ("DeepseekVL", {**_TEXT, "model_type": "llama"}, _OF_SIGLIP),
    "exaone4_5": (
        "Exaone4_5_",
        {"model_type": "exaone4", "sliding_window": 5},
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "num_key_value_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [0],
            }
        },
    ),
}
"""Family, `text_config`, and what is beside it."""

NESTED_IN_LAYOUTS: Final = ("glm4v", "mllama")
"""Models whose logits are tested in the layout tier; the others are in the stress tier."""
AS_IN_MEMORY: Final = (
    *("idefics2", "video_llama_3", "lighton_ocr", "janus", "deepseek_vl", "exaone4_5", "granite_docling"),
    *("glm4v", "glm46v", "glm_ocr", "qwen3_asr", "cohere2_vision"),
)
"""Files whose names are those that transformers has in memory."""
