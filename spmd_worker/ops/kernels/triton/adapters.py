"""Launches of adapter_kernels.py: tiles by the number of rows and the rank.

Shapes and launches follow from the number of rows alone, so a CUDA graph replays them for any adapters of its rows.
Stacks keep their addresses, and are filled in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.ops.kernels.adapters import AdapterSizes, Matrices, StepAdapters, rows_of_each
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
_ALIGNMENT: Final = 16
"""Inputs that are loaded together at most."""
_LEAST_RANK_STEP: Final = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces that A x is summed in: so many, of at most `size` inputs. `alignment` divides where leaves begin."""

    count: int
    size: int
    are_leaves: bool = False
    alignment: int = 1


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

    def with_rows(self, num_rows: int) -> "AdapterTile":
        """The tile with the rows of another: routers of bfloat16 models. Plain FMA of 64 rows is not pipelined."""
        return replace(self, rows=num_rows, num_stages=1)

    def shrink_constants(self, pieces: "Pieces", rank: int, num_parts: int, num_each: int = 1) -> dict[str, Any]:
        """Constexprs and launch options of `adapter_kernels.shrink` for adapters of `rank` at most, and inputs of
        `num_each` rows.
        """
        return {
            "PARTS": num_parts,
            "PIECE": pieces.size,
            "LEAVES": pieces.count if pieces.are_leaves else 0,
            "ALIGNED": pieces.alignment,
            "EACH": num_each,
            "BM": self.rows,
            "BR": _rank_step(rank, self.rank),
            "BK": self.inputs,
            "num_warps": self.num_shrink_warps,
            "num_stages": self.num_stages,
            **adapter_kernels.LAUNCH,
        }

    def join_constants(self, pieces: "Pieces", rank: int) -> dict[str, Any]:
        """Those of `adapter_kernels.join`."""
        return {
            "PIECES": pieces.count,
            "IS_TREE": pieces.are_leaves,
            "BM": self.rows,
            "BR": _rank_step(rank, self.rank),
            "num_warps": self.num_expand_warps,
            **adapter_kernels.LAUNCH,
        }

    def expand_constants(
        self, pieces: "Pieces", rank: int, num_parts: int, dtype: torch.dtype, *, by_row: bool = False
    ) -> dict[str, Any]:
        """Those of `adapter_kernels.expand`."""
        return {
            "PARTS": num_parts,
            "PIECES": pieces.count,
            "IS_TREE": pieces.are_leaves,
            "BY_ROW": by_row,
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


def pieces_of(num_inputs: int, leaf_ends: Sequence[int]) -> Pieces:
    """A piece is a leaf, also where a rank has only one of the model's; or `piece_of` the inputs of a layer without."""
    if not leaf_ends:
        return Pieces(-(-num_inputs // piece_of(num_inputs)), piece_of(num_inputs))
    longest = max(end - start for start, end in zip((0, *leaf_ends), leaf_ends))
    return Pieces(len(leaf_ends), -(-longest // _STEP) * _STEP, True, gcd(_ALIGNMENT, *leaf_ends))


_ONE_PIECE: Final = Pieces(1, 0)


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
        ends = sizes.leaf_ends
        assert not ends or (num_parts == 1 and len(ends).bit_count() == 1 and ends[-1] == sizes.num_inputs), sizes
        self._leaves = to_device(torch.tensor((0, *ends), dtype=torch.int32), sizes.device) if ends else None
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

    def add_(self, outputs: Tensor, x: Tensor, step: StepAdapters) -> None:
        num_each = rows_of_each(outputs, x)
        if len(x):
            self._expand(outputs, self._shrunk(x, step, num_each), step, self._pieces)

    def input_sums(self, x: Tensor, step: StepAdapters) -> Tensor:
        (num_slots, num_parts, rank, _), placed, num_rows = self.a.shape, step.layout, len(x)
        assert num_parts == 1, self.a.shape
        sums = x.new_zeros((num_rows, rank), dtype=torch.float32)
        if num_rows:
            tile = self._tile(placed)
            constants = tile.join_constants(self._pieces, rank)
            num_works = most_tiles(num_rows, num_slots, tile.rows) * -(-rank // constants["BR"])
            adapter_kernels.join[(min(num_programs(x.device, _PER_MULTIPROCESSOR), num_works),)](
                *(self._shrunk(x, step), self.ranks, sums, placed.order, placed.tiles, placed.num_tiles),
                *(num_rows, rank),
                **constants,
            )
        return sums

    def add_sums_(self, outputs: Tensor, sums: Tensor, step: StepAdapters) -> None:
        _, num_parts, rank, _ = self.a.shape
        assert num_parts == 1, self.a.shape
        assert sums.shape == (len(outputs), rank), (sums.shape, outputs.shape, self.a.shape)
        assert sums.dtype == torch.float32, sums.dtype
        assert sums.is_contiguous(), sums.stride()
        if len(outputs):
            self._expand(outputs, sums, step, _ONE_PIECE, by_row=True)

    @property
    def _pieces(self) -> Pieces:
        return pieces_of(self.sizes.num_inputs, self.sizes.leaf_ends)

    def _tile(self, placed: Placed) -> AdapterTile:
        """The tile of the rows that were placed, perhaps for layers of another dtype."""
        tile = tile_for(placed.num_slots, self.sizes.dtype, capability(self.a.device))
        return tile if tile.rows == placed.num_rows else tile.with_rows(placed.num_rows)

    def _shrunk(self, x: Tensor, step: StepAdapters, num_each: int = 1) -> Tensor:
        """`partials` of `adapter_kernels.shrink`."""
        num_inputs, (num_slots, num_parts, rank, _) = x.shape[1], self.a.shape
        placed: Placed = step.layout
        num_rows = len(x) * num_each
        assert (num_rows, num_slots) == (placed.num_slots, placed.num_own), (x.shape, num_each, self.sizes, placed)
        x = x if x.stride(1) == 1 else x.contiguous()
        tile, pieces = self._tile(placed), self._pieces
        constants = tile.shrink_constants(pieces, rank, num_parts, num_each)
        partials = x.new_empty((pieces.count, num_rows, num_parts, rank), dtype=torch.float32)
        num_tiles = most_tiles(num_rows, num_slots, tile.rows)
        num_works = num_tiles * pieces.count * num_parts * -(-rank // constants["BR"])
        adapter_kernels.shrink[(min(num_programs(x.device, _PER_MULTIPROCESSOR), num_works),)](
            *(x, self.a, self.ranks, partials, self._leaves, placed.order, placed.tiles, placed.num_tiles),
            *(num_rows, rank, num_inputs, x.stride(0)),
            **constants,
        )
        return partials

    def _expand(
        self, outputs: Tensor, partials: Tensor, step: StepAdapters, pieces: Pieces, *, by_row: bool = False
    ) -> None:
        (num_slots, num_parts, rank, _), num_rows = self.a.shape, len(outputs)
        placed: Placed = step.layout
        assert num_rows == placed.num_slots, (outputs.shape, placed.num_slots)
        assert outputs.stride(1) == 1, outputs.stride()
        tile = self._tile(placed)
        columns, num_tiles = self._columns[tile.columns], most_tiles(num_rows, num_slots, tile.rows)
        num_works = num_tiles * len(columns)
        adapter_kernels.expand[(min(num_programs(outputs.device, _PER_MULTIPROCESSOR), num_works),)](
            *(partials, self.b, self.ranks, outputs, columns, placed.order, placed.tiles, placed.num_tiles),
            *(num_rows, rank, self.b.shape[1], len(columns), outputs.stride(0)),
            **tile.expand_constants(pieces, rank, num_parts, outputs.dtype, by_row=by_row),
        )


class TritonAdapterKernels:
    """Implements `AdapterKernels`, of stacks of one dtype, and routers' in float32."""

    def __init__(self) -> None:
        self._dtype = torch.float32

    def numerics(self) -> Region:
        return triton_region().with_constants(rank_step=_LEAST_RANK_STEP)

    def new_stack(self, sizes: AdapterSizes) -> TritonAdapterStack:
        self._dtype = self._dtype if sizes.dtype == torch.float32 else sizes.dtype
        return TritonAdapterStack(sizes)

    def step(self, slots: Tensor, num_slots: int) -> StepAdapters:
        """`layout`: the rows by adapter. Two launches, which read nothing back."""
        ids = slots.view(-1, 1)
        num_rows = tile_for(len(ids), self._dtype, capability(slots.device)).rows
        counts = placing.count(ids, None, num_slots, None)
        return StepAdapters(slots, num_slots, self, placing.place(ids, None, counts, None, num_rows))
