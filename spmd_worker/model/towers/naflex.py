"""Tower of LFM2-VL: SigLIP 2 for images of any size (NaFlex), resampled positions, squares of patches as tokens.

Tiles of an image and the complete image behind them are sequences of one call. N: patches; E: width of the tower.
"""

import torch
from torch import Tensor

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.glm import resampled
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm, TowerTable, merged_rows
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.squares import TwoLinears
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk
from spmd_worker.model_config.vision_config import VisionConfig

_PROJECTOR = "model.multi_modal_projector."


class NaflexTower(Tower):
    """A row for each square of patches."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config, names, size = vision.tower, vision.tower.names, vision.tower.hidden_size
        self._config, self._merge_size, self._device = config, vision.merge_size, context.device
        self._dtype, self._side = context.dtype, round(config.num_positions**0.5)
        self._pixels = PixelTable(vision, context.device)
        self.patches = TowerLinear(context, ((names.patches, size),), (config.num_patch_numbers,), has_bias=True)
        self.positions = TowerTable(context, names.positions, config.num_positions, size)
        self.trunk = Trunk(context, config)
        self.last_norm = TowerNorm(context, names.last_norm, size, config.norm, config.eps)
        self._width = width = size * vision.merge_size**2
        self.norm: TowerNorm | None = None
        if config.norms_tokens:
            self.norm = TowerNorm(context, f"{_PROJECTOR}layer_norm", width, "layer", config.projector_eps)
        self.projector = TwoLinears(context, config, width, hidden_size, f"{_PROJECTOR}linear_")

    def forward(self, image: ImagePixels) -> TowerRows:
        found = [self._embedded(plane) for plane in self._pixels.planes(image)]
        x = self.trunk(torch.cat(found), ImageSequences([len(each) for each in found], self._device))
        tokens = self.last_norm(x).view(-1, self._width)
        return TowerRows(self.projector(tokens if self.norm is None else self.norm(tokens)))

    def _embedded(self, plane: Tensor) -> Tensor:
        """float32 [3, height, width] -> [N, E], patches in order of tokens."""
        size, merge_size = self._config.patch_size, self._merge_size
        grid = (plane.shape[1] // size, plane.shape[2] // size)
        # The channels of a pixel are side by side.
        patches = patches_of(plane, size, merge_size=merge_size).view(-1, len(plane), size**2).transpose(1, 2)
        x: Tensor = self.patches(patches.flatten(1).to(self._dtype))
        # Computed in float32 and rounded once.
        table = resampled(self.positions().view(self._side, self._side, -1), grid, antialiased_taps)
        return x.add_(merged_rows(table.flatten(0, 1), *grid, merge_size).to(x.dtype))


def antialiased_taps(size: int, new_size: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The lines around each new one and their weights: bilinear, by the middles of lines; of more lines than the new
    ones, all those that a new one covers.
    """
    scale = size / new_size
    support = max(scale, 1.0)
    middles = (torch.arange(new_size, dtype=torch.float64) + 0.5) * scale
    first = (middles - support + 0.5).long().clamp(min=0)
    stop = (middles + support + 0.5).long().clamp(max=size)
    lines = first.unsqueeze(1) + torch.arange(int((stop - first).max()))
    weights = (1 - (lines + 0.5 - middles.unsqueeze(1)).abs() / support).clamp(min=0)
    weights = torch.where(lines < stop.unsqueeze(1), weights, 0.0)
    weights = (weights / weights.sum(1, keepdim=True)).float()
    lines = lines.clamp(max=size - 1)
    return [(lines[:, tap].to(device), weights[:, tap].to(device)) for tap in range(lines.shape[1])]
