"""Launches of adapter_kernels.py: tiles by the number of rows and the rank.

Shapes and launches follow from the number of rows alone, so a CUDA graph replays them for any adapters of its rows.
Stacks keep their addresses, and are filled in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.ops.kernels.adapters import AdapterSizes, Matrices, StepAdapters
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.triton import adapter_kernels, placing
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two
from spmd_worker.ops.kernels.triton.placing import Placed, most_tiles
from spmd_worker.ops.kernels.triton.version import triton_region

MAX_FEW_ROWS: Final = 1024
"""Maximum rows of a step with tiles of few rows."""
MIN_PIECE = 1024
MAX_PIECES: Final = 8
_STEP: Final = 128
"""Inputs that a piece is a multiple of: the most of a step."""
_WITHOUT_FEW_ROWS: Final = 10
"""Major capability of chips whose tiles have 64 rows at least, for one kind of matrix instruction (`tiles.py`)."""
_PER_MULTIPROCESSOR: Final = 4
_LEAST_RANK_STEP: Final = 16


@dataclass(frozen=True, slots=True)
class AdapterTile:
    """Rows of the tiles of both kernels. Of `shrink`: numbers of the rank, at most, inputs of a step, warps and stages.
    Of `expand`: columns, numbers of the rank in a step, at most, and warps.
    """

    rows: int
    rank: int
    inputs: int
    num_shrink_warps: int
    num_stages: int
    columns: int
    rank_step: int
    num_expand_warps: int

    def shrink_constants(self, num_inputs: int, rank: int, num_parts: int) -> dict[str, Any]:
        """Constexprs and launch options of `adapter_kernels.shrink` for adapters of `rank` at most."""
        return {
            "PARTS": num_parts,
            "PIECE": piece_of(num_inputs),
            "BM": self.rows,
            "BR": _rank_step(rank, self.rank),
            "BK": self.inputs,
            "num_warps": self.num_shrink_warps,
            "num_stages": self.num_stages,
            **adapter_kernels.LAUNCH,
        }

    def expand_constants(self, num_inputs: int, rank: int, num_parts: int, dtype: torch.dtype) -> dict[str, Any]:
        """Those of `adapter_kernels.expand`."""
        return {
            "PARTS": num_parts,
            "PIECES": -(-num_inputs // piece_of(num_inputs)),
            "BM": self.rows,
            "BN": self.columns,
            "BR": _rank_step(rank, self.rank_step),
            # Three numbers of float16 have not float32's range.
            "SPLITS": dtype == torch.bfloat16,
            "num_warps": self.num_expand_warps,
            **adapter_kernels.LAUNCH,
        }


FEW_ROWS = AdapterTile(16, 64, 128, 4, 4, 128, 32, 4)
MANY_ROWS = AdapterTile(64, 64, 64, 4, 4, 64, 32, 8)
"""Estimates, not measured yet."""
FLOAT16 = AdapterTile(16, 64, 128, 4, 3, 32, 16, 4)
FLOAT32 = AdapterTile(16, 32, 32, 4, 2, 32, 16, 4)
"""Plain FMA: see `matmul.FLOAT32`."""


def tile_for(num_rows: int, dtype: torch.dtype, chip: tuple[int, int]) -> AdapterTile:
    """The tile for a step of `num_rows`; bits do not depend on it."""
    if dtype != torch.bfloat16:
        return FLOAT32 if dtype == torch.float32 else FLOAT16
    return FEW_ROWS if num_rows <= MAX_FEW_ROWS and chip[0] != _WITHOUT_FEW_ROWS else MANY_ROWS


def piece_of(num_inputs: int) -> int:
    """Inputs of a piece: bits depend on it, so it follows from the layer alone."""
    return max(MIN_PIECE, -(-num_inputs // (MAX_PIECES * _STEP)) * _STEP)


def _rank_step(rank: int, most: int) -> int:
    return max(_LEAST_RANK_STEP, min(most, power_of_two(rank)))


class TritonAdapterStack:
    """Implements `AdapterStack`: see adapter_kernels.py."""

    def __init__(self, sizes: AdapterSizes) -> None:
        self.sizes = sizes
        num_slots, num_parts, num_outputs = sizes.num_slots, len(sizes.parts), sizes.parts[-1][1]
        options: dict[str, Any] = {"dtype": sizes.dtype, "device": sizes.device}
        self.a = torch.zeros((num_slots, num_parts, sizes.max_rank, sizes.num_inputs), **options)
        self.b = torch.zeros((num_slots, num_outputs, sizes.max_rank), **options)
        self.ranks = torch.zeros((num_slots, num_parts), dtype=torch.int32, device=sizes.device)
        self._filled: set[int] = set()
        tiles = (tile_for(num_rows, sizes.dtype, (0, 0)) for num_rows in (1, MAX_FEW_ROWS + 1))
        self._columns = {tile.columns: self._column_tiles(tile.columns) for tile in tiles}

    def _column_tiles(self, width: int) -> Tensor:
        """`columns` of `adapter_kernels.expand`, int32 [tiles, 3]: no tile has outputs of two parts."""
        parts = enumerate(self.sizes.parts)
        found = [(part, at, stop) for part, (start, stop) in parts for at in range(start, stop, width)]
        return to_device(torch.tensor(found, dtype=torch.int32), self.sizes.device)

    @property
    def is_empty(self) -> bool:
        return not self._filled

    def pack(self, parts: Sequence[Matrices | None]) -> tuple[Tensor, Tensor, Tensor]:
        """A slot of `a`, `b` and `ranks` in host memory: a copy of only a part of a slot takes memory on the device."""
        a, b, ranks = (
            torch.zeros(each.shape[1:], dtype=each.dtype, device="cpu") for each in (self.a, self.b, self.ranks)
        )
        for part, ((start, stop), matrices) in enumerate(zip(self.sizes.parts, parts, strict=True)):
            if matrices is not None:
                ranks[part] = rank = len(matrices[0])
                a[part, :rank], b[start:stop, :rank] = matrices
        return a, b, ranks

    @torch.inference_mode()
    def write(self, slot: int, packed: tuple[Tensor, Tensor, Tensor]) -> None:
        for stack, each in zip((self.a, self.b, self.ranks), packed, strict=True):
            stack[slot].copy_(each)
        self._filled.add(slot)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        self.ranks[slot] = 0
        self._filled.discard(slot)

    def tensors(self) -> list[Tensor]:
        return [self.a, self.b, self.ranks]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        self.a, self.b, self.ranks = tensors

    def input_sums(self, x: Tensor, step: StepAdapters) -> Tensor:
        raise NotImplementedError

    def add_sums_(self, outputs: Tensor, sums: Tensor, step: StepAdapters) -> None:
        raise NotImplementedError

    def add_(self, outputs: Tensor, x: Tensor, step: StepAdapters) -> None:
        (num_rows, num_inputs), (num_slots, num_parts, rank, _) = x.shape, self.a.shape
        placed: Placed = step.layout
        assert len(outputs) == num_rows == placed.num_slots, (outputs.shape, x.shape, placed.num_slots)
        assert outputs.stride(1) == 1, outputs.stride()
        if not num_rows:
            return
        x = x if x.stride(1) == 1 else x.contiguous()
        tile = tile_for(num_rows, x.dtype, capability(x.device))
        shrink = tile.shrink_constants(num_inputs, rank, num_parts)
        expand = tile.expand_constants(num_inputs, rank, num_parts, x.dtype)
        columns, places = self._columns[tile.columns], (placed.order, placed.tiles, placed.num_tiles)
        partials = x.new_empty((expand["PIECES"], num_rows, num_parts, rank), dtype=torch.float32)
        num_tiles = most_tiles(num_rows, num_slots, tile.rows)
        programs = num_programs(x.device, _PER_MULTIPROCESSOR)
        num_works = num_tiles * expand["PIECES"] * num_parts * -(-rank // shrink["BR"])
        adapter_kernels.shrink[(min(programs, num_works),)](
            *(x, self.a, self.ranks, partials, *places, num_rows, rank, num_inputs, x.stride(0)), **shrink
        )
        adapter_kernels.expand[(min(programs, num_tiles * len(columns)),)](
            *(partials, self.b, self.ranks, outputs, columns, *places),
            *(num_rows, rank, self.b.shape[1], len(columns), outputs.stride(0)),
            **expand,
        )


class TritonAdapterKernels:
    """Implements `AdapterKernels`, of stacks of one dtype and number of slots."""

    def __init__(self) -> None:
        self._num_slots = 0
        self._dtype = torch.float32

    def numerics(self) -> Region:
        return triton_region().with_constants(rank_step=_LEAST_RANK_STEP)

    def new_stack(self, sizes: AdapterSizes) -> TritonAdapterStack:
        assert self._num_slots in (0, sizes.num_slots), (self._num_slots, sizes)
        self._num_slots, self._dtype = sizes.num_slots, sizes.dtype
        return TritonAdapterStack(sizes)

    def step(self, slots: Tensor) -> StepAdapters:
        """`layout`: the rows by adapter. Two launches, which read nothing back."""
        ids = slots.view(-1, 1)
        num_rows = tile_for(len(ids), self._dtype, capability(slots.device)).rows
        counts = placing.count(ids, None, self._num_slots, None)
        return StepAdapters(slots, placing.place(ids, None, counts, None, num_rows))
