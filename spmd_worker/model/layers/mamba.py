"""Mamba2 (https://arxiv.org/abs/2405.21060) in a decoder layer: a projection to z, x, B, C and dt, a short convolution
of x, B and C, the recurrence, a norm gated by z, and a projection back.

A rank has a range of heads, and the groups of B and C of these; a group of several ranks is replicated.

T: tokens of the step; H: heads, P their size; G: groups, n: size of a state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, kv_head_range
from spmd_worker.model.layers.recurrence import RecurrentMixer, own_outputs, recurrent_inputs
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import LayerConfig, MambaConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.recurrent import MambaRates, NormRule
from spmd_worker.ranks.topology import shard_range

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MambaShare:
    """A rank's heads and groups, (start, stop) of each."""

    config: MambaConfig
    heads: Range
    groups: Range

    @classmethod
    def of(cls, config: MambaConfig, size: int, rank: int) -> "MambaShare":
        groups = kv_head_range(config.num_groups, size, rank)
        return cls(config, shard_range(config.num_heads, size, rank), groups)

    @property
    def own(self) -> MambaConfig:
        """The rank's sizes."""
        num_heads, num_groups = (stop - start for start, stop in (self.heads, self.groups))
        return replace(self.config, num_heads=num_heads, num_groups=num_groups)

    @property
    def inner(self) -> Range:
        """Columns of the heads."""
        return _times(self.heads, self.config.head_size)

    @property
    def shared(self) -> Range:
        """Columns of B, and of C."""
        return _times(self.groups, self.config.state_size)

    @property
    def normed(self) -> Range:
        """Columns of all heads of the groups, those of other ranks too."""
        return _times(self.groups, self.config.num_heads * self.config.head_size // self.config.num_groups)


def _times(each: Range, size: int) -> Range:
    return each[0] * size, each[1] * size


class MambaConvolution(CheckpointLayer):
    """Weights of the convolution over x, B and C, [channels of this rank, 1, taps], and its bias."""

    def __init__(self, context: LayerContext, share: MambaShare) -> None:
        super().__init__()
        config, own = share.config, share.own
        self._shape = (config.num_channels, 1, config.kernel_size)
        sizes = (config.num_heads * config.head_size, *[config.num_groups * config.state_size] * 2)
        starts = (0, sizes[0], sizes[0] + sizes[1])
        of_parts = zip(starts, (share.inner, share.shared, share.shared))
        self._ranges = [(start + first, start + end) for start, (first, end) in of_parts]
        self.weight = context.parameter(own.num_channels, 1, config.kernel_size)
        self.bias = context.parameter(own.num_channels) if config.has_conv_bias else None

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        first = 0
        for start, stop in self._ranges:
            source, destination = (start, stop), (first, first + stop - start)
            others = ((0, 1), (0, self._shape[2]))
            name = f"{prefix}.weight"
            yield WeightSlice(name, self._shape, (source, *others), name, (destination, *others))
            if self.bias is not None:
                name = f"{prefix}.bias"
                yield WeightSlice(name, self._shape[:1], (source,), name, (destination,))
            first = destination[1]


class MambaGates(CheckpointLayer):
    """Numbers of each head, float32 [H of this rank]: A as the logarithm of its magnitude, the bias of dt, and D."""

    is_float32 = True

    def __init__(self, context: LayerContext, share: MambaShare) -> None:
        super().__init__()
        context, self._share = replace(context, dtype=torch.float32), share
        num_heads = share.own.num_heads
        self.a_log, self.dt_bias, self.skip = (context.parameter(num_heads) for _ in range(3))

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent, shape = prefix.rpartition(".")[0], (self._share.config.num_heads,)
        for name, parameter in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("D", "skip")):
            yield shard(f"{parent}.{name}", shape, f"{prefix}.{parameter}", 0, *self._share.heads)


class MambaNorm(CheckpointLayer):
    """[T, H P of this rank] and its gate -> the same, each group of heads normed by itself. A group of several ranks is
    gathered, so that its norm has the bits of one rank.
    """

    def __init__(self, context: LayerContext, share: MambaShare) -> None:
        super().__init__()
        self._share, self._group = share, context.tensor_group
        self._kernels = context.kernels.recurrent_kernels()
        first, end = share.normed
        self.weight = context.parameter(end - first)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        num_own = x.shape[1]
        first = 0
        if len(self.weight) > num_own:
            x, gate = self._gathered(x), self._gathered(gate)
            first = self._share.inner[0] - self._share.normed[0]
        config = self._share.own
        gates_first, rounds_once = config.norm == "grouped", config.norm_rounds_once
        rule = NormRule(config.norm_eps, config.num_groups, "silu", gates_first=gates_first, rounds_once=rounds_once)
        return self._kernels.gated_norm(x, gate, self.weight, rule)[:, first : first + num_own]

    def _gathered(self, part: Tensor) -> Tensor:
        """[T, columns of this rank] -> [T, columns of the group's ranks]."""
        num_ranks = len(self.weight) // part.shape[1]
        first = self._group.rank // num_ranks * num_ranks
        return torch.cat(self._group.all_gather(part.contiguous())[first : first + num_ranks].unbind(), dim=1)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        config = self._share.config
        shape = (config.num_heads * config.head_size,)
        yield shard(f"{prefix}.weight", shape, f"{prefix}.weight", 0, *self._share.normed)


class Mamba(RecurrentMixer):
    """[T, hidden] -> this rank's part of [T, hidden]."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        config, group = layer.mamba, context.tensor_group
        assert config is not None, layer
        share = MambaShare.of(config, group.size, group.rank)
        self.config, self._kernels = share.own, context.kernels
        self._recurrent = context.kernels.recurrent_kernels()
        num_columns, num_shared = config.num_heads * config.head_size, config.num_groups * config.state_size
        parts = (
            OutputPart("in_z", num_columns, *share.inner),
            OutputPart("in_x", num_columns, *share.inner),
            OutputPart("in_b", num_shared, *share.shared),
            OutputPart("in_c", num_shared, *share.shared),
            OutputPart("in_dt", config.num_heads, *share.heads),
        )
        self.in_proj = ColumnParallelLinear(context, hidden_size, parts, config.has_bias)
        sizes = [part.stop - part.start for part in parts]
        self._sizes = (sizes[0], sum(sizes[1:4]), sizes[4])
        self._multipliers: Tensor | None = None
        if set(config.multipliers) != {1.0}:
            each = torch.tensor(config.multipliers, dtype=context.dtype).repeat_interleave(torch.tensor(sizes))
            self._multipliers = each.to(context.device)
        self.conv1d = MambaConvolution(context, share)
        self.gates = MambaGates(context, share)
        self.norm = None if config.norm == "none" else MambaNorm(context, share)
        self.out_proj = RowParallelLinear(
            context, share.inner, num_columns, hidden_size, config.has_output_bias, config.out_multiplier
        )

    def mixed(
        self, x: Tensor, metadata: AttentionMetadata, states: LayerStates, adapters: StepAdapters | None
    ) -> Tensor:
        config = self.config
        assert states.state is not None, "the layer has states"
        projected = self.in_proj(_scaled(x, config.in_multiplier), adapters)
        projected = projected if self._multipliers is None else projected * self._multipliers
        gate, mixed, dt = projected.split_with_sizes(self._sizes, dim=-1)
        segments, (mixed, dt) = recurrent_inputs(metadata, states, mixed, dt)
        taps, gates = self.conv1d.weight.view(len(self.conv1d.weight), -1), self.gates
        mixed = self._recurrent.short_conv(mixed, taps, self.conv1d.bias, states.tail, segments, has_silu=True)
        rates = MambaRates(dt, gates.a_log, gates.dt_bias, gates.skip)
        scanned = self._recurrent.scan_mamba(mixed, rates, states.state, segments, config)
        scanned = own_outputs(metadata, scanned)
        if self.norm is None:
            gated = self._kernels.silu_and_mul(torch.cat((gate, scanned), dim=1))
        else:
            gated = self.norm(scanned, gate)
        output: Tensor = self.out_proj(gated, adapters)
        return output


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier
