"""Samples of files: the bits of transformers' loader, which are librosa's, for all formats, rates and channels."""

import sys

import numpy as np
import pytest
from hostile_audio import MP3, WAVE, encoded, tone, wave
from transformers.audio_utils import _load_audio_soundfile

from spmd_worker.media import audio_decode, audio_wave
from spmd_worker.media.audio_decode import decode_audio
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_wave import open_wave
from spmd_worker.media.errors import MediaError

LIMITS = AudioLimits()
PLAIN = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
CODINGS = [
    *(("WAV", coding) for coding in (*PLAIN, "ULAW")),
    *(("WAVEX", coding) for coding in ("PCM_16", "PCM_24", "FLOAT")),
    *(("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")),
]


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (audio_wave, audio_decode):
        monkeypatch.setattr(module, "BLOCK_SAMPLES", 2_000)


@pytest.mark.guarantee("Samples of audio files have the bits of transformers' loader")
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("kind", "coding"), CODINGS)
def test_samples_have_bits_of_transformers(kind: str, coding: str):
    """Decoded in many blocks here, at once there."""
    for rate, num_channels in ((16_000, 1), (48_000, 2), (8_000, 1), (24_000, 2)):
        data = encoded(tone(rate // 4 + 77, num_channels), kind, coding, rate)
        found = decode_audio(data, LIMITS)
        assert np.array_equal(found, _load_audio_soundfile(data, 16_000))
        assert found.flags.c_contiguous


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("rate", "num_channels"), [(44_100, 2), (192_000, 1), (1_000, 1), (16_000, 8), (11_025, 13)])
def test_rates_and_channels_have_bits_of_transformers(rate: int, num_channels: int):
    data = encoded(tone(9_001, num_channels), "WAV", "FLOAT", rate)
    assert np.array_equal(decode_audio(data, LIMITS), _load_audio_soundfile(data, 16_000))


@pytest.mark.control("Samples of audio files have the bits of transformers' loader")
def test_blocks_resampled_apart_have_other_samples():
    data = encoded(tone(12_000), "WAV", "FLOAT", 48_000)
    halves = [encoded(part, "WAV", "FLOAT", 48_000) for part in np.split(tone(12_000), 2)]
    apart = np.concatenate([decode_audio(each, LIMITS) for each in halves])
    assert len(apart) == 4_000
    assert not np.array_equal(apart, _load_audio_soundfile(data, 16_000))


@pytest.mark.parametrize("coding", PLAIN)
def test_plain_wave_needs_no_package(coding: str, monkeypatch: pytest.MonkeyPatch):
    data = encoded(tone(500), "WAV", coding)
    expected = _load_audio_soundfile(data, 16_000)
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, name, None)
    assert np.array_equal(decode_audio(data, LIMITS), expected)


@pytest.mark.parametrize(("data", "package"), [(MP3, "soundfile"), (wave(rate=8_000), "soxr")], ids=["MP3", "8 kHz"])
def test_missing_package_is_named(data: bytes, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MediaError, match=rf"{package}.*pip install 'spmd-worker\[audio\]'") as caught:
        decode_audio(data, LIMITS)
    assert caught.value.code == "extra_missing"


def test_wave_reader_leaves_other_codings():
    assert open_wave(encoded(tone(), "WAV", "ULAW")) is None
    assert open_wave(MP3) is None
    found = open_wave(WAVE)
    assert found is not None
    assert found[:3] == (16_000, 1, 4000)
