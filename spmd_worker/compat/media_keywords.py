"""vLLM's keywords about images and audio whose values are objects, as ours."""

import json
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_bool, plain_int, shown
from spmd_worker.base.config.schema import IMAGE_PROCESSOR_KEYS, VIDEO_PROCESSOR_KEYS
from spmd_worker.base.errors import ConfigError

MEDIA_KEYWORDS: Final = ("limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "language_model_only")
_SOUND: Final = ("use_audio_in_video", "load_audio_from_video")
_BACKGROUND: Final = "rgba_background_color"
_PIXELS: Final[Mapping[str, str]] = {"min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels"}


def media_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our keywords and values for those of `MEDIA_KEYWORDS` in `given`. Raises ConfigError for other keys and kinds of
    media, and for a value that differs from that of our own keyword.
    """
    own = {
        **_processor_values(_mapping(given, "mm_processor_kwargs")),
        **_background(_mapping(given, "media_io_kwargs")),
        **_most_media(_mapping(given, "limit_mm_per_prompt")),
    }
    if plain_bool(given.get("language_model_only")):
        own |= {"max_images": 0, "max_videos": 0, "max_audios": 0}
    for name, value in own.items():
        if given.get(name) not in (None, value):
            raise ConfigError(f"{name}={shown(given[name])}, and vLLM's keyword says {shown(value)}: give one of them")
    return own


def sound_fault(values: Any) -> str:
    """The fault of processor's keywords that ask for the sound of videos; empty without one."""
    asked = [key for key in _SOUND if isinstance(values, Mapping) and values.get(key)]
    rule = "is not supported: the sound of videos is not heard, give it as a recording beside the video"
    return f"mm_processor_kwargs has {asked[0]}, which {rule}" if asked else ""


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)} must be a dict")
    return value


def _most_media(limits: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for kind, value in limits.items():
        number = plain_int(value.get("count", 1) if isinstance(value, Mapping) else value)
        if number is None or number < 0:
            raise ConfigError(f"limit_mm_per_prompt={{{kind!r}: {shown(value)}}} must be a number, 0 or more")
        if kind in ("image", "video", "audio"):
            found[f"max_{kind}s"] = number
        elif number:
            raise ConfigError(f"limit_mm_per_prompt has the kind {kind!r}: give image, video or audio")
    return found


def _processor_values(values: Mapping[str, Any]) -> dict[str, Any]:
    if fault := sound_fault(values):
        raise ConfigError(fault)
    values = {name: value for name, value in values.items() if name not in _SOUND}
    found: dict[str, Any] = {_PIXELS[name]: value for name, value in values.items() if name in _PIXELS}
    others = {name: json.dumps(value) for name, value in values.items() if name not in _PIXELS and value is not None}
    # Keys of both are those of images.
    of_videos = [name for name in others if name in VIDEO_PROCESSOR_KEYS and name not in IMAGE_PROCESSOR_KEYS]
    if of_videos:
        found["video_processor"] = {name: others.pop(name) for name in of_videos}
    return found | ({"image_processor": others} if others else {})


def _background(values: Mapping[str, Any]) -> dict[str, Any]:
    of_images = values.get("image") or {}
    unknown = [*(kind for kind in values if kind != "image"), *(key for key in of_images if key != _BACKGROUND)]
    if unknown:
        raise ConfigError(f"media_io_kwargs has {unknown[0]!r}: give {{'image': {{{_BACKGROUND!r}: [r, g, b]}}}}")
    if _BACKGROUND not in of_images:
        return {}
    colour = list(of_images[_BACKGROUND]) if isinstance(of_images[_BACKGROUND], list | tuple) else []
    numbers = [plain_int(each) for each in colour]
    if len(numbers) not in (3, 4) or any(each is None or not 0 <= each <= 255 for each in numbers):
        raise ConfigError(f"{_BACKGROUND}={shown(of_images[_BACKGROUND])} must be three numbers from 0 to 255")
    return {"image_background": "#" + "".join(f"{each:02x}" for each in numbers[:3])}
