"""Rows of `vision_rows.py` whose towers hear: encoders of log-mel features with their projectors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.encoder_part import AudioInput
from spmd_worker.model_config.families.vision_files import SEPARATE, VisionFiles, activation_of, rope_theta_of
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

AUDIO_WAY_OUT: Final = "; limits.max_audios=0 runs the text alone"
AUDIO_PART: Final = "audio_config"
"""The key of config.json that describes the tower."""
_HEAD_STEP: Final = 4
_MOST_FRAMES: Final = 1 << 16
_MOST_BINS: Final = 1 << 10
_MOST_S: Final = 1200
"""Seconds of a recording that Qwen's own code gives to Qwen3-ASR."""


_NEWER_KEYS: Final = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
"""Whisper's names of keys -> those that classes after Qwen2-Audio's write."""


def _whisper_names(beginning: str, **names: Any) -> TowerNames:
    given = {
        "beginnings": (beginning, beginning.replace("audio_tower", "multi_modal_projector")),
        "output": "self_attn.out_proj",
        "norms": ("self_attn_layer_norm", "final_layer_norm"),
        "mlp": ("fc1", "fc2"),
        **names,
    }
    return TowerNames(
        layers=f"{beginning}layers",
        qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
        **given,
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


def _whisper_tower(
    audio: ConfigReader, activation: str = "activation_function", *, names: Mapping[str, Any] | None = None, **more: Any
) -> TowerConfig:
    """Whisper's encoder in windows, with other `names`; `more` are of the projector. `activation` is a key."""
    hidden_size, positions = audio.count("d_model", 1280), _positions(audio, "max_source_positions")
    plain = {"positions": "audio_tower.embed_positions", "last_norm": "audio_tower.layer_norm"}
    linears = ("linear_1", "linear_2") if more.get("projector_size") else ("linear",)
    given: dict[str, Any] = {
        "beginning": "audio_tower.",
        "projector": tuple([f"multi_modal_projector.{each}" for each in linears]),
        **(plain if names is None else names),
    }
    beginning = given["beginning"]
    return TowerConfig(
        names=_whisper_names(
            unbiased=("self_attn.k_proj",), convolutions=(f"{beginning}conv1", f"{beginning}conv2"), **given
        ),
        hidden_size=hidden_size,
        intermediate_size=audio.count("encoder_ffn_dim", 5120),
        num_layers=_layers(audio, 32),
        num_heads=_heads(audio, hidden_size, 20),
        patch_size=1,
        activation=activation_of(audio, activation, "gelu"),
        eps=1e-5,
        num_positions=positions if names is None else 0,
        **more,
    )


def _positions(audio: ConfigReader, key: str, default: int = 1500) -> int:
    return checked_integer(audio.get(key, default), audio.where(key), 2, _MOST_FRAMES)


def _qwen2_audio(files: VisionFiles) -> VisionConfig:
    audio = files.vision
    audio.choice("model_type", ("qwen2_audio_encoder",), "qwen2_audio_encoder")
    return VisionConfig(
        "qwen2_audio",
        image_token_id=files.whole.count("audio_token_index", 151646),
        merge_size=2,
        tower=_whisper_tower(audio),
        audio=AudioInput(audio.count("num_mel_bins", 128), 2 * _positions(audio, "max_source_positions")),
    )


def _in_windows(
    files: VisionFiles,
    kind: str,
    longest_s: int,
    rows_per_token: int,
    key: str = "max_source_positions",
    default: int = 1500,
    **heard: Any,
) -> AudioInput:
    """Recordings of at most `longest_s` in windows of twice as many frames as `key` has positions."""
    audio = files.vision
    audio.choice("model_type", (f"{kind}_encoder",), f"{kind}_encoder")
    window = 2 * _positions(audio, key, default)
    if window % _FRAMES_PER_S or window % (2 * rows_per_token):
        rule = f"must be whole seconds, of {_FRAMES_PER_S // 2} positions, and whole tokens, of {rows_per_token}"
        raise audio.error(key, f"{rule}{AUDIO_WAY_OUT}")
    num_frames = max(longest_s * _FRAMES_PER_S // window, 1) * window
    num_bins = checked_integer(audio.get("num_mel_bins", 128), audio.where("num_mel_bins"), 1, _MOST_BINS)
    return AudioInput(num_bins, num_frames, window_frames=window, **heard)


def _newer(files: VisionFiles) -> VisionFiles:
    """The files, whose tower may have keys by newer names."""
    given = files.vision.config
    keys = {ours: newer for ours, newer in _NEWER_KEYS.items() if newer in given or ours not in given}
    return replace(files, vision=replace(files.vision, file_keys=keys))


def _projector(files: VisionFiles, width: int) -> dict[str, Any]:
    activation = activation_of(files.whole, "projector_hidden_act", "gelu")
    return {"projector_size": width, "projector_activation": activation}


def _check_joined(audio: ConfigReader, rows_per_token: int) -> None:
    """Raise ModelConfigError if rows of a token, side by side, are not as wide as the feed-forward."""
    wanted = rows_per_token * audio.count("d_model", 1280)
    if audio.count("encoder_ffn_dim", 5120) != wanted:
        rule = f"must be {wanted}, {rows_per_token} rows of the encoder, which the projector reads"
        raise audio.error("encoder_ffn_dim", f"{rule}{AUDIO_WAY_OUT}")


def _voxtral(files: VisionFiles) -> VisionConfig:
    files = _newer(files)
    _check_joined(files.vision, 4)
    kept: dict[str, Any] = dict.fromkeys(("hears_padding", "counts_padding", "joins", "has_one_level"), True)
    return VisionConfig(
        "voxtral",
        image_token_id=files.whole.count("audio_token_id", 24),
        merge_size=4,
        audio=_in_windows(files, "voxtral", 1800, 4, **kept),
        tower=_whisper_tower(files.vision, **_projector(files, files.hidden_size), projector_has_bias=False),
    )


def _audioflamingo3(files: VisionFiles) -> VisionConfig:
    files = _newer(files)
    bias = files.whole.flag("projector_bias", True)
    return VisionConfig(
        "audioflamingo3",
        image_token_id=files.whole.count("audio_token_id", 151669),
        merge_size=2,
        audio=_in_windows(files, "audioflamingo3", 600, 2),
        tower=_whisper_tower(files.vision, **_projector(files, files.hidden_size), projector_has_bias=bias),
    )


def _glmasr(files: VisionFiles) -> VisionConfig:
    files = _newer(files)
    audio = files.vision
    _check_joined(audio, 4)
    names = {
        "last_norm": "audio_tower.norm",
        "output": "self_attn.o_proj",
        "norms": ("input_layernorm", "post_attention_layernorm"),
        "mlp": ("mlp.fc1", "mlp.fc2"),
    }
    projector = _projector(files, 2 * files.hidden_size)
    tower = _whisper_tower(audio, "hidden_act", names=names, rope_theta=rope_theta_of(audio, 10000.0), **projector)
    audio.choice("num_key_value_heads", (tower.num_heads,), tower.num_heads)
    audio.choice("head_dim", (tower.head_size,), tower.head_size)
    rope, key = audio.object("rope_parameters"), "partial_rotary_factor"
    rope.choice("rope_type", ("default",), "default")
    part = rope.number(key, audio.number(key, 0.5))
    rotary_size = int(tower.head_size * min(part, 1.0))
    if part > 1 or rotary_size < 2 or rotary_size % 2:
        raise rope.error(key, f"must leave an even part of a head of {tower.head_size}{AUDIO_WAY_OUT}")
    return VisionConfig(
        "glmasr",
        image_token_id=files.whole.count("audio_token_id", 59260),
        merge_size=4,
        audio=_in_windows(files, "glmasr", 655, 4, "max_position_embeddings", hears_padding=True, joins=True),
        tower=replace(tower, rotary_size=rotary_size),
    )


_FRAMES_PER_S: Final = 100


_CHUNK_FRAMES: Final = 100
_QWEN3_BEGINNING: Final = "model.audio_tower."


def _qwen3_asr(files: VisionFiles) -> VisionConfig:
    names = {
        "beginning": _QWEN3_BEGINNING,
        "projector": tuple([f"model.multi_modal_projector.linear_{number}" for number in (1, 2)]),
    }
    found = _of_pictures(files, "qwen3_asr_encoder", _MOST_S, names)
    return replace(found, kind="qwen3_asr", image_token_id=files.whole.count("audio_token_id", 151676))


def _check_sizes(files: VisionFiles, hidden_size: int) -> None:
    """Raise ModelConfigError for an encoder without sines for its positions, or with rows that are not the text's."""
    audio = files.vision
    if hidden_size % 2 or hidden_size < 4:
        raise audio.error("d_model", f"must be even, and 4 or more{AUDIO_WAY_OUT}")
    if audio.count("output_dim", 3584) != files.hidden_size:
        raise audio.error("output_dim", f"is not the hidden size of the text, {files.hidden_size}{AUDIO_WAY_OUT}")


def _of_pictures(files: VisionFiles, model_type: str, longest_s: int, names: Mapping[str, Any]) -> VisionConfig:
    """Recordings of at most `longest_s`, convolved as pictures, chunk by chunk. `names` are those of the tower."""
    audio, beginning = files.vision, names["beginning"]
    audio.choice("model_type", (model_type,), model_type)
    hidden_size = audio.count("d_model", 1024)
    _check_sizes(files, hidden_size)
    audio.choice("n_window", (_CHUNK_FRAMES // 2,), 50)
    window = checked_integer(audio.get("n_window_infer", 800), audio.where("n_window_infer"), 1, _MOST_FRAMES)
    if window % _CHUNK_FRAMES:
        raise audio.error("n_window_infer", f"must be a multiple of {_CHUNK_FRAMES}{AUDIO_WAY_OUT}")
    heard = AudioInput(
        num_mel_bins=checked_integer(audio.get("num_mel_bins", 128), audio.where("num_mel_bins"), 1, _MOST_BINS),
        num_frames=longest_s * _CHUNK_FRAMES,
        num_channels=audio.count("downsample_hidden_size", 480),
        chunk_frames=_CHUNK_FRAMES,
        window_chunks=window // _CHUNK_FRAMES,
    )
    if audio.get("max_position_embeddings", heard.num_chunk_rows) != heard.num_chunk_rows:
        raise audio.error("max_position_embeddings", f"must be the rows of a chunk, {heard.num_chunk_rows}")
    activation = activation_of(audio, "activation_function", "gelu")
    tower = TowerConfig(
        names=_whisper_names(
            convolutions=tuple([f"{beginning}conv2d{number}" for number in (1, 2, 3)]),
            last_norm=f"{beginning}ln_post",
            **names,
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
    return VisionConfig("", 0, tower=tower, audio=heard)


_OMNI_BEGINNING: Final = "thinker.audio_tower."
_OMNI_DEFAULTS: Final = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
}
"""Defaults of the class of Qwen3-Omni, which has those of Qwen3-ASR otherwise."""


def _omni_token_of(files: VisionFiles) -> int:
    """Id of the tokens that take rows, which files of Qwen2.5-Omni call otherwise."""
    whole = files.whole
    return whole.count("audio_token_index" if whole.get("audio_token_id") is None else "audio_token_id", 151646)


def _qwen2_5_omni(files: VisionFiles) -> VisionConfig:
    """Windows of frames of the recording alone, and sines as positions within each."""
    audio = files.vision
    names = {
        "beginning": _OMNI_BEGINNING,
        "beginnings": (_OMNI_BEGINNING,),
        "projector": (f"{_OMNI_BEGINNING}proj",),
        "last_norm": f"{_OMNI_BEGINNING}ln_post",
        # Embeddings of the tokens around a recording, which no class reads.
        "unused": (r"thinker\.audio_tower\.audio_bos_eos_token\.weight",),
    }
    tower = _whisper_tower(audio, names=names)
    _check_sizes(files, tower.hidden_size)
    kept: dict[str, Any] = dict.fromkeys(("has_one_level", "has_exact_end"), True)
    heard = _in_windows(files, "qwen2_5_omni_audio", 300, 2, "n_window", 100, **kept)
    if heard.num_rows > _positions(audio, "max_source_positions"):
        raise audio.error("n_window", f"must be at most max_source_positions{AUDIO_WAY_OUT}")
    return VisionConfig("qwen2_5_omni_audio", _omni_token_of(files), merge_size=2, tower=tower, audio=heard)


def _qwen3_omni(files: VisionFiles) -> VisionConfig:
    given = {key: value for key, value in files.vision.config.items() if value is not None}
    files = replace(files, vision=replace(files.vision, config={**_OMNI_DEFAULTS, **given}))
    names = {
        "beginning": _OMNI_BEGINNING,
        "beginnings": (_OMNI_BEGINNING,),
        "projector": tuple([f"{_OMNI_BEGINNING}proj{number}" for number in (1, 2)]),
    }
    found = _of_pictures(files, "qwen3_omni_moe_audio_encoder", 2400, names)
    assert found.audio is not None, found
    # transformers fills chunks to the longest of a call, so one that is alone in it is not filled.
    heard = replace(found.audio, has_exact_end=True)
    return replace(found, kind="qwen3_omni_audio", image_token_id=_omni_token_of(files), audio=heard)


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


_CLASS_TEXT: Final = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}


def opened_thinker(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The contents of one of Qwen's own files as transformers' form has them; those of a file without a text have the
    one of transformers' class. Raises ModelConfigError.
    """
    if config.get(_THINKER) is None:
        return config if config.get("text_config") is not None else {**config, "text_config": _CLASS_TEXT}
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
    "voxtral": _voxtral,
    "glmasr": _glmasr,
    "audioflamingo3": _audioflamingo3,
    "qwen2_5_omni_audio": _qwen2_5_omni,
    "qwen3_omni_audio": _qwen3_omni,
}
"""How config.json is read, by `Family.vision`."""
