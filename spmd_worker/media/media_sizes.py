"""MediaSizes: images and audio of another rank's prompt, as far as a rank without their content needs them."""

from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import numpy as np

from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.prepared import AudioFeatures, ImagePixels, PreparedImage, Shapes, image_of_sizes
from spmd_worker.media.sent_audio import PreparedMedia, audio_from
from spmd_worker.media.sent_image import image_from


@dataclass(frozen=True, slots=True)
class AbsentPixels(ImagePixels):
    """Sizes of pixels that are not here."""

    crop_shapes: Shapes = ()

    @property
    def shapes(self) -> Shapes:
        return self.crop_shapes

    @property
    def data(self) -> NoReturn:
        raise RuntimeError("the pixels of this image are not here: only its sizes are")

    @property
    def has_data(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class AbsentFeatures(AudioFeatures):
    """Sizes of features that another rank has."""

    shape: tuple[int, int] = (0, 0)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.shape

    @property
    def data(self) -> NoReturn:
        raise RuntimeError("the features of this audio are not here: only their sizes are")

    @property
    def has_data(self) -> bool:
        return False


class MediaSizes(NamedTuple):
    """Name and `content.sizes` of an image, or of a window of audio."""

    media_id: bytes
    is_audio: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, media: PreparedMedia) -> "MediaSizes":
        return cls(media.media_id, isinstance(media, PreparedAudio), media.content.sizes)

    @property
    def prepared(self) -> PreparedMedia:
        """The image or audio without its content."""
        if self.is_audio:
            bins, frames = self.sizes
            features = AbsentFeatures(np.empty((0, 0), np.float32), (bins, frames))
            return PreparedAudio(self.media_id, features, 0, 0, 0.0, 0.0, 0.0, b"")
        shapes, grid, size, frame = image_of_sizes(self.sizes)
        return PreparedImage(self.media_id, AbsentPixels((), grid, size, frame, shapes), "", 0, 0, (0, 0), b"")


def with_content(media: PreparedMedia, data: bytes | memoryview) -> PreparedMedia:
    """The image or audio with its `content.data`."""
    if isinstance(media, PreparedAudio):
        return replace(media, features=audio_from(media.content.sizes, data))
    return replace(media, pixels=image_from(media.content.sizes, data))
