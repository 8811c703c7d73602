"""The hot operations of a decoder layer on the CPU: compiled row operations, packed products.

Each output row depends on its input row alone, bit for bit. Float32 and bfloat16. Knows tensors and the compiled
library; knows nothing about layers, attention or ranks.

T: tokens; H: hidden size; D: head size; I: intermediate size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.kernels.api import Kernels
from spmd_worker.kernels.cpu.library import NativeLibrary, native_library
from spmd_worker.kernels.cpu.linear import PackedKernels

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

# A weight in panels for the matrix unit is [outputs / 16, inputs / 2, 16, 2]; it takes 32 inputs at a time.
_PANEL, _STEP, _PANELS_NDIM = 16, 32, 4


def cpu_kernels(dtype: torch.dtype) -> tuple[Kernels, str | None]:
    """The best kernels there are on this CPU, and why they are not the compiled ones where they are not."""
    if dtype not in NATIVE_DTYPES:
        return PackedKernels(), f"the compiled kernels compute in float32 and bfloat16, not in {dtype_name(dtype)}"
    library = native_library()
    return (PackedKernels(), library) if isinstance(library, str) else (CpuKernels(library), None)


def dtype_name(dtype: torch.dtype) -> str:
    """As in the names of compiled functions."""
    return str(dtype).removeprefix("torch.")


class CpuKernels(PackedKernels):
    """Implements `kernels.api.Kernels` for tensors of float32 and bfloat16 in host memory."""

    def __init__(self, library: NativeLibrary) -> None:
        self._functions, self._has_matrix_unit = library.functions, library.has_matrix_unit

    def pack(self, weight: Tensor) -> Tensor:
        """See `Kernels.pack`. In panels for the matrix unit where it takes them, else as `PackedKernels` does."""
        takes_panels = self._has_matrix_unit and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        num_outputs, num_inputs = weight.shape
        if takes_panels and num_inputs % _STEP == 0 and num_outputs % _PANEL == 0:
            pairs = weight.detach().view(num_outputs // _PANEL, _PANEL, num_inputs // 2, 2)
            return pairs.transpose(1, 2).contiguous()
        return super().pack(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        if weight.ndim != _PANELS_NDIM:
            return super().linear(x, weight, bias)
        _check(x, weight, *(() if bias is None else (bias,)))
        num_inputs, num_outputs = weight.shape[1] * 2, weight.shape[0] * _PANEL
        assert x.shape == (x.shape[0], num_inputs), (x.shape, weight.shape)
        if bias is not None:
            _check_whole(bias, (num_outputs,))
        x = _with_whole_rows(x)
        output = torch.empty((x.shape[0], num_outputs), dtype=x.dtype)
        self._functions["product_bfloat16"](
            *(x.data_ptr(), x.stride(0), x.shape[0], num_inputs, weight.data_ptr(), num_outputs),
            *(None if bias is None else bias.data_ptr(), output.data_ptr(), torch.get_num_threads()),
        )
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`. Rounded to the input's dtype before the weight is applied, as the reference does."""
        _check(x, weight)
        _check_whole(weight, x.shape[-1:])
        rows = _rows(x)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions[f"rms_norm_{dtype_name(x.dtype)}"](
            *rows.arguments, weight.data_ptr(), eps, output.data_ptr(), torch.get_num_threads()
        )
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        _check(x, residual, weight)
        assert x.ndim == 2, x.shape
        assert residual.shape == x.shape, (x.shape, residual.shape)
        _check_whole(weight, x.shape[-1:])
        x, residual = _with_whole_rows(x), _with_whole_rows(residual)
        output, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._functions[f"add_rms_norm_{dtype_name(x.dtype)}"](
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(x.shape[0], x.shape[1], weight.data_ptr(), eps),
            *(output.data_ptr(), total.data_ptr(), torch.get_num_threads()),
        )
        return output, total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Kernels.rotate`. `cos` and `sin` have the dtype of `x`."""
        _check(x, cos, sin)
        assert x.ndim == 3, x.shape
        assert x.shape[2] % 2 == 0, x.shape
        assert cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2), (cos.shape, sin.shape, x.shape)
        rows, cos, sin = _rows(x), cos.contiguous(), sin.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions[f"rotate_{dtype_name(x.dtype)}"](
            *rows.arguments, cos.data_ptr(), sin.data_ptr(), output.data_ptr(), torch.get_num_threads()
        )
        return output

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        _check(gate_up)
        assert gate_up.ndim == 2, gate_up.shape
        assert gate_up.shape[1] % 2 == 0, gate_up.shape
        gate_up = _with_whole_rows(gate_up)
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((num_tokens, size), dtype=gate_up.dtype)
        self._functions[f"silu_and_mul_{dtype_name(gate_up.dtype)}"](
            gate_up.data_ptr(), gate_up.stride(0), num_tokens, size, output.data_ptr(), torch.get_num_threads()
        )
        return output


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor as [tokens, heads, size] with whole rows. Holds the tensor, so that its memory stays."""

    tensor: Tensor
    token_stride: int
    head_stride: int
    num_tokens: int
    num_heads: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """As the compiled functions take them."""
        shape = (self.num_tokens, self.num_heads, self.tensor.shape[-1])
        return (self.tensor.data_ptr(), self.token_stride, self.head_stride, *shape)


def _rows(x: Tensor) -> _Rows:
    """Two and three dimensions as they lie, if their rows are whole; anything else copied."""
    x = _with_whole_rows(x)
    if x.ndim == 3:
        return _Rows(x, x.stride(0), x.stride(1), x.shape[0], x.shape[1])
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    return _Rows(x, x.stride(0), 0, x.shape[0], 1)


def _with_whole_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy, so that neighbours of the last dimension are neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check_whole(tensor: Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.is_contiguous(), tensor.stride()


def _check(*tensors: Tensor) -> None:
    dtype = tensors[0].dtype
    assert dtype in NATIVE_DTYPES, dtype
    for tensor in tensors:
        assert tensor.dtype == dtype, (tensor.dtype, dtype)
        assert tensor.device.type == "cpu", tensor.device
