"""Gated short convolution (LFM2, https://arxiv.org/abs/2511.23404): of three projections B, C and v of the input, C
times the causal depthwise convolution of B times v, then an output projection. No activation.

T: tokens of the step; C: channels of this rank; K: taps.
"""

from collections.abc import Iterator

from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from spmd_worker.model.layers.recurrence import RecurrentMixer, own_outputs, recurrent_inputs
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ranks.topology import shard_range


class ConvWeights(CheckpointLayer):
    """Taps [C, 1, K], oldest first, and biases [C] of a depthwise convolution over `num_channels` of all ranks."""

    def __init__(
        self, context: LayerContext, num_channels: int, channels: tuple[int, int], kernel_size: int, has_bias: bool
    ) -> None:
        super().__init__()
        self._shape, self._channels = (num_channels, 1, kernel_size), channels
        count = channels[1] - channels[0]
        self.weight = context.parameter(count, 1, kernel_size)
        self.bias = context.parameter(count) if has_bias else None

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield shard(f"{prefix}.weight", self._shape, f"{prefix}.weight", 0, *self._channels)
        if self.bias is not None:
            yield shard(f"{prefix}.bias", self._shape[:1], f"{prefix}.bias", 0, *self._channels)


class ShortConv(RecurrentMixer):
    """Channels are split over ranks, those of B, C and v alike."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        assert layer.conv is not None, layer
        conv, group = layer.conv, context.tensor_group
        channels = shard_range(hidden_size, group.size, group.rank)
        self._kernels = context.kernels.recurrent_kernels()
        # B, C and v are one behind the other in one tensor.
        firsts, (start, stop) = (0, hidden_size, 2 * hidden_size), channels
        parts = tuple(OutputPart("in_proj", 3 * hidden_size, first + start, first + stop) for first in firsts)
        self.in_proj = ColumnParallelLinear(context, hidden_size, parts, conv.has_bias)
        self.conv = ConvWeights(context, hidden_size, channels, conv.kernel_size, conv.has_bias)
        self.out_proj = RowParallelLinear(context, channels, hidden_size, hidden_size, conv.has_bias)

    def mixed(
        self, x: Tensor, metadata: AttentionMetadata, states: LayerStates, adapters: StepAdapters | None
    ) -> Tensor:
        before, after, value = self.in_proj(x, adapters).chunk(3, dim=-1)
        segments, (inputs,) = recurrent_inputs(metadata, states, before * value)
        mixed = self._kernels.short_conv(
            inputs, self.conv.weight[:, 0], self.conv.bias, states.tail, segments, has_silu=False
        )
        output: Tensor = self.out_proj(after * own_outputs(metadata, mixed), adapters)
        return output
