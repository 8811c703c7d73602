"""Tower of MiniCPM-V 4.6: SigLIP for images of any size, whose patches become a quarter behind one of the first layers.

Slices of an image and the complete image before them are sequences of one call. N: patches; E: width of the tower.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageAttention, ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm, TowerTable, merged_rows
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.qwen import QwenMerger
from spmd_worker.model.towers.squares import TwoLinears
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import PatchEmbedding, TowerLayer, Trunk
from spmd_worker.model_config.vision_config import WINDOWS_AT_ONCE, TowerConfig, VisionConfig

_SIDE: Final = 2
"""Patches a side of a window, and of what the projector makes a token of."""
_WINDOW: Final = _SIDE**2


class WindowMerger(nn.Module):
    """[N, E] by windows -> [N / 4, E]: attention in each, then two linear layers beside the mean of its patches."""

    def __init__(self, context: LayerContext, config: TowerConfig, beginning: str) -> None:
        super().__init__()
        self._config, self._backend, self._device = config, context.attention, context.device
        size, width = config.hidden_size, _WINDOW * config.hidden_size
        self.attention_norm = TowerNorm(context, f"{beginning}layer_norm1", size, "layer", config.eps)
        parts = tuple([(f"{beginning}{name}", size) for name in config.names.qkv])
        self.qkv = TowerLinear(context, parts, (size,), has_bias=True)
        self.output = TowerLinear(context, ((f"{beginning}{config.names.output}", size),), (size,), has_bias=True)
        self.norm = TowerNorm(context, f"{beginning}pre_norm", width, "layer", config.eps)
        inner = replace(config, projector_size=_WINDOW * config.intermediate_size, projector_activation="gelu_tanh")
        self.linears = TwoLinears(context, inner, width, size, f"{beginning}linear_")

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._merged(rows) for rows in torch.split(x, WINDOWS_AT_ONCE * _WINDOW)])

    def _merged(self, x: Tensor) -> Tensor:
        config, num_windows = self._config, len(x) // _WINDOW
        sequences = ImageSequences([_WINDOW] * num_windows, self._device)
        attention = ImageAttention(self._backend, config, x, sequences.num_blocks)
        heads = self.qkv(self.attention_norm(x)).view(len(x), 3, config.num_heads, config.head_size)
        x = x + self.output(attention.attend(heads[:, 0], heads[:, 1], heads[:, 2], sequences))
        patches = x.view(num_windows, _WINDOW, -1)
        merged: Tensor = self.linears(self.norm(patches.flatten(1)))
        # Added in order, in float32.
        sums = patches[:, 0].float()
        for index in range(1, _WINDOW):
            sums = sums.add_(patches[:, index])
        return merged.add_((sums / _WINDOW).to(x.dtype))


class MiniCpmTower(Tower):
    """A row for 4 x 4 patches, or for 2 x 2 if the window merger is left out, by `VisionConfig.merge_size`."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config, names, (top, merger) = vision.tower, vision.tower.names, vision.tower.names.beginnings
        self._config, self._device, self._is_merged = config, context.device, vision.merge_size > _SIDE
        self._side = round(config.num_positions**0.5)
        self._pixels = PixelTable(vision, context.device)
        self.patches = PatchEmbedding(context, config)
        self.positions = TowerTable(context, names.positions, config.num_positions, config.hidden_size)
        num_first = config.num_unmerged
        self.trunk = Trunk(context, replace(config, num_layers=num_first))
        self.window_merger = WindowMerger(context, config, f"{top}vit_merger.")
        self.later = Trunk(
            context,
            replace(config, num_layers=config.num_layers - num_first),
            lambda context, config, index: TowerLayer(context, config, index + num_first),
        )
        self.last_norm = TowerNorm(context, names.last_norm, config.hidden_size, "layer", config.eps)
        norm, first, second = (f"{merger}mlp.0.{each}" for each in names.projector)
        self.merger = QwenMerger(context, config, _SIDE, hidden_size, (norm, first, second), norms_tokens=True)

    def forward(self, image: ImagePixels) -> TowerRows:
        grids = [
            (len(each) // self._config.patch_size, each.shape[1] // self._config.patch_size) for each in image.crops
        ]
        x = torch.cat(
            [self._embedded(plane, grid) for plane, grid in zip(self._pixels.planes(image), grids, strict=True)]
        )
        x = self.trunk(x, self._sequences(grids))
        if self._is_merged:
            x, grids = self.window_merger(x), [(lines // _SIDE, columns // _SIDE) for lines, columns in grids]
        x = self.last_norm(self.later(x, self._sequences(grids)))
        if self._is_merged:
            parts = torch.split(x, [lines * columns for lines, columns in grids])
            x = torch.cat([merged_rows(part, *grid, _SIDE) for part, grid in zip(parts, grids, strict=True)])
        return TowerRows(self.merger(x))

    def _sequences(self, grids: list[tuple[int, int]]) -> ImageSequences:
        return ImageSequences([lines * columns for lines, columns in grids], self._device)

    def _embedded(self, plane: Tensor, grid: tuple[int, int]) -> Tensor:
        """float32 [3, height, width] -> [N, E], patches by windows."""
        x: Tensor = self.patches(patches_of(plane, self._config.patch_size, merge_size=_SIDE))
        lines, columns = (nearest_places(length, self._side) for length in grid)
        places = (lines.unsqueeze(1) * self._side + columns).flatten()
        places = merged_rows(places.unsqueeze(1), *grid, _SIDE).flatten().to(self._device)
        return x.add_(self.positions()[places])


def nearest_places(length: int, side: int) -> Tensor:
    """int64 [length]: lines of a table of `side` for those of an image, by their beginnings."""
    # In float32, whose roundings decide between two.
    ends = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(length) / length, ends, right=True)
