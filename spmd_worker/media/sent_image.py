"""SentImage: a prepared image as it travels to the worker, or the replica, that makes its rows."""

from collections.abc import Sequence
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
    def sizes(self) -> tuple[int, ...]:
        """All integers but those of the name."""
        return (*self.grid, *self.size, *[side for shape in self.shapes for side in shape])

    @property
    def content(self) -> ImagePixels:
        return image_from(self.sizes, self.data)

    @property
    def prepared(self) -> PreparedImage:
        """The image as far as an engine needs it."""
        return PreparedImage(self.media_id, self.content, "", 0, 0, (0, 0), b"")


def image_from(sizes: Sequence[int], data: bytes | memoryview) -> ImagePixels:
    """Pixels of the `sizes` and `data` of a `SentImage`."""
    lines, columns, height, width, *sides = sizes
    shapes = tuple(zip(sides[::2], sides[1::2], strict=True))
    return pixels_from(data, shapes, (lines, columns), (height, width))
