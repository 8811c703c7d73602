"""Preparing of an image: the crops that its tower takes and the text that stands in the prompt, by kind of model."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from spmd_worker.media import placeholders, sizes
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.media_id import media_id_of
from spmd_worker.media.prepared import NUM_CHANNELS, ImagePixels, Pixels, PreparedImage
from spmd_worker.media.resize import resize


class _Parts(NamedTuple):
    """`token_grid` is (0, 0) where positions do not follow it."""

    crops: list[Pixels]
    text: str
    num_rows: int
    token_grid: tuple[int, int] = (0, 0)


def prepare(pixels: Pixels, processor: ImageProcessor, *, is_alone: bool, source_digest: bytes = b"") -> PreparedImage:
    """The image as the model takes it; `is_alone`: it is the prompt's only one. Raises MediaError."""
    parts = _KINDS[processor.kind](pixels, processor, is_alone)
    crops = tuple([np.ascontiguousarray(each) for each in parts.crops])
    patch = processor.patch_size
    lines, columns = (side // patch for side in _size_of(crops[0]))
    prepared = ImagePixels(crops, (lines, columns), _size_of(pixels))
    return PreparedImage(
        media_id=media_id_of(prepared, processor, is_alone=is_alone),
        pixels=prepared,
        text=parts.text,
        num_rows=parts.num_rows,
        num_patches=sum(len(each) // patch * (each.shape[1] // patch) for each in crops),
        token_grid=parts.token_grid,
        source_digest=source_digest,
    )


def _size_of(pixels: Pixels) -> sizes.Size:
    return len(pixels), pixels.shape[1]


def _resized(pixels: Pixels, size: sizes.Size, processor: ImageProcessor) -> Pixels:
    return resize(pixels, *size, processor.resampling)


def _squeezed(pixels: Pixels, processor: ImageProcessor) -> Pixels:
    return _resized(pixels, (processor.side, processor.side), processor)


def _cut(pixels: Pixels, side: int) -> list[Pixels]:
    """Squares, line by line."""
    height, width = _size_of(pixels)
    return [pixels[y : y + side, x : x + side] for y in range(0, height, side) for x in range(0, width, side)]


def _padded(pixels: Pixels, size: sizes.Size, colour: tuple[int, ...]) -> Pixels:
    """The middle of a picture of one colour; where it cannot be, one pixel nearer to the top left."""
    padded = np.empty((*size, NUM_CHANNELS), np.uint8)
    padded[:] = colour
    height, width = _size_of(pixels)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    padded[top : top + height, left : left + width] = pixels
    return padded


def _square(pixels: Pixels, processor: ImageProcessor) -> Pixels:
    """Padded to a square with the mean's colour."""
    side = max(_size_of(pixels))
    return _padded(pixels, (side, side), tuple([int(level * 255) for level in processor.mean]))


_SIZES: Final = {"glm4v": sizes.glm_size, "paddleocr_vl": sizes.paddleocr_size}


def _qwen(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    unit = processor.patch_size * processor.merge_size
    size_of = _SIZES.get(processor.kind, sizes.qwen_size)
    height, width = size_of(*_size_of(pixels), unit, processor.min_pixels, processor.max_pixels)
    lines, columns = height // unit, width // unit
    text = placeholders.run_text(processor.kind, lines * columns)
    return _Parts([_resized(pixels, (height, width), processor)], text, lines * columns, (lines, columns))


def _kimi(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """The image at the top left of black tokens."""
    patch, unit = processor.patch_size, processor.patch_size * processor.merge_size
    limits = (processor.max_pixels // patch**2, processor.longest_edge // patch)
    resized = _resized(pixels, sizes.kimi_size(*_size_of(pixels), patch, *limits), processor)
    lines, columns = (-(-side // unit) for side in _size_of(resized))
    canvas = np.zeros((lines * unit, columns * unit, NUM_CHANNELS), np.uint8)
    canvas[: len(resized), : resized.shape[1]] = resized
    return _Parts([canvas], placeholders.run_text(processor.kind, lines * columns), lines * columns)


def _gemma3(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    num_rows = processor.tokens_per_crop
    return _Parts([_squeezed(pixels, processor)], placeholders.gemma_text(num_rows), num_rows)


def _gemma4(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    unit = processor.patch_size * processor.merge_size
    height, width = sizes.gemma4_size(*_size_of(pixels), unit, processor.max_pixels)
    num_rows = (height // unit) * (width // unit)
    return _Parts([_resized(pixels, (height, width), processor)], placeholders.gemma4_text(num_rows), num_rows)


def _llava(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    side = processor.side
    pixels = _square(pixels, processor) if processor.is_padded else pixels
    if processor.short_edge:
        size = sizes.short_edge_size(*_size_of(pixels), processor.short_edge)
        top, left = (size[0] - side) // 2, (size[1] - side) // 2
        crop = _resized(pixels, size, processor)[top : top + side, left : left + side]
    else:
        crop = _squeezed(pixels, processor)
    num_rows = processor.tokens_per_crop
    return _Parts([crop], placeholders.run_text(processor.kind, num_rows), num_rows)


def _deepseek(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Resized to the square, which is filled with the mean's colour."""
    size = sizes.deepseek_size(*_size_of(pixels), processor.side, processor.short_edge)
    num_rows = processor.tokens_per_crop
    crop = _square(_resized(pixels, size, processor), processor)
    return _Parts([crop], placeholders.run_text(processor.kind, num_rows), num_rows)


def _onevision(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Alone the image and crops of it, each line of tokens with a newline row; beside others one padded square."""
    if not is_alone:
        num_rows = processor.tokens_per_crop + 1
        crop = _squeezed(_square(pixels, processor), processor)
        return _Parts([crop], placeholders.run_text(processor.kind, num_rows), num_rows)
    return _llava_next(pixels, processor, is_alone)


def _llava_next(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """The image and crops of it, each line of tokens with a newline row."""
    height, width = _size_of(pixels)
    target = sizes.best_pinpoint(height, width, processor.pinpoints)
    fitted = _resized(pixels, sizes.fitted_size(height, width, target), processor)
    crops = [_squeezed(pixels, processor), *_cut(_padded(fitted, target, (0, 0, 0)), processor.side)]
    side = processor.side // processor.patch_size
    lines, columns = (length // processor.side * side for length in target)
    lines, columns = sizes.unpadded_grid(height, width, lines, columns, processor.max_crops, side)
    num_rows = processor.tokens_per_crop + lines * columns + lines
    return _Parts(crops, placeholders.run_text(processor.kind, num_rows), num_rows)


def _internvl(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Tiles, and behind several the complete image."""
    side = processor.side
    lines, columns = sizes.tile_grid(*_size_of(pixels), side, processor.min_crops, processor.max_crops)
    crops = _tiles(pixels, (lines, columns), processor)
    num_rows = processor.tokens_per_crop * len(crops)
    return _Parts(crops, placeholders.internvl_text(num_rows), num_rows)


def _tiles(pixels: Pixels, grid: tuple[int, int], processor: ImageProcessor) -> list[Pixels]:
    """Squares of the image at the size of `grid` of them, and behind several the complete image."""
    height, width = (length * processor.side for length in grid)
    crops = _cut(_resized(pixels, (height, width), processor), processor.side)
    return [*crops, _squeezed(pixels, processor)] if len(crops) > 1 else crops


def _cohere(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Tiles of the nearest ratio (Aya), or that the image fits (Command A)."""
    size, side, per_tile = _size_of(pixels), processor.side, processor.tokens_per_crop
    if processor.kind == "aya_vision":
        crops = _tiles(pixels, sizes.tile_grid(*size, side, processor.min_crops, processor.max_crops), processor)
        text = placeholders.aya_text(len(crops), per_tile)
    else:
        crops = _tiles(pixels, sizes.cohere_grid(*size, side, processor.max_crops), processor)
        text = placeholders.command_a_text(len(crops), per_tile)
    return _Parts(crops, text, per_tile * len(crops))


_MOST_TILES: Final = 16
"""Tiles of a line or column of Granite-Docling, which have tokens of their own."""


def _lfm2(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Tiles of an image that is too large for its tokens, and the complete image behind them or alone."""
    side, unit, size = processor.side, processor.patch_size * processor.merge_size, _size_of(pixels)
    height, width = sizes.lfm2_size(*size, unit, processor.min_pixels, processor.max_pixels)
    rounded = (max(processor.patch_size, round(each / unit) * unit) for each in size)
    lines = columns = 1
    if processor.splits and math.prod(rounded) > processor.max_pixels * processor.tolerance:
        lines, columns = sizes.lfm2_grid(*size, side, processor.min_crops, processor.max_crops)
    crops = [_resized(pixels, (height, width), processor)]
    if lines * columns > 1:
        crops = [*_cut(_resized(pixels, (lines * side, columns * side), processor), side), *crops]
    num_rows, per_tile = height // unit * (width // unit), processor.tokens_per_crop
    text = placeholders.lfm2_text(lines, columns, per_tile, num_rows)
    return _Parts(crops, text, num_rows + per_tile * (len(crops) - 1))


def _minicpm(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """The complete image, and slices of one of more pixels."""
    side, unit, size = processor.side, processor.patch_size * processor.merge_size, _size_of(pixels)
    grid = sizes.minicpm_grid(*size, side, processor.max_crops) if processor.splits else (1, 1)
    is_cut = grid != (1, 1)
    crops = [_resized(pixels, sizes.minicpm_size(*size, side, unit, grows=not is_cut), processor)]
    lines: list[list[int]] = []
    if is_cut:
        height, width = sizes.minicpm_tiles_size(*size, grid, side, unit)
        resized = _resized(pixels, (height, width), processor)
        tile = height // grid[0], width // grid[1]
        crops += [
            resized[top : top + tile[0], left : left + tile[1]]
            for top in range(0, height, tile[0])
            for left in range(0, width, tile[1])
        ]
        lines = [[tile[0] // unit * (tile[1] // unit)] * grid[1]] * grid[0]
    num_rows = len(crops[0]) // unit * (crops[0].shape[1] // unit)
    text = placeholders.minicpm_text(lines, num_rows, is_numbered=processor.is_numbered)
    return _Parts(crops, text, num_rows + sum(map(sum, lines)))


def _granite(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Tiles, of dense pages more, and behind several the complete image."""
    side, least, most = processor.side, processor.min_crops, processor.max_crops
    limits = (*_size_of(pixels), side)
    if processor.dense_crops and sizes.is_dense(
        *_size_of(pixels), sizes.tile_grid(*limits, least, most, _MOST_TILES)[1] * side, processor.dense_rule
    ):
        most = processor.dense_crops
    lines, columns = sizes.tile_grid(*limits, min(least, most), most, _MOST_TILES)
    crops = _tiles(pixels, (lines, columns), processor)
    text = placeholders.granite_text(lines, columns, processor.tokens_per_crop)
    return _Parts(crops, text, processor.tokens_per_crop * len(crops))


def _llama4(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Tiles of the image at the top left of a black canvas, and behind several the complete image."""
    side, (height, width) = processor.side, _size_of(pixels)
    lines, columns = sizes.llama4_grid(height, width, side, processor.max_crops)
    canvas = np.zeros((lines * side, columns * side, NUM_CHANNELS), np.uint8)
    fitted = _resized(pixels, sizes.llama4_size(height, width, side, _size_of(canvas)), processor)
    canvas[: len(fitted), : fitted.shape[1]] = fitted
    crops = _cut(canvas, side)
    if len(crops) > 1:
        crops.append(_squeezed(pixels, processor))
    text = placeholders.llama4_text(lines, columns, processor.tokens_per_crop)
    return _Parts(crops, text, processor.tokens_per_crop * len(crops))


def _pixtral(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    unit = processor.patch_size * processor.merge_size
    height, width = sizes.pixtral_size(*_size_of(pixels), processor.longest_edge, unit)
    lines, columns = height // unit, width // unit
    text = placeholders.pixtral_text(lines, columns)
    return _Parts([_resized(pixels, (height, width), processor)], text, lines * columns)


def _lighton(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Patches at the right and at the bottom may fill no token, but are seen."""
    height, width = sizes.pixtral_size(*_size_of(pixels), processor.longest_edge, processor.resize_unit)
    patch, unit = processor.patch_size, processor.patch_size * processor.merge_size
    num_rows = (height // unit) * (width // unit)
    if not num_rows:
        size = f"{pixels.shape[1]} x {len(pixels)} pixels are resized to {width} x {height}"
        raise MediaError("image_too_narrow", f"{size}: a token is of {unit} x {unit}")
    resized = _resized(pixels, (height, width), processor)[: height // patch * patch, : width // patch * patch]
    return _Parts([resized], placeholders.run_text(processor.kind, num_rows), num_rows)


def _smolvlm(pixels: Pixels, processor: ImageProcessor, is_alone: bool) -> _Parts:
    """Resized so that squares fill it, the squares if they are several, and the complete image behind them."""
    side, lines, columns = processor.side, 0, 0
    crops: list[Pixels] = []
    pixels = _resized(pixels, sizes.smolvlm_size(*_size_of(pixels), processor.longest_edge), processor)
    if processor.splits:
        pixels = _resized(pixels, sizes.squares_size(*_size_of(pixels), side), processor)
        if max(_size_of(pixels)) > side:
            lines, columns = (length // side for length in _size_of(pixels))
            crops = _cut(pixels, side)
    crops.append(_squeezed(pixels, processor))
    text = placeholders.smolvlm_text(lines, columns, processor.tokens_per_crop)
    return _Parts(crops, text, processor.tokens_per_crop * len(crops))


_KINDS: Final[dict[str, Callable[[Pixels, ImageProcessor, bool], _Parts]]] = {
    "qwen3_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "exaone4_5": _qwen,
    "qwen2_5_omni": _qwen,
    "qwen3_omni": _qwen,
    "glm4v": _qwen,
    "paddleocr_vl": _qwen,
    "kimi_k25": _kimi,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
    "llava": _llava,
    "deepseek_vl": _deepseek,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "internvl": _internvl,
    "aya_vision": _cohere,
    "cohere2_vision": _cohere,
    "llama4": _llama4,
    "mistral3": _pixtral,
    "pixtral": _pixtral,
    "lighton_ocr": _lighton,
    "smolvlm": _smolvlm,
    "granite_docling": _granite,
    "lfm2_vl": _lfm2,
    "minicpmv4_6": _minicpm,
}
