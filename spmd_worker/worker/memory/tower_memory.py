"""Activations of the tower of an image or of audio, by arithmetic: a plan of a run counts memory by them. A test
measures small towers.

Pictures that are made of squares have fewer tokens than patches: tokens of padding are left out, others resampled.
"""

from functools import lru_cache
from typing import Final

from spmd_worker.media.sizes import resampled_grid
from spmd_worker.model_config.tower_elements import chunk_activations, frame_activations
from spmd_worker.model_config.vision_config import WINDOWS_AT_ONCE, TowerConfig, VisionConfig

_MOST_ROWS: Final = 16384
"""Rows whose feed-forward is computed at once."""
_BLOCK_SIZE: Final = 64
"""Patches of a block of a tower's attention."""


def tower_activations(vision: VisionConfig, num_tokens: int, hidden_size: int) -> tuple[int, int]:
    """Elements of the model's dtype, and of float32, that a tower holds at its peak for an image of at most
    `num_tokens`, for a text of `hidden_size`.

    It has the residual stream, its norm, queries, keys and values, rotated, padded and in blocks, and their outputs.
    Before the first layer it has pixels and patches in float32. Feed-forwards are computed for some patches at a time.
    Behind the last it has its outputs, the projector's, and a picture of squares put together again.
    """
    config = vision.tower
    if config is None:
        return 0, 0
    if vision.kind == "gemma4_unified":
        return _embedder_activations(vision, config, num_tokens, hidden_size)
    frames = 0 if vision.audio is None else frame_activations(vision.audio, config.hidden_size)
    num_rows, size = max_tower_patches(vision, num_tokens), config.hidden_size
    padded = config.num_heads * config.padded_head_size
    per_row = 8 * size + 2 * padded + 3 * padded * (padded != size) + padded
    gates = min(num_rows, _MOST_ROWS) * 4 * config.intermediate_size
    rotated = 4 * size if config.rope_theta else 0
    projected = num_rows * (size + 4 * hidden_size + 2 * config.projector_size) if config.pinpoints else 0
    held = max(num_rows * per_row + gates, projected, num_rows * max(config.num_patch_numbers, frames))
    if config.num_unmerged:
        held += min(num_rows // 4, WINDOWS_AT_ONCE) * _BLOCK_SIZE * 2 * padded
    if vision.audio is not None and vision.audio.num_channels:
        held += chunk_activations(vision.audio)
    pooled = 2 * size if vision.audio is not None else 0
    return held, num_rows * max(3 * config.num_patch_numbers, rotated, pooled)


def _embedder_activations(
    vision: VisionConfig, config: TowerConfig, num_tokens: int, hidden_size: int
) -> tuple[int, int]:
    """Gemma 4's 12B has rows of tokens: pixels in float32 three times; then, in the dtype, pixels and their norm, rows,
    their norms and positions.
    """
    inputs = config.num_patch_numbers * vision.merge_size**2
    return num_tokens * (2 * inputs + 6 * config.hidden_size + hidden_size), num_tokens * 3 * inputs


def max_tower_patches(vision: VisionConfig, num_tokens: int) -> int:
    """The most patches, and class tokens of squares, that a tower reads for an image of at most `num_tokens`; the most
    rows of convolutions for such audio.
    """
    config, num_patches = vision.tower, num_tokens * vision.merge_size**2
    assert config is not None, vision
    if vision.audio is not None and vision.audio.window_frames:
        return -(-num_tokens * vision.merge_size // vision.audio.num_rows) * vision.audio.num_rows
    if vision.audio is not None:
        return num_tokens * vision.merge_size + 1
    if config.max_side:
        return _most_patches(config.max_side, vision.merge_size, num_tokens)
    if not config.crop_size:
        return num_patches
    side = config.crop_size // config.patch_size
    if config.pinpoints:
        num_squares = _most_squares(config.pinpoints, config.crop_size, side, config.max_crops, num_tokens)
    else:
        num_squares = max(num_patches // side**2, 1)
    return num_squares * (side**2 + bool(config.names.class_token))


def _most_patches(max_side: int, merge_size: int, num_tokens: int) -> int:
    """Patches of `num_tokens`, with those at the right and at the bottom that fill no square: most in a long image."""
    longest = max(min(num_tokens, max_side // merge_size), 1)
    behind, num_lines = merge_size - 1, -(-num_tokens // longest)
    return min(max_side**2, num_tokens * merge_size**2 + behind * merge_size * (longest + num_lines) + behind**2)


@lru_cache(maxsize=64)
def _most_squares(
    pinpoints: tuple[tuple[int, int], ...], crop_size: int, side: int, max_crops: int, num_tokens: int
) -> int:
    """The most squares of `side` x `side` patches of a picture of at most `num_tokens`, the complete image among them.

    A picture that is wider than a size of `pinpoints` fills its columns. It takes that size only if no smaller one with
    as many columns or more fits it as well, so its lines are more than those of any such size; and so with columns.
    """
    grids = sorted({(height // crop_size, width // crop_size) for height, width in pinpoints})
    most = 1
    for lines, columns in grids:
        smaller = [each for each in grids if each[0] * each[1] < lines * columns]
        least_lines = max([each[0] for each in smaller if each[1] >= columns], default=0)
        least_columns = max([each[1] for each in smaller if each[0] >= lines], default=0)
        # As many lines are cut above as below.
        grid_of_lines = [(each, columns * side) for each in range(lines * side, least_lines * side - 1, -2)]
        grid_of_columns = [(lines * side, each) for each in range(columns * side, least_columns * side - 1, -2)]
        kept = [resampled_grid(*each, max_crops, side) for each in (*grid_of_lines, *grid_of_columns)]
        if min(side**2 + each[0] * (each[1] + 1) for each in kept) <= num_tokens:
            most = max(most, 1 + lines * columns)
    return most
