"""EncoderTower: the encoder of an encoder-decoder model, token ids or log-mel features of one input -> its rows.

Its layers are those of text encoders, over blocks of this call. It reads one input a call, so its rows do not depend on
what is beside it. E: rows of the input; F: frames, 2 * E; M: mel bins; H: hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spmd_worker.media.prepared import AudioFeatures, EncoderIds
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import BLOCK_SIZE, ImageSequences
from spmd_worker.model.towers.layers import TowerLinear, TowerTable
from spmd_worker.model.towers.tower import Tower, TowerRows
from spmd_worker.model_config.encoder_part import AudioInput, EncoderPart
from spmd_worker.model_config.families.family import AudioNames
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import Stage

NewStack = Callable[[LayerContext, ModelConfig, Stage], nn.Module]
"""`DecoderStack`, which knows towers."""
_NUM_TAPS = 3


class FrameEmbedding(nn.Module):
    """Features [M, F] -> [E, H]: two convolutions of three taps, the second of stride 2, and positions, if a table has
    them.
    """

    def __init__(self, context: LayerContext, audio: AudioInput, names: AudioNames, hidden_size: int) -> None:
        super().__init__()
        self._kernels, self._dtype, self._device = context.kernels, context.dtype, context.device
        num_inputs = (audio.num_mel_bins, hidden_size)
        self.first, self.second = (
            TowerLinear(context, ((name, hidden_size),), (size, _NUM_TAPS), has_bias=True)
            for name, size in zip(names.convolutions, num_inputs, strict=True)
        )
        self.positions: TowerTable | None = None
        if names.positions:
            self.positions = TowerTable(context, f"{names.positions}.weight", audio.num_rows, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        x = features.T.to(self._device, self._dtype)
        for convolution, stride in ((self.first, 1), (self.second, 2)):
            x = self._kernels.activate(convolution(_unfolded(x, stride)), "gelu")
        if self.positions is None:
            return x
        positions: Tensor = self.positions()
        return x + positions[: len(x)]


def _unfolded(x: Tensor, stride: int) -> Tensor:
    """Each `stride`th row of x [rows, size] with those before and behind it, 0 beyond the ends: [rows / stride,
    size * 3], the three numbers of a column side by side.
    """
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    return padded.unfold(0, _NUM_TAPS, stride).flatten(1)


class EncoderTower(Tower):
    """An encoder, complete on this rank. `model` has the names of a text encoder's layers."""

    def __init__(self, context: LayerContext, part: EncoderPart, new_stack: NewStack) -> None:
        super().__init__()
        config, audio = part.stack, part.audio
        (shape,) = {(layer.num_kv_heads, layer.head_size) for layer in config.layers}
        self._part, self._dtype, self._device = part, context.dtype, context.device
        self._block_shape = context.attention.block_shape(shape[0], BLOCK_SIZE, shape[1])
        self.frames: FrameEmbedding | None = None
        if audio is not None:
            self.frames = FrameEmbedding(context, audio, config.names.audio, config.hidden_size)
        self.model = new_stack(context, config, encoder_stage(part))

    def forward(self, given: EncoderIds | AudioFeatures) -> TowerRows:
        """The rows of one input, [E, H]."""
        if self.frames is None:
            assert isinstance(given, EncoderIds), type(given)
            return TowerRows(self._rows(torch.tensor(given.token_ids, dtype=torch.int64, device=self._device), None))
        assert isinstance(given, AudioFeatures), type(given)
        x = self.frames(torch.from_numpy(given.features.copy()))
        return TowerRows(self._rows(torch.zeros(len(x), dtype=torch.int64, device=self._device), x))

    def _rows(self, token_ids: Tensor, incoming: Tensor | None) -> Tensor:
        sequences = ImageSequences([len(token_ids)], self._device)
        blocks = torch.zeros((sequences.num_blocks, *self._block_shape), dtype=self._dtype, device=self._device)
        # Layers run one after the other: the next may overwrite the keys and values of the last.
        caches = (blocks,) * self._part.stack.num_layers
        positions, regimes = torch.arange(len(token_ids), device=self._device), torch.zeros_like(token_ids)
        rows: Tensor = self.model(token_ids, positions, regimes, caches, sequences.metadata, incoming)
        return rows


def encoder_stage(part: EncoderPart) -> Stage:
    """All layers of the encoder; those of an encoder of audio begin behind `FrameEmbedding`."""
    return Stage(0, part.stack.num_layers, is_first=part.audio is None, is_last=True)
