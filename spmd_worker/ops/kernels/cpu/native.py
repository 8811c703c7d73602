"""The hot operations of a decoder layer on the CPU: compiled row operations, packed products.

Each output row depends on its input row alone, bit for bit. Float32 and bfloat16. Knows tensors and the compiled
library; knows nothing about layers, attention or ranks.

T: tokens; H: hidden size; D: head size; I: intermediate size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.model_config.int8_format import row_bytes, screen_bytes
from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.native.threads import num_threads
from spmd_worker.ops.kernels.api import Cuts, Kernels
from spmd_worker.ops.kernels.cpu.linear import PackedKernels

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

# A weight in panels for the library's products is [outputs / 16, inputs / 2, 16, 2], a gated one [outputs / 32, 2,
# inputs / 2, 16, 2]; the AMX unit takes 32 inputs at a time.
_PANEL, _STEP, _PANELS_NDIM, _GATED_NDIM = 16, 32, 4, 5
_PIECE = 1024  # ids whose masses draws.cpp sums up by themselves
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")  # by the numbers that rows.cpp has for them


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
        self._gemm_dtypes = library.gemm_dtypes
        names = (
            "rms_norm",
            "add_rms_norm",
            "full_norm",
            "rotate",
            "silu_and_mul",
            "activate",
            "bound",
            "argmax",
            "masses",
            "find_mass",
            "count_above",
            "forbid",
            "gemm",
        )
        self._functions = {
            (name, dtype): library.functions[f"{name}_{dtype_name(dtype)}"] for name in names for dtype in NATIVE_DTYPES
        }
        of_gemm = library.functions["gemm_argmax_bfloat16"]
        self._functions["gemm_argmax", torch.bfloat16] = of_gemm
        self._functions["cut", torch.float32] = library.functions["cut_float32"]
        for name in ("make_screen", "screened_argmax"):
            self._functions[name, torch.bfloat16] = library.functions[f"{name}_bfloat16"]
        self._has_screens = bool(library.functions["screens_bfloat16"]())

    def has_products(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are packed for the library's own products."""
        return dtype_name(dtype) in self._gemm_dtypes

    def pack(self, weight: Tensor) -> Tensor:
        """See `Kernels.pack`. In panels where the library's products take them, else as `PackedKernels` does."""
        return _panels(weight).contiguous() if self._takes_panels(weight, _PANEL) else super().pack(weight)

    def pack_gated(self, weight: Tensor) -> Tensor:
        """See `Kernels.pack_gated`. A panel of gates, then one of what they open, and so on."""
        if not self._takes_panels(weight, 2 * _PANEL):
            return super().pack_gated(weight)
        return torch.stack(_panels(weight).chunk(2), dim=1).contiguous()

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """See `Kernels.unpack`."""
        if not _is_packed(packed):
            return super().unpack(packed, start, stop)
        rows, index = _rows_of_panels(packed, start, stop)
        return rows[index].flatten(1)

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """See `Kernels.repack_`. Nothing is copied on the way."""
        if _is_packed(packed):
            to, index = _rows_of_panels(packed, start, start + len(rows))
            to[index] = rows.reshape(len(rows), *to.shape[-2:])
        else:
            super().repack_(packed, start, rows)

    def _takes_panels(self, weight: Tensor, outputs_step: int) -> bool:
        is_known = weight.device.type == "cpu" and dtype_name(weight.dtype) in self._gemm_dtypes
        return is_known and weight.shape[1] % _STEP == 0 and weight.shape[0] % outputs_step == 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        if are_gated_panels(weight):
            return self._linear_of_gated_panels(x, weight, bias)
        if not are_panels(weight):
            return super().linear(x, weight, bias)
        num_outputs = weight.shape[0] * _PANEL
        output = torch.empty((x.shape[0], num_outputs), dtype=x.dtype) if room is None else room
        return self._gemm(x, weight, bias, num_outputs, output, is_gated=False)

    def _linear_of_gated_panels(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Panels of gates and of what they open take turns, so the columns of the GEMM do: [T, pairs, 2, 16]."""
        num_pairs = len(weight)
        if bias is not None:
            bias = bias.view(2, num_pairs, _PANEL).transpose(0, 1).flatten()
        columns = self.linear(x, weight.flatten(0, 1), bias).view(len(x), num_pairs, 2, _PANEL)
        return columns.transpose(1, 2).flatten(1)

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.linear_argmax`. In panels of bfloat16 the product is never written down."""
        if not are_panels(weight) or x.dtype != torch.bfloat16:
            return super().linear_argmax(x, weight, count)
        num_outputs = weight.shape[0] * _PANEL
        assert 0 < count <= num_outputs, (count, num_outputs)
        x = _checked_input(x, weight)
        values, indices = _argmax_scratch(x.shape[0])
        self._functions["gemm_argmax", x.dtype](
            *(x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), num_outputs, count),
            *(values.data_ptr(), indices.data_ptr(), num_threads()),
        )
        return values, indices

    def screen_bytes(self, weight: Tensor) -> int:
        """See `Kernels.screen_bytes`. For panels of bfloat16, where AVX-512 multiplies bytes and no AMX unit does."""
        if not self._has_screens or not are_panels(weight) or weight.dtype != torch.bfloat16:
            return 0
        return screen_bytes(weight.shape[0] * _PANEL, weight.shape[1] * 2)

    def make_screen_(self, screen: Tensor, weight: Tensor) -> None:
        """See `Kernels.make_screen_`."""
        self._check_screen(screen, weight)
        self._functions["make_screen", weight.dtype](
            *(weight.data_ptr(), weight.shape[1] * 2, weight.shape[0] * _PANEL),
            *(screen.data_ptr(), num_threads()),
        )

    def screened_argmax(
        self, x: Tensor, weight: Tensor, count: int, screen: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        """See `Kernels.screened_argmax`."""
        self._check_screen(screen, weight)
        num_outputs, num_inputs = weight.shape[0] * _PANEL, weight.shape[1] * 2
        assert 0 < count <= num_outputs, (count, num_outputs)
        x = _checked_input(x, weight)
        if rows is not None:
            _check(x, rows)
            _check_whole(rows, (num_outputs, num_inputs))
        values, indices = _argmax_scratch(x.shape[0])
        room = torch.empty((x.shape[0], row_bytes(num_inputs)), dtype=torch.int8)
        num_computed = self._functions["screened_argmax", x.dtype](
            *(x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), num_outputs, count),
            *(None if rows is None else rows.data_ptr(), screen.data_ptr()),
            *(values.data_ptr(), indices.data_ptr(), room.data_ptr(), num_threads()),
        )
        return values, indices, num_computed

    def _check_screen(self, screen: Tensor, weight: Tensor) -> None:
        assert screen.dtype == torch.int8, screen.dtype
        assert screen.numel() == self.screen_bytes(weight) > 0, (screen.shape, weight.shape)
        assert screen.is_contiguous(), screen.stride()
        assert weight.is_contiguous(), weight.stride()

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.gated_linear`."""
        if not are_gated_panels(weight):
            return super().gated_linear(x, weight, bias)
        num_outputs = weight.shape[0] * 2 * _PANEL
        output = torch.empty((x.shape[0], num_outputs // 2), dtype=x.dtype)
        return self._gemm(x, weight, bias, num_outputs, output, is_gated=True)

    def _gemm(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int, output: Tensor, *, is_gated: bool
    ) -> Tensor:
        x = _checked_input(x, panels)
        _check(x, output)
        if bias is not None:
            _check(x, bias)
            _check_whole(bias, (num_outputs,))
        _check_whole(output, (x.shape[0], num_outputs // 2 if is_gated else num_outputs))
        self._functions["gemm", x.dtype](
            *(x.data_ptr(), x.stride(0), *x.shape, panels.data_ptr(), num_outputs),
            *(None if bias is None else bias.data_ptr(), output.data_ptr(), is_gated, num_threads()),
        )
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`. Rounded to the input's dtype before the weight is applied, as the reference does."""
        _check(x, weight)
        _check_whole(weight, x.shape[-1:])
        rows = _rows(x)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["rms_norm", x.dtype](*rows.arguments, weight.data_ptr(), eps, output.data_ptr(), num_threads())
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`. The norm takes the place of `x`."""
        _check(x, residual, weight)
        assert x.ndim == 2, x.shape
        assert residual.shape == x.shape, (x.shape, residual.shape)
        _check_whole(weight, x.shape[-1:])
        assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
        self._functions["add_rms_norm", x.dtype](
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(x.shape[0], x.shape[1], weight.data_ptr(), eps, num_threads()),
        )
        return x

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        """See `Kernels.full_norm`."""
        _check(x, weight)
        _check_whole(weight, x.shape[-1:])
        if bias is not None:
            _check(x, bias)
            _check_whole(bias, x.shape[-1:])
        rows = _rows(x)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["full_norm", x.dtype](
            *(*rows.arguments, weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(eps, offset, is_centred, output.data_ptr(), num_threads()),
        )
        return output

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Kernels.rotate`. `cos` and `sin` have the dtype of `x`."""
        _check(x, cos, sin)
        assert x.ndim == 3, x.shape
        assert x.shape[2] % 2 == 0, x.shape
        assert cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2), (cos.shape, sin.shape, x.shape)
        rows, cos, sin = _rows(x), cos.contiguous(), sin.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["rotate", x.dtype](
            *(*rows.arguments, cos.data_ptr(), sin.data_ptr()),
            *(output.data_ptr(), x.shape[1] * x.shape[2], num_threads()),
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
        self._functions["silu_and_mul", gate_up.dtype](
            gate_up.data_ptr(), gate_up.stride(0), num_tokens, size, output.data_ptr(), num_threads()
        )
        return output

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `Kernels.activate`."""
        return self._activate(x, activation, x.shape[1], is_gate=False)

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.activate_and_mul`."""
        assert gate_up.shape[1] % 2 == 0, gate_up.shape
        return self._activate(gate_up, activation, gate_up.shape[1] // 2, is_gate=True)

    def _activate(self, x: Tensor, activation: str, size: int, *, is_gate: bool) -> Tensor:
        _check(x)
        assert x.ndim == 2, x.shape
        x = _with_whole_rows(x)
        output = torch.empty((x.shape[0], size), dtype=x.dtype)
        self._functions["activate", x.dtype](
            *(x.data_ptr(), x.stride(0), x.shape[0], size, is_gate, _ACTIVATIONS.index(activation)),
            *(output.data_ptr(), num_threads()),
        )
        return output

    def bound(self, x: Tensor, cap: float) -> Tensor:
        """See `Kernels.bound`."""
        _check(x)
        assert x.ndim == 2, x.shape
        assert cap > 0, cap
        x = _with_whole_rows(x)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["bound", x.dtype](*(x.data_ptr(), x.stride(0), *x.shape, cap, output.data_ptr(), num_threads()))
        return output

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.largest`."""
        _check(rows)
        assert rows.ndim == 2, rows.shape
        assert rows.shape[1] > 0, rows.shape
        rows = _with_whole_rows(rows)
        num_rows, count = rows.shape
        values, indices = _argmax_scratch(num_rows)
        self._functions["argmax", rows.dtype](
            *(rows.data_ptr(), rows.stride(0), num_rows, count),
            *(values.data_ptr(), indices.data_ptr(), num_threads()),
        )
        return values, indices

    def masses(self, logits: Tensor, largest: Tensor, factors: Tensor) -> Tensor:
        """See `Kernels.masses`."""
        rows = _drawn(logits, largest, factors)
        sums = torch.empty((logits.shape[0], -(-logits.shape[1] // _PIECE)), dtype=torch.int64)
        self._functions["masses", logits.dtype](*rows, sums.data_ptr(), num_threads())
        return sums

    def find_mass(self, logits: Tensor, largest: Tensor, factors: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
        """See `Kernels.find_mass`."""
        rows = _drawn(logits, largest, factors)
        num_rows, count = logits.shape
        for each, shape in ((masses, (num_rows, -(-count // _PIECE))), (targets, (num_rows,))):
            assert each.shape == shape, (each.shape, shape)
            assert each.dtype == torch.int64, each.dtype
            assert each.is_contiguous(), each.stride()
        ids = torch.empty(num_rows, dtype=torch.int64)
        self._functions["find_mass", logits.dtype](*rows, masses.data_ptr(), targets.data_ptr(), ids.data_ptr())
        return ids

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        """See `Kernels.count_above`."""
        rows = _drawn(logits, values)
        counts = torch.empty(logits.shape[0], dtype=torch.int64)
        self._functions["count_above", logits.dtype](*rows, counts.data_ptr(), num_threads())
        return counts

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, places: Tensor, first_id: int) -> None:
        """See `Kernels.forbid_`."""
        _check(logits)
        assert logits.ndim == 2, logits.shape
        assert logits.stride(1) == 1, logits.stride()
        assert rows.shape == places.shape, (rows.shape, places.shape)
        for each, dtype in ((allowed, torch.int32), (rows, torch.int64), (places, torch.int64)):
            assert each.dtype == dtype, (each.dtype, dtype)
            assert each.is_contiguous(), each.stride()
        for each, count in ((rows, logits.shape[0]), (places, allowed.shape[0])):
            assert not len(each) or 0 <= int(each.min()) <= int(each.max()) < count, (each, count)
        self._functions["forbid", logits.dtype](
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], first_id, allowed.data_ptr(), allowed.shape[1]),
            *(rows.data_ptr(), places.data_ptr(), len(rows), num_threads()),
        )

    def cut_(self, logits: Tensor, cuts: Cuts) -> None:
        """See `Kernels.cut_`."""
        rows = _drawn(logits, cuts.largest, cuts.factors)
        others = cuts.tensors()[2:]
        for each, dtype in zip(others, (torch.float32, torch.int64, torch.float64), strict=True):
            assert each.shape == logits.shape[:1], (each.shape, logits.shape)
            assert each.dtype == dtype, (each.dtype, dtype)
            assert each.is_contiguous(), each.stride()
        self._functions["cut", logits.dtype](*rows, *(each.data_ptr() for each in others), num_threads())


def are_panels(weight: Tensor) -> bool:
    """Whether `pack` has put a weight into panels."""
    return weight.ndim == _PANELS_NDIM


def are_gated_panels(weight: Tensor) -> bool:
    """Whether `pack_gated` has."""
    return weight.ndim == _GATED_NDIM


def _is_packed(weight: Tensor) -> bool:
    return are_panels(weight) or are_gated_panels(weight)


def _rows_of_panels(panels: Tensor, start: int, stop: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A view [..., 16, inputs / 2, 2] of panels, and where rows `start` to `stop` are in its leading dimensions."""
    num_rows = panels.shape[:-3].numel() * _PANEL
    assert 0 <= start <= stop <= num_rows, (start, stop, num_rows)
    row = torch.arange(start, stop)
    if are_panels(panels):
        return panels.detach().transpose(-3, -2), (row // _PANEL, row % _PANEL)
    half = num_rows // 2
    return panels.detach().transpose(-3, -2), (row % half // _PANEL, row // half, row % _PANEL)


def _checked_input(x: Tensor, panels: Tensor) -> Tensor:
    """The rows of a product, each in one piece."""
    _check(x, panels)
    assert x.ndim == 2, x.shape
    assert x.shape[1] == panels.shape[-3] * 2, (x.shape, panels.shape)
    return _with_whole_rows(x)


def _drawn(logits: Tensor, *numbers: Tensor) -> tuple[int, ...]:
    """Rows of logits to draw from, and float32 numbers of each row, as the library takes them."""
    _check(logits)
    assert logits.ndim == 2, logits.shape
    assert logits.stride(1) == 1, logits.stride()
    for each in numbers:
        assert each.shape == logits.shape[:1], (each.shape, logits.shape)
        assert each.dtype == torch.float32, each.dtype
        assert each.is_contiguous(), each.stride()
    return (logits.data_ptr(), logits.stride(0), *logits.shape, *(each.data_ptr() for each in numbers))


def _argmax_scratch(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty(num_rows, dtype=torch.float32), torch.empty(num_rows, dtype=torch.int64)


def _panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [outputs / 16, inputs / 2, 16, 2], a view."""
    num_outputs, num_inputs = weight.shape
    return weight.detach().view(num_outputs // _PANEL, _PANEL, num_inputs // 2, 2).transpose(1, 2)


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
        assert tensor.is_cpu, tensor.device
