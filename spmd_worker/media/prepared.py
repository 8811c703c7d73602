"""Prepared inputs: pixels as a tower takes them, before they are normalised, and what they become in a prompt; ids and
features that the encoder of an encoder-decoder model reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""[height, width, 3]."""
Features = NDArray[np.float32]
"""[mel bins, frames]."""
NUM_CHANNELS: Final = 3
NUM_FEATURE_BYTES: Final = 4

Shapes = tuple[tuple[int, int], ...]
"""(height, width) of each crop."""


@dataclass(frozen=True, slots=True)
class ImagePixels:
    """The squares or the one picture that a tower reads of an image, in its order. `grid` is the number of patches of
    one of them, down and across; `size` is (height, width) of the image before it was prepared. In kinds whose frames
    of videos are pooled, `frame` is 1 for a frame, 2 for the last one of its video.
    """

    crops: tuple[Pixels, ...]
    grid: tuple[int, int]
    size: tuple[int, int]
    frame: int = 0

    @property
    def shapes(self) -> Shapes:
        return tuple([(len(each), each.shape[1]) for each in self.crops])

    @property
    def data(self) -> bytes:
        """All crops, one behind the other."""
        return b"".join([each.tobytes() for each in self.crops])

    @property
    def has_data(self) -> bool:
        """Whether more than its sizes is here."""
        return True

    @property
    def sizes(self) -> tuple[int, ...]:
        """All integers of it."""
        return image_sizes(self.shapes, self.grid, self.size, self.frame)

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        return sum(height * width for height, width in self.shapes) * NUM_CHANNELS


def image_sizes(shapes: Shapes, grid: tuple[int, int], size: tuple[int, int], frame: int) -> tuple[int, ...]:
    """`ImagePixels.sizes` of these."""
    return (*grid, *size, frame, *[side for shape in shapes for side in shape])


def image_of_sizes(sizes: Sequence[int]) -> tuple[Shapes, tuple[int, int], tuple[int, int], int]:
    """The inverse of `image_sizes`."""
    lines, columns, height, width, frame, *sides = sizes
    return tuple(zip(sides[::2], sides[1::2], strict=True)), (lines, columns), (height, width), frame


def pixels_from(
    data: bytes | memoryview, shapes: Shapes, grid: tuple[int, int], size: tuple[int, int], frame: int = 0
) -> ImagePixels:
    """`ImagePixels` of their `data` and `shapes`."""
    crops, start = [], 0
    whole = np.frombuffer(data, dtype=np.uint8)
    for height, width in shapes:
        stop = start + height * width * NUM_CHANNELS
        crops.append(whole[start:stop].reshape(height, width, NUM_CHANNELS))
        start = stop
    assert start == len(whole), (shapes, len(whole))
    return ImagePixels(tuple(crops), grid, size, frame)


@dataclass(frozen=True, slots=True)
class EncoderIds:
    """Token ids that an encoder reads, special tokens included: a row for each."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AudioFeatures:
    """Log-mel features of one window of audio, which an encoder reads: a row for two frames."""

    features: Features

    @property
    def data(self) -> bytes:
        """All numbers, row by row."""
        return self.features.tobytes()

    @property
    def has_data(self) -> bool:
        """Whether more than its sizes is here."""
        return True

    @property
    def sizes(self) -> tuple[int, int]:
        """Mel bins and frames."""
        return len(self.features), self.features.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of `data`."""
        bins, frames = self.sizes
        return bins * frames * NUM_FEATURE_BYTES


class FramePlace(NamedTuple):
    """Two frames of a video: `number` of the pair, from 0 on, and its positions in time behind the first one.
    `goes_on`: the next pair follows without a token between, and begins at the same position.
    """

    number: int
    time: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image of a prompt. `text` stands in the prompt in place of its placeholder and has `num_rows` image tokens;
    `token_grid` is the number of their lines and columns in families whose positions follow them, (0, 0) otherwise.
    `media_id` names the pixels and how they were prepared (`media_id.py`); `source_digest` is the SHA-256 of the bytes
    given. `frame`: it is two frames of a video, whose first pair has the text and the digest of all.
    """

    media_id: bytes
    pixels: ImagePixels
    text: str
    num_rows: int
    num_patches: int
    token_grid: tuple[int, int]
    source_digest: bytes
    frame: FramePlace | None = None

    @property
    def content(self) -> ImagePixels:
        return self.pixels
