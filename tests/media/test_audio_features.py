"""Features of audio: the numbers of transformers' numpy extractor, and files whose numbers are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_audio import tone
from transformers import WhisperFeatureExtractor

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.audio_features import log_mel, mel_filters
from spmd_worker.media.audio_settings import AudioSettings, read_audio_settings
from spmd_worker.media.audio_windows import Samples
from spmd_worker.model_config.encoder_part import AudioInput


def features_of_transformers(samples: Samples, settings: AudioSettings) -> Any:
    """Its numpy path; it takes the one of torch where there is torch."""
    extractor = WhisperFeatureExtractor(feature_size=settings.num_mel_bins, chunk_length=settings.window_s)
    window = np.zeros(settings.num_samples, np.float32)
    window[: len(samples)] = samples
    return extractor._np_extract_fbank_features(window[None], "cpu")[0]


@pytest.mark.guarantee("Audio features are those of WhisperFeatureExtractor within 1e-6")
@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize("num_samples", [0, 1, 399, 9_999, 16_000])
def test_features_are_those_of_transformers(num_mel_bins: int, num_samples: int):
    settings, samples = AudioSettings(num_mel_bins, 1), tone(num_samples)[:, 0]
    found = log_mel(samples, settings)
    assert found.shape == (num_mel_bins, settings.num_frames) == (num_mel_bins, 100)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.abs(found - features_of_transformers(samples, settings)).max() < 1e-6


def test_window_of_thirty_seconds_is_that_of_transformers():
    settings, samples = AudioSettings(128), tone(123_456)[:, 0]
    found = log_mel(samples, settings)
    assert found.shape == (128, 3000)
    assert np.abs(found - features_of_transformers(samples, settings)).max() < 1e-6
    extractor = WhisperFeatureExtractor(feature_size=128)
    # Its path of torch, which users compare with: "1e-5 tolerance" are its words.
    theirs = extractor(samples, sampling_rate=16_000)["input_features"][0]
    assert np.abs(found - theirs).max() < 1e-4


@pytest.mark.control("Audio features are those of WhisperFeatureExtractor within 1e-6")
def test_window_of_another_shape_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """A symmetric Hann window in place of the periodic one."""
    settings, samples = AudioSettings(80, 1), tone(9_999)[:, 0]
    right = features_of_transformers(samples, settings)
    symmetric = np.hanning(400)
    monkeypatch.setattr(np, "hanning", lambda _: np.append(symmetric, 0.0))
    assert np.abs(log_mel(samples, settings) - right).max() > 1e-6


def test_filters_are_those_of_transformers():
    for num_mel_bins in (80, 128):
        theirs = WhisperFeatureExtractor(feature_size=num_mel_bins).mel_filters.T
        assert np.abs(mel_filters(num_mel_bins) - theirs).max() < 1e-15


# Settings.

AUDIO = AudioInput(80, 3000)
SAVED = WhisperFeatureExtractor(feature_size=80).to_dict()


def folder_of(folder: Path, values: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


def test_settings_are_read_from_both_files(tmp_path: Path):
    assert read_audio_settings(folder_of(tmp_path, SAVED), AUDIO) == AudioSettings(80, 30)
    large = {"feature_extractor": {"feature_size": 128, "chunk_length": 1}}
    folder_of(tmp_path, large, "processor_config.json")
    settings = read_audio_settings(tmp_path, AudioInput(128, 100))
    assert (settings.num_samples, settings.num_frames, settings.num_rows) == (16_000, 100, 50)
    folder_of(tmp_path, {"processor_class": "WhisperProcessor"}, "processor_config.json")
    assert read_audio_settings(tmp_path, AUDIO) == AudioSettings(80, 30)
    assert read_audio_settings(folder_of(tmp_path, {}), AUDIO) == AudioSettings(80, 30)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("feature_extractor_type", "SeamlessM4TFeatureExtractor", "feature_extractor_type"),
        ("sampling_rate", 8000, "16000"),
        ("hop_length", 128, "160"),
        ("n_fft", 512, "400"),
        ("padding_value", 1.0, "0.0"),
        ("padding_side", "left", "right"),
        ("dither", 1e-5, "0.0"),
        ("feature_size", 128, "num_mel_bins of config.json, 80"),
        ("feature_size", "80", "feature_size"),
        ("chunk_length", 10, "makes 1000 frames and the encoder of config.json reads 3000"),
        ("chunk_length", 0, "chunk_length"),
    ],
)
def test_odd_setting_is_refused(tmp_path: Path, key: str, value: Any, words: str):
    folder = folder_of(tmp_path, {**SAVED, key: value})
    with pytest.raises(ModelConfigError, match=words) as caught:
        read_audio_settings(folder, AUDIO)
    assert key in str(caught.value)
    assert "preprocessor_config.json" in str(caught.value)


def test_missing_settings_are_named(tmp_path: Path):
    with pytest.raises(ModelConfigError, match=r"preprocessor_config\.json: add it"):
        read_audio_settings(tmp_path, AUDIO)
