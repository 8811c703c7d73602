"""Positions and sight of a step's tokens where rows have images, computed from `Request.media`.

A token's numbers are a function of its row's prompt up to it, so every pipeline stage computes them alike, in any
chunks. Steps of rows without images have none, and nothing is computed.

T: tokens of the step.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence
from spmd_worker.replica.sequence.media_items import MediaItem

Integers = NDArray[np.int64]
Numbers = Sequence[int] | Integers
Media = tuple[MediaItem, ...]

_MEDIA: Final = attrgetter("request.media")


def media_of_step(vision: VisionConfig | None, sequences: Sequence[MirroredSequence]) -> Sequence[Media] | None:
    """The images of each row; None if no row has any, or the model needs nothing of them here."""
    if vision is None or not (vision.has_three_positions or vision.sees_whole_image):
        return None
    media = list(map(_MEDIA, sequences))
    return media if any(media) else None


def rope_positions_of(
    vision: VisionConfig | None, media: Sequence[Media] | None, firsts: Numbers, counts: Numbers
) -> Integers | None:
    """int64 [3, T]: time, line and column of the tokens [first, first + count) of each row; three equal numbers for
    rows without images; [6, T], with those of the first token of each token's run behind them, in a model that chooses
    keys by runs. None if the model's tokens have one position, or no row has images.
    """
    if media is None or vision is None or not vision.has_three_positions:
        return None
    rows = zip(media, firsts, counts, strict=True)
    if vision.run_length == 1:
        return np.concatenate([rope_positions(*row) for row in rows], axis=1)
    return np.concatenate([_with_runs(*row, vision.run_length) for row in rows], axis=1)


def _with_runs(media: Media, first: int, count: int, length: int) -> Integers:
    """int64 [6, count]: positions of the tokens from `first` on, and of the first tokens of their runs."""
    start = first // length * length
    positions = rope_positions(media, start, first + count - start)
    of_runs = np.arange(first, first + count) // length * length - start
    return np.concatenate((positions[:, first - start :], positions[:, of_runs]))


def last_visible_of(
    vision: VisionConfig | None, media: Sequence[Media] | None, firsts: Numbers, counts: Numbers
) -> Integers | None:
    """int64 [T]: the position of the last key that each token sees. None if it is the token's own for all."""
    if media is None or vision is None or not vision.sees_whole_image:
        return None
    rows = list(zip(media, firsts, counts, strict=True))
    if not any(item.start < first + count and item.end > first for items, first, count in rows for item in items):
        return None
    return np.concatenate([last_visible(*row) for row in rows])


def position_delta(media: Media) -> int:
    """Difference between the position and the index of a token behind all images of a row."""
    return sum(item.num_positions - item.num_rows for item in media if item.grid[0])


def rope_positions(media: Media, first: int, count: int) -> Integers:
    """int64 [3, count] of the tokens from `first` on.

    Text counts on. An image stands at one time, and spreads over lines and columns from there; the text behind begins
    where the longer of its sides ends. Frames of a video that go on have the same lines and columns, each at its time,
    and the text behind begins where the longest of all ends.
    """
    end, shift = first + count, 0
    positions = np.arange(first, end) + np.zeros((3, 1), dtype=np.int64)
    for item in media:
        lines, columns = item.grid
        if not lines:
            continue
        assert len(item.runs) == 1, (item, "lines and columns are those of one run")
        tokens = np.arange(max(item.start, first), min(item.end, end)) - item.start
        if len(tokens):
            steps = np.stack((0 * tokens + item.time, tokens // columns, tokens % columns))
            at = tokens[0] + item.start - first
            positions[:, at : at + len(tokens)] = item.start + shift + steps
        shift += item.num_positions - item.num_rows
        behind = max(item.end, first)
        positions[:, max(behind - first, 0) :] = np.arange(behind, end) + shift
    return positions


def last_visible(media: Media, first: int, count: int) -> Integers:
    """int64 [count] of the tokens from `first` on: the end of a token's run of image tokens, else its own position."""
    last, end = np.arange(first, first + count), first + count
    for start, length in (run for item in media for run in item.runs):
        begin, stop = max(start, first), min(start + length, end)
        if begin < stop:
            assert stop == start + length, (start, length, end, "a chunk ends inside an image that is seen at once")
            last[begin - first : stop - first] = stop - 1
    return last
