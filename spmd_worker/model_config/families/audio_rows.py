"""Rows of `vision_rows.py` whose towers hear: encoders of log-mel features with their projectors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

from collections.abc import Callable
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.encoder_part import AudioInput
from spmd_worker.model_config.families.vision_files import SEPARATE, VisionFiles, activation_of
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

AUDIO_WAY_OUT: Final = "; limits.max_audios=0 runs the text alone"
AUDIO_PART: Final = "audio_config"
"""The key of config.json that describes the tower."""
_HEAD_STEP: Final = 4
_MOST_FRAMES: Final = 1 << 16
_OUTSIDE: Final = ("audio_tower.", "multi_modal_projector.")


def _whisper_names(**names: Any) -> TowerNames:
    return TowerNames(
        beginnings=_OUTSIDE,
        layers="audio_tower.layers",
        qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
        unbiased=("self_attn.k_proj",),
        output="self_attn.out_proj",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        mlp=("fc1", "fc2"),
        **names,
    )


def _heads(audio: ConfigReader, hidden_size: int, default: int) -> int:
    num_heads = audio.count("encoder_attention_heads", default)
    if hidden_size % num_heads or hidden_size // num_heads % _HEAD_STEP:
        rule = f"must divide d_model={hidden_size} into heads of multiples of {_HEAD_STEP}{AUDIO_WAY_OUT}"
        raise audio.error("encoder_attention_heads", rule)
    return num_heads


def _layers(audio: ConfigReader, default: int) -> int:
    """Number of layers, checked as those of a text are."""
    return ConfigReader({"num_hidden_layers": audio.get("encoder_layers")}, audio.path, section=audio.section).count(
        "num_hidden_layers", default
    )


def _qwen2_audio(files: VisionFiles) -> VisionConfig:
    audio = files.vision
    audio.choice("model_type", ("qwen2_audio_encoder",), "qwen2_audio_encoder")
    hidden_size = audio.count("d_model", 1280)
    positions = checked_integer(
        audio.get("max_source_positions", 1500), audio.where("max_source_positions"), 2, _MOST_FRAMES
    )
    tower = TowerConfig(
        names=_whisper_names(
            convolutions=("audio_tower.conv1", "audio_tower.conv2"),
            positions="audio_tower.embed_positions",
            last_norm="audio_tower.layer_norm",
        ),
        hidden_size=hidden_size,
        intermediate_size=audio.count("encoder_ffn_dim", 5120),
        num_layers=_layers(audio, 32),
        num_heads=_heads(audio, hidden_size, 20),
        patch_size=1,
        activation=activation_of(audio, "activation_function", "gelu"),
        eps=1e-5,
        num_positions=positions,
    )
    return VisionConfig(
        "qwen2_audio",
        image_token_id=files.whole.count("audio_token_index", 151646),
        merge_size=2,
        tower=tower,
        audio=AudioInput(audio.count("num_mel_bins", 128), 2 * positions),
    )


AUDIO_ROWS: Final[dict[str, Callable[[VisionFiles], VisionConfig]]] = {"qwen2_audio": _qwen2_audio}
"""How config.json is read, by `Family.vision`."""
