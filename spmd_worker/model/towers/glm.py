"""Tower of GLM-4.1V, 4.5V, 4.6V and GLM-OCR: images of any size, axial angles and, but for OCR, resampled positions,
squares of patches as tokens.

N: patches; E: width of the tower; M: tokens of the image; H: hidden size of the text.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.layers import TowerGates, TowerLinear, TowerNorm, TowerTable, merged_rows
from spmd_worker.model.towers.qwen import QwenTower
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.model.towers.trunk import axial_angles, interpolated
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

Taps: TypeAlias = list[tuple[Tensor, Tensor]]
"""Indices and weights, of each tap of all new lines."""
_A: Final = -0.75
"""Parameter of cubic convolution, as torch has it."""


class GlmMerger(nn.Module):
    """[M, H] -> [M, H]: a linear layer, its norm, and a gated feed-forward."""

    def __init__(self, context: LayerContext, config: TowerConfig, hidden_size: int, beginning: str) -> None:
        super().__init__()
        inner, kernels = config.projector_size, context.kernels
        gates = (f"{beginning}gate_proj", f"{beginning}up_proj")
        self._kernels = kernels
        self.first = TowerLinear(context, ((f"{beginning}proj", hidden_size),), (hidden_size,), has_bias=False)
        self.norm = TowerNorm(context, f"{beginning}post_projection_norm", hidden_size, "layer", config.projector_eps)
        self.up = TowerGates(context, gates, hidden_size, inner, config.projector_activation, has_bias=False)
        self.down = TowerLinear(context, ((f"{beginning}down_proj", hidden_size),), (inner,), has_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.down(self.up(self._kernels.activate(self.norm(self.first(x)), "gelu")))
        return merged


class GlmTower(QwenTower):
    """Patches are normed before their positions are added, if they have any, and behind the layers; a token's are one
    linear layer's.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, names, size = self._config, self._config.names, self._config.hidden_size
        (beginning,) = names.beginnings
        self._side = round(config.num_positions**0.5)
        self.first_norm, self.positions = None, None
        if config.num_positions:
            self.first_norm = TowerNorm(context, names.first_norm, size, config.norm, config.eps)
            self.positions = TowerTable(context, names.positions, config.num_positions, size)
        self.last_norm = TowerNorm(context, names.last_norm, size, config.norm, config.eps)
        parts, square = ((f"{beginning}downsample", hidden_size),), (vision.merge_size, vision.merge_size)
        self.downsample = TowerLinear(context, parts, (size, *square), has_bias=True)
        self.merger = GlmMerger(context, config, hidden_size, f"{beginning}merger.")

    def forward(self, image: ImagePixels) -> TowerRows:
        x, (rows, columns), config = self._embedded(image), self._places(image.grid), self._config
        if self.first_norm is not None and self.positions is not None:
            # Computed in float32 and rounded once.
            positions = resampled(self.positions().view(self._side, self._side, -1), image.grid)
            merged = merged_rows(positions.flatten(0, 1), *image.grid, self._vision.merge_size)
            x = self.first_norm(x).add_(merged.to(x.dtype))
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, torch.float32).to(self._device)
        x = self.last_norm(self.trunk(x, ImageSequences([len(x)], self._device), angles))
        # A number of all patches of a token, then the next one, as the weights of a convolution.
        squares = x.view(-1, self._vision.merge_size**2, config.hidden_size).transpose(1, 2).flatten(1)
        return TowerRows(self.merger(self.downsample(squares)))


def resampled(table: Tensor, grid: tuple[int, int], taps_of: Callable[..., Taps] | None = None) -> Tensor:
    """[lines, columns, E] -> float32 [*grid, E]: bicubic, by the middles of patches, columns first. Beyond its edges
    the table goes on with its last numbers. `taps_of` are in place of those of this curve.
    """
    taps_of = taps_of or _taps
    lines, columns, size = table.shape
    by_columns = table.transpose(0, 1).reshape(columns, lines * size)
    across = interpolated(by_columns, taps_of(columns, grid[1], table.device)).view(grid[1], lines, size)
    by_lines = across.transpose(0, 1).reshape(lines, grid[1] * size)
    return interpolated(by_lines, taps_of(lines, grid[0], table.device)).view(*grid, size)


def _taps(size: int, new_size: int, device: torch.device) -> Taps:
    """The four lines around each new one and their weights."""
    # The steps of `grid_sample`, each rounded to float32.
    place = ((torch.arange(new_size) + 0.5) / new_size) * 2 - 1
    source = ((place + 1) * size - 1) / 2
    low = source.floor()
    part = source - low
    weights = (_outer(part + 1), _inner(part), _inner(1 - part), _outer(2 - part))
    return [
        ((low.long() + step).clamp(0, size - 1).to(device), weight.to(device))
        for step, weight in enumerate(weights, start=-1)
    ]


def _inner(x: Tensor) -> Tensor:
    """Weight of a line nearer than 1."""
    return ((_A + 2) * x - (_A + 3)) * x * x + 1


def _outer(x: Tensor) -> Tensor:
    """Weight of a line at 1 to 2."""
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A
