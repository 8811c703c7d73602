"""Compiled kernels of low-rank adapters on the CPU: one call adds all adapters of a step to one layer's outputs.

The structures and the packing of matrices are those of `native/adapters.h`.

T: tokens of the step; r: rank of an adapter.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.model_config.int8_format import PANEL
from spmd_worker.native.library import NativeLibrary
from spmd_worker.native.threads import num_threads
from spmd_worker.native.version import native_version
from spmd_worker.ops.kernels.adapters import RANK_STEP, AdapterSizes, Matrices, StepAdapters, rows_of_each
from spmd_worker.ops.kernels.cpu.panels import check_dtype, contiguous_rows, dtype_name

_MAX_RANK, _MAX_PARTS, _MAX_LEAVES = 512, 6, 64  # as in native/adapters.h
_BLOCK_ROWS: Final = 8
"""Rows of one item of work, at most."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrices", "parts", "leaf_ends")),
        *((name, ctypes.c_int64) for name in ("num_parts", "num_inputs", "num_leaves")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("blocks", ctypes.c_void_p), ("num_blocks", ctypes.c_int64)]


@dataclass(frozen=True, slots=True, eq=False)
class NativeRows:
    """Rows of a step that have adapters, by slot: `rows` int64 [n] and `blocks` int64 [b, 3], slot, first and count;
    `structure` points to them.
    """

    rows: np.ndarray
    blocks: np.ndarray
    structure: _Rows

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structure)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """Packed matrices of one layer, and their entry of the stack's table: addresses of A and B, and rank of each part,
    int64 [parts, 3].
    """

    tensors: tuple[Tensor, ...]
    entry: np.ndarray


class NativeStack:
    """Implements `AdapterStack` for float32 and bfloat16 in host memory. An adapter takes memory for its own rank."""

    def __init__(self, library: NativeLibrary, sizes: AdapterSizes) -> None:
        ends, num_parts, num_inputs = sizes.leaf_ends or (sizes.num_inputs,), len(sizes.parts), sizes.num_inputs
        assert num_parts <= _MAX_PARTS, sizes
        assert len(ends) == 1 or (num_parts == 1 and len(ends) <= _MAX_LEAVES and len(ends).bit_count() == 1), sizes
        assert ends[-1] == num_inputs, sizes
        self._sizes, self._functions, self._name = sizes, library.functions, dtype_name(sizes.dtype)
        self._table = np.zeros((sizes.num_slots, num_parts, 3), dtype=np.int64)
        self._bounds, self._ends = np.array(sizes.parts, dtype=np.int64), np.array(ends, dtype=np.int64)
        self._packed: dict[int, PackedAdapter] = {}
        arrays = (self._table, self._bounds, self._ends)
        self.structure = _Layer(*(each.ctypes.data for each in arrays), num_parts, num_inputs, len(ends))

    @property
    def is_empty(self) -> bool:
        return not self._packed

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(each.nbytes for packed in self._packed.values() for each in packed.tensors)

    @property
    def address(self) -> int:
        """Address of the structure that describes the stack."""
        return ctypes.addressof(self.structure)

    def pack(self, parts: Sequence[Matrices | None]) -> PackedAdapter:
        assert len(parts) == len(self._bounds), (len(parts), self._bounds)
        tensors: list[Tensor] = []
        entry = np.zeros((len(parts), 3), dtype=np.int64)
        for number, (matrices, (start, stop)) in enumerate(zip(parts, self._sizes.parts)):
            if matrices is None:
                continue
            (a, b), rank = matrices, len(matrices[0])
            assert a.shape == (rank, self._sizes.num_inputs), (a.shape, self._sizes)
            assert b.shape == (stop - start, rank), (b.shape, self._sizes)
            assert 0 < rank <= min(self._sizes.max_rank, _MAX_RANK), (rank, self._sizes)
            packed = _packed_inputs(a, self._ends.tolist()), _packed_outputs(b)
            tensors += packed
            entry[number] = *(each.data_ptr() for each in packed), rank
        return PackedAdapter(tuple(tensors), entry)

    def write(self, slot: int, packed: PackedAdapter) -> None:
        assert slot not in self._packed, slot
        self._packed[slot] = packed
        self._table[slot] = packed.entry

    def clear(self, slot: int) -> None:
        self._table[slot] = 0
        self._packed.pop(slot, None)

    def tensors(self) -> list[Tensor]:
        return []

    def replace(self, tensors: Sequence[Tensor]) -> None:
        assert not tensors, len(tensors)

    def add_(self, outputs: Tensor, x: Tensor, step: StepAdapters) -> None:
        num_each = rows_of_each(outputs, x)
        x = self._checked_inputs(x if num_each == 1 else x.repeat_interleave(num_each, 0), step)
        self._check_outputs(outputs, step)
        self._functions[f"add_adapters_{self._name}"](
            *(self.address, step.layout.address, x.data_ptr(), x.stride(0)),
            *(outputs.data_ptr(), outputs.stride(0), 0, num_threads()),
        )

    def input_sums(self, x: Tensor, step: StepAdapters) -> Tensor:
        assert len(self._sizes.parts) == 1, self._sizes
        x, sums = self._checked_inputs(x, step), torch.zeros((len(x), self._sizes.max_rank), dtype=torch.float32)
        self._functions[f"adapter_input_sums_{self._name}"](
            *(self.address, step.layout.address, x.data_ptr(), x.stride(0)),
            *(sums.data_ptr(), sums.stride(0), num_threads()),
        )
        return sums

    def add_sums_(self, outputs: Tensor, sums: Tensor, step: StepAdapters) -> None:
        assert len(self._sizes.parts) == 1, self._sizes
        assert sums.shape == (len(outputs), self._sizes.max_rank), (sums.shape, outputs.shape, self._sizes)
        assert sums.dtype == torch.float32, sums.dtype
        assert sums.stride(1) == 1, sums.stride()
        self._check_outputs(outputs, step)
        self._functions[f"add_adapter_sums_{self._name}"](
            *(self.address, step.layout.address, sums.data_ptr(), sums.stride(0)),
            *(outputs.data_ptr(), outputs.stride(0), num_threads()),
        )

    def _checked_inputs(self, x: Tensor, step: StepAdapters) -> Tensor:
        check_dtype(x)
        assert x.dtype == self._sizes.dtype, (x.dtype, self._sizes)
        assert x.shape == (len(step.slots), self._sizes.num_inputs), (x.shape, step.slots.shape, self._sizes)
        return contiguous_rows(x)

    def _check_outputs(self, outputs: Tensor, step: StepAdapters) -> None:
        check_dtype(outputs)
        assert outputs.dtype == self._sizes.dtype, (outputs.dtype, self._sizes)
        assert len(outputs) == len(step.slots), (outputs.shape, step.slots.shape)
        assert outputs.shape[1] >= self._sizes.parts[-1][1], (outputs.shape, self._sizes)
        assert outputs.stride(1) == 1, outputs.stride()


class NativeAdapterKernels:
    """Implements `AdapterKernels`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def numerics(self) -> Region:
        return Region(f"native {self._library.instruction_set}", native_version(), {"rank_step": RANK_STEP})

    def new_stack(self, sizes: AdapterSizes) -> NativeStack:
        return NativeStack(self._library, sizes)

    def step(self, slots: Tensor, num_slots: int) -> StepAdapters:
        """Rows of an adapter are divided into blocks, which threads share."""
        of_rows = slots.numpy()
        rows = np.argsort(of_rows, kind="stable")
        rows = rows[np.searchsorted(of_rows[rows], 0) :]
        ordered = of_rows[rows]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        counts = np.diff(starts, append=len(ordered))
        num_blocks = -(-counts // _BLOCK_ROWS)
        offsets = (np.arange(num_blocks.sum()) - (num_blocks.cumsum() - num_blocks).repeat(num_blocks)) * _BLOCK_ROWS
        firsts = starts.repeat(num_blocks) + offsets
        sizes = np.minimum(counts.repeat(num_blocks) - offsets, _BLOCK_ROWS)
        blocks = np.stack((ordered[firsts], firsts, sizes), axis=1).astype(np.int64)
        structure = _Rows(rows.ctypes.data, blocks.ctypes.data, len(blocks))
        return StepAdapters(slots, num_slots, self, NativeRows(rows, blocks, structure))


def _packed_inputs(a: Tensor, leaf_ends: Sequence[int]) -> Tensor:
    """A [r, inputs] -> [r / 16, inputs / 2, 16, 2] of bfloat16, [r / 16, inputs, 16] of float32, filled with zeros; of
    an odd leaf too, so that none has a part of a pair.
    """
    group = 2 if a.dtype == torch.bfloat16 else 1
    bounds = zip((0, *leaf_ends), leaf_ends)
    leaves = [F.pad(a[:, start:stop], (0, (start - stop) % group)) for start, stop in bounds]
    padded = F.pad(leaves[0] if len(leaves) == 1 else torch.cat(leaves, dim=1), (0, 0, 0, -len(a) % RANK_STEP))
    panels = padded.view(len(padded) // RANK_STEP, RANK_STEP, padded.shape[1] // group, group)
    return panels.transpose(1, 2).contiguous()


def _packed_outputs(b: Tensor) -> Tensor:
    """B [outputs, r] -> [outputs / 16, r, 16], filled with zeros."""
    padded = F.pad(b, (0, 0, 0, -len(b) % PANEL))
    return padded.view(len(padded) // PANEL, PANEL, b.shape[1]).transpose(1, 2).contiguous()
