"""WAV files of plain numbers (PCM and floats), read without a decoder; other codings are the decoder's."""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.errors import MediaError

Block = NDArray[np.float32]
"""[frames, channels]."""
BLOCK_SAMPLES: Final = 1 << 18
"""Samples, of all channels, that are decoded at a time."""
_PCM: Final = 1
_FLOAT: Final = 3
_EXTENSIBLE: Final = 0xFFFE
_CODINGS: Final = ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64))
_UNKNOWN_SIZE: Final = 0x7FFF_0000
"""Programs that write to a pipe declare sizes from here on: the samples go to the end of the file."""


class Recording(NamedTuple):
    """Audio that is decoded block by block. `num_frames` is what the file declares, None if that is not known."""

    sampling_rate: int
    num_channels: int
    num_frames: int | None
    blocks: Iterator[Block]


class _Format(NamedTuple):
    coding: int
    num_channels: int
    sampling_rate: int
    num_frame_bytes: int
    num_bits: int


def open_wave(data: bytes) -> Recording | None:
    """None for other files, and other codings. Raises MediaError for a file that is cut short."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    found: _Format | None = None
    for name, start, num_bytes in _chunks(data):
        if name == b"fmt ":
            found = _format(data[start : start + num_bytes])
        elif name == b"data":
            return None if found is None else _recording(data, start, num_bytes, found)
    raise MediaError("audio_unreadable", "the WAV file has no samples behind its header: it is cut short")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and declared size of each chunk of a RIFF file."""
    at = 12
    while at + 8 <= len(data):
        name, num_bytes = struct.unpack_from("<4sI", data, at)
        yield name, at + 8, num_bytes
        at += 8 + num_bytes + num_bytes % 2


def _format(chunk: bytes) -> _Format | None:
    """None for a coding that is not plain numbers."""
    if len(chunk) < 16:
        return None
    coding, num_channels, sampling_rate, _, num_frame_bytes, num_bits = struct.unpack_from("<HHIIHH", chunk)
    if coding == _EXTENSIBLE and len(chunk) >= 26:
        (coding,) = struct.unpack_from("<H", chunk, 24)
    is_plain = (coding, num_bits) in _CODINGS and num_frame_bytes * 8 == num_channels * num_bits > 0
    return _Format(coding, num_channels, sampling_rate, num_frame_bytes, num_bits) if is_plain else None


def _recording(data: bytes, start: int, num_bytes: int, form: _Format) -> Recording:
    num_left = len(data) - start
    if num_bytes >= _UNKNOWN_SIZE:
        num_bytes = num_left
    if num_bytes > num_left:
        message = f"the WAV file declares {num_bytes:,} bytes of samples and has {num_left:,}: it is cut short"
        raise MediaError("audio_unreadable", message)
    num_frames = num_bytes // form.num_frame_bytes
    blocks = _blocks(memoryview(data)[start : start + num_frames * form.num_frame_bytes], form)
    return Recording(form.sampling_rate, form.num_channels, num_frames, blocks)


def _blocks(content: memoryview, form: _Format) -> Iterator[Block]:
    size = max(BLOCK_SAMPLES // form.num_channels, 1) * form.num_frame_bytes
    for start in range(0, len(content), size):
        yield _levels(content[start : start + size], form).reshape(-1, form.num_channels)


def _levels(content: memoryview, form: _Format) -> Block:
    """Numbers from -1 to 1, with libsndfile's bits: whole numbers become float32 before they are divided."""
    if form.coding == _FLOAT:
        return np.frombuffer(content, f"<f{form.num_bits // 8}").astype(np.float32)
    if form.num_bits == 8:
        return (np.frombuffer(content, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if form.num_bits == 24:
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)
    whole = np.frombuffer(content, f"<i{form.num_bits // 8}")
    return whole.astype(np.float32) / np.float32(1 << form.num_bits - 1)
