"""Pixels of an image -> patches: what a tower's first linear layer takes.

Pixels are normalised by a table of 768 numbers, with the bits of the image processors that use Pillow. N: patches; P:
side of a patch.
"""

import numpy as np
import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model_config.vision_config import Levels, VisionConfig


class PixelTable(nn.Module):
    """uint8 [height, width, 3] -> float32 [3, height, width]."""

    def __init__(self, vision: VisionConfig, device: torch.device) -> None:
        super().__init__()
        self._table, self._device = _table(vision, vision.image_levels), device
        self._of_frames = self._table if vision.video_levels is None else _table(vision, vision.video_levels)

    def forward(self, pixels: Tensor, *, is_frame: bool = False) -> Tensor:
        table = (self._of_frames if is_frame else self._table).to(pixels.device)
        return torch.stack([table[channel][pixels[:, :, channel].int()] for channel in range(3)])

    def planes(self, image: ImagePixels) -> list[Tensor]:
        """float32 [3, height, width] of each square of the image, or of the image itself."""
        # Arrays of received pixels are read-only.
        pixels = [torch.tensor(each, device=self._device) for each in image.crops]
        return [self(each, is_frame=image.frame > 0) for each in pixels]


def _table(vision: VisionConfig, levels: Levels) -> Tensor:
    """float32 [3, 256]: (x * scale - mean) / std, each step rounded to float32, or to bfloat16; or the same with mean
    and std divided by the scale.
    """
    if vision.has_bfloat16_pixels:
        given = torch.arange(256, dtype=torch.bfloat16) * levels.scale
        mean, std = (torch.tensor(each, dtype=torch.bfloat16).unsqueeze(1) for each in (levels.mean, levels.std))
        return ((given - mean) / std).float()
    if vision.scales_levels:
        mean, std = (torch.tensor(each).unsqueeze(1) * (1 / levels.scale) for each in (levels.mean, levels.std))
        return (torch.arange(256, dtype=torch.float32) - mean) / std
    scaled = (np.arange(256, dtype=np.float64) * levels.scale).astype(np.float32)
    pairs = zip(levels.mean, levels.std, strict=True)
    return torch.from_numpy(np.stack([(scaled - np.float32(mean)) / np.float32(std) for mean, std in pairs]))


def patches_of(plane: Tensor, patch_size: int, num_frames: int = 1, merge_size: int = 1) -> Tensor:
    """float32 [3, height, width] -> [N, 3 * frames * P * P], every frame the same, or [frames, 3, height, width].
    Patches are in order of lines, or of squares of `merge_size` patches a side.
    """
    height, width = plane.shape[-2:]
    rows, columns = height // patch_size, width // patch_size
    assert (rows * patch_size, columns * patch_size) == (height, width), (plane.shape, patch_size)
    assert rows % merge_size == columns % merge_size == 0, (rows, columns, merge_size)
    squares = plane.view(
        -1, 3, rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size
    ).permute(2, 5, 3, 6, 1, 0, 4, 7)
    frames = squares.expand(*squares.shape[:5], num_frames, patch_size, patch_size)
    return frames.reshape(rows * columns, -1)
