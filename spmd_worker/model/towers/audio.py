"""Towers of audio: log-mel features of one recording -> a row for each of its tokens.

F: frames; N: rows behind the convolutions; M: mel bins; E: width of the tower; H: hidden size of the text.
"""

import torch
from torch import Tensor

from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.encoder import FrameEmbedding
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk
from spmd_worker.model_config.families.family import AudioNames
from spmd_worker.model_config.vision_config import VisionConfig


class Qwen2AudioTower(Tower):
    """Whisper's encoder without its padding, means of two rows each, their norm and one linear layer.

    Features end behind the last frame that a row sees: [M, 2 * N + 1], or all of the window's 2 * N.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        assert vision.audio is not None, vision
        config, size = vision.tower, vision.tower.hidden_size
        first, second = config.names.convolutions
        names = AudioNames((first, second), config.names.positions)
        self._device = context.device
        self.frames = FrameEmbedding(context, vision.audio, names, size)
        self.trunk = Trunk(context, config)
        self.norm = TowerNorm(context, config.names.last_norm, size, "layer", config.eps)
        parts = (("multi_modal_projector.linear", hidden_size),)
        self.projector = TowerLinear(context, parts, (size,), has_bias=True)

    def forward(self, audio: AudioFeatures) -> TowerRows:
        features = torch.from_numpy(audio.features.copy())
        # Rows behind the last are of padding, which no row sees.
        x = self.frames(features)[: _num_rows(features.shape[1])].contiguous()
        x = self.trunk(x, ImageSequences([len(x)], self._device))
        return TowerRows(self.projector(self.norm(_means_of_two(x))))


def _num_rows(num_frames: int) -> int:
    """Rows behind the convolutions that are not of padding."""
    return num_frames // 2


def _means_of_two(x: Tensor) -> Tensor:
    """[N, E] -> [N // 2, E]; a last row without a neighbour is left out."""
    pairs = x[: len(x) // 2 * 2].view(-1, 2, x.shape[1])
    return ((pairs[:, 0].float() + pairs[:, 1].float()) / 2).to(x.dtype)
