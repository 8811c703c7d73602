"""Several residual streams, of which a layer computes with one: all are predicted from all, and corrected by what came
of that one (AltUp, https://arxiv.org/abs/2301.13310); and the projection by way of few numbers beside attention
(LAuReL, https://arxiv.org/abs/2411.07501).

T: tokens; S: streams; H: hidden size; a token's streams are one row [S * H]. Few products are of so few numbers that
they are written out, element by element.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.row_means import row_lengths
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.model_config.stream_config import PredictedStreamsConfig
from spmd_worker.ops.kernels.adapters import StepAdapters

_LEAST_SQUARE = 1e-5
"""Mean square of a row, at least, that others are made as long as."""


class SmallLinear(CheckpointLayer):
    """[T, S] -> [T, outputs], in float32, rounded once: products are added one stream after the other. Replicated."""

    def __init__(self, context: LayerContext, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = context.parameter(num_outputs, num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.float(), self.weight.float()
        total = rows[:, :1] * weight[:, 0]
        for each in range(1, weight.shape[1]):
            total = total + rows[:, each : each + 1] * weight[:, each]
        return total.to(x.dtype)


class StreamPredictor(CheckpointLayer):
    """Predictions of a layer's streams, and their corrections. Every rank computes all."""

    def __init__(
        self, context: LayerContext, streams: PredictedStreamsConfig, hidden_size: int, norm: NormConfig
    ) -> None:
        super().__init__()
        count = streams.num_streams
        self._streams, self._hidden_size, self._kernels = streams, hidden_size, context.kernels
        self.correct_output_scale = context.parameter(hidden_size)
        self.correction_coefs = SmallLinear(context, count, count)
        self.prediction_coefs = SmallLinear(context, count, count * count)
        self.modality_router = replicated_linear(context, "modality_router", hidden_size, count)
        self.router_norm = new_norm(context, hidden_size, norm)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Its own; modules inside have theirs."""
        name = f"{prefix}.correct_output_scale"
        yield replicated(name, (self._hidden_size,), name)

    def predicted(self, streams: Tensor) -> Tensor:
        """[T, S * H] -> [T, S, H]."""
        count = self._streams.num_streams
        rows = streams.view(len(streams), count, self._hidden_size)
        weights: Tensor = self.prediction_coefs(self._modes(rows[:, self._streams.active].contiguous()))
        by_stream, wide = weights.view(len(streams), count, count).float(), rows.float()
        total = wide[:, :1] * by_stream[:, :, :1]
        for each in range(1, count):
            total = total + wide[:, each : each + 1] * by_stream[:, :, each : each + 1]
        return (total + wide).to(streams.dtype)

    def corrected(self, predicted: Tensor, active: Tensor) -> Tensor:
        """Predictions [T, S, H] and what the active one became [T, H] -> [T, S, H]."""
        weights: Tensor = self.correction_coefs(self._modes(active)).float() + 1
        change = (active - predicted[:, self._streams.active]).unsqueeze(1)
        return (change.float() * weights.unsqueeze(2) + predicted.float()).to(active.dtype)

    def output(self, corrected: Tensor) -> Tensor:
        """The active one of corrected streams [T, S, H], by which inputs of the layer's own are gated, [T, H]."""
        active = corrected[:, self._streams.active].contiguous()
        return active * self.correct_output_scale if self._streams.scales_output else active

    def _modes(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, S], numbers from -1 to 1 from which weights of streams follow."""
        routed: Tensor = self.modality_router(self.router_norm(x) * self._hidden_size**-1)
        return self._kernels.bound(routed.float(), 1.0).to(x.dtype)


class LowRankResidual(nn.Module):
    """[T, H] -> [T, H], the input and a normed projection of it by way of few numbers. Every rank computes all."""

    def __init__(self, context: LayerContext, rank: int, hidden_size: int, norm: NormConfig) -> None:
        super().__init__()
        self.linear_left = replicated_linear(context, "linear_left", hidden_size, rank)
        self.linear_right = replicated_linear(context, "linear_right", rank, hidden_size)
        self.post_laurel_norm = new_norm(context, hidden_size, norm)

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        projected: Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x, adapters), adapters))
        return x + projected


class StreamProjections(nn.ModuleDict):
    """Projections between the first stream and the others, each as long as the first. Every rank computes all."""

    def __init__(self, context: LayerContext, streams: PredictedStreamsConfig, hidden_size: int) -> None:
        names = [str(number) for number in range(streams.num_streams - 1)]
        super().__init__({name: replicated_linear(context, name, hidden_size, hidden_size) for name in names})

    def split(self, embedded: Tensor) -> Tensor:
        """Embeddings [T, H] -> streams [T, S * H]."""
        others = self._as_long([embedded] * len(self), embedded)
        return torch.cat((embedded, *[each.to(embedded.dtype) for each in others]), dim=1)

    def joined(self, streams: Tensor) -> Tensor:
        """Streams [T, S * H] -> their mean [T, H]."""
        first, *others = streams.chunk(len(self) + 1, dim=1)
        total = first.float()
        for each in self._as_long(others, first):
            total = total + each
        return (total / (len(self) + 1)).to(streams.dtype)

    def _as_long(self, rows: list[Tensor], first: Tensor) -> Iterator[Tensor]:
        """Projections of rows, each [T, H], of the length of the first, float32."""
        length, least = row_lengths(first), _LEAST_SQUARE**0.5
        for linear, each in zip(self.values(), rows, strict=True):
            projected = linear(each.contiguous()).float()
            yield projected * length / row_lengths(projected).clamp(min=least)
