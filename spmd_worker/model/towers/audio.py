"""Towers of audio: log-mel features of one recording -> a row for each of its tokens.

F: frames; N: rows behind the convolutions; M: mel bins; E: width of the tower; H: hidden size of the text.
"""

import numpy as np
import torch
from torch import Tensor, nn

from spmd_worker.media.audio_tokens import chunk_lengths
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.encoder import FrameEmbedding
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk
from spmd_worker.model_config.encoder_part import AudioInput
from spmd_worker.model_config.families.family import AudioNames
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig


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


class PictureEmbedding(nn.Module):
    """Features of one chunk [M, F] -> [N, E]: three convolutions of 3 x 3 and stride 2, a linear layer over what is
    left of the bands, and positions within the chunk.
    """

    def __init__(self, context: LayerContext, config: TowerConfig, audio: AudioInput) -> None:
        super().__init__()
        self._kernels, self._activation = context.kernels, config.activation
        channels = audio.num_channels
        self.convolutions = nn.ModuleList(
            TowerLinear(context, ((name, channels),), (inputs, 3, 3), has_bias=True)
            for name, inputs in zip(config.names.convolutions, (1, channels, channels), strict=True)
        )
        name = f"{config.names.layers.removesuffix('layers')}conv_out"
        parts, inputs = ((name, config.hidden_size),), (channels * audio.num_bands,)
        self.output = TowerLinear(context, parts, inputs, has_bias=False)
        self._positions = _sinusoids(audio.num_chunk_rows, config.hidden_size).to(context.device, context.dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Rows of a chunk that is filled with zeros, those of the zeros included."""
        x = features.unsqueeze(0)
        for convolution in self.convolutions:
            squares = torch.nn.functional.pad(x, (1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2)
            _, lines, columns, *_ = squares.shape
            y = convolution(squares.permute(1, 2, 0, 3, 4).reshape(lines * columns, -1))
            x = self._kernels.activate(y, self._activation).view(lines, columns, -1).permute(2, 0, 1)
        rows: Tensor = self.output(x.permute(2, 0, 1).reshape(x.shape[2], -1))
        return rows + self._positions[: len(rows)]


class Qwen3AsrTower(Tower):
    """Rows of chunks of frames, attention within windows of several chunks, and two linear layers."""

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        assert vision.audio is not None, vision
        config, self._audio = vision.tower, vision.audio
        size = config.hidden_size
        self._device, self._dtype, self._kernels = context.device, context.dtype, context.kernels
        self._activation = config.projector_activation
        self.pictures = PictureEmbedding(context, config, vision.audio)
        self.trunk = Trunk(context, config)
        self.norm = TowerNorm(context, config.names.last_norm, size, "layer", config.eps)
        names = [f"{config.names.beginnings[1]}linear_{number}" for number in (1, 2)]
        inner = config.projector_size
        self.first = TowerLinear(context, ((names[0], inner),), (size,), has_bias=True)
        self.second = TowerLinear(context, ((names[1], hidden_size),), (inner,), has_bias=True)

    def forward(self, audio: AudioFeatures) -> TowerRows:
        features = torch.from_numpy(audio.features.copy()).to(self._device, self._dtype)
        num_frames, chunk = features.shape[1], self._audio.chunk_frames
        features = torch.nn.functional.pad(features, (0, -num_frames % chunk))
        parts = zip(torch.split(features, chunk, dim=1), chunk_lengths(num_frames), strict=True)
        x = torch.cat([self.pictures(part)[:length] for part, length in parts])
        window = self._audio.window_chunks * self._audio.num_chunk_rows
        lengths = [min(window, len(x) - start) for start in range(0, len(x), window)]
        x = self.trunk(x, ImageSequences(lengths, self._device))
        return TowerRows(self.second(self._kernels.activate(self.first(self.norm(x)), self._activation)))


def _sinusoids(num_positions: int, size: int) -> Tensor:
    """[positions, size] of the sines and cosines of https://arxiv.org/abs/1706.03762, sines first."""
    step = np.log(10000) / (size // 2 - 1)
    frequencies = torch.exp(-step * torch.arange(size // 2).float())
    angles = torch.arange(num_positions).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _num_rows(num_frames: int) -> int:
    """Rows behind the convolutions that are not of padding."""
    return num_frames // 2


def _means_of_two(x: Tensor) -> Tensor:
    """[N, E] -> [N // 2, E]; a last row without a neighbour is left out."""
    pairs = x[: len(x) // 2 * 2].view(-1, 2, x.shape[1])
    return ((pairs[:, 0].float() + pairs[:, 1].float()) / 2).to(x.dtype)
