"""SentImage: a prepared image as it travels to the worker that makes its rows."""

from collections.abc import Sequence
from typing import NamedTuple

from spmd_worker.media.prepared import ImagePixels, PreparedImage, image_of_sizes, image_sizes, pixels_from


class SentImage(NamedTuple):
    """Name and pixels of an image of a prompt that is expanded already; `data` are those of all crops."""

    media_id: bytes
    shapes: tuple[tuple[int, int], ...]
    grid: tuple[int, int]
    size: tuple[int, int]
    data: bytes
    frame: int = 0

    @classmethod
    def of(cls, image: PreparedImage) -> "SentImage":
        pixels = image.pixels
        return cls(image.media_id, pixels.shapes, pixels.grid, pixels.size, pixels.data, pixels.frame)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All integers but those of the name."""
        return image_sizes(self.shapes, self.grid, self.size, self.frame)

    @property
    def content(self) -> ImagePixels:
        return pixels_from(self.data, self.shapes, self.grid, self.size, self.frame)


def image_from(sizes: Sequence[int], data: bytes | memoryview) -> ImagePixels:
    """Pixels of the `sizes` and `data` of a `SentImage`."""
    return pixels_from(data, *image_of_sizes(sizes))
