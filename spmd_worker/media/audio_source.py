"""Audio as callers give it: files by their bytes, paths and data URLs, or samples with their rate.

`Given` is what is left of the many forms: a file that is read later, or one array of float32.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.audio_limits import MAX_CHANNELS, AudioLimits
from spmd_worker.media.audio_settings import SAMPLING_RATE
from spmd_worker.media.errors import MediaError

AudioSource: TypeAlias = bytes | str | Path | NDArray[Any] | list[float] | tuple[Any, int | float] | Mapping[str, Any]
"""Bytes of a file, a data URL, a file URL or a path; samples [samples] or [channels, samples] of floats at 16 kHz;
(samples, rate); {"array", "sampling_rate"} or {"bytes", "path"}, as Hugging Face datasets have them.
"""
_FORMS: Final = 'bytes, a path, a data URL, floats, (floats, sampling rate) or {"array", "sampling_rate"}'


class GivenSamples(NamedTuple):
    """[channels, samples], float32."""

    samples: NDArray[np.float32]
    sampling_rate: int

    @property
    def digest(self) -> bytes:
        """SHA-256 of the rate, the shape and all numbers."""
        described = b"%d %d %d\n" % (self.sampling_rate, *self.samples.shape)
        return sha256(described + self.samples.tobytes()).digest()


Given: TypeAlias = bytes | str | Path | GivenSamples


def given_audio(source: AudioSource, limits: AudioLimits) -> Given:
    """Raises MediaError."""
    if isinstance(source, bytes | str | Path):
        return source
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Mapping):
        return _of_mapping(source, limits)
    if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], int | float):
        return _samples(source[0], source[1], limits)
    return _samples(source, SAMPLING_RATE, limits)


def _of_mapping(source: Mapping[str, Any], limits: AudioLimits) -> Given:
    if source.get("array") is not None:
        if "sampling_rate" not in source:
            raise MediaError("audio_unreadable", '{"array"} has no "sampling_rate": give both')
        return _samples(source["array"], source["sampling_rate"], limits)
    for key, kinds in (("bytes", bytes), ("path", str | Path)):
        value = source.get(key)
        if isinstance(value, kinds):
            given: Given = value
            return given
    raise MediaError("audio_unreadable", f"an object with {', '.join(map(repr, source))} is not audio: give {_FORMS}")


def _samples(array: Any, rate: Any, limits: AudioLimits) -> GivenSamples:
    if not isinstance(rate, int | float | np.number) or not 0 < rate < 1 << 31 or int(rate) != rate:
        raise MediaError("audio_unreadable", f"the sampling rate {rate!r} must be a whole number of Hz")
    samples = _array(array)
    if samples.dtype.kind != "f":
        rule = "must be floats from -1 to 1: divide whole numbers by their full scale, 32768 for int16"
        raise MediaError("audio_unreadable", f"samples of {samples.dtype} {rule}")
    channels = samples[None] if samples.ndim == 1 else samples
    if channels.ndim != 2 or not 1 <= len(channels) <= MAX_CHANNELS:
        rule = f"must be [samples], or [channels, samples] of at most {MAX_CHANNELS} channels: transpose them"
        raise MediaError("audio_unreadable", f"samples of shape {list(samples.shape)} {rule}")
    if channels.shape[1] > limits.max_audio_s * rate:
        shown = f"limits.max_audio_s={limits.max_audio_s}"
        raise MediaError("audio_too_long", f"the audio is longer than {shown}: cut it into parts, or raise it")
    with np.errstate(over="ignore"):
        return GivenSamples(np.ascontiguousarray(channels, np.float32), int(rate))


def _array(array: Any) -> NDArray[Any]:
    """An array, a tensor on the host, or a list of numbers as an array."""
    if not isinstance(array, list | tuple) and not hasattr(array, "__array__"):
        raise MediaError("audio_unreadable", f"{type(array).__name__} is not audio: give {_FORMS}")
    try:
        found = np.asarray(array)
    # Tensors on a device, or with a history, raise errors of their own.
    except (TypeError, ValueError, RuntimeError) as error:
        raise MediaError("audio_unreadable", f"{type(array).__name__} is not an array of samples: {error}") from None
    return found.astype(np.float32) if isinstance(array, list | tuple) and found.dtype.kind in "iu" else found
