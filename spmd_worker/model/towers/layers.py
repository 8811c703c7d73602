"""Layers of towers: complete on every rank of the first stage, with the names of the checkpoint's tensors.

N: patches.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Final

from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, full_rectangle, replicated

_ROW_STEP: Final = 16
"""Compiled GEMMs take multiples of so many outputs."""


class TowerLinear(PackedLayer):
    """[N, inputs] -> [N, outputs] of one or several checkpoint tensors, one behind the other: `parts` are names without
    their last word, and numbers of outputs. A tensor may have more dimensions than two, of which all but the first are
    the inputs: `input_shape`. Each part has `padding` more rows, of zeros. The checkpoint has no bias of those that
    are `unbiased`: it is zeros here.
    """

    def __init__(
        self,
        context: LayerContext,
        parts: tuple[tuple[str, int], ...],
        input_shape: tuple[int, ...],
        *,
        has_bias: bool,
        padding: int = 0,
        unbiased: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._unbiased = unbiased
        self._kernels, self._parts, self._input_shape, self._padding = context.kernels, parts, input_shape, padding
        num_outputs = sum(size + padding for _, size in parts)
        self.weight = context.parameter(num_outputs, *input_shape)
        self.bias = context.parameter(num_outputs) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self.weight, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        for leaf, inputs in (("weight", self._input_shape), ("bias", ())):
            if getattr(self, leaf) is None:
                continue
            start = 0
            for name, size in self._parts:
                shape = (size, *inputs)
                source = full_rectangle(shape)
                destination = ((start, start + size), *source[1:])
                if leaf == "weight" or name not in self._unbiased:
                    yield WeightSlice(f"{name}.{leaf}", shape, source, f"{prefix}.{leaf}", destination)
                start += size + self._padding

    def padding_slices(self, prefix: str) -> Iterable[PaddingSlice]:
        leaves = (("weight", self._input_shape), ("bias", ()))
        stop = 0
        for name, size in self._parts:
            start, stop = stop + size, stop + size + self._padding
            if name in self._unbiased:
                yield PaddingSlice(f"{prefix}.bias", ((start - size, start),))
            for leaf, inputs in leaves if self._padding else ():
                if getattr(self, leaf) is not None:
                    yield PaddingSlice(f"{prefix}.{leaf}", ((start, stop), *full_rectangle(inputs)))

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        found = super().read_region(parameter, region)
        return found.view(len(found), *self._input_shape) if parameter == "weight" and self.is_packed else found

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """Full rows of a packed weight."""
        is_packed = parameter == "weight" and self.is_packed
        super().write_region(parameter, region, values.reshape(len(values), -1) if is_packed else values)

    def _packed(self) -> Tensor:
        return self._kernels.pack(self.weight.flatten(1))

    def _empty_packed(self) -> Tensor | None:
        return self._kernels.empty_packed(self.weight.flatten(1), is_gated=False)


class TowerGates(TowerLinear):
    """[N, inputs] -> act(gate) * up, [N, outputs]. Rows are added until compiled GEMMs take the sizes; their outputs
    are cut off again.
    """

    def __init__(
        self, context: LayerContext, names: tuple[str, str], input_size: int, size: int, activation: str, has_bias: bool
    ) -> None:
        parts = tuple([(name, size) for name in names])
        super().__init__(context, parts, (input_size,), has_bias=has_bias, padding=-size % _ROW_STEP)
        self._size, self._activation, self._is_plain = size, activation, activation == "silu"

    def forward(self, x: Tensor) -> Tensor:
        if self._is_plain:
            return self._kernels.gated_linear(x, self.weight, self.bias)[:, : self._size]
        return self._kernels.activate_and_mul(super().forward(x), self._activation)[:, : self._size]

    def _packed(self) -> Tensor:
        return self._kernels.pack_gated(self.weight) if self._is_plain else super()._packed()

    def _empty_packed(self) -> Tensor | None:
        return self._kernels.empty_packed(self.weight, is_gated=self._is_plain)


class JoinedGates(TowerGates):
    """`TowerGates` of one tensor of the checkpoint, `name`, whose first half are the rows of up."""

    def __init__(
        self, context: LayerContext, name: str, input_size: int, size: int, activation: str, has_bias: bool
    ) -> None:
        super().__init__(context, (name, name), input_size, size, activation, has_bias)
        self._name = name

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        size, padded = self._size, self._size + self._padding
        for leaf, inputs in (("weight", self._input_shape), ("bias", ())):
            if getattr(self, leaf) is None:
                continue
            for source, start in ((size, 0), (0, padded)):
                rest = full_rectangle(inputs)
                destination = ((start, start + size), *rest)
                rectangle = ((source, source + size), *rest)
                yield WeightSlice(
                    f"{self._name}.{leaf}", (2 * size, *inputs), rectangle, f"{prefix}.{leaf}", destination
                )


class TransposedLinear(PackedLayer):
    """[N, inputs] -> [N, outputs] with a matrix that the checkpoint has as [inputs, outputs], by its full name."""

    def __init__(self, context: LayerContext, name: str, input_size: int, output_size: int) -> None:
        super().__init__()
        self._kernels, self._name = context.kernels, name
        self.weight = context.parameter(output_size, input_size)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self.weight, None)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        shape = tuple(self.shape_of("weight"))
        source, destination = full_rectangle(shape[::-1]), full_rectangle(shape)
        yield WeightSlice(self._name, shape[::-1], source, f"{prefix}.weight", destination, is_transposed=True)


class TowerNorm(CheckpointLayer):
    """[..., size] -> [..., size]. `kind`: "layer", "rms", "rms_once", which is rounded once, behind the weights, or
    "rms_plus_one", whose weights are added to 1.
    """

    def __init__(self, context: LayerContext, name: str, size: int, kind: str, eps: float) -> None:
        super().__init__()
        self._kernels, self._name, self._kind, self._eps = context.kernels, name, kind, eps
        self.weight = context.parameter(size)
        self.bias = context.parameter(size) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self._kind == "rms":
            return self._kernels.rms_norm(x, self.weight, self._eps)
        offset = float(self._kind == "rms_plus_one")
        return self._kernels.full_norm(
            x, self.weight, self.bias, self._eps, offset=offset, is_centred=self._kind == "layer"
        )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        for leaf, parameter in self.named_parameters(recurse=False):
            yield replicated(f"{self._name}.{leaf}", tuple(parameter.shape), f"{prefix}.{leaf}")


class TowerTable(CheckpointLayer):
    """A parameter, by its full name, that is used as it is: positions, a class token, factors."""

    def __init__(self, context: LayerContext, name: str, *shape: int) -> None:
        super().__init__()
        self._name, self._shape = name, shape
        self.weight = context.parameter(*shape)

    def forward(self) -> Tensor:
        """[rows, size]."""
        weight: Tensor = self.weight
        return weight.view(prod(self._shape[:-1]), self._shape[-1])

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield replicated(self._name, self._shape, f"{prefix}.weight")


def merged_rows(x: Tensor, rows: int, columns: int, merge_size: int) -> Tensor:
    """[rows * columns, size] by lines -> the same by squares of `merge_size` a side, one behind the other."""
    if merge_size == 1:
        return x
    squares = x.view(rows // merge_size, merge_size, columns // merge_size, merge_size, -1)
    return squares.transpose(1, 2).reshape(rows * columns, -1)
