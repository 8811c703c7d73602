"""Tokens of the largest image that a processor makes of any picture, or a little more: memory is planned for them."""

from collections.abc import Callable
from math import ceil, isqrt, sqrt
from typing import Final

from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.limits import MAX_ASPECT_RATIO
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.media.video_processor import VideoProcessor


def most_image_tokens(processor: ImageProcessor) -> int:
    """Tokens of an image of `processor`, or a little more than any has."""
    return _KINDS.get(processor.kind, _of_squares)(processor)


def _of_squares(processor: ImageProcessor) -> int:
    """Tokens of at most `max_crops` squares, and behind several the complete image."""
    most = max(processor.max_crops, processor.dense_crops)
    return processor.tokens_per_crop * (most + 1 if most > 1 else 1)


def _qwen(processor: ImageProcessor) -> int:
    unit = (processor.patch_size * processor.merge_size) ** 2
    unit *= NUM_FRAMES if processor.kind == "glm4v" else 1
    return _of_pixels(processor.min_pixels / unit, processor.max_pixels // unit)


def most_frame_tokens(processor: VideoProcessor) -> int:
    """Tokens of two frames of a video of `processor`, or a little more than any have."""
    if processor.side:
        return processor.tokens_per_frame + processor.rule.pools
    unit = processor.unit**2 * (NUM_FRAMES if processor.rule.bounds_video else 1)
    return _of_pixels(processor.min_pixels / unit, processor.max_pixels // unit)


def _of_pixels(least_tokens: float, most: int) -> int:
    """Tokens of a picture that is resized to squares of `least_tokens` to `most`, of any ratio."""
    least = ceil(least_tokens)
    # A narrow picture has a line of tokens, and one that grows a line and a column more than it has pixels for. Sides
    # were rounded before.
    ratio = 2 * MAX_ASPECT_RATIO
    return max(most, isqrt(most * ratio) + 1, isqrt(ratio) + 1, least + isqrt(4 * least * ratio) + 2)


def _lfm2(processor: ImageProcessor) -> int:
    return _qwen(processor) + processor.tokens_per_crop * processor.max_crops * processor.splits


def _minicpm(processor: ImageProcessor) -> int:
    """Each slice, and the complete image. Sides are rounded up by half a token at most, or to a complete one."""
    side, ratio = processor.side / (processor.patch_size * processor.merge_size), sqrt(MAX_ASPECT_RATIO)
    most = max(side**2 + side * (ratio + 1 / ratio) / 2 + 1, side * ratio + 1, 1)
    return ceil(most) * (processor.max_crops * processor.splits + 1)


def _kimi(processor: ImageProcessor) -> int:
    """Patches that a line of the picture fills in part are counted as none before it shrinks, and as one behind."""
    merge, most, found = processor.merge_size, processor.max_pixels // processor.patch_size**2, 0
    longest = processor.longest_edge // processor.patch_size
    for lines in range(1, ceil(longest / merge) + 1):
        least = max((lines - 1) * merge, 1)
        columns = longest if lines == 1 else min(longest, most * (least + 1) / least**2 + 2)
        found = max(found, lines * ceil(columns / merge))
    return found


def _gemma4(processor: ImageProcessor) -> int:
    return processor.max_pixels // (processor.patch_size * processor.merge_size) ** 2


def _pictures(processor: ImageProcessor) -> int:
    """The complete image and the largest picture, with a newline a line; one that is resampled has fewer."""
    side, most = processor.side // processor.patch_size, 0
    for height, width in processor.pinpoints:
        lines, columns = (each // processor.side * side for each in (height, width))
        most = max(most, lines * (columns + 1))
    return processor.tokens_per_crop + max(most, 1)


def _pixtral(processor: ImageProcessor) -> int:
    return ceil(processor.longest_edge / (processor.patch_size * processor.merge_size)) ** 2


def _lighton(processor: ImageProcessor) -> int:
    longest = ceil(processor.longest_edge / processor.resize_unit) * processor.resize_unit
    return (longest // (processor.patch_size * processor.merge_size)) ** 2


def _smolvlm(processor: ImageProcessor) -> int:
    # Short sides are made even.
    most = ceil((processor.longest_edge + 1) / processor.side) ** 2 + 1
    return processor.tokens_per_crop * (most if processor.splits else 1)


_KINDS: Final[dict[str, Callable[[ImageProcessor], int]]] = {
    **dict.fromkeys(("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni"), _qwen),
    **dict.fromkeys(("glm4v", "paddleocr_vl", "exaone4_5"), _qwen),
    "kimi_k25": _kimi,
    "lfm2_vl": _lfm2,
    "minicpmv4_6": _minicpm,
    **dict.fromkeys(("gemma4", "gemma4_unified"), _gemma4),
    **dict.fromkeys(("llava_next", "llava_onevision"), _pictures),
    **dict.fromkeys(("mistral3", "pixtral"), _pixtral),
    "lighton_ocr": _lighton,
    "smolvlm": _smolvlm,
}
"""Others take squares alone."""
