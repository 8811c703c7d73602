"""Log-mel spectrograms, as WhisperFeatureExtractor of transformers computes them with numpy."""

from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.audio_settings import FRAME_SAMPLES, HOP_SAMPLES, SAMPLING_RATE, AudioSettings
from spmd_worker.media.audio_windows import Samples

_NUM_BINS: Final = FRAME_SAMPLES // 2 + 1
"""Frequencies of a frame's Fourier transform."""
_MAX_HZ: Final = SAMPLING_RATE / 2
_FRAMES_AT_ONCE: Final = 3000
"""Frames that are transformed at once."""
_LEAST_POWER: Final = 1e-10
_RANGE: Final = 8.0
"""Powers of ten below the loudest that are kept."""

# Slaney's scale of mels: linear up to 1,000 Hz, which is mel 15, and logarithmic above.
_MELS_PER_HZ: Final = 3 / 200
_LINE_HZ: Final = 1000.0
_LINE_MELS: Final = 15.0
_MELS_PER_LOG: Final = 27 / np.log(6.4)


def log_mel(samples: Samples, settings: AudioSettings) -> NDArray[np.float32]:
    """[mels, frames] of a window; samples beyond it are left out, and silence follows shorter ones, or those that are
    too few.
    """
    length = max(len(samples), settings.least_samples) if settings.least_samples else settings.num_samples
    window = np.zeros(length, np.float32)
    window[: len(samples)] = samples[: len(window)]
    powers = _mel_powers(_powers(window), settings.num_mel_bins)[:, : length // HOP_SAMPLES]
    levels = np.log10(np.maximum(powers, _LEAST_POWER)).astype(np.float32)
    levels = np.maximum(levels, levels.max() - np.float32(_RANGE))
    return np.asarray((levels + np.float32(4)) / np.float32(4), np.float32)


def prompt_features(samples: Samples, settings: AudioSettings, num_frames: int) -> NDArray[np.float32]:
    """[mels, num_frames] of a recording in a prompt: of its windows one behind the other, silence behind the last."""
    if not settings.chunk_s:
        return log_mel(samples, settings)[:, :num_frames]
    size = settings.chunk_s * SAMPLING_RATE
    num_windows = -(-num_frames // settings.chunk_frames)
    if settings.has_one_level:
        # Behind an exact end features are those of a longer silence.
        window_s = num_windows * settings.chunk_s
        window_s = min(window_s + 1, settings.window_s) if settings.has_exact_end else window_s
        return log_mel(samples, replace(settings, window_s=window_s))[:, :num_frames]
    each = replace(settings, window_s=settings.chunk_s)
    windows = [log_mel(samples[start : start + size], each) for start in range(0, num_windows * size, size)]
    return np.concatenate(windows, axis=1)[:, :num_frames]


def _powers(window: Samples) -> NDArray[np.float64]:
    """[frequencies, frames]. The last frame, which is half padding, is not Whisper's."""
    padded = np.pad(window, FRAME_SAMPLES // 2, mode="reflect").astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME_SAMPLES)[:-1:HOP_SAMPLES]
    powers = np.empty((_NUM_BINS, len(frames)))
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        part = frames[start : start + _FRAMES_AT_ONCE]
        # transformers rounds to complex64.
        spectrum = np.fft.rfft(part * np.hanning(FRAME_SAMPLES + 1)[:-1]).astype(np.complex64)
        powers[:, start : start + len(part)] = (np.abs(spectrum.astype(np.complex128)) ** 2).T
    return powers


def _mel_powers(powers: NDArray[np.float64], num_mel_bins: int) -> NDArray[np.float64]:
    """[mels, frames]. A filter is 0 but for a few frequencies; these are added in their order, so that no number
    depends on a matrix product's threads.
    """
    mels = np.zeros((num_mel_bins, powers.shape[1]))
    for i, filter_ in enumerate(mel_filters(num_mel_bins)):
        for j in np.flatnonzero(filter_):
            mels[i] += filter_[j] * powers[j]
    return mels


@cache
def mel_filters(num_mel_bins: int) -> NDArray[np.float64]:
    """[mels, frequencies]: triangles between the neighbours' centres, of equal area (Slaney)."""
    centres = _hz(np.linspace(0.0, _mels(_MAX_HZ), num_mel_bins + 2))
    frequencies = np.linspace(0.0, _MAX_HZ, _NUM_BINS)
    widths = np.diff(centres)[:, None]
    distances = centres[:, None] - frequencies
    triangles = np.maximum(0.0, np.minimum(-distances[:-2] / widths[:-1], distances[2:] / widths[1:]))
    filters: NDArray[np.float64] = triangles * (2.0 / (centres[2:] - centres[:-2]))[:, None]
    return filters


def _mels(hz: float) -> float:
    """Mels of a frequency above the line's end."""
    return float(_LINE_MELS + np.log(hz / _LINE_HZ) * _MELS_PER_LOG)


def _hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _LINE_HZ * np.exp((mels - _LINE_MELS) / _MELS_PER_LOG)
    return np.where(mels >= _LINE_MELS, above, mels / _MELS_PER_HZ)
