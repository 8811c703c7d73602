"""Rows of `table.py`: the text answers of Qwen's Omni models, which take text, images and audio in one prompt.

Tensor names are those of the files of the complete model. What speaks the answers is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import (
    Attention,
    Family,
    FeedForward,
    Names,
    Rope,
    TextPart,
    Windows,
)

_THINKER: Final = "thinker_config"
_LEFT_OUT: Final = (_THINKER, "talker_config", "token2wav_config", "code2wav_config", "tie_word_embeddings")
_OF_THE_MODEL: Final = ("architectures", "model_type")
_BEGINNING: Final = "thinker."
_PARTS: Final = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "model.audio_tower.": "audio_tower.",
    "model.": "model.",
    "visual.": "visual.",
    "audio_tower.": "audio_tower.",
    "lm_head.": "lm_head.",
}
"""Beginnings of names in memory, and in files of a thinker alone -> those behind `thinker.` in files."""
_NAMES: Final = Names(
    embedding="thinker.model.embed_tokens",
    layers="thinker.model.layers",
    norm="thinker.model.norm",
    head="thinker.lm_head",
    ignored_prefixes=("thinker.visual.", "thinker.audio_tower.", "talker.", "token2wav.", "code2wav."),
    aliases={f"{prefix}{name}": f"{_BEGINNING}{ours}" for prefix in (_BEGINNING, "") for name, ours in _PARTS.items()},
)


def opened_omni(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The contents of a complete model's file as those of its thinker are; others unchanged. Raises
    ModelConfigError.
    """
    if config.get(_THINKER) is None:
        return config
    thinker = ConfigReader(config, path).object(_THINKER).config
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    own = {key: value for key, value in thinker.items() if key not in _OF_THE_MODEL and value is not None}
    return {**kept, **own}


_QWEN2_5: Final = Family(
    models="Qwen2.5-Omni, its text answers",
    vision="qwen2_5_omni",
    audio="qwen2_5_omni_audio",
    names=_NAMES,
    attention=Attention(qkv_bias=True, output_bias=False),
    windows=Windows(rule="late_layers"),
    rope=Rope(sections=(16, 24, 24)),
    feed_forward=FeedForward(bias=False),
    text=TextPart(opened=opened_omni),
    defaults={
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
    },
)
_QWEN3: Final = Family(
    models="Qwen3-Omni 30B-A3B: Instruct, Thinking and Captioner, their text answers",
    vision="qwen3_omni",
    audio="qwen3_omni_audio",
    names=_NAMES,
    attention=Attention(qk_norm="head"),
    rope=Rope(sections=(24, 20, 20), interleaves_sections=True),
    feed_forward=FeedForward(bias=False),
    experts=ExpertsFamily(default_count=128, every_key="decoder_sparse_step", dense_layers_key="mlp_only_layers"),
    text=TextPart(opened=opened_omni),
    defaults={
        "vocab_size": 3584,
        "hidden_size": 2048,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
)

OMNI_ROWS: Final[dict[str, Family]] = {
    "Qwen2_5OmniForConditionalGeneration": _QWEN2_5,
    # The name in the hub's first files.
    "Qwen2_5OmniModel": _QWEN2_5,
    "Qwen2_5OmniThinkerForConditionalGeneration": replace(_QWEN2_5, models="The thinker of Qwen2.5-Omni alone"),
    "Qwen3OmniMoeForConditionalGeneration": _QWEN3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": replace(_QWEN3, models="The thinker of Qwen3-Omni alone"),
}
