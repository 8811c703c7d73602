"""Launches of adapter_kernels.py: tiles by the number of rows and the rank.

Shapes and launches follow from the number of rows alone, so a CUDA graph replays them for any adapters of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.triton import adapter_kernels, placing
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two
from spmd_worker.ops.kernels.triton.placing import Placed, most_tiles

MAX_PARTS: Final = 3
MAX_FEW_ROWS: Final = 1024
"""Maximum rows of a step with tiles of few rows."""
MIN_PIECE: Final = 1024
MAX_PIECES: Final = 8
_WITHOUT_FEW_ROWS: Final = 10
"""Major capability of chips whose tiles have 64 rows at least, for one kind of matrix instruction (`tiles.py`)."""
_PER_MULTIPROCESSOR: Final = 4
_MIN_SIDE: Final = 16
_STEP: Final = 128
"""Inputs that a piece is a multiple of: the most of a step."""


@dataclass(frozen=True, slots=True)
class AdapterTile:
    """Rows of both kernels' tiles; columns of `shrink`, at most, and its inputs of a step; columns of `expand`, and its
    rank numbers of a step, at most; warps and stages of both.
    """

    rows: int
    low_columns: int
    inputs: int
    columns: int
    rank_step: int
    num_warps: int
    num_stages: int

    def shrink_constants(self, num_inputs: int, num_low: int) -> dict[str, Any]:
        """Constexprs and launch options of `adapter_kernels.shrink` with `num_low` numbers of all parts."""
        return {
            "PIECE": piece_of(num_inputs),
            "BM": self.rows,
            "BN": _side(num_low, self.low_columns),
            "BK": self.inputs,
            **self._options(),
        }

    def expand_constants(self, num_inputs: int, rank: int, num_parts: int, *, splits: bool) -> dict[str, Any]:
        """Constexprs and launch options of `adapter_kernels.expand`."""
        return {
            "PARTS": num_parts,
            "PIECES": -(-num_inputs // piece_of(num_inputs)),
            "BM": self.rows,
            "BN": self.columns,
            "BR": _side(rank, self.rank_step),
            "SPLITS": splits,
            **self._options(),
        }

    def _options(self) -> dict[str, Any]:
        return adapter_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}


FEW_ROWS: Final = AdapterTile(16, 64, 128, 128, 64, 4, 4)
MANY_ROWS: Final = AdapterTile(64, 64, 64, 128, 64, 8, 4)
FLOAT32 = AdapterTile(16, 32, 32, 32, 16, 4, 2)
"""Plain FMA: see `matmul.FLOAT32`."""
FLOAT16: Final = AdapterTile(16, 64, 128, 32, 16, 4, 3)
"""The second product is plain FMA: three numbers of float16 have not float32's range."""


def tile_for(num_rows: int, dtype: torch.dtype, chip: tuple[int, int]) -> AdapterTile:
    """The tile for a step of `num_rows`; bits do not depend on it."""
    if dtype != torch.bfloat16:
        return FLOAT32 if dtype == torch.float32 else FLOAT16
    return FEW_ROWS if num_rows <= MAX_FEW_ROWS and chip[0] != _WITHOUT_FEW_ROWS else MANY_ROWS


def piece_of(num_inputs: int) -> int:
    """Inputs of a piece: bits depend on it, so it follows from the layer alone."""
    return max(MIN_PIECE, -(-num_inputs // (MAX_PIECES * _STEP)) * _STEP)


def _side(number: int, most: int) -> int:
    return max(_MIN_SIDE, min(most, power_of_two(number)))


class TritonAdapters:
    """Adds the low-rank products of a step's rows to outputs of layers."""

    def place(self, slots: Tensor, num_adapters: int, dtype: torch.dtype) -> Placed:
        """Rows by adapter, of `slots` int32 [T], of which -1 has none: once a step, for layers of `dtype`."""
        ids = slots.view(-1, 1)
        tile = tile_for(len(ids), dtype, capability(slots.device))
        return placing.place(ids, None, placing.count(ids, None, num_adapters, None), None, tile.rows)

    def add_(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, widths: Sequence[int], placed: Placed
    ) -> None:
        """Add to `out` [T, N] what adapters make of x [T, K], in place.

        a [adapters, P * R, K], b [adapters, N, R], `scales` float32 [adapters, P]; `widths`: outputs of each of the P
        parts; `placed`: from `place`.
        """
        assert 0 < len(widths) <= MAX_PARTS, widths
        (num_rows, num_inputs), num_low, rank = x.shape, a.shape[1], b.shape[2]
        assert num_low == len(widths) * rank, (a.shape, b.shape, widths)
        if not num_rows:
            return
        x = x if x.stride(1) == 1 else x.contiguous()
        tile = tile_for(num_rows, x.dtype, capability(x.device))
        splits = x.dtype == torch.bfloat16
        num_pieces = -(-num_inputs // piece_of(num_inputs))
        partials = x.new_empty((num_pieces, num_rows, num_low), dtype=torch.float32)
        constants = tile.shrink_constants(num_inputs, num_low)
        num_tiles = most_tiles(num_rows, placed.num_own, tile.rows)
        programs = num_programs(x.device, _PER_MULTIPROCESSOR)
        adapter_kernels.shrink[(min(programs, num_tiles * num_pieces * -(-num_low // constants["BN"])),)](
            *(x, a, partials, placed.order, placed.tiles, placed.num_tiles),
            *(num_rows, num_low, num_inputs, x.stride(0)),
            **constants,
        )
        constants = tile.expand_constants(num_inputs, rank, len(widths), splits=splits)
        num_columns = sum(-(-width // tile.columns) for width in widths)
        first, second, *_ = (*widths, 0)
        adapter_kernels.expand[(min(programs, num_tiles * num_columns),)](
            *(partials, b, scales, out, placed.order, placed.tiles, placed.num_tiles),
            *(num_rows, b.shape[1], rank, first, second, out.stride(0)),
            **constants,
        )
