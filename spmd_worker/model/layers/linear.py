"""Linear layers that own their sharding rule: which rectangle of which checkpoint tensor is this rank's.

Column-parallel layers split the outputs and need no communication; row-parallel ones split the inputs and sum. Merged
layers hold several checkpoint tensors in one parameter, one product instead of three. The split follows Megatron-LM
(https://arxiv.org/abs/1909.08053).

T: tokens of the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import Rectangle, WeightSlice, whole
from spmd_worker.ops.kernels.int8 import row_maxima
from spmd_worker.ranks.topology import shard_range


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One checkpoint tensor among the outputs of a merged layer: `name` replaces the layer's own in checkpoint names.

    This rank owns outputs `start` to `stop` of the `total`.
    """

    name: str
    total: int
    start: int
    stop: int


class ColumnParallelLinear(PackedLayer):
    """[T, input_size] -> [T, outputs of this rank], from one or several checkpoint tensors."""

    def __init__(self, context: LayerContext, input_size: int, parts: tuple[OutputPart, ...], has_bias: bool) -> None:
        super().__init__()
        self.input_size, self.parts = input_size, parts
        self._kernels, self._quantised = context.kernels, context.quantised
        num_outputs = sum(part.stop - part.start for part in parts)
        self.weight = context.parameter(num_outputs, input_size)
        self.bias = context.parameter(num_outputs) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, input_size] -> [T, outputs of this rank]."""
        return self._kernels.linear(x, self.weight, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name; a part's name replaces its last word."""
        parent = prefix.rpartition(".")[0]
        first = 0
        for part in self.parts:
            end = first + part.stop - part.start
            source, destination = (part.start, part.stop), (first, end)
            name, columns = f"{parent}.{part.name}", (0, self.input_size)
            shape = (part.total, self.input_size)
            yield WeightSlice(f"{name}.weight", shape, (source, columns), f"{prefix}.weight", (destination, columns))
            if self.bias is not None:
                yield WeightSlice(f"{name}.bias", (part.total,), (source,), f"{prefix}.bias", (destination,))
            first = end


class GatedLinear(ColumnParallelLinear):
    """Two parts of equal size, gates and what they open: [T, input_size] -> act(gate) * up, [T, size of a part]
    (https://arxiv.org/abs/2002.05202).
    """

    def __init__(
        self,
        context: LayerContext,
        input_size: int,
        parts: tuple[OutputPart, ...],
        has_bias: bool,
        activation: str = "silu",
    ) -> None:
        super().__init__(context, input_size, parts, has_bias)
        self._activation = activation

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, input_size] -> [T, half of the outputs of this rank]. If not `is_fused`, the GEMM is written down and the
        gates are applied after it, with the same bits.
        """
        if self._activation != "silu":
            columns = self._kernels.linear(x, self.weight, self.bias)
            return self._kernels.activate_and_mul(columns, self._activation)
        if is_fused:
            return self._kernels.gated_linear(x, self.weight, self.bias)
        return self._kernels.silu_and_mul(self._kernels.linear(x, self.weight, self.bias))

    def _packed(self) -> Tensor:
        return self._kernels.pack_gated(self.weight) if self._activation == "silu" else super()._packed()


class ActivatedLinear(ColumnParallelLinear):
    """[T, input_size] -> act of the outputs of this rank; no `activation`: the outputs as they are."""

    def __init__(
        self, context: LayerContext, input_size: int, parts: tuple[OutputPart, ...], has_bias: bool, activation: str
    ) -> None:
        super().__init__(context, input_size, parts, has_bias)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, input_size] -> [T, outputs of this rank]."""
        outputs: Tensor = super().forward(x)
        return self._kernels.activate(outputs, self._activation) if self._activation else outputs


class ReplicatedLinear(PackedLayer):
    """[T, input_size] -> [T, output_size], without a bias, whole on every rank."""

    def __init__(self, context: LayerContext, input_size: int, output_size: int) -> None:
        super().__init__()
        self.input_size, self.output_size, self._kernels = input_size, output_size, context.kernels
        self._quantised = context.quantised
        self.weight = context.parameter(output_size, input_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, input_size] -> [T, output_size]."""
        return self._kernels.linear(x, self.weight, None)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield whole(f"{prefix}.weight", (self.output_size, self.input_size), f"{prefix}.weight")


class RowParallelLinear(PackedLayer):
    """[T, inputs of this rank] -> this rank's part of [T, output_size]: the sum over the tensor-parallel group is made
    with what follows (`RMSNorm.add_and_norm`). With quantised kernels it is the sum itself, the same bits on any number
    of ranks: whole numbers are summed before they are scaled, by the largest magnitude of the whole row.

    The bias is whole on every rank and in the first rank's part.
    """

    def __init__(
        self, context: LayerContext, input_range: tuple[int, int], input_size: int, output_size: int, has_bias: bool
    ) -> None:
        super().__init__()
        self.input_range, self.input_size, self.output_size = input_range, input_size, output_size
        self._kernels, self._group = context.kernels, context.tensor_group
        self._quantised = context.quantised
        # Alone it is a layer like any other.
        self._parts = context.quantised if self._group.size > 1 else None
        self.weight = context.parameter(output_size, input_range[1] - input_range[0])
        self.bias = context.parameter(output_size) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs of this rank] -> [T, output_size], to be summed before anything else is exchanged in the group."""
        if self._parts is not None:
            maxima = self._whole_maxima(self._parts.row_maxima(x))
            sums = self._parts.sums(x, maxima, self.weight)
            return self._parts.scaled(self._group.all_gather(sums), maxima, self.weight, self.bias)
        fast = self._group.fast
        room = None if fast is None else fast.part_buffer((len(x), self.output_size), x.dtype)
        return self._kernels.linear(x, self.weight, self.own_bias, room)

    @property
    def own_bias(self) -> Tensor | None:
        """What this rank adds to its part."""
        return self.bias if self._group.rank == 0 else None

    def _whole_maxima(self, maxima: Tensor) -> Tensor:
        """Largest magnitudes of this rank's parts of rows -> those of the whole rows."""
        return self._group.all_gather(maxima).amax(dim=0)

    def _packed(self) -> Tensor:
        """The plain weight as the kernels like it. Every rank of the group calls this where they are quantised."""
        if self._parts is None:
            return super()._packed()
        return self._parts.pack_part(self.weight, self._whole_maxima(row_maxima(self.weight)))

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """See `CheckpointLayer.check_changes`: of a quantised row other ranks have other parts."""
        if self._parts is None or parameter != "weight":
            return
        if self._parts.is_changed(self.weight, region[0][0], self._as_given(values)):
            raise CheckpointError(
                "each rank has some inputs of this quantised weight, whose scales are those of whole rows: give whole "
                "tensors to load_weights (LLM.update_weights), or run with parallel.tensor_parallel_size=1"
            )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        (start, stop), rows = self.input_range, (0, self.output_size)
        shape = (self.output_size, self.input_size)
        destination = (rows, (0, stop - start))
        yield WeightSlice(f"{prefix}.weight", shape, (rows, (start, stop)), f"{prefix}.weight", destination)
        if self.bias is not None:
            yield whole(f"{prefix}.bias", (self.output_size,), f"{prefix}.bias")


def qkv_linear(
    context: LayerContext, hidden_size: int, num_heads: int, num_kv_heads: int, head_size: int, has_bias: bool
) -> ColumnParallelLinear:
    """Query, key and value projections as one layer.

    Key-value heads are shared out, or, when ranks outnumber them, each is held by as many ranks as it must serve.
    """
    group = context.tensor_group
    query = _heads("q_proj", num_heads, head_size, *shard_range(num_heads, group.size, group.rank))
    kv_range = kv_head_range(num_kv_heads, group.size, group.rank)
    key_value = [_heads(name, num_kv_heads, head_size, *kv_range) for name in ("k_proj", "v_proj")]
    return ColumnParallelLinear(context, hidden_size, (query, *key_value), has_bias)


def kv_head_range(num_kv_heads: int, size: int, rank: int) -> tuple[int, int]:
    """Key-value heads (start, stop) of a rank of the tensor-parallel group."""
    if size <= num_kv_heads:
        return shard_range(num_kv_heads, size, rank)
    head = rank // (size // num_kv_heads)
    return head, head + 1


def gate_up_linear(
    context: LayerContext, hidden_size: int, intermediate_size: int, has_bias: bool, activation: str = "silu"
) -> GatedLinear:
    """Gate and up projections as one layer, with what the gates do."""
    start, stop = shard_range(intermediate_size, context.tensor_group.size, context.tensor_group.rank)
    parts = tuple(OutputPart(name, intermediate_size, start, stop) for name in ("gate_proj", "up_proj"))
    return GatedLinear(context, hidden_size, parts, has_bias, activation)


def up_linear(
    context: LayerContext, hidden_size: int, intermediate_size: int, has_bias: bool, activation: str
) -> ActivatedLinear:
    """The up projection of a feed-forward without gates, with what follows it."""
    start, stop = shard_range(intermediate_size, context.tensor_group.size, context.tensor_group.rank)
    part = OutputPart("up_proj", intermediate_size, start, stop)
    return ActivatedLinear(context, hidden_size, (part,), has_bias, activation)


def _heads(name: str, num_heads: int, head_size: int, start: int, stop: int) -> OutputPart:
    return OutputPart(name, num_heads * head_size, start * head_size, stop * head_size)
