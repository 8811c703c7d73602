"""The experts of a sparse layer in one call of the compiled library, with the results of `Expert`, one by one.

The structures are those of `experts.cpp`, field by field.

T: tokens of the step; C: experts of a token; E: experts of the layer; H: hidden size; I: intermediate size on it.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from spmd_worker.model_config.int8_format import PANEL, panel_bytes
from spmd_worker.native.library import NativeLibrary
from spmd_worker.native.threads import num_threads
from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights
from spmd_worker.ops.kernels.cpu.panels import (
    ACTIVATIONS,
    are_byte_panels,
    are_gated_panels,
    are_panels,
    are_stored_panels,
    check_tensor,
    contiguous_rows,
    dtype_name,
    in_row_order,
    leaf_integers,
)
from spmd_worker.ops.kernels.cpu.stored_panels import stored_panels_fit

_IN_PANELS, _FIRST_HALF, _UNGATED, _ALTERNATING = range(4)
"""Ways to apply gates, numbered as in `experts.cpp`."""
_ELEMENTS, _BYTES, _STORED = range(3)
"""Kinds of weights, numbered as in `experts.cpp`."""
_ALL, _COLUMNS, _DOWN = range(3)
"""Parts that a call computes, numbered as in `experts.cpp`."""


class _Expert(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gates", "gates_bias", "down", "down_bias")]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("experts", ctypes.POINTER(_Expert)),
        ("numbers", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_experts", "hidden_size", "intermediate_size", "gating", "activation"),
                *("leaf_ends", "num_leaves", "is_part", "kind"),
            )
        ),
        ("limit", ctypes.c_float),
    ]


class _Tokens(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "num_tokens", "num_chosen")),
        ("ids", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
    ]


class NativeExperts:
    """Implements `kernels.api.JoinedExperts`. The weights keep their addresses. Made by `join_experts`."""

    def __init__(self, library: NativeLibrary, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes) -> None:
        # Keeps the memory whose addresses it has: a parameter may be given other memory.
        self._memory, self._sizes = [_detached(each.tensors()) for each in experts.values()], sizes
        name = dtype_name(sizes.dtype)
        self._outputs, self._sum = library.functions[f"experts_{name}"], library.functions[f"weighted_sum_{name}"]
        addresses = [
            _Expert(*(None if each is None else each.data_ptr() for each in tensors)) for tensors in self._memory
        ]
        self.takes_activation = _gating(sizes) != _IN_PANELS or next(iter(experts.values())).gates_bias is None
        numbers = [-1] * sizes.num_experts
        for number, index in enumerate(experts):
            numbers[index] = number
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._leaf_ends = leaf_integers(sizes.leaf_ends) if sizes.leaf_ends else None
        self._layer = _Layer(
            *((_Expert * len(addresses))(*addresses), ctypes.addressof(self._numbers)),
            *(sizes.num_experts, sizes.hidden_size, sizes.intermediate_size, _gating(sizes)),
            0 if sizes.limit > 0 else ACTIVATIONS.index(sizes.activation),
            *(0 if self._leaf_ends is None else ctypes.addressof(self._leaf_ends), len(sizes.leaf_ends)),
            *(sizes.part_dtype == torch.float32, _kind(experts), sizes.limit),
        )

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        totals: Tensor,
        slots: Tensor | None = None,
        activated: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        del slots  # steps of CPUs are not padded
        of_tokens = (len(ids), self._sizes.hidden_size)
        if activated is None:
            return self._computed(_ALL, x, ids, totals, of_tokens)
        columns = self._computed(_COLUMNS, x, ids, totals, of_tokens)
        # Gate and up panels are interleaved.
        gated = activated(in_row_order(columns) if self._layer.gating == _IN_PANELS else columns)
        return self._computed(_DOWN, gated, ids, None, (ids.numel(), self._sizes.intermediate_size))

    def _computed(self, phase: int, x: Tensor, ids: Tensor, totals: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """A call of `spmd_experts`; x has this `shape`."""
        sizes, (num_tokens, num_chosen) = self._sizes, ids.shape
        x = contiguous_rows(x)
        assert x.shape == shape, (x.shape, ids.shape, sizes)
        assert x.dtype == sizes.dtype, (x.dtype, sizes.dtype)
        ids = ids.contiguous()
        check_tensor(ids, torch.int64, (num_tokens, num_chosen))
        if totals is not None:
            check_tensor(totals, torch.int64, (sizes.num_experts,))
        width, dtype = sizes.hidden_size, sizes.part_dtype
        if phase == _COLUMNS:
            width, dtype = (1 + sizes.is_gated) * sizes.intermediate_size, sizes.dtype
        results = torch.empty((num_tokens * num_chosen, width), dtype=dtype)
        counts = None if totals is None else totals.data_ptr()
        tokens = _Tokens(x.data_ptr(), x.stride(0), num_tokens, num_chosen, ids.data_ptr(), counts)
        self._outputs(ctypes.byref(self._layer), ctypes.byref(tokens), results.data_ptr(), phase, num_threads())
        return results

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        (num_tokens, num_chosen), size = weights.shape, results.shape[1]
        results, weights = results.contiguous(), weights.contiguous()
        check_tensor(results, self._sizes.dtype, (num_tokens * num_chosen, size))
        check_tensor(weights, torch.float32, (num_tokens, num_chosen))
        output = torch.empty((num_tokens, size), dtype=results.dtype)
        sizes = (num_tokens, num_chosen, size)
        self._sum(results.data_ptr(), weights.data_ptr(), *sizes, output.data_ptr(), num_threads())
        return output


def join_experts(
    library: NativeLibrary, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes
) -> NativeExperts | None:
    """None if the call does not compute such gates, or a weight is not in panels."""
    if not experts or sizes.bound or not (sizes.limit > 0 or sizes.activation in ACTIVATIONS):
        return None
    is_gated = _gating(sizes) == _IN_PANELS
    if _kind(experts) == _ELEMENTS:
        are_gates = are_gated_panels if is_gated else are_panels
        are_packed = all(are_gates(each.gates) and are_panels(each.down) for each in experts.values())
    else:
        are_right = are_byte_panels if _kind(experts) == _BYTES else are_stored_panels
        are_packed = all(are_right(each.gates) and are_right(each.down) for each in experts.values())
    if not are_packed:
        return None
    for each in experts.values():
        _check_shapes(each, sizes)
    return NativeExperts(library, experts, sizes)


def _kind(experts: Mapping[int, ExpertWeights]) -> int:
    """The kind of all weights, as those of the first expert."""
    return {torch.int8: _BYTES, torch.uint8: _STORED}.get(next(iter(experts.values())).down.dtype, _ELEMENTS)


def _detached(tensors: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else each.detach() for each in tensors)


def _gating(sizes: ExpertSizes) -> int:
    """Numbered as in `experts.cpp`."""
    if sizes.limit > 0:
        return _ALTERNATING
    if not sizes.is_gated:
        return _UNGATED
    return _IN_PANELS if sizes.activation == "silu" else _FIRST_HALF


def _check_shapes(expert: ExpertWeights, sizes: ExpertSizes) -> None:
    """Raise AssertionError for weights that the compiled code would read out of bounds."""
    hidden, size, num_each = sizes.hidden_size, sizes.intermediate_size, 1 + sizes.is_gated
    has_bytes, is_stored = are_byte_panels(expert.down), are_stored_panels(expert.down)

    def count(num_outputs: int, num_inputs: int) -> int:
        return num_outputs // PANEL * panel_bytes(num_inputs) if has_bytes else num_outputs * num_inputs

    for weight in (expert.gates, expert.down):
        dtype = torch.int8 if has_bytes else torch.uint8 if is_stored else sizes.dtype
        check_tensor(weight, dtype, tuple(weight.shape))
    if is_stored:
        assert sizes.dtype == torch.bfloat16, sizes.dtype
        assert stored_panels_fit(expert.gates, num_each * size, hidden), (expert.gates.shape, sizes)
        assert stored_panels_fit(expert.down, hidden, size), (expert.down.shape, sizes)
    else:
        counts = (expert.gates.numel(), expert.down.numel())
        assert counts == (count(num_each * size, hidden), count(hidden, size)), (counts, sizes)
    if has_bytes or is_stored:
        num_parts = 2 if _gating(sizes) == _IN_PANELS else 1
        assert (expert.gates.shape[1], expert.down.shape[1]) == (num_parts, 1), (expert.gates.shape, expert.down.shape)
    assert not (has_bytes and sizes.leaf_ends), sizes
    for bias, num_outputs in ((expert.gates_bias, num_each * size), (expert.down_bias, hidden)):
        if bias is not None:
            check_tensor(bias, sizes.dtype, (num_outputs,))
    assert not sizes.leaf_ends or sizes.leaf_ends[-1] == size, (sizes.leaf_ends, size)
