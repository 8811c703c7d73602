"""Mamba (https://arxiv.org/abs/2312.00752) in a decoder layer: a projection to channels x and gates z, a short
convolution of x, a projection of its outputs to dt, B and C, the recurrence, gated by z, and a projection back.

A rank has a range of channels. What dt, B and C of all of them are made from is a sum over ranks, as outputs of
row-parallel layers are.

T: tokens of the step; C: channels of this rank; n: numbers of a channel's state; R: numbers that dt comes from.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from spmd_worker.model.layers.norm import FullNorm, RMSNorm
from spmd_worker.model.layers.recurrence import RecurrentMixer, own_outputs, recurrent_inputs
from spmd_worker.model.layers.short_conv import ConvWeights
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import LayerConfig, Mamba1Config, NormConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.recurrent import MambaRates
from spmd_worker.ranks.topology import shard_range


class ChannelGates(CheckpointLayer):
    """Numbers of each channel, float32: A [C, n] as the logarithms of its magnitudes, the bias of dt [C], and D [C]."""

    is_float32 = True

    def __init__(self, context: LayerContext, config: Mamba1Config, channels: tuple[int, int]) -> None:
        super().__init__()
        context, self._config, self._channels = replace(context, dtype=torch.float32), config, channels
        count = channels[1] - channels[0]
        self.a_log = context.parameter(count, config.state_size)
        self.dt_bias, self.skip = context.parameter(count), context.parameter(count)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent, shape = prefix.rpartition(".")[0], (self._config.num_channels,)
        yield shard(f"{parent}.A_log", (*shape, self._config.state_size), f"{prefix}.a_log", 0, *self._channels)
        for name, parameter in (("dt_proj.bias", "dt_bias"), ("D", "skip")):
            yield shard(f"{parent}.{name}", shape, f"{prefix}.{parameter}", 0, *self._channels)


class Mamba1(RecurrentMixer):
    """[T, hidden] -> this rank's part of [T, hidden]."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        config, group = layer.mamba1, context.tensor_group
        assert config is not None, layer
        channels = shard_range(config.num_channels, group.size, group.rank)
        self.config = config.share(group.size)
        self._kernels, self._recurrent = context.kernels, context.kernels.recurrent_kernels()
        self._group, self._dtype = context.parts_group, context.dtype
        parts = tuple(OutputPart(name, config.num_channels, *channels) for name in ("in_x", "in_z"))
        self.in_proj = ColumnParallelLinear(context, hidden_size, parts, config.has_bias)
        self.conv1d = ConvWeights(context, config.num_channels, channels, config.kernel_size, config.has_conv_bias)
        num_shared = config.num_parameters_of_scan
        self.x_proj = RowParallelLinear(context, channels, config.num_channels, num_shared, has_bias=False)
        dt_part = OutputPart("dt_proj", config.num_channels, *channels)
        self.dt_proj = ColumnParallelLinear(context, config.dt_rank, (dt_part,), has_bias=False)
        self.gates = ChannelGates(context, config, channels)
        self._sizes = (config.dt_rank, config.state_size, config.state_size)
        norms = [_new_norm(context, config, size) for size in self._sizes]
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = norms
        self.out_proj = RowParallelLinear(context, channels, config.num_channels, hidden_size, config.has_output_bias)

    def mixed(
        self, x: Tensor, metadata: AttentionMetadata, states: LayerStates, adapters: StepAdapters | None
    ) -> Tensor:
        assert states.state is not None, "the layer has states"
        inputs, gate = self.in_proj(x, adapters).chunk(2, dim=-1)
        segments, (inputs,) = recurrent_inputs(metadata, states, inputs)
        taps, gates = self.conv1d.weight[:, 0], self.gates
        mixed = self._recurrent.short_conv(inputs, taps, self.conv1d.bias, states.tail, segments, has_silu=True)
        # Of tokens that rows lag by too, which have no adapters: none are of `x_proj` and `dt_proj`.
        dt, shared = self._step_numbers(mixed)
        rates = MambaRates(dt, gates.a_log, gates.dt_bias, gates.skip)
        scanned = self._recurrent.scan_mamba1(mixed, shared, rates, states.state, segments)
        gated = self._kernels.silu_and_mul(torch.cat((gate, own_outputs(metadata, scanned)), dim=1))
        output: Tensor = self.out_proj(gated, adapters)
        return output

    def _step_numbers(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """[T, C] -> dt as it is projected, [T, C], and B and C of the recurrence, [T, 2 n]."""
        projected = self._group.sum_parts(self.x_proj(mixed), self._dtype)
        rank = self.config.dt_rank
        dt_norm, b_norm, c_norm = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        if dt_norm is None or b_norm is None or c_norm is None:
            return self.dt_proj(projected[:, :rank].contiguous()), projected[:, rank:]
        dt, b, c = (part.contiguous() for part in projected.split_with_sizes(self._sizes, dim=-1))
        return self.dt_proj(dt_norm(dt)), torch.cat((b_norm(b), c_norm(c)), dim=1)


def _new_norm(context: LayerContext, config: Mamba1Config, size: int) -> RMSNorm | FullNorm | None:
    if config.norm == "none":
        return None
    if config.norm == "weighted":
        return RMSNorm(context, size, config.norm_eps)
    return FullNorm(context, size, NormConfig("rms", config.norm_eps, rounds_once=True, has_weight=False))
