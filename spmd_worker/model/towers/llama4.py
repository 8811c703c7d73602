"""Tower of Llama 4: squares of one size, each with a class token behind its patches, axial angles of neighbours.

C: squares; N: patches of a square; E: width of the tower; H: hidden size of the text.
"""

from dataclasses import replace

import torch
from torch import Tensor

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm, TowerTable
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.squares import columns_first
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk, axial_angles
from spmd_worker.model_config.vision_config import VisionConfig


class Llama4Tower(Tower):
    """Squares of patches through two linear layers with an activation behind each, and one more to the text."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config, names, size = vision.tower, vision.tower.names, vision.tower.hidden_size
        self._config, self._merge_size, self._device = config, vision.merge_size, context.device
        self._kernels, self._dtype = context.kernels, context.dtype
        self._side = config.crop_size // config.patch_size
        self._pixels = PixelTable(vision, context.device)
        # Its weights are those of a linear layer on unfolded patches.
        self.patches = TowerLinear(context, ((names.patches, size),), (config.num_patch_numbers,), has_bias=False)
        self.positions = TowerTable(context, names.positions, config.num_positions, size)
        self.class_token = TowerTable(context, names.class_token, size)
        self.first_norm, self.last_norm = (
            TowerNorm(context, name, size, "layer", config.eps) for name in (names.first_norm, names.last_norm)
        )
        self.trunk = Trunk(context, config)
        width, inner = size * vision.merge_size**2, config.projector_size
        self.first, self.second, self.projection = (
            TowerLinear(context, ((name, outputs),), (inputs,), has_bias=False)
            for name, outputs, inputs in (
                ("vision_model.vision_adapter.mlp.fc1", inner, width),
                ("vision_model.vision_adapter.mlp.fc2", inner, inner),
                ("multi_modal_projector.linear_1", hidden_size, inner),
            )
        )

    def forward(self, image: ImagePixels) -> TowerRows:
        x = columns_first(self._squares(image), self._side, self._merge_size)
        for linear in (self.first, self.second):
            x = self._kernels.activate(linear(x), "gelu")
        return TowerRows(self.projection(x))

    def _squares(self, image: ImagePixels) -> Tensor:
        """[C, N, E]."""
        planes, config, num_patches = self._pixels.planes(image), self._config, self._side**2
        count = len(planes)
        patches = torch.cat([patches_of(plane, config.patch_size) for plane in planes])
        x = self.patches(patches.to(self._dtype)).view(count, num_patches, -1)
        x = torch.cat((x, self.class_token().expand(count, 1, -1)), dim=1) + self.positions()
        rows: Tensor = self.first_norm(x.flatten(0, 1))
        sequences = ImageSequences([num_patches + 1] * count, self._device)
        rows = self.last_norm(self.trunk(rows, sequences, self._angles(count)))
        return rows.view(x.shape)[:, :num_patches]

    def _angles(self, count: int) -> Angles:
        """Half of a head's pairs turn by column, the others by line, both from 1 on; those of class tokens do not."""
        index = torch.arange(self._side**2)
        columns, lines = (
            torch.cat((each + 1, torch.zeros(1, dtype=torch.int64))).repeat(count)
            for each in (index % self._side, index // self._side)
        )
        angles = axial_angles(columns, lines, self._config.head_size, self._config.rope_theta, torch.float32)
        return replace(angles, is_interleaved=True, is_plain=False).to(self._device)
