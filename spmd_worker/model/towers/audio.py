"""Towers of audio: log-mel features of one recording -> a row for each of its tokens.

F: frames; N: rows behind the convolutions; M: mel bins; E: width of the tower; H: hidden size of the text.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from spmd_worker.media.audio_tokens import chunk_lengths
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.towers.attention import ImageSequences
from spmd_worker.model.towers.encoder import FrameEmbedding
from spmd_worker.model.towers.layers import TowerLinear, TowerNorm
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model.towers.trunk import Trunk
from spmd_worker.model_config.encoder_part import AudioInput
from spmd_worker.model_config.families.family import AudioNames
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig


class WhisperTower(Tower):
    """Whisper's encoder, window by window, with the rows of its padding or without them; then its norm, means of two
    rows each or several side by side, and one or two linear layers.

    Features without padding end behind the last frame that a row sees: [M, 2 * N + 1], or all of the window's 2 * N; or
    with the recording (`has_exact_end`). Rows without angles or a table have sines as positions.
    """

    def __init__(self, context: LayerContext, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        assert vision.tower is not None, vision
        assert vision.audio is not None, vision
        config, self._audio, size = vision.tower, vision.audio, vision.tower.hidden_size
        first, second = config.names.convolutions
        names = AudioNames((first, second), config.names.positions)
        self._device, self._kernels, self._config = context.device, context.kernels, config
        self._num_joined = vision.merge_size if vision.audio.joins else 1
        self.has_rows_behind = vision.audio.hears_padding and not vision.audio.counts_padding
        self.frames = FrameEmbedding(context, vision.audio, names, size)
        self.trunk = Trunk(context, config)
        self.norm = TowerNorm(context, config.names.last_norm, size, "layer", config.eps)
        inner, has_bias = config.projector_size, config.projector_has_bias
        first_name, *others = config.names.projector
        parts, inputs = ((first_name, inner or hidden_size),), (size * self._num_joined,)
        self.projector = TowerLinear(context, parts, inputs, has_bias=has_bias)
        self.second: TowerLinear | None = None
        if inner:
            self.second = TowerLinear(context, ((others[0], hidden_size),), (inner,), has_bias=has_bias)
        self._angles = _angles(vision.audio, config, context) if config.rope_theta else None
        self._sinusoids: Tensor | None = None
        if not (config.names.positions or config.rope_theta):
            self._sinusoids = _sinusoids(vision.audio.num_rows, size).to(context.device, context.dtype)

    def forward(self, audio: AudioFeatures) -> TowerRows:
        features = torch.from_numpy(audio.features.copy())
        windows = torch.split(features, self._audio.window_frames or features.shape[1], dim=1)
        parts = [self._embedded(each) for each in windows]
        x = torch.cat(parts)
        angles = self._angles
        if angles is not None:
            angles = replace(angles, cos=angles.cos.repeat(len(parts), 1), sin=angles.sin.repeat(len(parts), 1))
        x = self.trunk(x, ImageSequences([len(each) for each in parts], self._device), angles)
        if self._num_joined == 1:
            x = self.norm(_means_of_two(x))
        else:
            x = self.norm(x).view(len(x) // self._num_joined, -1)
        x = self.projector(x)
        if self.second is not None:
            x = self.second(self._kernels.activate(x, self._config.projector_activation))
        return TowerRows(x)

    def _embedded(self, window: Tensor) -> Tensor:
        """Rows of a window that are seen."""
        rows: Tensor = self.frames(window)
        # Other rows behind the last are of padding.
        rows = rows if self._audio.has_exact_end else rows[: _num_rows(window.shape[1])]
        return rows if self._sinusoids is None else rows + self._sinusoids[: len(rows)]


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
        """Rows of a chunk, which may be filled with zeros, those of the zeros included."""
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
        names = config.names.projector
        inner = config.projector_size
        self.first = TowerLinear(context, ((names[0], inner),), (size,), has_bias=True)
        self.second = TowerLinear(context, ((names[1], hidden_size),), (inner,), has_bias=True)

    def forward(self, audio: AudioFeatures) -> TowerRows:
        features = torch.from_numpy(audio.features.copy()).to(self._device, self._dtype)
        num_frames, chunk = features.shape[1], self._audio.chunk_frames
        if num_frames > chunk or not self._audio.has_exact_end:
            features = torch.nn.functional.pad(features, (0, -num_frames % chunk))
        parts = zip(torch.split(features, chunk, dim=1), chunk_lengths(num_frames), strict=True)
        x = torch.cat([self.pictures(part)[:length] for part, length in parts])
        window = self._audio.window_chunks * self._audio.num_chunk_rows
        lengths = [min(window, len(x) - start) for start in range(0, len(x), window)]
        x = self.trunk(x, ImageSequences(lengths, self._device))
        return TowerRows(self.second(self._kernels.activate(self.first(self.norm(x)), self._activation)))


def _angles(audio: AudioInput, config: TowerConfig, context: LayerContext) -> Angles:
    """Those of a complete window's rows."""
    size = config.rotary_size or config.head_size
    frequencies = config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = torch.arange(audio.num_rows, dtype=torch.float32).unsqueeze(1) * frequencies.float()
    cos, sin = (part.float().to(context.device, context.dtype) for part in (turns.double().cos(), turns.double().sin()))
    return Angles(cos, sin, is_interleaved=False, is_plain=size == config.head_size)


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
