"""VideoPart: a video of a prompt as it is given, its frames or a file, and the numbers given with it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_float, plain_int, shown

DEFAULT_FPS: Final = 2.0
"""Frames a second of given frames, and of those taken of a file, where nothing says how many: the rate at which Qwen's
models sample.
"""
_FRAMES_URL: Final = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)
_RATES: Final = ("fps", "sample_fps")
_MOST_FRAMES: Final = 1 << 24
_LEAST_FPS: Final = 0.001
_MOST_FPS: Final = 1000.0
_OF_FILES: Final = {"num_frames": "num_frames", "nframes": "num_frames"} | {
    each: each for each in ("min_frames", "max_frames")
}
VIDEO_OPTIONS: Final = (*_RATES, *_OF_FILES)
"""Numbers that a part of a conversation may have beside its video."""


@dataclass(frozen=True, slots=True, eq=False)
class VideoPart:
    """`video` is a list of frames, each as an image is given, an array of them, or a file: bytes, a path or a data URL.
    None is that of a part of a conversation whose video a row has elsewhere.

    Given frames are those at `indices` of a video of `total` frames, `fps` of them a second; without `indices` they are
    all. Of a file `fps` a second are taken, `min_frames` to `max_frames`, or `num_frames`.
    """

    video: Any = None
    fps: float | None = None
    indices: tuple[int, ...] = ()
    total: float = 0.0
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    @property
    def is_file(self) -> bool:
        return isinstance(self.video, str | bytes | Path)

    @property
    def texts(self) -> list[str | bytes]:
        """Paths, data URLs and bytes of the frames, or of a file."""
        given = self.video if isinstance(self.video, list | tuple) else [self.video]
        return [each for each in given if isinstance(each, str | bytes)]


def is_open(source: Any) -> bool:
    """Whether a part of a conversation has its type alone."""
    return source is None or (isinstance(source, VideoPart) and source.video is None)


def num_source_bytes(source: Any) -> int:
    """Characters and bytes of an image, recording or video of a row."""
    if isinstance(source, VideoPart):
        return sum([len(each) for each in source.texts])
    return len(source or "")


def video_part(video: Any, options: Mapping[str, Any]) -> VideoPart:
    """The video with its `VIDEO_OPTIONS`; others are ignored. A data URL of JPEG frames between commas, as vLLM has it,
    becomes its frames. Raises ValueError, which names the key.
    """
    rates = {each: _rate(each, options[each]) for each in _RATES if options.get(each) is not None}
    if len(set(rates.values())) > 1:
        raise ValueError(f"has {' and '.join(rates)}, which differ: give one of them")
    fps = next(iter(rates.values()), None)
    if isinstance(video, str) and (beginning := _FRAMES_URL.match(video)):
        video = [f"data:image/jpeg;base64,{each}" for each in video[beginning.end() :].split(",")]
    if isinstance(video, list | tuple) and not video:
        raise ValueError("has no frames: give one at least")
    given = [each for each in _OF_FILES if options.get(each) is not None]
    numbers = {_OF_FILES[each]: int(_checked(each, options[each], plain_int(options[each]))) for each in given}
    bounds = [numbers.get(each) for each in ("num_frames", "min_frames", "max_frames")]
    part = VideoPart(video, fps, (), 0.0, *bounds)
    if not part.is_file and given:
        raise ValueError(f"has {given[0]}, which is for files: given frames are all taken")
    if part.is_file and "sample_fps" in rates:
        raise ValueError("has sample_fps, which is for given frames: fps is what is taken of a file")
    if len(numbers) < len(given) or ("num_frames" in numbers and (rates or len(numbers) > 1)):
        raise ValueError(f"has {', '.join([*rates, *given])}: give num_frames, or fps and bounds")
    if numbers.get("min_frames", 1) > numbers.get("max_frames", _MOST_FRAMES):
        raise ValueError("has min_frames above max_frames")
    return part


def video_with_metadata(video: Any, metadata: Mapping[str, Any]) -> VideoPart:
    """Frames with the metadata that vLLM and qwen-vl-utils give beside them: `fps` of the source, and `frames_indices`
    of `total_num_frames`. Raises ValueError.
    """
    # transformers' VideoMetadata is a mapping whose `get` raises AttributeError.
    values = dict(metadata)
    part = video_part(video, {"fps": values.get("fps")})
    if part.is_file:
        raise ValueError("is a file with metadata, which go with frames: give a dict with video and fps")
    if values.get("do_sample_frames"):
        raise ValueError("has do_sample_frames: given frames are all taken, leave it out")
    indices = values.get("frames_indices")
    if indices is None:
        return part
    try:
        listed = [plain_int(each) for each in indices]
    except TypeError:
        listed = []
    if not listed or any(each is None or not 0 <= each < _MOST_FRAMES for each in listed):
        raise ValueError(f"has frames_indices={shown(indices)}, which must be whole numbers of frames")
    numbers = tuple([each for each in listed if each is not None])
    given = values.get("total_num_frames")
    given = max(numbers) + 1 if given is None else given
    total = _checked("total_num_frames", given, plain_float(given))
    return VideoPart(part.video, part.fps, numbers, total)


def _rate(name: str, value: Any) -> float:
    number = plain_float(value)
    if number is None or not math.isfinite(number) or not _LEAST_FPS <= number <= _MOST_FPS:
        raise ValueError(f"has {name}={shown(value)}, which must be frames a second, {_LEAST_FPS:g} to {_MOST_FPS:g}")
    return number


def _checked(name: str, value: Any, number: float | None) -> float:
    if number is None or not 1 <= number < _MOST_FRAMES:
        raise ValueError(f"has {name}={shown(value)}, which must be a number of frames")
    return number
