"""Rows of `vision_rows.py` whose towers hear: encoders of log-mel features with their projectors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
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
_MOST_BINS: Final = 1 << 10
_MOST_S: Final = 1200
"""Seconds of a recording that Qwen's own code gives to Qwen3-ASR."""


def _whisper_names(beginning: str, **names: Any) -> TowerNames:
    return TowerNames(
        beginnings=(beginning, beginning.replace("audio_tower", "multi_modal_projector")),
        layers=f"{beginning}layers",
        qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
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
            beginning="audio_tower.",
            unbiased=("self_attn.k_proj",),
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


_CHUNK_FRAMES: Final = 100
_QWEN3_BEGINNING: Final = "model.audio_tower."


def _qwen3_asr(files: VisionFiles) -> VisionConfig:
    audio = files.vision
    audio.choice("model_type", ("qwen3_asr_encoder",), "qwen3_asr_encoder")
    hidden_size, output_size = audio.count("d_model", 1024), audio.count("output_dim", 3584)
    if hidden_size % 2 or hidden_size < 4:
        raise audio.error("d_model", f"must be even, and 4 or more{AUDIO_WAY_OUT}")
    if output_size != files.hidden_size:
        raise audio.error("output_dim", f"is not the hidden size of the text, {files.hidden_size}{AUDIO_WAY_OUT}")
    audio.choice("n_window", (_CHUNK_FRAMES // 2,), 50)
    window = checked_integer(audio.get("n_window_infer", 800), audio.where("n_window_infer"), 1, _MOST_FRAMES)
    if window % _CHUNK_FRAMES:
        raise audio.error("n_window_infer", f"must be a multiple of {_CHUNK_FRAMES}{AUDIO_WAY_OUT}")
    heard = AudioInput(
        num_mel_bins=checked_integer(audio.get("num_mel_bins", 128), audio.where("num_mel_bins"), 1, _MOST_BINS),
        num_frames=_MOST_S * _CHUNK_FRAMES,
        num_channels=audio.count("downsample_hidden_size", 480),
        chunk_frames=_CHUNK_FRAMES,
        window_chunks=window // _CHUNK_FRAMES,
    )
    if audio.get("max_position_embeddings", heard.num_chunk_rows) != heard.num_chunk_rows:
        raise audio.error("max_position_embeddings", f"must be the rows of a chunk, {heard.num_chunk_rows}")
    activation = activation_of(audio, "activation_function", "gelu")
    tower = TowerConfig(
        names=_whisper_names(
            beginning=_QWEN3_BEGINNING,
            convolutions=tuple([f"{_QWEN3_BEGINNING}conv2d{number}" for number in (1, 2, 3)]),
            last_norm=f"{_QWEN3_BEGINNING}ln_post",
        ),
        hidden_size=hidden_size,
        intermediate_size=audio.count("encoder_ffn_dim", 4096),
        num_layers=_layers(audio, 24),
        num_heads=_heads(audio, hidden_size, 16),
        patch_size=1,
        activation=activation,
        eps=1e-5,
        projector_size=hidden_size,
        projector_activation=activation,
    )
    token_id = files.whole.count("audio_token_id", 151676)
    return VisionConfig("qwen3_asr", image_token_id=token_id, tower=tower, audio=heard)


THINKER_NAMES: Final = {
    "thinker.model.": "model.language_model.",
    "thinker.lm_head.": "lm_head.",
    "thinker.audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "thinker.audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "thinker.audio_tower.": _QWEN3_BEGINNING,
}
"""Beginnings of names in Qwen's own files of Qwen3-ASR -> those in transformers' form."""
_THINKER: Final = "thinker_config"
_THINKER_TEXT: Final = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5000000.0,
}
_THINKER_AUDIO: Final = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "n_window": 100,
    "n_window_infer": 400,
    "output_dim": 3584,
}
"""Defaults of Qwen's own classes."""


def opened_thinker(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The contents of one of Qwen's own files as transformers' form has them. Raises ModelConfigError."""
    if config.get(_THINKER) is None:
        return config
    thinker = ConfigReader(config, path).object(_THINKER)
    if thinker.get("classify_num") is not None:
        raise thinker.error("classify_num", "is of a model that finds the times of words, which does not run")
    parts: dict[str, Any] = {}
    for key, defaults in (("text_config", _THINKER_TEXT), (AUDIO_PART, _THINKER_AUDIO)):
        given = thinker.object(key).config
        kind = given.get("model_type")
        kinds = {"qwen3_asr_text": "qwen3", "qwen3_asr_audio_encoder": "qwen3_asr_encoder"}
        parts[key] = {**defaults, **given, "model_type": kinds.get(kind, kind) if isinstance(kind, str) else kind}
    token = {"audio_token_id": thinker.get("audio_token_id", 151646)}
    return {**{key: value for key, value in config.items() if key != _THINKER}, **parts, **token}


AUDIO_ROWS: Final[dict[str, Callable[[VisionFiles], VisionConfig]]] = {
    "qwen2_audio": _qwen2_audio,
    "qwen3_asr": _qwen3_asr,
}
"""How config.json is read, by `Family.vision`."""
