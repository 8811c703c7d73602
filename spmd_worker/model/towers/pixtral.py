"""Towers of Pixtral, Mistral 3 and LightOnOCR: images of any size, angles by row and by column in turns.

N: patches; E: width of the tower; H: hidden size of the text.
"""

from dataclasses import replace

import torch
from torch import Tensor

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.squares import TwoLinears
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import PatchEmbedding, Trunk, axial_angles
from spmd_worker.model_config.vision_config import VisionConfig


class PixtralTower(Tower):
    """A row for each patch."""

    _top = "multi_modal_projector"

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        self._config, self._device = vision.tower, context.device
        config = self._config
        self._pixels = PixelTable(vision, context.device)
        self.patches = PatchEmbedding(context, config)
        self.first_norm = TowerNorm(context, config.names.first_norm, config.hidden_size, "rms", config.eps)
        self.trunk = Trunk(context, config)
        names = config.names.projector[2:]
        sizes = (config.hidden_size, hidden_size)
        self.projector = TwoLinears(context, config, *sizes, f"{self._top}.linear_", names)

    def forward(self, image: ImagePixels) -> TowerRows:
        return TowerRows(self.projector(self._states(image)))

    def _states(self, image: ImagePixels) -> Tensor:
        """[N, E]."""
        (plane,), config = self._pixels.planes(image), self._config
        x = self.first_norm(self.patches(patches_of(plane, config.patch_size)))
        index = torch.arange(len(x))
        rows, columns = index // image.grid[1], index % image.grid[1]
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, x.dtype, is_by_turns=True)
        if config.pairs_neighbours:
            angles = replace(angles, is_interleaved=True, is_plain=False)
        states: Tensor = self.trunk(x, ImageSequences([len(x)], self._device), angles.to(self._device))
        return states


class Mistral3Tower(PixtralTower):
    """Squares of patches, each number of all of them together, through one more linear layer. Patches that fill no
    square, at the right and at the bottom, are left out behind the layers.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision, hidden_size)
        size, self._merge_size = self._config.hidden_size, vision.merge_size
        names = self._config.names.projector or (f"{self._top}.norm", f"{self._top}.patch_merger.merging_layer")
        self.norm = TowerNorm(context, names[0], size, "rms", self._config.projector_eps)
        self.merger = TowerLinear(context, ((names[1], size),), (size * vision.merge_size**2,), has_bias=False)

    def forward(self, image: ImagePixels) -> TowerRows:
        x, size = self.norm(self._states(image)), self._merge_size
        lines, columns = image.grid[0] // size, image.grid[1] // size
        filled = x.view(*image.grid, -1)[: lines * size, : columns * size]
        squares = filled.reshape(lines, size, columns, size, -1).permute(0, 2, 4, 1, 3)
        return TowerRows(self.projector(self.merger(squares.reshape(lines * columns, -1))))


class LightonTower(Mistral3Tower):
    """Mistral 3's, by other names."""

    _top = "model.vision_projection"
