"""Bytes of an image to RGB pixels: the header is checked before pixels are decoded.

The first frame of an animation, upright by EXIF, transparency composited on the background in whole numbers, 16 bits
shifted to 8. Colour profiles are ignored.
"""

import io
from typing import TYPE_CHECKING, Final

import numpy as np

from spmd_worker.base.config.extras import package_fault
from spmd_worker.base.errors import ConfigError
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MAX_ASPECT_RATIO, MAX_SIDE, MediaLimits
from spmd_worker.media.prepared import NUM_CHANNELS, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_EXPLAINED: Final = 200
_WEBP_HEADER_BYTES: Final = 30
_STRIP_PIXELS: Final = 1 << 20
"""Pixels that are composited at a time."""


def check_pillow() -> None:
    """Raise ConfigError unless Pillow can be imported."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"images need Pillow, which {package_fault('Pillow', 'vision', error, 'PIL')}") from error


def decode(data: bytes, limits: MediaLimits) -> Pixels:
    """Pixels of an image file. Raises MediaError; MemoryError passes."""
    if len(data) > limits.max_image_bytes:
        message = f"the image has {len(data):,} bytes: limits.max_image_bytes={limits.max_image_bytes}"
        raise MediaError("image_too_large", message)
    canvas = _webp_canvas(data)
    if canvas is not None:
        check_size(*canvas, limits)
    image = _opened(data, limits)
    return pixels_of(image, limits)


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a WebP file; None for others. Opening one allocates its canvas, before the size is known."""
    if len(data) < _WEBP_HEADER_BYTES or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if data[12:16] == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if data[12:16] == b"VP8L":
        sides = int.from_bytes(data[21:25], "little")
        return (sides >> 14 & 0x3FFF) + 1, (sides & 0x3FFF) + 1
    return int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF


def _opened(data: bytes, limits: MediaLimits) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=limits.image_formats)
    except UnidentifiedImageError:
        formats = ", ".join(limits.image_formats)
        message = f"{len(data):,} bytes are not an image that can be read: give one of {formats}"
        raise MediaError("image_unreadable", message) from None
    except Image.DecompressionBombError as error:
        raise MediaError("image_too_large", _explained(error)) from None
    except MemoryError:
        raise
    # Decoders raise errors of any class.
    except Exception as error:
        raise MediaError("image_unreadable", _explained(error)) from None


def check_size(height: int, width: int, limits: MediaLimits) -> None:
    """Raise MediaError for a size that is not to be decoded or resized."""
    if height < 1 or width < 1:
        raise MediaError("image_unreadable", f"{width} x {height} pixels: give an image with pixels")
    if max(height, width) > MAX_SIDE or height * width > limits.max_image_pixels:
        rule = f"limits.max_image_pixels={limits.max_image_pixels} in all, and {MAX_SIDE:,} a side, is the limit"
        raise MediaError("image_too_large", f"{width} x {height} pixels: {rule}")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        rule = f"a side must be at most {MAX_ASPECT_RATIO} times the other"
        raise MediaError("image_too_narrow", f"{width} x {height} pixels: {rule}")


def pixels_of(image: "Image", limits: MediaLimits) -> Pixels:
    """Pixels of an opened image. Raises MediaError; MemoryError passes."""
    check_size(image.height, image.width, limits)
    try:
        # The first frame of an animation. The number of frames is not asked: that would read them all.
        image.load()
        return _as_rgb(_upright(image), limits.background)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError("image_unreadable", _explained(error)) from None


def checked_array(pixels: Pixels, limits: MediaLimits) -> Pixels:
    """Pixels that a caller gives. Raises MediaError."""
    if pixels.ndim != 3 or pixels.shape[2] != NUM_CHANNELS or pixels.dtype != np.uint8:
        message = f"an array of {pixels.dtype} {list(pixels.shape)}: give uint8 [height, width, 3]"
        raise MediaError("image_unreadable", message)
    check_size(pixels.shape[0], pixels.shape[1], limits)
    return np.ascontiguousarray(pixels)


def _explained(error: Exception) -> str:
    why = " ".join(str(error).split())[:_MAX_EXPLAINED]
    return f"the image cannot be decoded: {why or type(error).__name__}"


def _upright(image: "Image") -> "Image":
    """Turned by its EXIF orientation; EXIF that cannot be read counts as none."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image) if image.getexif() else image
    except MemoryError:
        raise
    except Exception:  # Pillow's readers of EXIF raise errors of any class
        return image


def _as_rgb(image: "Image", background: tuple[int, int, int]) -> Pixels:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Pillow's own conversion makes all levels above 255 white.
        levels = np.asarray(image) >> 8
        pixels = np.empty((*levels.shape, NUM_CHANNELS), np.uint8)
        pixels[:] = levels.clip(0, 255, out=levels)[:, :, None]
        return pixels
    if image.mode in ("F", "I"):
        raise MediaError("image_unreadable", "pixels of 32 bits have no known range: give 8 or 16 bits")
    if image.has_transparency_data:
        return _composited(np.asarray(image.convert("RGBA")), background)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _composited(rgba: Pixels, background: tuple[int, int, int]) -> Pixels:
    """[height, width, 4] on a colour, rounded half up."""
    height, width = rgba.shape[:2]
    pixels = np.empty((height, width, NUM_CHANNELS), np.uint8)
    colour = np.array(background, np.uint16)
    num_lines = max(_STRIP_PIXELS // width, 1)
    for first in range(0, height, num_lines):
        strip = rgba[first : first + num_lines].astype(np.uint16)
        alpha = strip[:, :, 3:]
        # At most 255 * 255 + 127, which 16 bits hold.
        pixels[first : first + num_lines] = (strip[:, :, :3] * alpha + colour * (255 - alpha) + 127) // 255
    return pixels
