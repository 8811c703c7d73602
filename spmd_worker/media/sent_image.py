"""SentImage: a prepared image as it travels to the worker that makes its rows."""

from typing import NamedTuple

from spmd_worker.media.prepared import ImagePixels, PreparedImage, pixels_from


class SentImage(NamedTuple):
    """Name and pixels of an image of a prompt that is expanded already; `data` are those of all crops."""

    media_id: bytes
    shapes: tuple[tuple[int, int], ...]
    grid: tuple[int, int]
    size: tuple[int, int]
    data: bytes

    @classmethod
    def of(cls, image: PreparedImage) -> "SentImage":
        pixels = image.pixels
        return cls(image.media_id, pixels.shapes, pixels.grid, pixels.size, pixels.data)

    @property
    def pixels(self) -> ImagePixels:
        return pixels_from(self.data, self.shapes, self.grid, self.size)
