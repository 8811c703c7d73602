"""Products of int8 by the compiled library, with the sums and the roundings of `ops/kernels/int8.py`, bit for bit.

Weights whose sizes fit panels are packed as `native/int8.h` has them, others as `Int8Weights` does; the rest of a
layer is computed as ever, by `CpuKernels`.

T: tokens; O: outputs; I: inputs.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.model_config.int8_format import (
    PANEL,
    ROW_STEP,
    SCALE_BYTES,
    fits_panels,
    inputs_of,
    panel_bytes,
    row_bytes,
)
from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.native.threads import num_threads
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ops.kernels.cpu.panels import dtype_name
from spmd_worker.ops.kernels.int8 import Int8Kernels, Int8Packing, Int8Weights, row_maxima

_OFFSET: Final = 128
_FUNCTIONS: Final = ("maxima", "quantise", "product", "argmax", "scaled")


def int8_kernels(dtype: torch.dtype) -> "tuple[Int8Kernels | Int8CpuKernels, str | None]":
    """The best there are on this CPU, and why they are not the compiled ones where they are not."""
    _, reason = cpu_kernels(dtype)
    library = native_library()
    if reason is not None or isinstance(library, str):
        return Int8Kernels(dtype), reason
    return Int8CpuKernels(library, dtype), None


def are_byte_panels(packed: Tensor) -> bool:
    """Whether an int8 weight is in panels."""
    return packed.dtype == torch.int8 and packed.ndim == 3


def int8_shape(packed: Tensor) -> tuple[int, int]:
    """Outputs and inputs of a packed int8 weight."""
    if are_byte_panels(packed):
        return _num_outputs(packed), inputs_of(packed.shape[-1])
    return packed.shape[0], packed.shape[1] - SCALE_BYTES


class Int8Panels(Int8Weights):
    """How a weight is packed: int8 [O / 16, 1, bytes of a panel], a gated one [O / 32, 2, bytes of a panel]: a panel of
    gates, then one of what they open, and so on. Rows where the sizes fit no panels.
    """

    def empty(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        num_outputs, num_inputs = weight.shape
        if not fits_panels(num_outputs, num_inputs, is_gated=is_gated):
            return super().empty(weight, is_gated=is_gated)
        in_turn = 1 + is_gated
        return torch.zeros((num_outputs // PANEL // in_turn, in_turn, panel_bytes(num_inputs)), dtype=torch.int8)

    def numbers_and_scales(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `Int8Weights.numbers_and_scales`. Copies."""
        if not are_byte_panels(packed):
            return super().numbers_and_scales(packed, start, stop)
        numbers, scales, _ = _parts_of(packed)
        index = _places(packed, start, stop)
        return numbers[index].flatten(1), scales[index]

    def put(self, packed: Tensor, start: int, numbers: Tensor, scales: Tensor) -> None:
        if not are_byte_panels(packed):
            return super().put(packed, start, numbers, scales)
        to, to_scales, starts = _parts_of(packed)
        index = _places(packed, start, start + len(numbers))
        to[index] = numbers.view(len(numbers), -1, 4)
        to_scales[index] = scales
        starts[index] = numbers.sum(dim=1, dtype=torch.int32) * -_OFFSET
        return None


class Int8CpuKernels(Int8Packing, CpuKernels):
    """Implements `kernels.api.QuantisedKernels` for tensors of float32 or bfloat16 in host memory."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        super().__init__(library)
        self.dtype, self.weights, self._rows = dtype, Int8Panels(dtype), Int8Kernels(dtype)
        self._int8 = {name: library.functions[f"int8_{name}_{dtype_name(dtype)}"] for name in _FUNCTIONS}
        self._int8["sums"] = library.functions["int8_sums"]

    def pack_gated(self, weight: Tensor) -> Tensor:
        return self.weights.pack(weight, row_maxima(weight), is_gated=True)

    def row_maxima(self, x: Tensor) -> Tensor:
        x = self._checked(x)
        maxima = torch.empty(len(x), dtype=torch.float32)
        self._int8["maxima"](x.data_ptr(), x.stride(0), *x.shape, maxima.data_ptr(), num_threads())
        return maxima

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`. Makes no use of `room`."""
        if weight.dtype != torch.int8:
            return super().linear(x, weight, bias, room)
        if not are_byte_panels(weight):
            return self._rows.linear(x, weight, bias)
        num_pairs, in_turn, _ = weight.shape
        if in_turn == 1:
            return self._product(x, weight, bias, is_gated=False)
        # Panels of gates and of what they open take turns, so the columns of the product do: [T, pairs, 2, 16].
        if bias is not None:
            bias = bias.view(2, num_pairs, PANEL).transpose(0, 1).flatten()
        columns = self._product(x, weight, bias, is_gated=False).view(len(x), num_pairs, 2, PANEL)
        return columns.transpose(1, 2).flatten(1)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype == torch.int8 and not are_byte_panels(weight):
            return self.silu_and_mul(self._rows.linear(x, weight, bias))
        if weight.dtype != torch.int8:
            return super().gated_linear(x, weight, bias)
        return self._product(x, weight, bias, is_gated=True)

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.linear_argmax`. In panels the product is never written down."""
        if weight.dtype != torch.int8:
            return super().linear_argmax(x, weight, count)
        if not are_byte_panels(weight) or weight.shape[1] != 1:
            return self.largest(self.linear(x, weight, None)[:, :count])
        x, num_outputs = self._checked(x), _num_outputs(weight)
        assert 0 < count <= num_outputs, (count, num_outputs)
        values, places = torch.empty(len(x), dtype=torch.float32), torch.empty(len(x), dtype=torch.int64)
        maxima, rows = _scratch(x)
        self._int8["argmax"](
            *_product_arguments(x, weight),
            *(count, values.data_ptr(), places.data_ptr()),
            *(maxima.data_ptr(), rows.data_ptr(), num_threads()),
        )
        return values, places

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
        x, num_outputs = self._checked(x), _num_outputs(weight)
        output = torch.empty((len(x), num_outputs // (1 + is_gated)), dtype=x.dtype)
        bias = self._checked_bias(bias, num_outputs)
        maxima, rows = _scratch(x)
        self._int8["product"](
            *_product_arguments(x, weight),
            *(None if bias is None else bias.data_ptr(), output.data_ptr(), is_gated),
            *(maxima.data_ptr(), rows.data_ptr(), num_threads()),
        )
        return output

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        if not are_byte_panels(weight):
            return self._rows.sums(x, maxima, weight)
        sums = torch.empty((len(x), _num_outputs(weight)), dtype=torch.int32)
        rows = self._quantised(self._checked(x), maxima)
        self._int8["sums"](*_gemm_arguments(rows, weight), sums.data_ptr(), num_threads())
        return sums

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not are_byte_panels(weight):
            return self._rows.scaled(parts, maxima, weight, bias)
        num_parts, num_rows, num_outputs = parts.shape
        assert num_outputs == _num_outputs(weight), (parts.shape, weight.shape)
        bias = self._checked_bias(bias, num_outputs)
        assert parts.is_contiguous(), parts.stride()
        output = torch.empty((num_rows, num_outputs), dtype=self.weights.dtype)
        self._int8["scaled"](
            *(parts.data_ptr(), num_parts, num_rows, inputs_of(weight.shape[-1]), weight.data_ptr(), num_outputs),
            *(maxima.data_ptr(), None if bias is None else bias.data_ptr(), output.data_ptr()),
            num_threads(),
        )
        return output

    def _quantised(self, x: Tensor, maxima: Tensor) -> Tensor:
        """[T, I] -> int8 [T, I rounded up to 64], as the library's products take it."""
        num_rows, num_inputs = x.shape
        rows = torch.empty((num_rows, row_bytes(num_inputs)), dtype=torch.int8)
        self._int8["quantise"](
            *(x.data_ptr(), x.stride(0), num_rows, num_inputs, maxima.data_ptr()),
            *(rows.data_ptr(), rows.shape[1], num_threads()),
        )
        return rows

    def _checked(self, x: Tensor) -> Tensor:
        assert x.dtype == self.weights.dtype, (x.dtype, self.weights.dtype)
        assert x.is_cpu, x.device
        assert x.ndim == 2, x.shape
        return x if x.stride(1) == 1 else x.contiguous()

    def _checked_bias(self, bias: Tensor | None, num_outputs: int) -> Tensor | None:
        if bias is not None:
            assert bias.dtype == self.weights.dtype, (bias.dtype, self.weights.dtype)
            assert bias.shape == (num_outputs,), (bias.shape, num_outputs)
            assert bias.is_contiguous(), bias.stride()
        return bias


def _num_outputs(weight: Tensor) -> int:
    return weight.shape[0] * weight.shape[1] * PANEL


def _scratch(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the library works in for a product of `x` [T, I]: float32 [T], int8 [T, bytes of a row]."""
    num_rows, num_inputs = x.shape
    rows = torch.empty((num_rows, row_bytes(num_inputs)), dtype=torch.int8)
    return torch.empty(num_rows, dtype=torch.float32), rows


def _product_arguments(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    assert weight.is_contiguous(), weight.stride()
    assert x.shape[1] == inputs_of(weight.shape[-1]), (x.shape, weight.shape)
    return (x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), _num_outputs(weight))


def _gemm_arguments(rows: Tensor, weight: Tensor) -> tuple[int, ...]:
    num_inputs = inputs_of(weight.shape[-1])
    assert weight.is_contiguous(), weight.stride()
    assert 0 <= rows.shape[1] - num_inputs < ROW_STEP, (rows.shape, weight.shape)
    shape = (rows.shape[1], len(rows), num_inputs)
    return (rows.data_ptr(), *shape, weight.data_ptr(), _num_outputs(weight))


def _parts_of(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [panels, in turn, 16, inputs / 4, 4], and float32 and int32 [panels, in turn, 16]: numbers, scales, and
    what sums start from.
    """
    end = inputs_of(packed.shape[-1]) * PANEL
    numbers = packed.detach()[..., :end].view(*packed.shape[:-1], -1, PANEL, 4).transpose(-3, -2)
    scales, starts = (packed.detach()[..., end + at : end + at + 4 * PANEL] for at in (0, 4 * PANEL))
    return numbers, scales.view(torch.float32), starts.view(torch.int32)


def _places(packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `start` to `stop`: the panel, whether it is the second of a pair, and the place in it."""
    in_turn = packed.shape[1]
    each = len(packed) * PANEL
    assert 0 <= start <= stop <= each * in_turn, (start, stop, packed.shape)
    row = torch.arange(start, stop)
    return row % each // PANEL, row // each, row % PANEL
