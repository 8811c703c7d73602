"""SentAudio: prepared audio as it travels to the worker that makes its rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.prepared import AudioFeatures, PreparedImage
from spmd_worker.media.sent_image import SentImage

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


def sent(media: PreparedMedia) -> SentMedia:
    """Prepared media as they travel."""
    return SentImage.of(media) if isinstance(media, PreparedImage) else SentAudio.of(media)
