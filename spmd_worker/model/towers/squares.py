"""Towers that read squares of one size: SigLIP and CLIP with the projectors of Gemma 3, LLaVA, LLaVA-NeXT,
LLaVA-OneVision, SmolVLM and Idefics3, Aya Vision and Command A Vision; InternVL.

Squares of an image are sequences of one call, which do not see each other. C: squares; N: patches of a square; E: width
of the tower; H: hidden size of the text.
"""

import math

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.media.sizes import best_pinpoint
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.layers import JoinedGates, TowerLinear, TowerNorm, TowerTable, TransposedLinear
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import PatchEmbedding, Trunk, interpolated
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

_PROJECTOR = "multi_modal_projector"


class TwoLinears(nn.Module):
    """[rows, inputs] -> [rows, H], with an activation between two linear layers, whose names are `names`, or without
    any `name` and 1 or 2.
    """

    def __init__(
        self,
        context: LayerContext,
        config: TowerConfig,
        input_size: int,
        hidden_size: int,
        name: str = f"{_PROJECTOR}.linear_",
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        names = names or (f"{name}1", f"{name}2")
        self._kernels, self._activation = context.kernels, config.projector_activation
        sizes, has_bias = (input_size, config.projector_size, hidden_size), config.projector_has_bias
        self.first, self.second = (
            TowerLinear(context, ((each, outputs),), (inputs,), has_bias=has_bias)
            for each, inputs, outputs in zip(names, sizes, sizes[1:], strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.second(self._kernels.activate(self.first(x), self._activation))
        return rows


class SquareTower(Tower):
    """Base: the trunk's outputs of all squares of an image."""

    def __init__(self, context: LayerContext, vision: VisionConfig) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        config, names, size = vision.tower, vision.tower.names, vision.tower.hidden_size
        self._config, self._merge_size, self._device = config, vision.merge_size, context.device
        self._side = config.crop_size // config.patch_size
        self._pixels = PixelTable(vision, context.device)
        self.patches = PatchEmbedding(context, config)
        # InternVL's parameters have more dimensions.
        leading = (1,) if names.scales else ()
        self.positions = TowerTable(context, names.positions, *leading, config.num_positions, size)
        self.class_token: TowerTable | None = None
        if names.class_token:
            self.class_token = TowerTable(context, names.class_token, *(leading * 2), size)
        self.first_norm, self.last_norm = (
            TowerNorm(context, name, size, "layer", config.eps) if name else None
            for name in (names.first_norm, names.last_norm)
        )
        self.trunk = Trunk(context, config)

    def _squares(self, image: ImagePixels) -> Tensor:
        """[C, N, E], with a class token [C, N + 1, E] unless the tower drops it."""
        rows, shape = self._embedded(image)
        rows = self.trunk(rows, self._sequences(shape))
        rows = rows if self.last_norm is None else self.last_norm(rows)
        squares: Tensor = rows.view(shape)[:, int(self._config.drops_first_row) :]
        return squares

    def _sequences(self, shape: torch.Size) -> ImageSequences:
        return ImageSequences([shape[1]] * shape[0], self._device)

    def _embedded(self, image: ImagePixels) -> tuple[Tensor, torch.Size]:
        """Input of the first layer, [C * N, E], and its shape [C, N, E]; with class tokens N is one more."""
        planes = self._pixels.planes(image)
        used, count = self._side * self._config.patch_size, len(planes)
        # A convolution leaves out incomplete patches at the end.
        patches = [patches_of(plane[:, :used, :used], self._config.patch_size) for plane in planes]
        x = self.patches(torch.cat(patches)).view(count, self._side**2, -1)
        if self.class_token is not None:
            x = torch.cat((self.class_token().expand(count, 1, -1), x), dim=1)
        rows: Tensor = (x + self.positions()).flatten(0, 1)
        return rows if self.first_norm is None else self.first_norm(rows), x.shape

    def _merged(self, x: Tensor) -> Tensor:
        """[C, N, E] -> [tokens, E * patches of a token], patches of a token by lines."""
        count, size = x.shape[0], self._merge_size
        side = self._side // size
        return x.view(count, side, size, side, size, -1).transpose(2, 3).reshape(count * side**2, -1)


class Gemma3Tower(SquareTower):
    """Means of patches, normed and projected by a matrix [E, H]."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        size = self._config.hidden_size
        self.norm = TowerNorm(context, f"{_PROJECTOR}.mm_soft_emb_norm", size, "rms_plus_one", self._config.eps)
        self.projection = TransposedLinear(context, f"{_PROJECTOR}.mm_input_projection_weight", size, hidden_size)

    def forward(self, image: ImagePixels) -> TowerRows:
        squares = self._squares(image)
        patches = self._merged(squares).view(-1, self._merge_size**2, self._config.hidden_size)
        # Added in order, in float32.
        sums = patches[:, 0].float()
        for index in range(1, patches.shape[1]):
            sums = sums.add_(patches[:, index])
        means = (sums / patches.shape[1]).to(squares.dtype)
        return TowerRows(self.projection(self.norm(means)))


class LlavaTower(SquareTower):
    """A row for each patch."""

    _linears = f"{_PROJECTOR}.linear_"

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        self.projector = TwoLinears(context, self._config, self._config.hidden_size, hidden_size, self._linears)

    def forward(self, image: ImagePixels) -> TowerRows:
        return TowerRows(self.projector(self._squares(image).flatten(0, 1)))


class DeepseekTower(LlavaTower):
    """LLaVA's, by other names."""

    _linears = "model.aligner.linear"


class OnevisionTower(LlavaTower):
    """The image as one square, then its squares put together again, without what was padded, and a newline's row behind
    each line. LLaVA-NeXT's has no most squares. Frames of videos have half the lines and columns, and the newline's row
    is behind the last one.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision, hidden_size)
        self.newline = TowerTable(context, "image_newline", hidden_size)

    def forward(self, image: ImagePixels) -> TowerRows:
        rows, newline = super().forward(image).rows.view(len(image.crops), self._side**2, -1), self.newline()
        if image.frame:
            side = -(-self._side // 2)
            pooled = _scaled(rows[0].view(self._side, self._side, -1), side, side).flatten(0, 1)
            return TowerRows(torch.cat((pooled, newline)) if image.frame > 1 else pooled)
        if len(rows) == 1:
            return TowerRows(torch.cat((rows[0], newline)))
        height, width = best_pinpoint(*image.size, self._config.pinpoints)
        grid = (height // self._config.crop_size, width // self._config.crop_size)
        assert grid[0] * grid[1] == len(rows) - 1, (grid, len(rows))
        picture = rows[1:].view(*grid, self._side, self._side, -1).transpose(1, 2)
        picture = self._resampled(_unpadded(picture.flatten(2, 3).flatten(0, 1), image.size))
        ends = newline.expand(len(picture), 1, -1)
        return TowerRows(torch.cat((rows[0], torch.cat((picture, ends), dim=1).flatten(0, 1))))

    def _resampled(self, picture: Tensor) -> Tensor:
        """[lines, columns, H], of no more tokens than `max_crops` squares, about."""
        lines, columns, _ = picture.shape
        if not self._config.max_crops:
            return picture
        ratio = math.sqrt(lines * columns / (self._config.max_crops * self._side**2))
        if ratio <= _MOST_GROWTH:
            return picture
        return _scaled(picture, int(lines // ratio), int(columns // ratio))


_MOST_GROWTH = 1.1


def _scaled(picture: Tensor, new_lines: int, new_columns: int) -> Tensor:
    """[lines, columns, H] -> [new lines, new columns, H], bilinear."""
    lines, columns, size = picture.shape
    row_taps, column_taps = _taps(lines, new_lines), _taps(columns, new_columns)
    taps = [
        (
            (row.unsqueeze(1) * columns + column).flatten().to(picture.device),
            (row_weight.unsqueeze(1) * column_weight).flatten().to(picture.device),
        )
        for row, row_weight in row_taps
        for column, column_weight in column_taps
    ]
    found = interpolated(picture.flatten(0, 1), taps)
    return found.to(picture.dtype).view(new_lines, new_columns, size)


def _taps(size: int, new_size: int) -> list[tuple[Tensor, Tensor]]:
    """The two lines around each new one and their weights: bilinear, by the middles of lines."""
    source = ((torch.arange(new_size) + 0.5) * (size / new_size) - 0.5).clamp(min=0)
    low = source.floor().long().clamp(max=size - 1)
    weight = source - low
    return [(low, 1 - weight), ((low + 1).clamp(max=size - 1), weight)]


def _unpadded(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """[lines, columns, H] without the lines or columns that are not of the image of `size`."""
    (height, width), (lines, columns) = size, picture.shape[:2]
    if width / height > columns / lines:
        cut = (lines - int(round(height * (columns / width), 7))) // 2
        return picture[cut : lines - cut]
    cut = (columns - int(round(width * (lines / height), 7))) // 2
    return picture[:, cut : columns - cut]


class SmolvlmTower(SquareTower):
    """Squares of patches, one linear layer."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        width = self._config.hidden_size * vision.merge_size**2
        name = "model.connector.modality_projection.proj"
        self.projection = TowerLinear(context, ((name, hidden_size),), (width,), has_bias=False)

    def forward(self, image: ImagePixels) -> TowerRows:
        return TowerRows(self.projection(self._merged(self._squares(image))))


class CohereTower(SquareTower):
    """Squares of patches, gates of one linear layer, and a second one; a norm before them if it `norms_tokens`."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, width = self._config, self._config.hidden_size * vision.merge_size**2
        norm, first, second = config.names.projector
        self.norm = TowerNorm(context, norm, width, "layer", config.projector_eps) if config.norms_tokens else None
        inner, activation = config.projector_size, config.projector_activation
        self.gates = JoinedGates(context, first, width, inner, activation, has_bias=True)
        self.second = TowerLinear(context, ((second, hidden_size),), (inner,), has_bias=True)

    def forward(self, image: ImagePixels) -> TowerRows:
        tokens = self._merged(self._squares(image))
        return TowerRows(self.second(self.gates(tokens if self.norm is None else self.norm(tokens))))


class InternvlTower(SquareTower):
    """Squares of patches in an order of its own: columns first."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        width = self._config.hidden_size * vision.merge_size**2
        self.norm = TowerNorm(context, f"{_PROJECTOR}.layer_norm", width, "layer", self._config.projector_eps)
        self.projector = TwoLinears(context, self._config, width, hidden_size)

    def forward(self, image: ImagePixels) -> TowerRows:
        tokens = columns_first(self._squares(image), self._side, self._merge_size)
        return TowerRows(self.projector(self.norm(tokens)))


def columns_first(squares: Tensor, side: int, merge_size: int) -> Tensor:
    """[C, side * side, E] -> [tokens, E * patches of a token], patches of a token by columns."""
    count, new_side = len(squares), side // merge_size
    lines = squares.reshape(count, side, new_side, -1).transpose(1, 2)
    return lines.reshape(count, new_side, new_side, -1).transpose(1, 2).reshape(count * new_side**2, -1)
