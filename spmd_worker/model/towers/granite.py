"""Tower of Granite-Docling: SigLIP's, squares of patches as tokens by a connector with fixed positions, and outputs of
layers in between for the text's first layers (deepstack).

C: squares; M: tokens of a square; E: width of the tower; H: hidden size of the text.
"""

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm
from spmd_worker.model.towers.squares import SquareTower, TwoLinears
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

_BASE = 10000.0


class DeepstackMerger(nn.Module):
    """[C * M, E * patches of a token] -> [C * M, H]: a norm and two linear layers."""

    def __init__(self, context: LayerContext, config: TowerConfig, width: int, hidden_size: int, name: str) -> None:
        super().__init__()
        self.norm = TowerNorm(context, f"{name}.layer_norm", width, "layer", config.projector_eps)
        self.linears = TwoLinears(context, config, width, hidden_size, f"{name}.linear_")

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.linears(self.norm(x))
        return merged


class ConnectorPath(nn.Module):
    """The layers for tokens of `merge_size` patches a side."""

    def __init__(
        self, context: LayerContext, config: TowerConfig, merge_size: int, hidden_size: int, beginning: str
    ) -> None:
        super().__init__()
        width = config.hidden_size * merge_size**2
        parts = ((f"{beginning}projection", hidden_size),)
        self.projection = TowerLinear(context, parts, (width,), has_bias=False)
        self.mergers = nn.ModuleList(
            DeepstackMerger(context, config, width, hidden_size, f"{beginning}deepstack_mergers.{index}")
            for index in range(len(config.added_layers))
        )

    def added(self, index: int, x: Tensor) -> Tensor:
        """Rows of deepstack, by the merger of this index."""
        rows: Tensor = self.mergers[index](x)
        return rows


class GraniteDoclingTower(SquareTower):
    """Both paths have weights; the coarse or the fine one is run, by `VisionConfig.merge_size`."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(context, vision)
        config, (top,), size = self._config, self._config.names.beginnings, hidden_size
        self._kernels, connector = context.kernels, f"{top}connector."
        self.paths = nn.ModuleList(
            ConnectorPath(context, config, merge_size, size, f"{connector}{name}.")
            for merge_size, name in zip(config.merge_sizes, ("coarse", "fine"))
        )
        self._path = config.merge_sizes.index(vision.merge_size)
        self.norm_in, self.norm_mid, self.norm_out = (
            TowerNorm(context, f"{connector}{name}", width, "layer", config.projector_eps)
            for name, width in (("ln_in", config.hidden_size), ("ln_mid", size), ("ln_out", size))
        )
        self.second = TowerLinear(context, ((f"{connector}mlp_fc2", size),), (size,), has_bias=False)
        self._positions = square_positions(self._side // vision.merge_size, size).to(context.device, context.dtype)

    def forward(self, image: ImagePixels) -> TowerRows:
        config, path = self._config, self.paths[self._path]
        assert isinstance(path, ConnectorPath), type(path)
        x, shape = self._embedded(image)
        added: list[Tensor] = []
        for index, state in enumerate(self.trunk.states(x, self._sequences(shape))):
            if index in config.added_layers:
                added.append(path.added(len(added), self._merged(state.view(shape))))
        assert self.last_norm is not None, "SigLIP has one"
        tokens = path.projection(self._merged(self.norm_in(self.last_norm(x)).view(shape)))
        tokens = (tokens.view(shape[0], -1, tokens.shape[1]) + self._positions).flatten(0, 1)
        tokens = self._kernels.activate(self.norm_mid(tokens), "gelu")
        return TowerRows(self.norm_out(self.second(tokens)), tuple(added))


def square_positions(side: int, size: int) -> Tensor:
    """float32 [side * side, size]: sines and cosines of the column, then those of the line."""
    quarter = size // 4
    frequencies = _BASE ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    turns = torch.arange(side, dtype=torch.float64).unsqueeze(1) * frequencies
    table = torch.cat((turns.sin(), turns.cos()), dim=1).float()
    index = torch.arange(side * side)
    return torch.cat((table[index % side], table[index // side]), dim=1)
