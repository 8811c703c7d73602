"""Sizes to which kinds of models resize and cut images, as transformers' processors compute them.

Rounding is part of each rule: Python's `round` is half to even.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MAX_ASPECT_RATIO

Size: TypeAlias = tuple[int, int]
"""(height, width)."""
_MAX_SMOLVLM_SIDE: Final = 4096
_SMALLER_RATIO: Final = 1.1
NUM_FRAMES: Final = 2
"""Frames that a row of a video is of, and that GLM counts an image as."""


def qwen_size(height: int, width: int, unit: int, min_pixels: float, max_pixels: float) -> Size:
    """Multiples of `unit` at about the same ratio, with `min_pixels` to `max_pixels` pixels."""
    _check_ratio(height, width)
    return _within(height, width, round(height / unit) * unit, round(width / unit) * unit, unit, min_pixels, max_pixels)


def _within(
    height: int, width: int, new_height: int, new_width: int, unit: int, min_pixels: float, max_pixels: float
) -> Size:
    """The new sizes, if they have `min_pixels` to `max_pixels` pixels, or others that have."""
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(unit, math.floor(height / scale / unit) * unit)
        new_width = max(unit, math.floor(width / scale / unit) * unit)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height, new_width = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return new_height, new_width


def lfm2_size(height: int, width: int, unit: int, min_pixels: int, max_pixels: int) -> Size:
    """Qwen's, of sides of `unit` and more."""
    new_height, new_width = (max(unit, round(each / unit) * unit) for each in (height, width))
    return _within(height, width, new_height, new_width, unit, min_pixels, max_pixels)


def lfm2_grid(height: int, width: int, side: int, min_tiles: int, max_tiles: int) -> Size:
    """Lines and columns of tiles: the nearest ratio; of equals the larger grid, while the image has more than half its
    pixels.
    """
    best, nearest = (1, 1), math.inf
    for columns, lines in _lfm2_grids(min_tiles, max_tiles):
        distance = abs(width / height - columns / lines)
        has_pixels = height * width > 0.5 * (side * side * columns * lines)
        if distance < nearest or (distance == nearest and has_pixels):
            best, nearest = (lines, columns), distance
    return best


@lru_cache(maxsize=16)
def _lfm2_grids(min_tiles: int, max_tiles: int) -> list[Size]:
    """Columns and lines of `min_tiles` to `max_tiles`, the fewest first."""
    every = [
        (columns, lines)
        for most in range(min_tiles, max_tiles + 1)
        for columns in range(1, most + 1)
        for lines in range(1, most + 1)
        if min_tiles <= columns * lines <= max_tiles
    ]
    # Those of one number in the order of transformers' set: hashes of integers are the same everywhere.
    return sorted(set(every), key=lambda grid: grid[0] * grid[1])


def gemma4_size(height: int, width: int, unit: int, max_pixels: int) -> Size:
    """Multiples of `unit` at about the same ratio, as many as fit `max_pixels` pixels, a multiple of unit squares."""
    # In the order of transformers: floats are rounded.
    scale = math.sqrt(max_pixels / (height * width))
    new_height = math.floor(scale * height / unit) * unit
    new_width = math.floor(scale * width / unit) * unit
    longest = max_pixels // unit
    if not new_height:
        return unit, min(width // height * unit, longest)
    if not new_width:
        return min(height // width * unit, longest), unit
    return new_height, new_width


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        rule = f"a side must be at most {MAX_ASPECT_RATIO} times the other"
        raise MediaError("image_too_narrow", f"{width} x {height} pixels: {rule}")


def glm_size(height: int, width: int, unit: int, min_pixels: int, max_pixels: int) -> Size:
    """Qwen's, of images with sides of `unit` and more; shorter ones are made as long first. Pixels are those of two
    frames.
    """
    _check_ratio(height, width)
    height, width = _with_unit(height, width, unit)
    return qwen_size(height, width, unit, min_pixels / NUM_FRAMES, max_pixels / NUM_FRAMES)


def _with_unit(height: int, width: int, unit: int) -> Size:
    """A size whose short side is `unit` at least, but for rounding."""
    if min(height, width) >= unit:
        return height, width
    scale = max(unit / height, unit / width)
    return int(height * scale), int(width * scale)


def qwen_video_size(num_frames: int, height: int, width: int, unit: int, min_pixels: float, max_pixels: float) -> Size:
    """Multiples of `unit` of which all frames of a video have `min_pixels` to `max_pixels` pixels."""
    height, width = _with_unit(height, width, unit)
    _check_ratio(height, width)
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    num_pixels = round(num_frames / NUM_FRAMES) * NUM_FRAMES * new_height * new_width
    if num_pixels > max_pixels:
        scale = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(unit, math.floor(height / scale / unit) * unit)
        new_width = max(unit, math.floor(width / scale / unit) * unit)
    elif num_pixels < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        new_height, new_width = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return new_height, new_width


def paddleocr_size(height: int, width: int, unit: int, min_pixels: int, max_pixels: int) -> Size:
    """Qwen's, of images with sides of `unit` and more; a shorter height is made as long first, then the width."""
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return qwen_size(height, width, unit, min_pixels, max_pixels)


def kimi_size(height: int, width: int, patch: int, max_patches: int, max_side: int) -> Size:
    """Sides of at most `max_side` patches, about `max_patches` in all; images do not grow."""
    num_patches = max(1.0, height // patch) * max(1.0, width // patch)
    most = max_side * patch
    # In the order of transformers: floats are rounded.
    scale = min(1.0, math.sqrt(max_patches / num_patches), most / height, most / width)
    return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)


def short_edge_size(height: int, width: int, short_edge: int) -> Size:
    """The short side becomes `short_edge`; the long one is rounded down."""
    if width <= height:
        return int(short_edge * height / width), short_edge
    return short_edge, int(short_edge * width / height)


def deepseek_size(height: int, width: int, side: int, shortest: int) -> Size:
    """The long side becomes `side`, the short one at least `shortest`."""
    scale = side / max(height, width)
    return max(round(height * scale), shortest), max(round(width * scale), shortest)


def best_pinpoint(height: int, width: int, pinpoints: Sequence[Size]) -> Size:
    """The size that keeps most pixels of an image, and of such the one that wastes least."""

    def merit(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    # Of equals the first.
    return max(pinpoints, key=merit)


def fitted_size(height: int, width: int, target: Size) -> Size:
    """The largest size within `target` at the same ratio, rounded up."""
    target_height, target_width = target
    scale_width, scale_height = target_width / width, target_height / height
    if scale_width < scale_height:
        return min(math.ceil(height * scale_width), target_height), target_width
    return target_height, min(math.ceil(width * scale_height), target_width)


def unpadded_grid(height: int, width: int, lines: int, columns: int, max_crops: int, side: int) -> Size:
    """Lines and columns of the tokens of crops of LLaVA-NeXT and LLaVA-OneVision: without those of padding, and made
    fewer beyond `max_crops` crops of `side` x `side` tokens, 0 for any number.
    """
    if width / height > columns / lines:
        lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
    return resampled_grid(lines, columns, max_crops, side)


def resampled_grid(lines: int, columns: int, max_crops: int, side: int) -> Size:
    """Lines and columns that tokens of a picture are resampled to; see `unpadded_grid`."""
    ratio = math.sqrt(lines * columns / (max_crops * side**2)) if max_crops else 1.0
    return (int(lines // ratio), int(columns // ratio)) if ratio > _SMALLER_RATIO else (lines, columns)


def tile_grid(height: int, width: int, side: int, min_tiles: int, max_tiles: int, longest: int = 0) -> Size:
    """Lines and columns of InternVL's tiles: the nearest ratio; of equals the larger grid, while the image has more
    than half its pixels. A line or column has at most `longest` tiles, 0 for any number.
    """
    numbers = range(1, min(max_tiles, longest or max_tiles) + 1)
    grids = [(lines, columns) for columns in numbers for lines in numbers if min_tiles <= lines * columns <= max_tiles]
    best, nearest = (1, 1), math.inf
    for lines, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / lines)
        has_pixels = height * width > 0.5 * side * side * columns * lines
        if distance < nearest or (distance == nearest and has_pixels):
            best, nearest = (lines, columns), distance
    return best


def is_dense(height: int, width: int, tiled_width: int, rule: Sequence[float]) -> bool:
    """Whether a page of Granite-Docling has more tiles than others: it is wider than the second number of `rule` times
    its height, not wider than the third, and its tiles are less wide than the first times the page; 0 for no rule.
    """
    scale, least, most = rule
    ratio = width / height
    is_wide = ratio > least and (not most or ratio <= most)
    return bool(scale or least) and is_wide and (not scale or tiled_width / width < scale)


def llama4_grid(height: int, width: int, side: int, max_tiles: int) -> Size:
    """Lines and columns of tiles that an image fits with least growth, or else with least loss; of such the fewest."""
    grids: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for lines in [each for each in range(1, count + 1) if count % each == 0]:
            grids.setdefault(lines / (count // lines), []).append((lines, count // lines))
    # In transformers' order and float32.
    ordered = [grid for equal in grids.values() for grid in equal]
    scales = [
        min(np.float32(lines * side) / np.float32(height), np.float32(columns * side) / np.float32(width))
        for lines, columns in ordered
    ]
    growing = [scale for scale in scales if scale >= 1]
    chosen = min(growing) if growing else max(scales)
    fitting = [grid for grid, scale in zip(ordered, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def llama4_size(height: int, width: int, side: int, canvas: Size) -> Size:
    """The largest size within `canvas` at the same ratio, rounded down; images do not grow beyond `side`."""
    wanted = max(height, side), max(width, side)
    # transformers divides sides of a canvas in float32, and others in float64.
    kinds = [np.float32 if most < each else float for most, each in zip(canvas, wanted, strict=True)]
    limit_height, limit_width = (min(pair) for pair in zip(canvas, wanted, strict=True))
    tall = kinds[0](limit_height) / kinds[0](height)
    wide = kinds[1](limit_width) / kinds[1](width)
    compared = float if kinds == [float, float] else np.float32
    if compared(wide) < compared(tall):
        return max(min(math.floor(kinds[1](height) * wide), limit_height), 1), limit_width
    return limit_height, max(min(math.floor(kinds[0](width) * tall), limit_width), 1)


def cohere_grid(height: int, width: int, side: int, max_tiles: int) -> Size:
    """Lines and columns of tiles that an image fits with least growth, or else with least loss; of equals the fewest,
    then the fewest columns.
    """
    numbers = range(1, max_tiles + 1)
    grids = [(lines, columns) for columns in numbers for lines in numbers if lines * columns <= max_tiles]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = [min(columns * side / width, lines * side / height) for lines, columns in grids]
    growing = [scale for scale in scales if scale >= 1]
    return grids[scales.index(min(growing) if growing else max(scales))]


def minicpm_size(height: float, width: float, side: int, unit: int, *, grows: bool) -> Size:
    """Multiples of `unit` of about `side` x `side` pixels; smaller images keep their size unless it `grows`."""
    if height * width > side * side or grows:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _multiple(height, unit), _multiple(width, unit)


def minicpm_grid(height: int, width: int, side: int, max_tiles: int) -> Size:
    """Lines and columns of slices: about as many as the image has squares of `side`, of the nearest ratio; one for an
    image of no more than a square.
    """
    count = min(math.ceil(width * height / (side * side)), max_tiles)
    best, nearest = (1, 1), math.inf
    numbers = [each for each in (count - 1, count, count + 1) if 1 < each <= max_tiles] if count > 1 else []
    for number in numbers:
        for lines in [each for each in range(1, number + 1) if number % each == 0]:
            distance = abs(math.log(width / height) - math.log(number // lines / lines))
            if distance < nearest or (distance == nearest and lines > best[0]):
                best, nearest = (lines, number // lines), distance
    return best


def minicpm_tiles_size(height: int, width: int, grid: Size, side: int, unit: int) -> Size:
    """Size of all slices of a `grid`, each of about `side` x `side` pixels."""
    shares = [_multiple(length, count) / count for length, count in zip((height, width), grid, strict=True)]
    lines, columns = minicpm_size(shares[0], shares[1], side, unit, grows=True)
    return lines * grid[0], columns * grid[1]


def _multiple(length: float, unit: int) -> int:
    """The nearest multiple, at least one."""
    return max(round(length / unit) * unit, unit)


def pixtral_size(height: int, width: int, longest_edge: int, unit: int) -> Size:
    """Sides of at most `longest_edge`, then up to multiples of `unit`."""
    ratio = max(height / longest_edge, width / longest_edge)
    if ratio > 1:
        height, width = max(math.floor(height / ratio), 1), max(math.floor(width / ratio), 1)
    return ((height - 1) // unit + 1) * unit, ((width - 1) // unit + 1) * unit


def smolvlm_size(height: int, width: int, longest_edge: int) -> Size:
    """The long side becomes `longest_edge`, the short one even; then at most 4,096 a side."""
    ratio = width / height
    if width >= height:
        height, width = int(longest_edge / ratio), longest_edge
        height += height % 2
    else:
        height, width = longest_edge, int(longest_edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_SMOLVLM_SIDE:
        height, width = int(_MAX_SMOLVLM_SIDE / ratio), _MAX_SMOLVLM_SIDE
    elif height > width and height > _MAX_SMOLVLM_SIDE:
        height, width = _MAX_SMOLVLM_SIDE, int(_MAX_SMOLVLM_SIDE * ratio)
    return max(height, 1), max(width, 1)


def squares_size(height: int, width: int, side: int) -> Size:
    """Multiples of `side`, rounded up, the long side first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(max(int(width / ratio), 1) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(max(int(height * ratio), 1) / side) * side
