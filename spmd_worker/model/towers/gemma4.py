"""The tower of Gemma 4: images of any size, learned positions and angles by column and line, means of squares of
patches as tokens; and what its 12B has instead, without layers.

N: patches; E: width of the tower; H: heads; D: head size; M: tokens of the image.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.norm import FullNorm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model.towers.attention import ImageAttention, ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm, TowerTable
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk, axial_angles, rows_at_once
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

_NORM: Final = "rms_once"
_TOWER, _PROJECTOR = "model.vision_tower", "model.embed_vision.embedding_projection"
_CHANNELS: Final = 3


def _bare_norm(context: LayerContext, size: int, eps: float) -> FullNorm:
    """A norm without weights."""
    return FullNorm(context, size, NormConfig(eps=eps, rounds_once=True, has_weight=False))


class ClippedLinear(TowerLinear):
    """[N, inputs] -> [N, outputs] without bias, of the tensor `name`.linear. If it `clips`, inputs and outputs are
    bounded by numbers of the checkpoint, buffers in transformers, infinite in a model that was never trained.
    """

    bounds = ("input_min", "input_max", "output_min", "output_max")

    def __init__(self, context: LayerContext, name: str, input_size: int, output_size: int, *, clips: bool) -> None:
        super().__init__(context, ((f"{name}.linear", output_size),), (input_size,), has_bias=False)
        self._name, self._clips = name, clips
        if clips:
            self.input_min, self.input_max = context.parameter(), context.parameter()
            self.output_min, self.output_max = context.parameter(), context.parameter()

    def forward(self, x: Tensor) -> Tensor:
        if not self._clips:
            return super().forward(x)
        x = super().forward(x.clamp(self.input_min, self.input_max))
        return x.clamp_(self.output_min, self.output_max)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().weight_slices(prefix)
        for each in self.bounds if self._clips else ():
            yield replace(replicated(f"{self._name}.{each}", (), f"{prefix}.{each}", is_buffer=True), is_bound=True)


class Gemma4Layer(nn.Module):
    """One layer: norms before attention and feed-forward, and of their outputs; norms of queries, keys and values."""

    def __init__(self, context: LayerContext, config: TowerConfig, index: int) -> None:
        super().__init__()
        names, size, inner = config.names, config.hidden_size, config.num_heads * config.head_size
        beginning = f"{names.layers}.{index}."
        self._shape, self._kernels, self._activation = (
            (-1, config.num_heads, config.head_size),
            context.kernels,
            config.activation,
        )

        def norm(name: str, size: int = size) -> TowerNorm:
            return TowerNorm(context, beginning + name, size, _NORM, config.eps)

        def linear(name: str, input_size: int, output_size: int) -> ClippedLinear:
            return ClippedLinear(context, beginning + name, input_size, output_size, clips=config.clips)

        self.attention_norm, self.mlp_norm = map(norm, names.norms)
        self.attention_output_norm, self.mlp_output_norm = map(norm, names.output_norms)
        self.query, self.key, self.value = (linear(name, size, inner) for name in names.qkv)
        self.query_norm, self.key_norm = (norm(name, config.head_size) for name in (names.query_norm, names.key_norm))
        self.value_norm = _bare_norm(context, config.head_size, config.eps)
        self.output = linear(names.output, inner, size)
        gate, up, down = names.mlp
        self.gate, self.up = (linear(name, size, config.intermediate_size) for name in (gate, up))
        self.down = linear(down, config.intermediate_size, size)

    def forward(self, x: Tensor, angles: Angles, attention: ImageAttention, sequences: ImageSequences) -> None:
        """The residual stream [N, E], changed in place."""
        normed = self.attention_norm(x)
        query, key = (
            angles.rotate(self._kernels, _by_axis(norm(linear(normed).view(self._shape))))
            for linear, norm in ((self.query, self.query_norm), (self.key, self.key_norm))
        )
        value = self.value_norm(self.value(normed).view(self._shape))
        attended = attention.attend(query, key, value, sequences)
        self._kernels.add_(x, self.attention_output_norm(self.output(attended)))
        for rows in rows_at_once(x):
            y = self.mlp_norm(rows)
            y = self._kernels.activate(self.gate(y), self._activation).mul_(self.up(y))
            self._kernels.add_(rows, self.mlp_output_norm(self.down(y)))


def _by_axis(x: Tensor) -> Tensor:
    """[N, H, D]: each half of a head has the pairs of an axis, its first half against its second. The same numbers with
    the first ones of all pairs, then the second ones, as rotations of complete heads have them. Scores are sums over
    pairs, so queries and keys may both be so.
    """
    num_patches, num_heads, size = x.shape
    quarters = x.view(num_patches, num_heads, 2, 2, size // 4)
    return quarters.transpose(2, 3).reshape(num_patches, num_heads, size)


class Gemma4Tower(Tower):
    """A row for each square of patches."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config = self._config = vision.tower
        size, self._merge_size, self._device, self._dtype = (
            config.hidden_size,
            vision.merge_size,
            context.device,
            context.dtype,
        )
        self._kernels, self._pixels = context.kernels, PixelTable(vision, context.device)
        patches = ((config.names.patches, size),)
        self.patches = TowerLinear(context, patches, (config.num_patch_numbers,), has_bias=False)
        self.positions = TowerTable(context, config.names.positions, 2, config.num_positions, size)
        self.trunk = Trunk(context, config, Gemma4Layer)
        self.shift, self.scale = (
            StandardTable(context, f"{_TOWER}.{name}", size) if config.standardises else None
            for name in ("std_bias", "std_scale")
        )
        self.norm = _bare_norm(context, size, config.eps)
        self.projector = TowerLinear(context, ((_PROJECTOR, hidden_size),), (size,), has_bias=False)

    def forward(self, image: ImagePixels) -> TowerRows:
        (plane,), config = self._pixels.planes(image), self._config
        index = torch.arange(image.grid[0] * image.grid[1])
        lines, columns = index // image.grid[1], index % image.grid[1]
        x = self.patches(_numbers_of(plane, config.patch_size).sub_(0.5).mul_(2).to(self._dtype))
        x = self._kernels.add_(x, self._positions_of(lines.to(self._device), columns.to(self._device)))
        # Columns come first, and angles are rounded.
        angles = axial_angles(columns, lines, config.head_size, config.rope_theta, x.dtype).to(self._device)
        x = self.trunk(x, ImageSequences([len(x)], self._device), angles)
        return TowerRows(self.projector(self.norm(self._pooled(x, image.grid))))

    def _positions_of(self, lines: Tensor, columns: Tensor) -> Tensor:
        """[N, E]: the position of the column and that of the line, added and rounded."""
        table, count = self.positions(), self._config.num_positions
        positions: Tensor = table[columns] + table[count + lines]
        return positions

    def _pooled(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """[N, E] -> [M, E]: means of squares, times the root of E, in float32 but for the means."""
        side, size = self._merge_size, x.shape[1]
        squares = x.view(grid[0] // side, side, grid[1] // side, side, size).transpose(1, 2).reshape(-1, side**2, size)
        # Added in order.
        means = squares[:, 0].float() / side**2
        for patch in range(1, side**2):
            means += squares[:, patch].float() / side**2
        rows = means.to(x.dtype).float() * size**0.5
        if self.shift is not None and self.scale is not None:
            rows = (rows - self.shift().float()) * self.scale().float()
        pooled: Tensor = rows.to(x.dtype)
        return pooled


class StandardTable(TowerTable):
    """[1, E], by its full name, a buffer in transformers."""

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield replicated(self._name, self._shape, f"{prefix}.weight", is_buffer=True)


def _numbers_of(plane: Tensor, patch_size: int) -> Tensor:
    """float32 [3, height, width] -> [N, P * P * 3], the channels of a pixel side by side."""
    patches = patches_of(plane, patch_size).view(-1, _CHANNELS, patch_size**2)
    return patches.transpose(1, 2).flatten(1)


class Gemma4Embedder(Tower):
    """A row for each square of pixels as large as a square of patches: norms, a linear layer, positions of its column
    and line.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config, (beginning, _) = vision.tower, vision.tower.names.beginnings
        size, self._side = config.hidden_size, config.patch_size * vision.merge_size
        self._merge_size, self._device, self._dtype = vision.merge_size, context.device, context.dtype
        self._kernels, self._pixels = context.kernels, PixelTable(vision, context.device)
        num_inputs = _CHANNELS * self._side**2

        def norm(name: str, size: int) -> TowerNorm:
            return TowerNorm(context, beginning + name, size, "layer", config.eps)

        self.pixel_norm, self.patch_norm = norm("patch_ln1", num_inputs), norm("patch_ln2", size)
        self.patches = TowerLinear(context, ((config.names.patches, size),), (num_inputs,), has_bias=True)
        self.positions = TowerTable(context, config.names.positions, config.num_positions, 2, size)
        self.position_norm = norm("pos_norm", size)
        self.norm = _bare_norm(context, size, config.projector_eps)
        self.projector = TowerLinear(context, ((_PROJECTOR, hidden_size),), (size,), has_bias=False)

    def forward(self, image: ImagePixels) -> TowerRows:
        (plane,) = self._pixels.planes(image)
        num_lines, num_columns = (each // self._merge_size for each in image.grid)
        index = torch.arange(num_lines * num_columns, device=self._device)
        lines, columns = index // num_columns, index % num_columns
        x = self.pixel_norm(_numbers_of(plane, self._side).to(self._dtype))
        x, table = self.patch_norm(self.patches(x)), self.positions()
        # A position has a row of columns, then one of lines.
        x = self._kernels.add_(x, table[2 * columns] + table[2 * lines + 1])
        return TowerRows(self.projector(self.norm(self.position_norm(x))))
