"""Linear layers, each with its sharding rule: which rectangle of which checkpoint tensor is this rank's.

Column-parallel layers split the outputs and need no communication; row-parallel ones split the inputs and sum. Merged
layers hold several checkpoint tensors in one parameter: one GEMM instead of three. The split follows Megatron-LM
(https://arxiv.org/abs/1909.08053).

T: tokens of the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, replicated
from spmd_worker.ops.kernels.adapters import AdapterStack, StepAdapters
from spmd_worker.ops.kernels.gates import bounded_gates
from spmd_worker.ops.kernels.int8 import row_maxima
from spmd_worker.ranks.leaves import leaf_ends, tree_sum
from spmd_worker.ranks.topology import shard_range


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One checkpoint tensor among the outputs of a merged layer: `name` replaces the last word of the layer's name.

    This rank has outputs `start` to `stop` of the `total`. Without `has_bias` it has none where other parts have one.
    """

    name: str
    total: int
    start: int
    stop: int
    has_bias: bool = True


class AdaptableLayer(PackedLayer):
    """A linear layer to whose outputs low-rank adapters may add."""

    adapters: AdapterStack | None = None
    """Their matrices; None: the model takes no adapters."""

    def is_adapted(self, step: StepAdapters | None) -> bool:
        """Whether the step may have rows with an adapter of this layer."""
        return step is not None and self.adapters is not None and not self.adapters.is_empty

    def adapted(self, outputs: Tensor, x: Tensor, step: StepAdapters | None) -> Tensor:
        """The layer's `outputs` [T, outputs] for its inputs x [T, inputs], changed in place by the step's adapters."""
        if step is not None and self.adapters is not None and self.is_adapted(step):
            self.adapters.add_(outputs, x, step)
        return outputs


class ColumnParallelLinear(AdaptableLayer):
    """[T, input_size] -> [T, outputs of this rank], from one or several checkpoint tensors."""

    def __init__(self, context: LayerContext, input_size: int, parts: tuple[OutputPart, ...], has_bias: bool) -> None:
        super().__init__()
        self.input_size, self.parts = input_size, parts
        self._kernels, self._quantised = context.kernels, context.quantised
        self.num_outputs = sum(part.stop - part.start for part in parts)
        self.weight = context.parameter(self.num_outputs, input_size)
        self.bias = context.parameter(self.num_outputs) if has_bias else None

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self.adapted(self.columns(x, self.weight), x, adapters)

    def columns(self, x: Tensor, weight: Tensor) -> Tensor:
        """Its outputs by this weight, which the kernels' products take, without adapters."""
        return self._kernels.linear(x, weight, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent = prefix.rpartition(".")[0]
        first = 0
        for part in self.parts:
            end = first + part.stop - part.start
            source, destination = (part.start, part.stop), (first, end)
            name, columns = f"{parent}.{part.name}", (0, self.input_size)
            shape = (part.total, self.input_size)
            yield WeightSlice(f"{name}.weight", shape, (source, columns), f"{prefix}.weight", (destination, columns))
            if self.bias is not None and part.has_bias:
                yield WeightSlice(f"{name}.bias", (part.total,), (source,), f"{prefix}.bias", (destination,))
            first = end

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        """Biases of parts without one are zero."""
        ends = list(accumulate(part.stop - part.start for part in self.parts))
        for part, first, end in zip(self.parts, [0, *ends], ends, strict=False):
            if self.bias is not None and not part.has_bias:
                yield PaddingSlice(f"{prefix}.bias", ((first, end),))


class GatedLinear(ColumnParallelLinear):
    """Two parts of equal size, gate and up: [T, input_size] -> act(gate) * up, [T, half of the outputs of this rank]
    (https://arxiv.org/abs/2002.05202). `bound`, if above 0, bounds both factors (`LayerConfig.bound`). Gates are
    multiplied by `gate_multiplier` first.
    """

    def __init__(
        self,
        context: LayerContext,
        input_size: int,
        parts: tuple[OutputPart, ...],
        has_bias: bool,
        activation: str,
        bound: float = 0.0,
        gate_multiplier: float = 1.0,
    ) -> None:
        super().__init__(context, input_size, parts, has_bias)
        self._activation, self._bound, self._gate_multiplier = activation, bound, gate_multiplier
        self.pairs_gates = activation == "silu" and not bound

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        """If not `is_fused`, or if adapters add to them, the GEMM's outputs are stored before the activation is
        applied, with the same bits.
        """
        is_scaled = self._gate_multiplier != 1.0
        if is_fused and self.pairs_gates and not is_scaled and not self.is_adapted(adapters):
            return self._kernels.gated_linear(x, self.weight, self.bias)
        return self.activated(super().forward(x, adapters))

    def activated(self, columns: Tensor) -> Tensor:
        """[T, outputs of this rank] of the GEMM -> [T, half of them]."""
        if self._gate_multiplier != 1.0:
            gates, ups = columns.chunk(2, dim=1)
            columns = torch.cat((gates * self._gate_multiplier, ups), dim=1)
        if self._bound:
            return bounded_gates(columns, self._activation, self._bound, self._kernels.activate)
        return (
            self._kernels.silu_and_mul(columns)
            if self.pairs_gates
            else self._kernels.activate_and_mul(columns, self._activation)
        )

    def _packed(self) -> Tensor:
        return self._kernels.pack_gated(self.weight) if self.pairs_gates else super()._packed()


class RowParallelLinear(AdaptableLayer):
    """[T, inputs of this rank] -> this rank's part of [T, output_size], of `GroupHandle.part_dtype`, which the next
    norm sums over the tensor-parallel group (`RMSNorm.forward`). Inputs are summed in leaves (`ranks/leaves.py`).
    With integer kernels it is the sum itself, with the same bits for any number of ranks: int32 sums are added before
    they are scaled, and scales follow from the maxima of full rows.

    Every rank has the bias, and the first adds it to its part. Adapters add to a sum: in a group that adds by a tree it
    is made here and is the first rank's part (`GroupHandle.once`); else an adapter adds to each rank's part what
    follows from its inputs. The sum is multiplied by `multiplier` at last. Integer sums need no leaves, but adapters of
    such models sum in those of the model too (`adapter_leaf_ends`; none: the model has no leaves).
    """

    def __init__(
        self,
        context: LayerContext,
        input_range: tuple[int, int],
        input_size: int,
        output_size: int,
        has_bias: bool,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_range, self.input_size, self.output_size = input_range, input_size, output_size
        self._kernels, self._group = context.kernels, context.tensor_group
        self._quantised = context.quantised
        self._parts = context.integer if self._group.size > 1 else None
        self.leaf_ends = leaf_ends(input_range, input_size, 1 if context.quantised is not None else context.num_leaves)
        self._multiplier, part_dtype = multiplier, context.parts_group.part_dtype(context.dtype)
        # One leaf is multiplied as several are, by kernels for which that is not what `linear` does.
        self._has_leaves = context.quantised is None and (context.num_leaves > 1 or part_dtype != context.dtype)
        self.weight = context.parameter(output_size, input_range[1] - input_range[0])
        self.bias = context.parameter(output_size) if has_bias else None
        has_leaves = context.num_leaves > 1
        self.adapter_leaf_ends = leaf_ends(input_range, input_size, context.num_leaves) if has_leaves else ()

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """The part has to be summed before the group exchanges anything else."""
        if self._parts is not None:
            maxima = self._full_row_maxima(self._parts.row_maxima(x))
            sums = self._parts.sums(x, maxima, self.weight)
            outputs = self._parts.scaled(self._group.all_gather(sums), maxima, self.weight, self.bias)
            return self._multiplied(self._with_summed_adapters(outputs, x, adapters))
        group, fast = self._group, self._group.fast
        room = None if fast is None else fast.part_buffer((len(x), self.output_size), group.part_dtype(x.dtype))
        part = self.product(x, room)
        if not group.has_tree or (self._multiplier == 1.0 and not self.is_adapted(adapters)):
            return self._multiplied(self.adapted(part, x, adapters))
        return group.once(self._multiplied(self._with_summed_adapters(group.sum_parts(part, x.dtype), x, adapters)))

    def product(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """This rank's part, without adapters and multiplier, perhaps in `room`."""
        if not self._has_leaves:
            return self._kernels.linear(x, self.weight, self.rank_bias, room)
        dtype = self._group.part_dtype(x.dtype)
        return self._kernels.linear_of_leaves(x, self.weight, self.rank_bias, self.leaf_ends, dtype, room)

    def _multiplied(self, outputs: Tensor) -> Tensor:
        return outputs if self._multiplier == 1.0 else outputs * self._multiplier

    def _with_summed_adapters(self, outputs: Tensor, x: Tensor, adapters: StepAdapters | None) -> Tensor:
        """Complete outputs, the same on every rank, with what the adapters add to rows that have one."""
        if adapters is not None and self.adapters is not None and self.is_adapted(adapters):
            sums = tree_sum(list(self._group.all_gather(self.adapters.input_sums(x, adapters))))
            self.adapters.add_sums_(outputs, sums, adapters)
        return outputs

    @property
    def rank_bias(self) -> Tensor | None:
        """The bias on the group's first rank, None on the others."""
        return self.bias if self._group.rank == 0 else None

    def _full_row_maxima(self, maxima: Tensor) -> Tensor:
        """Maximum magnitudes of this rank's parts of rows -> those of the full rows."""
        return self._group.all_gather(maxima).amax(dim=0)

    def _packed(self) -> Tensor:
        """A collective with integer kernels: every rank of the group calls it."""
        if self._has_leaves:
            return self._kernels.pack_leaves(self.weight)
        if self._parts is None:
            return super()._packed()
        return self._parts.pack_part(self.weight, self._full_row_maxima(row_maxima(self.weight)))

    @property
    def shares_rows(self) -> bool:
        return self._parts is not None or super().shares_rows

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """`CheckpointLayer.check_changes`: other ranks have other parts of a quantised row."""
        super().check_changes(parameter, region, values)
        if self._parts is None or parameter != "weight":
            return
        if self._parts.is_changed(self.weight, region[0][0], self._converted(values)):
            raise CheckpointError(
                "a quantised weight whose inputs are split over ranks cannot be changed slice by slice, because its "
                "scales follow from full rows: pass full tensors to load_weights (LLM.update_weights), or run with "
                "parallel.tensor_parallel_size=1"
            )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        (start, stop), rows = self.input_range, (0, self.output_size)
        shape = (self.output_size, self.input_size)
        destination = (rows, (0, stop - start))
        yield WeightSlice(f"{prefix}.weight", shape, (rows, (start, stop)), f"{prefix}.weight", destination)
        if self.bias is not None:
            yield replicated(f"{prefix}.bias", (self.output_size,), f"{prefix}.bias")


def kv_head_range(num_kv_heads: int, size: int, rank: int) -> tuple[int, int]:
    """Key-value heads (start, stop) of a rank of the tensor-parallel group: a share of them, or, if there are more
    ranks than heads, one head that several ranks have.
    """
    if size <= num_kv_heads:
        return shard_range(num_kv_heads, size, rank)
    head = rank // (size // num_kv_heads)
    return head, head + 1


def gate_up_linear(
    context: LayerContext,
    hidden_size: int,
    intermediate_size: int,
    has_bias: bool,
    activation: str,
    bound: float = 0.0,
    gate_multiplier: float = 1.0,
) -> GatedLinear:
    """Gate and up projections, merged."""
    start, stop = context.columns(intermediate_size)
    parts = tuple(OutputPart(name, intermediate_size, start, stop) for name in ("gate_proj", "up_proj"))
    return GatedLinear(context, hidden_size, parts, has_bias, activation, bound, gate_multiplier)


def replicated_linear(
    context: LayerContext, name: str, input_size: int, output_size: int, *, has_bias: bool = False
) -> ColumnParallelLinear:
    """[T, input_size] -> [T, output_size] on every rank. `name` is the layer's own in its parent."""
    return ColumnParallelLinear(context, input_size, (OutputPart(name, output_size, 0, output_size),), has_bias)
