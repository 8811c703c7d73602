"""Hyper-connections with doubly stochastic mixing (mHC): several residual streams instead of one.

A part of a layer reads one stream, a weighted sum of all; its output is added to each by a weight, and the streams are
mixed by a matrix whose rows and columns sum to 1. All weights come from the streams, in float32. Sums are over few
numbers, one after the other, or row-wise products, so a token's bits depend on it alone.

T: tokens of the step; N: streams; H: hidden size.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.stream_config import BalancedStreamsConfig
from spmd_worker.ops.kernels.gates import sigmoid


class StreamWeights(CheckpointLayer):
    """Projection of all streams, normed as one row, to `num_outputs` numbers, and `num_scales` scales and biases of
    these, in float32. Replicated.
    """

    is_float32 = True

    def __init__(
        self, context: LayerContext, streams: BalancedStreamsConfig, hidden_size: int, num_outputs: int, num_scales: int
    ) -> None:
        super().__init__()
        self._streams, self._kernels = streams, context.kernels.plain
        context, num_inputs = replace(context, dtype=torch.float32), streams.num_streams * hidden_size
        self.fn = context.parameter(num_outputs, num_inputs)
        self.base, self.scale = context.parameter(num_outputs), context.parameter(num_scales)
        self._ones = torch.ones(num_inputs, dtype=torch.float32, device=context.device)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`fn`, `base` and `scale` behind the layer's name."""
        for name in ("fn", "base", "scale"):
            yield replicated(f"{prefix}.{name}", self.shape_of(name), f"{prefix}.{name}")

    def projected(self, streams: Tensor) -> Tensor:
        """[T, N * H] -> float32 [T, outputs], not scaled."""
        rows = streams.float()
        normed = self._kernels.full_norm(rows, self._ones, None, self._streams.norm_eps, offset=0.0, is_centred=False)
        return self._kernels.linear(normed, self._kernels.pack(self.fn), None)

    def first_weights(self, projected: Tensor) -> Tensor:
        """Weights by which streams are summed to one, float32 [T, N]."""
        count = self._streams.num_streams
        return sigmoid(projected[:, :count] * self.scale[0] + self.base[:count]) + self._streams.eps

    def summed(self, streams: Tensor, weights: Tensor) -> Tensor:
        """[T, N * H] and float32 [T, N] -> [T, H]."""
        rows = streams.view(len(streams), self._streams.num_streams, -1)
        total = rows[:, 0].float() * weights[:, :1]
        for index in range(1, self._streams.num_streams):
            total += rows[:, index].float() * weights[:, index : index + 1]
        return total.to(streams.dtype)


class StreamMatrix(StreamWeights):
    """Streams around one part of a layer."""

    def __init__(self, context: LayerContext, streams: BalancedStreamsConfig, hidden_size: int) -> None:
        super().__init__(context, streams, hidden_size, (2 + streams.num_streams) * streams.num_streams, 3)

    def enter(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[T, N * H] -> the part's input [T, H]; weights of its output [T, N], and the matrix [T, N, N], float32."""
        count, projected = self._streams.num_streams, self.projected(streams)
        after = 2 * sigmoid(projected[:, count : 2 * count] * self.scale[1] + self.base[count : 2 * count])
        mixed = (projected[:, 2 * count :] * self.scale[2] + self.base[2 * count :]).view(-1, count, count)
        return self.summed(streams, self.first_weights(projected)), (after, self._balanced(mixed.softmax(-1)))

    def _balanced(self, matrix: Tensor) -> Tensor:
        """The matrix with columns, and nearly rows, that sum to 1, by Sinkhorn and Knopp's method."""
        eps = self._streams.eps
        matrix = matrix + eps
        matrix = matrix / (_sum(matrix, 1) + eps)
        for _ in range(self._streams.num_iterations - 1):
            matrix = matrix / (_sum(matrix, 2) + eps)
            matrix = matrix / (_sum(matrix, 1) + eps)
        return matrix

    def leave(self, streams: Tensor, output: Tensor, after: Tensor, matrix: Tensor) -> None:
        """Change the streams [T, N * H], in place, to those behind a part with the output [T, H]."""
        count, dtype = self._streams.num_streams, streams.dtype
        rows, weights, matrix = streams.view(len(streams), count, -1).float(), after.to(dtype).float(), matrix.to(dtype)
        found = torch.empty_like(rows)
        for to in range(count):
            total = rows[:, 0] * matrix[:, 0, to].float().unsqueeze(1)
            for index in range(1, count):
                total += rows[:, index] * matrix[:, index, to].float().unsqueeze(1)
            found[:, to] = total.to(dtype).float() + (output.float() * weights[:, to : to + 1]).to(dtype).float()
        streams.copy_(found.flatten(1))


class StreamHead(StreamWeights):
    """The weighted sum of the streams behind the last layer."""

    def __init__(self, context: LayerContext, streams: BalancedStreamsConfig, hidden_size: int) -> None:
        super().__init__(context, streams, hidden_size, streams.num_streams, 1)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N * H] -> [T, H]."""
        return self.summed(streams, self.first_weights(self.projected(streams)))


def _sum(matrix: Tensor, axis: int) -> Tensor:
    """The sum over an axis, kept, of few numbers in their order."""
    first, *others = matrix.unbind(axis)
    for each in others:
        first = first + each
    return first.unsqueeze(axis)
