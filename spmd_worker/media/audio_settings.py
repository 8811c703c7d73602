"""AudioSettings: the numbers by which a checkpoint's audio becomes features, and how they are read.

Numbers of Whisper's that no checkpoint changes are constants; a file with others is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.processor_settings import json_object
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.encoder_part import AudioInput

SAMPLING_RATE: Final = 16_000
"""Samples of a second."""
HOP_SAMPLES: Final = 160
"""Samples from frame to frame."""
FRAME_SAMPLES: Final = 400
"""Samples of a frame, and of its Fourier transform (`n_fft`)."""
_FILES: Final = ("processor_config.json", "preprocessor_config.json")
_CLASS: Final = "WhisperFeatureExtractor"
_UNPADDED_CLASS: Final = "Qwen3ASRFeatureExtractor"
_KEPT: Final = ("hears_padding", "counts_padding", "has_one_level", "has_exact_end")
CHUNK_FRAMES: Final = 100
"""Frames that the convolutions of Qwen3-ASR and Qwen3-Omni see at once."""
_FIXED: Final[Mapping[str, Any]] = {
    "sampling_rate": SAMPLING_RATE,
    "hop_length": HOP_SAMPLES,
    "n_fft": FRAME_SAMPLES,
    "padding_value": 0.0,
    "padding_side": "right",
    "dither": 0.0,
}


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """`window_s` is the length of audio that an encoder reads: shorter audio is padded with silence, longer audio is
    cut (`audio_windows.py`). `kind`: audio is in prompts of text, of a model of this kind (`audio_tokens.py`); "" for
    an encoder's input. `least_samples`: shorter audio is padded to these alone, and longer audio is not.

    `chunk_s`: what an encoder reads at once of a recording in a prompt, 0 for all. Its rows and their padding are those
    of `AudioInput`, `rows_per_token` of them in a token; so is `has_exact_end`.
    """

    num_mel_bins: int
    window_s: int = 30
    kind: str = ""
    least_samples: int = 0
    chunk_s: int = 0
    rows_per_token: int = 1
    hears_padding: bool = False
    counts_padding: bool = False
    has_one_level: bool = False
    has_exact_end: bool = False

    @property
    def chunk_frames(self) -> int:
        """Frames that an encoder reads at once."""
        return (self.chunk_s or self.window_s) * SAMPLING_RATE // HOP_SAMPLES

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.window_s * SAMPLING_RATE

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return self.num_samples // HOP_SAMPLES

    @property
    def num_rows(self) -> int:
        """The encoder's second convolution has stride 2."""
        return self.num_frames // 2


def read_audio_settings(folder: Path, audio: AudioInput, kind: str = "", rows_per_token: int = 1) -> AudioSettings:
    """Read `preprocessor_config.json`, or the part of `processor_config.json` for audio. A missing key has the value
    that its class of transformers has. Raises ModelConfigError.
    """
    reader = _reader(folder)
    if audio.chunk_frames:
        return _of_any_length(reader, audio, kind)
    reader.choice("feature_extractor_type", (_CLASS,), _CLASS)
    for key, value in _FIXED.items():
        reader.choice(key, (value,), value)
    length, given = reader.count("chunk_length", 30), dict[str, Any]()
    if audio.window_frames:
        kept = {name: getattr(audio, name) for name in _KEPT}
        given = {**kept, "window_s": _longest_s(folder, audio), "chunk_s": length}
        if audio.has_exact_end:
            # The file has the longest recording.
            window_s = audio.window_frames * HOP_SAMPLES // SAMPLING_RATE
            if length % window_s:
                raise reader.error("chunk_length", f"must be whole windows of the encoder, of {window_s} s")
            given |= {"window_s": min(given["window_s"], length), "chunk_s": window_s}
    settings = AudioSettings(
        **{"num_mel_bins": reader.count("feature_size", 80), "window_s": length, "kind": kind, **given},
        rows_per_token=rows_per_token,
    )
    if settings.num_mel_bins != audio.num_mel_bins:
        raise reader.error("feature_size", f"must be num_mel_bins of config.json, {audio.num_mel_bins}")
    if settings.chunk_frames != 2 * audio.num_rows:
        rule = f"makes {settings.chunk_frames} frames and the encoder of config.json reads {2 * audio.num_rows}"
        raise reader.error("chunk_length", rule)
    return settings


def _longest_s(folder: Path, audio: AudioInput) -> int:
    """Seconds of the longest recording, in complete windows: those of the model, or fewer by the processor's file."""
    frames_per_s = SAMPLING_RATE // HOP_SAMPLES
    longest, window = audio.num_frames // frames_per_s, audio.window_frames // frames_per_s
    path = folder / _FILES[0]
    processor = ConfigReader(json_object(path) or {}, path)
    if processor.get("max_audio_len") is None:
        return longest
    own = checked_integer(processor.get("max_audio_len"), processor.where("max_audio_len"), window, MAX_INT)
    return min(longest, own // window * window)


def _of_any_length(reader: ConfigReader, audio: AudioInput, kind: str) -> AudioSettings:
    """The settings of a model that hears as many frames as a recording has."""
    # Qwen's own files name Whisper's, whose features Qwen's own code does not pad to a window.
    reader.choice("feature_extractor_type", (_UNPADDED_CLASS, _CLASS), _UNPADDED_CLASS)
    for key, value in _FIXED.items():
        reader.choice(key, (value,), value)
    reader.choice("n_window", (CHUNK_FRAMES // 2,), CHUNK_FRAMES // 2)
    least = reader.get("min_length", FRAME_SAMPLES if kind == "qwen3_omni_audio" else 8000)
    least = checked_integer(least, reader.where("min_length"), FRAME_SAMPLES, audio.num_frames * HOP_SAMPLES)
    num_mel_bins = reader.count("feature_size", 128)
    if num_mel_bins != audio.num_mel_bins:
        raise reader.error("feature_size", f"must be num_mel_bins of config.json, {audio.num_mel_bins}")
    return AudioSettings(num_mel_bins, audio.num_frames * HOP_SAMPLES // SAMPLING_RATE, kind, least)


def has_audio_processor(folder: Path) -> bool:
    """Whether a folder says how audio is prepared."""
    found = _found_reader(folder)
    return found is not None and bool(found.config)


def _reader(folder: Path) -> ConfigReader:
    found = _found_reader(folder)
    if found is not None:
        return found
    files = f"neither {_FILES[0]} with feature_extractor nor {_FILES[1]}"
    raise ModelConfigError(f"{folder} has {files}: add it, audio cannot be prepared without it")


def _found_reader(folder: Path) -> ConfigReader | None:
    for path in (folder / name for name in _FILES):
        found = json_object(path)
        if found is not None and path.name == _FILES[0]:
            found = found.get("feature_extractor")
        if isinstance(found, dict):
            return ConfigReader(found, path)
    return None
