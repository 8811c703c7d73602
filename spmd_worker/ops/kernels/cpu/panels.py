"""Panels: weights in the layout of the compiled GEMMs, and checks of the tensors whose addresses these are given.

A packed weight is [outputs / 16, inputs / 2, 16, 2], a gated one [outputs / 32, 2, inputs / 2, 16, 2]. AMX takes 32
inputs at a time.
"""

import ctypes
import functools
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from spmd_worker.model_config.int8_format import PANEL, STEP

NATIVE_DTYPES: Final = (torch.float32, torch.bfloat16)
ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu")  # numbered as in rows.cpp
_BYTES_NDIM, _PANELS_NDIM, _GATED_NDIM = 3, 4, 5
_MAX_LEAVES = 64  # as in gemm.h


def dtype_name(dtype: torch.dtype) -> str:
    """The suffix of compiled functions for a dtype."""
    return str(dtype).removeprefix("torch.")


def fits_panels(weight: Tensor, *, is_gated: bool) -> bool:
    """Whether a weight [outputs, inputs] has the sizes of panels, in pairs of them if it `is_gated`."""
    return weight.shape[1] % STEP == 0 and weight.shape[0] % (PANEL * (1 + is_gated)) == 0


def are_panels(weight: Tensor) -> bool:
    """Whether `Kernels.pack` put a weight into panels."""
    return weight.ndim == _PANELS_NDIM


def are_gated_panels(weight: Tensor) -> bool:
    """Whether `Kernels.pack_gated` put a weight into panels."""
    return weight.ndim == _GATED_NDIM


def are_byte_panels(weight: Tensor) -> bool:
    """Whether a packed weight is int8 in panels."""
    return weight.dtype == torch.int8 and weight.ndim == _BYTES_NDIM


def are_stored_panels(weight: Tensor) -> bool:
    """Whether a weight is as its file stores it, in panels (`stored_panels.py`)."""
    return weight.dtype == torch.uint8 and weight.ndim == _BYTES_NDIM


def byte_panel_indices(packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of rows `start` to `stop` of panels of bytes: panel or pair of panels, panel of the pair, row of the
    panel.
    """
    each = len(packed) * PANEL
    assert 0 <= start <= stop <= each * packed.shape[1], (start, stop, packed.shape)
    row = torch.arange(start, stop)
    return row % each // PANEL, row // each, row % PANEL


def panels_of(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [outputs / 16, inputs / 2, 16, 2], a view."""
    num_outputs, num_inputs = weight.shape
    return weight.detach().view(num_outputs // PANEL, PANEL, num_inputs // 2, 2).transpose(1, 2)


def rows_of_panels(panels: Tensor, start: int, stop: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A view [..., 16, inputs / 2, 2] of panels, and the indices there of rows `start` to `stop`."""
    num_rows = panels.shape[:-3].numel() * PANEL
    assert 0 <= start <= stop <= num_rows, (start, stop, num_rows)
    row = torch.arange(start, stop)
    if are_panels(panels):
        return panels.detach().transpose(-3, -2), (row // PANEL, row % PANEL)
    half = num_rows // 2
    return panels.detach().transpose(-3, -2), (row % half // PANEL, row // half, row % PANEL)


def write_rows(panels: Tensor, start: int, rows: Tensor) -> None:
    """Overwrite rows from `start` on by `rows` [n, inputs]: complete panels without a temporary copy."""
    panels, is_gated = panels.detach(), are_gated_panels(panels)
    num_rows, written = panels.shape[:-3].numel() * PANEL, 0
    num_each = num_rows // (1 + is_gated)
    while written < len(rows):
        part, row = divmod(start + written, num_each)
        count = min(len(rows) - written, num_each - row)
        if row % PANEL == 0 and count >= PANEL:
            count -= count % PANEL
            to = panels[row // PANEL : (row + count) // PANEL]
            (to[:, part] if is_gated else to).copy_(panels_of(rows[written : written + count]))
        else:
            count = min(count, PANEL - row % PANEL)
            found, index = rows_of_panels(panels, start + written, start + written + count)
            found[index] = rows[written : written + count].reshape(count, *found.shape[-2:])
        written += count


def panel_shape(panels: Tensor) -> tuple[int, int]:
    """Outputs and inputs of panels that are not gated."""
    return panels.shape[0] * PANEL, panels.shape[1] * 2


def interleaved(bias: Tensor | None) -> Tensor | None:
    """A gated bias [outputs] in the order of gated panels: 16 gates, 16 of the up projection, and so on."""
    return None if bias is None else bias.view(2, -1, PANEL).transpose(0, 1).flatten()


def in_row_order(columns: Tensor) -> Tensor:
    """[T, outputs] in the order of gated panels -> gates, then the up projection."""
    return columns.view(len(columns), columns.shape[1] // (2 * PANEL), 2, PANEL).transpose(1, 2).flatten(1)


def checked_input(x: Tensor, panels: Tensor) -> Tensor:
    """The input rows of a GEMM, each contiguous."""
    check_dtype(x, panels)
    assert x.ndim == 2, x.shape
    assert x.shape[1] == panels.shape[-3] * 2, (x.shape, panels.shape)
    return contiguous_rows(x)


@functools.cache
def leaf_integers(ends: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Ends of leaves, for the compiled GEMMs: a power of two of them, at multiples of 32. A model has few."""
    assert len(ends).bit_count() == 1, ends
    assert len(ends) <= _MAX_LEAVES, ends
    assert all(start < end and end % STEP == 0 for start, end in pairwise((0, *ends))), ends
    return (ctypes.c_int64 * len(ends))(*ends)


def argmax_results(num_rows: int) -> tuple[Tensor, Tensor]:
    """Uninitialised values, float32 [R], and indices, int64 [R]."""
    return torch.empty(num_rows, dtype=torch.float32), torch.empty(num_rows, dtype=torch.int64)


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_tensor(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise AssertionError unless the tensor has this dtype and shape, and is contiguous in host memory."""
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_cpu, tensor.device
    assert tensor.is_contiguous(), tensor.stride()


def check_dtype(*tensors: Tensor) -> None:
    """Raise AssertionError unless the tensors are in host memory and have one dtype that the library computes in."""
    dtype = tensors[0].dtype
    assert dtype in NATIVE_DTYPES, dtype
    for tensor in tensors:
        assert tensor.dtype == dtype, (tensor.dtype, dtype)
        assert tensor.is_cpu, tensor.device
