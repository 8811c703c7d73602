"""Tower of Kimi K2.5 (MoonViT): images of any size, resampled positions, angles of columns and lines in turns, squares
of patches as tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.glm import resampled
from spmd_worker.model.towers.layers import TowerNorm, TowerTable, merged_rows
from spmd_worker.model.towers.qwen import QwenMerger, QwenTower
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.model.towers.trunk import axial_angles
from spmd_worker.model_config.vision_config import VisionConfig


class KimiTower(QwenTower):
    """A row for each square of patches."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, size = self._config, self._config.hidden_size
        side = round(config.num_positions**0.5)
        self.positions = TowerTable(context, config.names.positions, side, side, size)
        self.last_norm = TowerNorm(context, config.names.last_norm, size, config.norm, config.eps)
        names = ("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2")
        self.merger = QwenMerger(context, config, vision.merge_size, hidden_size, names)

    def forward(self, image: ImagePixels) -> TowerRows:
        x, table = self._embedded(image), self.positions.weight
        # Computed in float32 and rounded once.
        positions = merged_rows(resampled(table, image.grid).flatten(0, 1), *image.grid, self._vision.merge_size)
        x = x.add_(positions.to(x.dtype))
        x = self.trunk(x, ImageSequences([len(x)], self._device), self._angles(image.grid))
        return TowerRows(self.merger(self.last_norm(x)))

    def _angles(self, grid: tuple[int, int]) -> Angles:
        """Neighbouring numbers are pairs, which turn by column and by line in turns."""
        rows, columns = self._places(grid)
        angles = axial_angles(columns, rows, self._config.head_size, self._config.rope_theta, torch.float32)
        tables = [_in_turns(each).to(self._device) for each in (angles.cos, angles.sin)]
        return replace(angles, cos=tables[0], sin=tables[1], is_interleaved=True, is_plain=False)


def _in_turns(x: Tensor) -> Tensor:
    """[N, pairs], the first half of columns and the other of lines -> the same, one of each in turns."""
    return x.view(len(x), 2, -1).transpose(1, 2).flatten(1)
