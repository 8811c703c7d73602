"""Compiled W8A8 GEMMs, with the sums and the rounding of `ops/kernels/int8.py`, bit for bit.

Weights that fit panels are packed as in `native/int8.h`, others as by `Int8Weights`.

T: tokens; O: outputs; I: inputs.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import QUANTISATION, Region
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
from spmd_worker.native.version import native_version
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ops.kernels.cpu.panels import (
    are_byte_panels,
    argmax_results,
    byte_panel_indices,
    check_tensor,
    contiguous_rows,
    dtype_name,
    in_row_order,
    interleaved,
)
from spmd_worker.ops.kernels.int8 import Int8Kernels, Int8Packing, Int8Weights, int8_region, row_maxima

_OFFSET: Final = 128
_FUNCTIONS: Final = ("maxima", "quantise", "gemm", "argmax", "scaled")


def int8_kernels(dtype: torch.dtype) -> "tuple[Int8Kernels | Int8CpuKernels, str | None]":
    """The fastest int8 kernels of this CPU, and the reason if these are not the compiled ones."""
    _, reason = cpu_kernels(dtype)
    library = native_library()
    if reason is not None or isinstance(library, str):
        return Int8Kernels(dtype), reason
    return Int8CpuKernels(library, dtype), None


def int8_shape(packed: Tensor) -> tuple[int, int]:
    """Outputs and inputs of a packed int8 weight."""
    if are_byte_panels(packed):
        return _num_outputs(packed), inputs_of(packed.shape[-1])
    return packed.shape[0], packed.shape[1] - SCALE_BYTES


class Int8Panels(Int8Weights):
    """Packed layout of a weight: int8 [O / 16, 1, bytes of a panel]; of a gated one [O / 32, 2, bytes of a panel],
    panels of gate and up projection interleaved. Rows as in `Int8Weights` if the sizes do not fit panels.
    """

    def empty(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        num_outputs, num_inputs = weight.shape
        if not fits_panels(num_outputs, num_inputs, is_gated=is_gated):
            return super().empty(weight, is_gated=is_gated)
        num_each = 1 + is_gated
        return torch.zeros((num_outputs // PANEL // num_each, num_each, panel_bytes(num_inputs)), dtype=torch.int8)

    def numbers_and_scales(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies."""
        if not are_byte_panels(packed):
            return super().numbers_and_scales(packed, start, stop)
        numbers, scales, _ = _parts_of(packed)
        index = byte_panel_indices(packed, start, stop)
        return numbers[index].flatten(1), scales[index]

    def store(self, packed: Tensor, start: int, numbers: Tensor, scales: Tensor) -> None:
        if not are_byte_panels(packed):
            return super().store(packed, start, numbers, scales)
        to, to_scales, starts = _parts_of(packed)
        index = byte_panel_indices(packed, start, start + len(numbers))
        to[index] = numbers.view(len(numbers), -1, 4)
        to_scales[index] = scales
        starts[index] = numbers.sum(dim=1, dtype=torch.int32) * -_OFFSET
        return None


class Int8CpuKernels(Int8Packing, CpuKernels):
    """Implements `kernels.api.IntegerKernels` for tensors of float32 or bfloat16 in host memory."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        super().__init__(library)
        self.dtype, self.weights, self._rows = dtype, Int8Panels(dtype), Int8Kernels(dtype)
        self._int8 = {name: library.functions[f"int8_{name}_{dtype_name(dtype)}"] for name in _FUNCTIONS}
        self._int8["sums"] = library.functions["int8_sums"]

    @property
    def integer(self) -> "Int8CpuKernels":
        return self

    @property
    def plain(self) -> CpuKernels:
        return CpuKernels(self._library)

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        native = int8_region("native", native_version())
        return CpuKernels.numerics(self, dtype) | {QUANTISATION: native}

    def pack_gated(self, weight: Tensor) -> Tensor:
        return self.weights.pack(weight, row_maxima(weight), is_gated=True)

    def row_maxima(self, x: Tensor) -> Tensor:
        x = self._checked(x)
        maxima = torch.empty(len(x), dtype=torch.float32)
        self._int8["maxima"](x.data_ptr(), x.stride(0), *x.shape, maxima.data_ptr(), num_threads())
        return maxima

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if weight.dtype != torch.int8:
            return super().linear(x, weight, bias, out)
        if not are_byte_panels(weight):
            return self._rows.linear(x, weight, bias)
        if weight.shape[1] == 1:
            return self._int8_gemm(x, weight, bias, is_gated=False)
        # Gate and up panels are interleaved, and so are the columns of the GEMM.
        return in_row_order(self._int8_gemm(x, weight, interleaved(bias), is_gated=False))

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dtype != torch.int8:
            return super().gated_linear(x, weight, bias)
        if not are_byte_panels(weight):
            return self.silu_and_mul(self._rows.linear(x, weight, bias))
        return self._int8_gemm(x, weight, bias, is_gated=True)

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The logits are computed in panels and never stored."""
        if weight.dtype != torch.int8:
            return super().linear_argmax(x, weight, count)
        if not are_byte_panels(weight) or weight.shape[1] != 1:
            return self.argmax(self.linear(x, weight, None)[:, :count])
        x, num_outputs = self._checked(x), _num_outputs(weight)
        assert 0 < count <= num_outputs, (count, num_outputs)
        values, indices = argmax_results(len(x))
        maxima, rows = _scratch(x)
        self._int8["argmax"](
            *_input_arguments(x, weight),
            *(count, values.data_ptr(), indices.data_ptr()),
            *(maxima.data_ptr(), rows.data_ptr(), num_threads()),
        )
        return values, indices

    def _int8_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
        x, num_outputs = self._checked(x), _num_outputs(weight)
        output = torch.empty((len(x), num_outputs // (1 + is_gated)), dtype=x.dtype)
        bias = self._checked_bias(bias, num_outputs)
        maxima, rows = _scratch(x)
        self._int8["gemm"](
            *_input_arguments(x, weight),
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
        """[T, I] -> int8 [T, I rounded up to 64], for the compiled GEMMs."""
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
        return contiguous_rows(x)

    def _checked_bias(self, bias: Tensor | None, num_outputs: int) -> Tensor | None:
        if bias is not None:
            check_tensor(bias, self.weights.dtype, (num_outputs,))
        return bias


def _num_outputs(weight: Tensor) -> int:
    return weight.shape[0] * weight.shape[1] * PANEL


def _scratch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scratch memory of a GEMM of `x` [T, I]: float32 [T], int8 [T, bytes of a row]."""
    num_rows, num_inputs = x.shape
    rows = torch.empty((num_rows, row_bytes(num_inputs)), dtype=torch.int8)
    return torch.empty(num_rows, dtype=torch.float32), rows


def _input_arguments(x: Tensor, weight: Tensor) -> tuple[int, ...]:
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
    """Views: int8 values [panels, 1 or 2, 16, inputs / 4, 4], float32 scales and int32 initial sums [panels, 1 or 2,
    16].
    """
    end = inputs_of(packed.shape[-1]) * PANEL
    numbers = packed.detach()[..., :end].view(*packed.shape[:-1], -1, PANEL, 4).transpose(-3, -2)
    scales, starts = (packed.detach()[..., end + at : end + at + 4 * PANEL] for at in (0, 4 * PANEL))
    return numbers, scales.view(torch.float32), starts.view(torch.int32)
