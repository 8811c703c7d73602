"""SentAudio: prepared audio as it travels to the worker that makes its rows."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.prepared import AudioFeatures, ImagePixels, PreparedImage
from spmd_worker.media.sent_image import SentImage, image_from

PreparedMedia = PreparedImage | PreparedAudio
"""Content that a request's rows are made of, but an encoder's text."""


class SentAudio(NamedTuple):
    """Name and features [mels, frames] of one window of audio; `data` are float32, row by row."""

    media_id: bytes
    shape: tuple[int, int]
    data: bytes

    @classmethod
    def of(cls, audio: PreparedAudio) -> "SentAudio":
        features = audio.features.features
        return cls(audio.media_id, (len(features), features.shape[1]), audio.features.data)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape

    @property
    def content(self) -> AudioFeatures:
        return audio_from(self.sizes, self.data)


SentMedia = SentImage | SentAudio


def audio_from(sizes: Sequence[int], data: bytes | memoryview) -> AudioFeatures:
    """Features of the `sizes` and `data` of a `SentAudio`."""
    # A copy: torch takes no memory that may not be written.
    return AudioFeatures(np.frombuffer(data, dtype=np.float32).reshape(sizes).copy())


def content_from(sizes: Sequence[int], data: bytes | memoryview) -> ImagePixels | AudioFeatures:
    """Pixels or features of `SentMedia.sizes` and its `data`. Images have more sizes than audio."""
    return audio_from(sizes, data) if len(sizes) == _NUM_AUDIO_SIZES else image_from(sizes, data)


_NUM_AUDIO_SIZES: Final = 2


def sent(media: PreparedMedia) -> SentMedia:
    """Prepared media as they travel."""
    return SentImage.of(media) if isinstance(media, PreparedImage) else SentAudio.of(media)
