"""Towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and PaddleOCR-VL: images of any size, or two frames of a video,
axial angles, squares of patches as tokens.

N: patches; E: width of the tower; M: tokens of the image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm, TowerTable, merged_rows
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import PatchEmbedding, Trunk, axial_angles, interpolated
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig


class QwenMerger(nn.Module):
    """[N, E] -> [M, hidden size of the text]: the patches of a token, one behind the other, through two linear layers.
    The norm is of patches, or of tokens if `norms_tokens`.
    """

    def __init__(
        self,
        context: LayerContext,
        config: TowerConfig,
        merge_size: int,
        hidden_size: int,
        names: tuple[str, str, str],
        *,
        norms_tokens: bool = False,
    ) -> None:
        super().__init__()
        norm, first, second = names
        self._kernels, self._norms_tokens = context.kernels, norms_tokens
        self._width = width = config.hidden_size * merge_size**2
        self.norm = TowerNorm(
            context, norm, width if norms_tokens else config.hidden_size, config.norm, config.projector_eps
        )
        self.first = TowerLinear(context, ((first, width),), (width,), has_bias=True)
        self.second = TowerLinear(context, ((second, hidden_size),), (width,), has_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, self._width)
        tokens = self.norm(tokens) if self._norms_tokens else self.norm(x).view(-1, self._width)
        merged: Tensor = self.second(self._kernels.activate(self.first(tokens), "gelu"))
        return merged


class QwenTower(Tower):
    """Base: patches in order of tokens, with their angles."""

    def __init__(self, context: LayerContext, vision: VisionConfig) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        self._vision, self._config, self._device = vision, vision.tower, context.device
        self._pixels = PixelTable(vision, context.device)
        self.patches = PatchEmbedding(context, self._config)
        self.trunk = Trunk(context, self._config)

    def _embedded(self, image: ImagePixels) -> Tensor:
        # An image, or two frames of a video.
        planes, config = torch.stack(self._pixels.planes(image)), self._config
        x: Tensor = self.patches(patches_of(planes, config.patch_size, config.num_frames, self._vision.merge_size))
        return x

    def _places(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, int64 [N] each."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        row, column = (
            merged_rows(each.reshape(-1, 1), *grid, self._vision.merge_size).flatten() for each in (rows, columns)
        )
        return row, column


class Qwen3Tower(QwenTower):
    """Learned positions too, resampled to the image's grid; layers' outputs for the text's first layers (deepstack)."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, (beginning,) = self._config, self._config.names.beginnings
        self._side = round(config.num_positions**0.5)
        self.positions = TowerTable(context, config.names.positions, config.num_positions, config.hidden_size)

        def merger(name: str, *, norms_tokens: bool) -> QwenMerger:
            norm, first, second = (f"{beginning}{name}.{part}" for part in config.names.projector)
            sizes = (vision.merge_size, hidden_size)
            return QwenMerger(context, config, *sizes, (norm, first, second), norms_tokens=norms_tokens)

        self.merger = merger("merger", norms_tokens=False)
        count = len(config.added_layers)
        self.added = nn.ModuleList(merger(f"{config.names.added}.{index}", norms_tokens=True) for index in range(count))

    def forward(self, image: ImagePixels) -> TowerRows:
        x, (rows, columns), config = self._embedded(image), self._places(image.grid), self._config
        # Summed in float32 and rounded once.
        positions = interpolated(self.positions(), _taps(rows, columns, image.grid, self._side, self._device))
        x = x.add_(positions.to(x.dtype))
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, torch.float32).to(self._device)
        added = []
        for index, state in enumerate(self.trunk.states(x, ImageSequences([len(x)], self._device), angles)):
            if index in config.added_layers:
                added.append(self.added[config.added_layers.index(index)](state))
        return TowerRows(self.merger(x), tuple(added))


def _taps(
    rows: Tensor, columns: Tensor, grid: tuple[int, int], side: int, device: torch.device, *, has_middles: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """The four positions around each patch and their weights: bilinear, corners on corners or by patches' middles."""
    row_taps, column_taps = (
        _line_taps(index, size, side, has_middles=has_middles) for index, size in ((rows, grid[0]), (columns, grid[1]))
    )
    return [
        ((row * side + column).to(device), (row_weight * column_weight).to(device))
        for row, row_weight in row_taps
        for column, column_weight in column_taps
    ]


def _line_taps(index: Tensor, size: int, side: int, *, has_middles: bool) -> list[tuple[Tensor, Tensor]]:
    if has_middles:
        source = (index.float() + 0.5) * side / size - 0.5
    else:
        source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor().long()
    found = []
    for tap in (low, low + 1):
        weight = (1 - (source - tap).abs()).clamp(min=0)
        found.append((tap.clamp(0, side - 1), weight))
    return found


class PaddleocrTower(QwenTower):
    """Learned positions too, resampled by the middles of patches; a norm behind the layers."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, size = self._config, self._config.hidden_size
        self._side = round(config.num_positions**0.5)
        self.positions = TowerTable(context, config.names.positions, config.num_positions, size)
        self.last_norm = TowerNorm(context, config.names.last_norm, size, config.norm, config.eps)
        names = ("mlp_AR.pre_norm", "mlp_AR.linear_1", "mlp_AR.linear_2")
        self.merger = QwenMerger(context, config, vision.merge_size, hidden_size, names)

    def forward(self, image: ImagePixels) -> TowerRows:
        x, (rows, columns), config = self._embedded(image), self._places(image.grid), self._config
        taps = _taps(rows, columns, image.grid, self._side, self._device, has_middles=True)
        # Summed in float32 and rounded once.
        x = x.add_(interpolated(self.positions(), taps).to(x.dtype))
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, torch.float32).to(self._device)
        x = self.trunk(x, ImageSequences([len(x)], self._device), angles)
        return TowerRows(self.merger(self.last_norm(x)))


class Qwen2Tower(QwenTower):
    """All layers see the complete image; a row for each token."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        (beginning,) = self._config.names.beginnings
        names = (f"{beginning}merger.ln_q", f"{beginning}merger.mlp.0", f"{beginning}merger.mlp.2")
        self.merger = QwenMerger(context, self._config, vision.merge_size, hidden_size, names)

    def forward(self, image: ImagePixels) -> TowerRows:
        x, (rows, columns), config = self._embedded(image), self._places(image.grid), self._config
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, torch.float32).to(self._device)
        return TowerRows(self.merger(self.trunk(x, ImageSequences([len(x)], self._device), angles)))


class Qwen2_5Tower(Qwen2Tower):
    """Most layers see windows: patches are in order of windows, tokens are put back at the end."""

    def forward(self, image: ImagePixels) -> TowerRows:
        config, merge_size = self._config, self._vision.merge_size
        grid = (image.grid[0] // merge_size, image.grid[1] // merge_size)
        order, lengths = windows(*grid, config.window_size // merge_size // config.patch_size)
        num_each = merge_size**2
        patches = (order.unsqueeze(1) * num_each + torch.arange(num_each)).flatten()
        rows, columns = (each[patches] for each in self._places(image.grid))
        angles = axial_angles(rows, columns, config.head_size, config.rope_theta, torch.float32).to(self._device)
        x = self._embedded(image)[patches.to(self._device)]
        of_windows = ImageSequences([length * num_each for length in lengths], self._device)
        x = self.trunk(x, ImageSequences([len(x)], self._device), angles, of_windows)
        return TowerRows(self.merger(x)[order.argsort().to(self._device)])


def windows(rows: int, columns: int, size: int) -> tuple[Tensor, Sequence[int]]:
    """Tokens by square windows, int64 [M], and how many each window has: those at the edges may have fewer."""
    index = torch.arange(rows * columns).view(rows, columns)
    found = [
        index[top : top + size, left : left + size].flatten()
        for top in range(0, rows, size)
        for left in range(0, columns, size)
    ]
    return torch.cat(found), [len(each) for each in found]
