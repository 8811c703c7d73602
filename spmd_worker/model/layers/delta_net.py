"""Gated delta net (https://arxiv.org/abs/2412.06464): projections, a short convolution, a scan over a state [dk, dv] of
each value head, a gated norm of each head, output projection.

T: tokens of the step; Hk, Hv: key and value heads of this rank, neighbouring value heads share a key head; dk, dv:
their sizes; C: channels of the convolution, those of queries, keys and values.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, kv_head_range
from spmd_worker.model.layers.recurrence import RecurrentMixer, own_outputs, recurrent_inputs
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import DeltaConfig, LayerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.recurrent import DeltaRates, NormRule
from spmd_worker.ranks.topology import shard_range


class DeltaConv(CheckpointLayer):
    """Taps of the convolution over queries, keys and values, [C, 1, K], each a range of the rows of a tensor."""

    def __init__(self, context: LayerContext, parts: tuple[OutputPart, ...], kernel_size: int) -> None:
        super().__init__()
        self._parts, self._kernel_size = parts, kernel_size
        self.weight = context.parameter(sum(part.stop - part.start for part in parts), 1, kernel_size)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent, taps, first = prefix.rpartition(".")[0], ((0, 1), (0, self._kernel_size)), 0
        for part in self._parts:
            end = first + part.stop - part.start
            name, shape = f"{parent}.{part.name}.weight", (part.total, 1, self._kernel_size)
            yield WeightSlice(name, shape, ((part.start, part.stop), *taps), f"{prefix}.weight", ((first, end), *taps))
            first = end


class DeltaGates(CheckpointLayer):
    """Numbers by which the state of each value head decays, float32: `a_log` [Hv] and `dt_bias` [Hv], or, if each
    channel decays by itself, [1, 1, Hv, 1], or [Hv], and [Hv dk], as files have them.
    """

    is_float32 = True

    def __init__(self, context: LayerContext, delta: DeltaConfig, heads: tuple[int, int]) -> None:
        super().__init__()
        self._num_heads, self._heads, self._num_steps = delta.num_value_heads, heads, _num_steps(delta)
        self._around = ((1, 1), (1,)) if delta.is_per_channel and not delta.are_flat else ((), ())
        context, count = replace(context, dtype=torch.float32), heads[1] - heads[0]
        self.a_log = context.parameter(*self._rate_shape(count))
        self.dt_bias = context.parameter(count * self._num_steps)

    def _rate_shape(self, count: int) -> tuple[int, ...]:
        before, behind = self._around
        return (*before, count, *behind)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent, (start, stop), each = prefix.rpartition(".")[0], self._heads, self._num_steps
        shape, axis = self._rate_shape(self._num_heads), len(self._around[0])
        yield shard(f"{parent}.A_log", shape, f"{prefix}.a_log", axis, start, stop)
        steps = (self._num_heads * each,)
        yield shard(f"{parent}.dt_bias", steps, f"{prefix}.dt_bias", 0, start * each, stop * each)

    def rates(self) -> Tensor:
        """[Hv]."""
        return self.a_log.view(-1)


class GatedNorm(CheckpointLayer):
    """RMS norm of each head, with one weight [dv] for all, times the activation of a gate. Replicated."""

    def __init__(self, context: LayerContext, delta: DeltaConfig) -> None:
        super().__init__()
        self._eps, self._activation = delta.norm_eps, delta.gate_activation
        self._kernels = context.kernels.recurrent_kernels()
        self.weight = context.parameter(delta.value_size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Both [T, Hv dv] -> [T, Hv dv]."""
        rule = NormRule(self._eps, x.shape[1] // len(self.weight), self._activation, gates_first=False)
        return self._kernels.gated_norm(x, gate, self.weight, rule)


class DeltaNet(RecurrentMixer):
    """Value heads are split over ranks with their key heads; of more ranks than key heads several have one."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        assert layer.delta is not None, layer
        delta, group = layer.delta, context.tensor_group
        keys = kv_head_range(delta.num_key_heads, group.size, group.rank)
        values = shard_range(delta.num_value_heads, group.size, group.rank)
        self.config = delta.share(group.size)
        self._kernels = context.kernels.recurrent_kernels()
        of_keys, of_values = (delta.num_key_heads, keys), (delta.num_value_heads, values)
        mixed = {"q": (of_keys, delta.key_size), "k": (of_keys, delta.key_size), "v": (of_values, delta.value_size)}
        gates = {"z": (of_values, delta.value_size), "b": (of_values, 1), "a": (of_values, _num_steps(delta))}
        parts = [_part(f"in_proj_{name}", *sizes) for name, sizes in {**mixed, **gates}.items()]
        self.z_proj: ColumnParallelLinear | None = None
        self.a_proj: ColumnParallelLinear | None = None
        rank = delta.gate_rank
        if rank:
            self.z_proj, self.a_proj = (
                ColumnParallelLinear(context, rank, (_part(f"{name}_proj", *gates[name]),), has_bias=False)
                for name in "za"
            )
            latents = {f"in_proj_{name}": OutputPart(f"{name}_latent", rank, 0, rank) for name in "za"}
            parts = [latents.get(part.name, part) for part in parts]
        self.in_proj = ColumnParallelLinear(context, hidden_size, tuple(parts), has_bias=False)
        self._sizes = [self.config.num_channels, *(part.stop - part.start for part in parts[len(mixed) :])]
        conv = tuple(_part(f"{name}_conv1d", *sizes) for name, sizes in mixed.items())
        self.conv = DeltaConv(context, conv, delta.kernel_size)
        self.gates = DeltaGates(context, delta, values)
        self.norm = GatedNorm(context, delta)
        inputs = (values[0] * delta.value_size, values[1] * delta.value_size)
        num_inputs = delta.num_value_heads * delta.value_size
        self.out_proj = RowParallelLinear(context, inputs, num_inputs, hidden_size, has_bias=False)

    def mixed(
        self, x: Tensor, metadata: AttentionMetadata, states: LayerStates, adapters: StepAdapters | None
    ) -> Tensor:
        assert states.state is not None
        gates = self.gates
        mixed, gate, b, a = self.in_proj(x, adapters).split_with_sizes(self._sizes, dim=-1)
        if self.z_proj is not None and self.a_proj is not None:
            gate, a = self.z_proj(gate.contiguous(), adapters), self.a_proj(a.contiguous(), adapters)
        segments, (mixed, b, a) = recurrent_inputs(metadata, states, mixed, b, a)
        mixed = self._kernels.short_conv(mixed, self.conv.weight[:, 0], None, states.tail, segments, has_silu=True)
        rates = DeltaRates(a, b, gates.rates(), gates.dt_bias)
        scanned = self._kernels.scan_delta(mixed, rates, states.state, segments, self.config)
        scanned = own_outputs(metadata, scanned).flatten(1)
        output: Tensor = self.out_proj(self.norm(scanned, gate), adapters)
        return output


def _num_steps(delta: DeltaConfig) -> int:
    """Numbers of a value head by which its state decays."""
    return delta.key_size if delta.is_per_channel else 1


def _part(name: str, heads: tuple[int, tuple[int, int]], size: int) -> OutputPart:
    """Outputs of all heads, each of `size` of them, and of this rank's (start, stop)."""
    num_heads, (start, stop) = heads
    return OutputPart(name, num_heads * size, start * size, stop * size)
