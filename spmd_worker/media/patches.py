"""Input of a tower's first linear layer: normalised planes, cut into patches.

H, W: of a crop; P: side of a patch; N: patches.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.prepared import NUM_CHANNELS, Pixels

Plane = NDArray[np.float32]
"""[3, H, W]."""
_NUM_LEVELS: Final = 256
_NUM_FRAMES: Final = 2
"""Qwen's towers take pairs of frames: an image is its own second."""


def normalise(pixels: Pixels, mean: Sequence[float], std: Sequence[float], scale: float = 1 / 255) -> Plane:
    """(pixels * scale - mean) / std as float32 [3, H, W], by a table: each of the three operations rounds to float32,
    as in transformers' processors for Pillow.
    """
    levels = (np.arange(_NUM_LEVELS, dtype=np.float64) * scale).astype(np.float32)
    planes = np.empty((NUM_CHANNELS, *pixels.shape[:2]), np.float32)
    for channel in range(NUM_CHANNELS):
        table = (levels - np.float32(mean[channel])) / np.float32(std[channel])
        np.take(table, pixels[:, :, channel], out=planes[channel])
    return planes


def patches(plane: Plane, patch: int) -> Plane:
    """[N, 3 * P * P], row by row; what does not fill a patch at the right and at the bottom is left out."""
    _, height, width = plane.shape
    rows, columns = height // patch, width // patch
    cut = plane[:, : rows * patch, : columns * patch].reshape(NUM_CHANNELS, rows, patch, columns, patch)
    return cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, NUM_CHANNELS * patch * patch)


def qwen_patches(plane: Plane, patch: int, merge: int) -> Plane:
    """[N, 3 * 2 * P * P], in a row channel, frame, P, P; the `merge` x `merge` patches of a token are consecutive."""
    _, height, width = plane.shape
    rows, columns = height // patch, width // patch
    blocks = plane.reshape(NUM_CHANNELS, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    blocks = np.broadcast_to(blocks, (*blocks.shape[:5], _NUM_FRAMES, patch, patch))
    return blocks.reshape(rows * columns, NUM_CHANNELS * _NUM_FRAMES * patch * patch)
