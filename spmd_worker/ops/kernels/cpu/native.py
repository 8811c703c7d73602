"""Compiled kernels on the CPU: GEMMs of packed weights, norms, activations, sampling.

Each output row depends on its input row alone, bit for bit. Float32 and bfloat16.

T: tokens; H: hidden size; D: head size; I: intermediate size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import (
    ACTIVATION,
    COLUMN_PARALLEL,
    EXPERTS,
    HEAD,
    NORM,
    ROW_PARALLEL,
    SAMPLING,
    Region,
)
from spmd_worker.model_config.int8_format import PANEL
from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.native.threads import num_threads
from spmd_worker.native.version import native_version
from spmd_worker.ops.kernels.adapters import AdapterKernels
from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights, JoinedExperts, Kernels, LogitFilters
from spmd_worker.ops.kernels.cpu.adapters import NativeAdapterKernels
from spmd_worker.ops.kernels.cpu.argmax_bytes import argmax_bytes
from spmd_worker.ops.kernels.cpu.argmax_prefilter import ArgmaxPrefilter
from spmd_worker.ops.kernels.cpu.experts import join_experts
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.panels import (
    ACTIVATIONS,
    NATIVE_DTYPES,
    are_gated_panels,
    are_panels,
    are_stored_panels,
    argmax_results,
    check_dtype,
    check_tensor,
    checked_input,
    contiguous_rows,
    dtype_name,
    fits_panels,
    in_row_order,
    interleaved,
    leaf_integers,
    panel_shape,
    panels_of,
    rows_of_panels,
    write_rows,
)
from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.cpu.stored_panels import NativePanels, checked_stored_input
from spmd_worker.ops.kernels.recurrent import RecurrentKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

_PIECE = 1024  # token ids of one of `prob_sums`, as in sampling.cpp
_FUNCTIONS = (
    *("rms_norm", "add_rms_norm", "add", "full_norm", "rotate", "rotate_once", "silu_and_mul", "activate", "bound"),
    *("gemm", "gemm_leaves", "gemm_heads"),
    *("argmax", "prob_sums", "invert_cdf", "count_above", "forbid"),
)
"""Functions that the library has for every dtype."""
_HEADS_NDIM = 5  # of the weights of heads in panels


def cpu_kernels(dtype: torch.dtype, *, has_argmax_prefilter: bool = False) -> tuple[Kernels, str | None]:
    """The fastest kernels of this CPU, and the reason if these are not the compiled ones."""
    if dtype not in NATIVE_DTYPES:
        return PackedKernels(), f"the compiled kernels compute in float32 and bfloat16, not in {dtype_name(dtype)}"
    library = native_library()
    if isinstance(library, str):
        return PackedKernels(), library
    return CpuKernels(library, has_argmax_prefilter=has_argmax_prefilter), None


class CpuKernels(PackedKernels):
    """Implements `kernels.api.Kernels` for tensors of float32 and bfloat16 in host memory."""

    def __init__(self, library: NativeLibrary, *, has_argmax_prefilter: bool = False) -> None:
        """`has_argmax_prefilter`: the argmax of a head is found by an int8 pre-filter where that is faster."""
        self._library, self._gemm_dtypes = library, library.gemm_dtypes
        self._functions = {
            (name, dtype): library.functions[f"{name}_{dtype_name(dtype)}"]
            for name in _FUNCTIONS
            for dtype in NATIVE_DTYPES
        }
        self._stored = {name: library.functions[f"stored_{name}_bfloat16"] for name in ("gemm", "gemm_leaves")}
        self._gemm_argmax, self._filter = library.functions["gemm_argmax_bfloat16"], library.functions["filter_float32"]
        self._prefilter = None
        if has_argmax_prefilter and library.functions["has_argmax_prefilter"]():
            self._prefilter = (
                library.functions["fill_prefilter_bfloat16"],
                library.functions["filtered_argmax_bfloat16"],
            )

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        # oneDNN is not asked where it multiplies nothing: a host program's own products would lose AMX.
        regions = ReferenceKernels.numerics(self, dtype) if self.has_gemm(dtype) else super().numerics(dtype)
        native = Region(f"native {self._library.instruction_set}", native_version())
        if self.has_gemm(dtype):
            of_products = native.with_constants(amx=self._library.has_amx)
            regions |= dict.fromkeys((COLUMN_PARALLEL, ROW_PARALLEL, HEAD, EXPERTS), of_products)
        sampling = native.with_constants(**regions[SAMPLING].constants)
        return regions | {NORM: native, ACTIVATION: native, SAMPLING: sampling}

    def has_gemm(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are packed for the compiled GEMMs."""
        return dtype_name(dtype) in self._gemm_dtypes

    def pack(self, weight: Tensor) -> Tensor:
        """Packs into panels if the compiled GEMMs take them, otherwise as `PackedKernels`."""
        return panels_of(weight).contiguous() if self._packs(weight, is_gated=False) else super().pack(weight)

    def pack_gated(self, weight: Tensor) -> Tensor:
        """Interleaves panels of gate and up projection, 16 outputs each."""
        if not self._packs(weight, is_gated=True):
            return super().pack_gated(weight)
        return torch.stack(panels_of(weight).chunk(2), dim=1).contiguous()

    def empty_packed(self, weight: Tensor, *, is_gated: bool) -> Tensor | None:
        if not self._packs(weight, is_gated=is_gated):
            return super().empty_packed(weight, is_gated=is_gated)
        num_panels, *panel = panels_of(weight).shape
        shape = (num_panels // 2, 2, *panel) if is_gated else (num_panels, *panel)
        return torch.zeros(shape, dtype=weight.dtype)

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        if not (are_panels(packed) or are_gated_panels(packed)):
            return super().unpack(packed, start, stop)
        rows, index = rows_of_panels(packed, start, stop)
        return rows[index].flatten(1)

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """Makes no copy of complete panels."""
        if are_panels(packed) or are_gated_panels(packed):
            write_rows(packed, start, rows)
        else:
            super().repack_(packed, start, rows)

    def _packs(self, weight: Tensor, *, is_gated: bool) -> bool:
        is_supported = weight.device.type == "cpu" and dtype_name(weight.dtype) in self._gemm_dtypes
        return is_supported and fits_panels(weight, is_gated=is_gated)

    def stored_panels(self, dtype: torch.dtype) -> NativePanels | None:
        takes = dtype == torch.bfloat16 and self.has_gemm(dtype)
        return NativePanels(bool(self._library.functions["stored_are_rows"]())) if takes else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        is_stored = are_stored_panels(weight)
        if are_gated_panels(weight) or (is_stored and weight.shape[1] > 1):
            # Gate and up panels are interleaved, and so are the columns of the GEMM.
            panels = weight.view(-1, 1, weight.shape[2]) if is_stored else weight.flatten(0, 1)
            return in_row_order(self.linear(x, panels, interleaved(bias)))
        if not (is_stored or are_panels(weight)):
            return super().linear(x, weight, bias)
        num_outputs = weight.shape[0] * PANEL
        output = torch.empty((x.shape[0], num_outputs), dtype=x.dtype) if out is None else out
        return self._gemm(x, weight, bias, num_outputs, output, is_gated=False)

    def pack_leaves(self, weight: Tensor) -> Tensor:
        """Panels if the compiled GEMMs take them, otherwise the plain weight."""
        return panels_of(weight).contiguous() if self._packs(weight, is_gated=False) else weight

    def linear_of_leaves(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Sequence[int],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        is_stored = are_stored_panels(weight)
        if not (is_stored or are_panels(weight)):
            return super().linear_of_leaves(x, weight, bias, ends, dtype, out)
        num_outputs = weight.shape[0] * PANEL
        x = checked_stored_input(x, weight, num_outputs) if is_stored else checked_input(x, weight)
        assert ends[-1] == x.shape[1], (ends, x.shape)
        assert dtype in (x.dtype, torch.float32), dtype
        if bias is not None:
            check_tensor(bias, x.dtype, (num_outputs,))
        output = torch.empty((x.shape[0], num_outputs), dtype=dtype) if out is None else out
        check_tensor(output, dtype, (x.shape[0], num_outputs))
        gemm_leaves = self._stored["gemm_leaves"] if is_stored else self._functions["gemm_leaves", x.dtype]
        gemm_leaves(
            *(x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), num_outputs),
            *(None if bias is None else bias.data_ptr(), output.data_ptr(), leaf_integers(tuple(ends)), len(ends)),
            *(dtype == torch.float32, num_threads()),
        )
        return output

    def pack_heads(self, weight: Tensor) -> Tensor:
        """[heads, outputs / 16, inputs / 2, 16, 2] if the compiled GEMMs take it."""
        rows = weight.detach().flatten(0, 1)
        fits = self._packs(weight[0], is_gated=False)
        if not fits:
            return super().pack_heads(weight)
        panels = panels_of(rows)
        return panels.view(len(weight), -1, *panels.shape[1:]).contiguous()

    def unpack_heads(self, packed: Tensor) -> Tensor:
        if not _are_heads(packed):
            return super().unpack_heads(packed)
        return packed.detach().transpose(2, 3).flatten(3).flatten(1, 2)

    def linear_of_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if not _are_heads(weight):
            return super().linear_of_heads(x, weight, out)
        num_tokens, num_heads, num_inputs = x.shape
        num_outputs = weight.shape[1] * PANEL
        check_dtype(x, weight, out)
        assert weight.shape == (num_heads, num_outputs // PANEL, num_inputs // 2, PANEL, 2), (weight.shape, x.shape)
        assert weight[0].is_contiguous(), weight.stride()
        assert out.shape == (num_tokens, num_heads, num_outputs), (out.shape, x.shape)
        assert x.stride(2) == out.stride(2) == 1, (x.stride(), out.stride())
        self._functions["gemm_heads", x.dtype](
            *(x.data_ptr(), x.stride(0), x.stride(1), num_tokens, num_inputs),
            *(weight.data_ptr(), weight.stride(0), num_heads, num_outputs),
            *(out.data_ptr(), out.stride(0), out.stride(1), num_threads()),
        )
        return None

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Panels of bfloat16: the logits are never stored."""
        if not are_panels(weight) or x.dtype != torch.bfloat16:
            return super().linear_argmax(x, weight, count)
        num_outputs = weight.shape[0] * PANEL
        assert 0 < count <= num_outputs, (count, num_outputs)
        x = checked_input(x, weight)
        values, indices = argmax_results(x.shape[0])
        self._gemm_argmax(
            *(x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), num_outputs, count),
            *(values.data_ptr(), indices.data_ptr(), num_threads()),
        )
        return values, indices

    def argmax_module(self, weight: Tensor) -> ArgmaxPrefilter | None:
        """An int8 pre-filter for panels of bfloat16, if AVX-512 multiplies bytes and there is no AMX."""
        if self._prefilter is None or not are_panels(weight):
            return None
        num_bytes = argmax_bytes(*panel_shape(weight), dtype_name(weight.dtype), weight.device.type)
        return ArgmaxPrefilter(self, *self._prefilter, num_bytes) if num_bytes else None

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (are_gated_panels(weight) or (are_stored_panels(weight) and weight.shape[1] > 1)):
            return super().gated_linear(x, weight, bias)
        num_outputs = weight.shape[0] * 2 * PANEL
        output = torch.empty((x.shape[0], num_outputs // 2), dtype=x.dtype)
        return self._gemm(x, weight, bias, num_outputs, output, is_gated=True)

    def _gemm(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int, output: Tensor, *, is_gated: bool
    ) -> Tensor:
        is_stored = are_stored_panels(panels)
        x = checked_stored_input(x, panels, num_outputs) if is_stored else checked_input(x, panels)
        if bias is not None:
            check_tensor(bias, x.dtype, (num_outputs,))
        check_tensor(output, x.dtype, (x.shape[0], num_outputs // 2 if is_gated else num_outputs))
        gemm = self._stored["gemm"] if is_stored else self._functions["gemm", x.dtype]
        gemm(
            *(x.data_ptr(), x.stride(0), *x.shape, panels.data_ptr(), num_outputs),
            *(None if bias is None else bias.data_ptr(), output.data_ptr(), is_gated, num_threads()),
        )
        return output

    def join_experts(self, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes) -> JoinedExperts | None:
        return join_experts(self._library, experts, sizes)

    def adapter_kernels(self) -> AdapterKernels:
        return NativeAdapterKernels(self._library)

    def recurrent_kernels(self) -> RecurrentKernels:
        return NativeRecurrentKernels(self._library)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Rounds to the input's dtype before the weight is applied, as the reference does."""
        check_dtype(x)
        check_tensor(weight, x.dtype, x.shape[-1:])
        output = torch.empty(x.shape, dtype=x.dtype)
        x, arguments = _rows(x)
        self._functions["rms_norm", x.dtype](*arguments, weight.data_ptr(), eps, output.data_ptr(), num_threads())
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Overwrites `x` with the norm."""
        check_dtype(x, residual)
        assert x.ndim == 2, x.shape
        assert residual.shape == x.shape, (x.shape, residual.shape)
        check_tensor(weight, x.dtype, x.shape[-1:])
        assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
        self._functions["add_rms_norm", x.dtype](
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0)),
            *(x.shape[0], x.shape[1], weight.data_ptr(), eps, num_threads()),
        )
        return x

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """Subnormal sums may be zero in bfloat16, as with `add_rms_norm`."""
        check_dtype(x, y)
        assert x.ndim == 2, x.shape
        assert y.shape == x.shape, (x.shape, y.shape)
        assert x.stride(1) == y.stride(1) == 1, (x.stride(), y.stride())
        self._functions["add", x.dtype](x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), *x.shape, num_threads())
        return x

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        check_dtype(x)
        for each in (weight,) if bias is None else (weight, bias):
            check_tensor(each, x.dtype, x.shape[-1:])
        output = torch.empty(x.shape, dtype=x.dtype)
        x, arguments = _rows(x)
        self._functions["full_norm", x.dtype](
            *(*arguments, weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(eps, offset, is_centred, output.data_ptr(), num_threads()),
        )
        return output

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cos` and `sin` have the dtype of `x`."""
        check_dtype(x, cos, sin)
        assert x.ndim == 3, x.shape
        assert x.shape[2] % 2 == 0, x.shape
        assert cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2), (cos.shape, sin.shape, x.shape)
        output = torch.empty(x.shape, dtype=x.dtype)
        (x, arguments), cos, sin = _rows(x), cos.contiguous(), sin.contiguous()
        self._functions["rotate", x.dtype](
            *(*arguments, cos.data_ptr(), sin.data_ptr()),
            *(output.data_ptr(), x.shape[1] * x.shape[2], num_threads()),
        )
        return output

    def rotate_once(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        check_dtype(x)
        assert x.ndim == 3, x.shape
        assert x.shape[2] % 2 == 0, x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        (x, arguments), cos, sin = _rows(x), cos.contiguous(), sin.contiguous()
        for each in (cos, sin):
            check_tensor(each, torch.float32, (x.shape[0], x.shape[2] // 2))
        self._functions["rotate_once", x.dtype](
            *(*arguments, cos.data_ptr(), sin.data_ptr(), output.data_ptr(), num_threads())
        )
        return output

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        check_dtype(gate_up)
        assert gate_up.ndim == 2, gate_up.shape
        assert gate_up.shape[1] % 2 == 0, gate_up.shape
        gate_up = contiguous_rows(gate_up)
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((num_tokens, size), dtype=gate_up.dtype)
        self._functions["silu_and_mul", gate_up.dtype](
            gate_up.data_ptr(), gate_up.stride(0), num_tokens, size, output.data_ptr(), num_threads()
        )
        return output

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return self._activate(x, activation, x.shape[1], is_gate=False)

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        assert gate_up.shape[1] % 2 == 0, gate_up.shape
        return self._activate(gate_up, activation, gate_up.shape[1] // 2, is_gate=True)

    def _activate(self, x: Tensor, activation: str, size: int, *, is_gate: bool) -> Tensor:
        check_dtype(x)
        assert x.ndim == 2, x.shape
        x = contiguous_rows(x)
        output = torch.empty((x.shape[0], size), dtype=x.dtype)
        self._functions["activate", x.dtype](
            *(x.data_ptr(), x.stride(0), x.shape[0], size, is_gate, ACTIVATIONS.index(activation)),
            *(output.data_ptr(), num_threads()),
        )
        return output

    def bound(self, x: Tensor, cap: float) -> Tensor:
        check_dtype(x)
        assert x.ndim == 2, x.shape
        assert cap > 0, cap
        x = contiguous_rows(x)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["bound", x.dtype](*(x.data_ptr(), x.stride(0), *x.shape, cap, output.data_ptr(), num_threads()))
        return output

    def argmax(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        check_dtype(rows)
        assert rows.ndim == 2, rows.shape
        assert rows.shape[1] > 0, rows.shape
        rows = contiguous_rows(rows)
        num_rows, count = rows.shape
        values, indices = argmax_results(num_rows)
        self._functions["argmax", rows.dtype](
            *(rows.data_ptr(), rows.stride(0), num_rows, count),
            *(values.data_ptr(), indices.data_ptr(), num_threads()),
        )
        return values, indices

    def prob_sums(self, logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
        rows = _logit_arguments(logits, maxima, factors)
        sums = torch.empty((logits.shape[0], -(-logits.shape[1] // _PIECE)), dtype=torch.int64)
        self._functions["prob_sums", logits.dtype](*rows, sums.data_ptr(), num_threads())
        return sums

    def invert_cdf(self, logits: Tensor, maxima: Tensor, factors: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
        rows = _logit_arguments(logits, maxima, factors)
        num_rows, count = logits.shape
        check_tensor(sums, torch.int64, (num_rows, -(-count // _PIECE)))
        check_tensor(targets, torch.int64, (num_rows,))
        ids = torch.empty(num_rows, dtype=torch.int64)
        self._functions["invert_cdf", logits.dtype](*rows, sums.data_ptr(), targets.data_ptr(), ids.data_ptr())
        return ids

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        rows = _logit_arguments(logits, values)
        counts = torch.empty(logits.shape[0], dtype=torch.int64)
        self._functions["count_above", logits.dtype](*rows, counts.data_ptr(), num_threads())
        return counts

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, mask_rows: Tensor, first_id: int) -> None:
        check_dtype(logits)
        assert logits.ndim == 2, logits.shape
        assert logits.stride(1) == 1, logits.stride()
        assert rows.shape == mask_rows.shape, (rows.shape, mask_rows.shape)
        for each, dtype in ((allowed, torch.int32), (rows, torch.int64), (mask_rows, torch.int64)):
            check_tensor(each, dtype, each.shape)
        for each, count in ((rows, logits.shape[0]), (mask_rows, allowed.shape[0])):
            assert not len(each) or 0 <= int(each.min()) <= int(each.max()) < count, (each, count)
        self._functions["forbid", logits.dtype](
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], first_id, allowed.data_ptr(), allowed.shape[1]),
            *(rows.data_ptr(), mask_rows.data_ptr(), len(rows), num_threads()),
        )

    def filter_(self, logits: Tensor, filters: LogitFilters) -> None:
        assert logits.dtype == torch.float32, logits.dtype
        rows = _logit_arguments(logits, filters.maxima, filters.factors)
        others = filters.tensors()[2:]
        for each, dtype in zip(others, (torch.float32, torch.int64, torch.float64), strict=True):
            check_tensor(each, dtype, logits.shape[:1])
        self._filter(*rows, *(each.data_ptr() for each in others), num_threads())


def _are_heads(weight: Tensor) -> bool:
    """Whether `pack_heads` put weights into panels."""
    return weight.ndim == _HEADS_NDIM


def _logit_arguments(logits: Tensor, *numbers: Tensor) -> tuple[int, ...]:
    """Arguments of the compiled functions for rows of logits and float32 values of each row."""
    check_dtype(logits)
    assert logits.ndim == 2, logits.shape
    assert logits.stride(1) == 1, logits.stride()
    for each in numbers:
        check_tensor(each, torch.float32, logits.shape[:1])
    return (logits.data_ptr(), logits.stride(0), *logits.shape, *(each.data_ptr() for each in numbers))


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor as [tokens, heads, size] with contiguous rows, copied if they are not; and as the library takes it."""
    x = contiguous_rows(x)
    if x.ndim == 3:
        return x, (x.data_ptr(), x.stride(0), x.stride(1), *x.shape)
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return x, (x.data_ptr(), x.stride(0), 0, x.shape[0], 1, x.shape[1])
