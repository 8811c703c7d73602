"""Frames that are taken of a file of video: the rules of transformers' processors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from spmd_worker.media.errors import MediaError
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.media.video_processor import VideoProcessor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Numbers that a caller gives in place of the processor's; None: the processor's."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


class _Wish(NamedTuple):
    """`rate` frames a second are wished of a video of `total` frames, `fps` of which are a second; `least` to `most`.
    `is_callers`: a caller says so, not the model.
    """

    total: int
    fps: float
    rate: float
    least: int
    most: int
    is_callers: bool


def sampled_indices(total: int, fps: float, sampling: Sampling, processor: VideoProcessor) -> list[int]:
    """Indices of the frames that are taken of `total`, `fps` of which are a second. Raises MediaError."""
    wanted = sampling.num_frames
    if wanted is None and sampling.fps is None and processor.num_frames:
        wanted = max(processor.num_frames, sampling.min_frames or 1)
        wanted = min(wanted, sampling.max_frames or wanted)
        if processor.rule.num_frames:
            # Shorter videos have all of their frames.
            wanted = min(wanted, total)
    if wanted is not None and wanted > total:
        raise MediaError("video_too_short", f"the video has {total} frames, and num_frames={wanted} asks for more")
    by_number, by_rate = _RULES[processor.rule.sampling]
    if wanted is not None:
        return by_number(total, wanted)
    # A caller's bound moves the processor's other one.
    least = sampling.min_frames or min(processor.min_frames, sampling.max_frames or processor.min_frames)
    most = sampling.max_frames or max(processor.max_frames, least)
    is_callers = sampling.fps is not None
    return by_rate(_Wish(total, fps, sampling.fps or processor.fps, least, most, is_callers))


def _ends(total: int, number: int) -> list[int]:
    """The first frame, the last, and others at equal distances."""
    return [int(each) for each in np.linspace(0, total - 1, max(number, 1)).round()]


def _ends_at_rate(wish: _Wish) -> list[int]:
    return _ends(wish.total, _number_at_rate(wish))


def _number_at_rate(wish: _Wish) -> int:
    return min(max(int(wish.total / wish.fps * wish.rate), wish.least), wish.most, wish.total)


def _beginnings(total: int, number: int) -> list[int]:
    """The first frame of each of so many equal parts."""
    # transformers has the frame before or behind where its float32 is rounded, and more or fewer with another number of
    # vector lanes.
    return [each * total // number for each in range(number)]


def _beginnings_at_rate(wish: _Wish) -> list[int]:
    return _beginnings(wish.total, _number_at_rate(wish))


def _middles(total: int, number: int) -> list[int]:
    """The frame in the middle of each of so many equal parts."""
    return [(2 * each + 1) * total // (2 * number) for each in range(number)]


def _middles_at_rate(wish: _Wish) -> list[int]:
    return _middles(wish.total, _number_at_rate(wish))


def _pairs(total: int, number: int) -> list[int]:
    return _beginnings(total, max(round(number / NUM_FRAMES) * NUM_FRAMES, 1))


def _pairs_at_rate(wish: _Wish) -> list[int]:
    most, rated = _even(min(wish.most, wish.total)), wish.total / wish.fps * wish.rate
    return _beginnings(wish.total, max(_even(min(max(rated, wish.least), most, wish.total)), 1))


def _even(number: float) -> int:
    return math.floor(number / NUM_FRAMES) * NUM_FRAMES


# GLM.

_LONG_S: Final = 300
"""Seconds of which the frames of a longer video are."""
_STEPS: Final = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Seconds, and pairs of frames a second of videos that are not longer."""
_MOST_DYNAMIC: Final = 640


def _glm4v(wish: _Wish) -> list[int]:
    """Frames at whole steps of time."""
    last, seconds = wish.total - 1, wish.total / wish.fps
    if seconds <= _LONG_S:
        number = max(math.floor(seconds * wish.rate), 1)
        found = [min(last, math.ceil(each * wish.fps / wish.rate)) for each in range(number)]
    elif int(_LONG_S * wish.rate) >= wish.total:
        found = list(range(wish.total))
    else:
        found = [min(last, math.ceil(each * wish.fps)) for each in np.linspace(0, seconds, int(_LONG_S * wish.rate))]
    return _bounded(list(dict.fromkeys(found)), wish)


def _glm46v(wish: _Wish) -> list[int]:
    """Rates follow the length of a video; a caller's rate has the rule of GLM-4.1V."""
    if wish.is_callers:
        return _glm4v(wish)
    last, seconds = wish.total - 1, wish.total / wish.fps
    length = min(seconds, _STEPS[-1][0])
    rate = next(rate for most, rate in _STEPS if length <= most)
    number = min(int(length * rate * NUM_FRAMES), _MOST_DYNAMIC)
    if wish.total < number:
        found = _floored(0, last, number)
    else:
        found = _at_steps(wish, 1 / (NUM_FRAMES * rate), int(seconds))
    if len(found) < number:
        found = _floored(found[0], found[-1], number)
    elif len(found) > number:
        found = _floored(0, last, number)
    return _bounded(list(dict.fromkeys(found)) or [0], wish)


def _at_steps(wish: _Wish, step: float, end: int) -> list[int]:
    """The first frame at or behind each step of seconds, up to `end`."""
    found, second, frame_s = list[int](), 0.0, 1 / wish.fps
    for index in range(wish.total):
        if index * frame_s >= second:
            second += step
            found.append(index)
            if second >= end:
                break
    return found


def _smolvlm(wish: _Wish) -> list[int]:
    """Frames at equal distances, of long videos without their first and last second."""
    first, last, seconds = 0, wish.total - 1, wish.total / wish.fps
    number = min(max(min(round(seconds * wish.rate), wish.most), wish.least), wish.total)
    if seconds - 2 > wish.most * wish.rate:
        first, last = int(wish.fps), min(int(wish.total - wish.fps), last)
    if first >= last:
        first, last = 0, wish.total - 1
    return list(dict.fromkeys(_floored(first, last, number)))


def _floored(first: int, last: int, number: int) -> list[int]:
    return [int(each) for each in np.linspace(first, last, number, dtype=int)]


def _bounded(found: list[int], wish: _Wish) -> list[int]:
    """An even number of `found` frames, the last perhaps twice, or others if they are too few or too many."""
    if not wish.least <= len(found) <= wish.most:
        found = _ends(wish.total, min(max(len(found), wish.least), wish.most, wish.total))
    return [*found, *found[-1:] * (len(found) % NUM_FRAMES)]


_RULES: Final[dict[str, tuple[Callable[[int, int], list[int]], Callable[[_Wish], list[int]]]]] = {
    "pairs": (_pairs, _pairs_at_rate),
    "ends": (_ends, _ends_at_rate),
    "beginnings": (_beginnings, _beginnings_at_rate),
    "middles": (_middles, _middles_at_rate),
    "glm4v": (_ends, _glm4v),
    "glm46v": (_ends, _glm46v),
    "smolvlm": (_ends, _smolvlm),
}
"""`VideoRule.sampling` -> indices by a number of frames, and by a rate."""
