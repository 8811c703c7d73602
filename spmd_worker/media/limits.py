"""MediaLimits: bounds on the images and videos of a prompt, before a model sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.errors import ConfigError

KNOWN_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
DEFAULT_FORMATS: Final = KNOWN_FORMATS[:-1]
"""Other formats are never tried: their decoders are rarely used and have had faults."""
MAX_SIDE: Final = 16_384
MAX_ASPECT_RATIO: Final = 200


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """`max_image_pixels` is checked against the header, before pixels are decoded; `max_image_tokens` is for one image,
    or two frames of a video, and `max_video_tokens` for a video. `background` is the colour behind transparent pixels.
    """

    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 64_000_000
    max_images: int = 32
    max_image_tokens: int = 4096
    max_videos: int = 4
    max_video_bytes: int = 100 << 20
    max_video_frames: int = 768
    max_video_tokens: int = 32_768
    image_formats: tuple[str, ...] = DEFAULT_FORMATS
    background: tuple[int, int, int] = (255, 255, 255)

    def __post_init__(self) -> None:
        unknown = [name for name in self.image_formats if name not in KNOWN_FORMATS]
        if unknown or not self.image_formats:
            known = ", ".join(KNOWN_FORMATS)
            raise ConfigError(f"limits.image_formats={list(self.image_formats)} must list some of {known}")
        if len(self.background) != 3 or not all(0 <= level <= 255 for level in self.background):
            raise ConfigError(f"model.image_background={list(self.background)} must be three numbers from 0 to 255")


def limits_of(values: Mapping[str, Any]) -> MediaLimits:
    """The limits whose `asdict` travelled as JSON."""
    listed = {key: tuple(values[key]) for key in ("image_formats", "background")}
    return MediaLimits(**{**values, **listed})
