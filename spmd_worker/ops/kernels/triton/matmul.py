"""Launches of matmul_kernels.py: tiles and number of programs.

One tile shape up to 64 rows and one above, with one step along K; bits do not depend on it. Faster tables by (N, K, M)
need measurements on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.ops.kernels.triton import matmul_kernels
from spmd_worker.ops.kernels.triton.launching import num_programs


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program's result tile, inputs of a step along K, warps, pipeline stages."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int

    def constants(self, has_bias: bool) -> dict[str, int]:
        """Constexprs of the kernels."""
        return {"BM": self.rows, "BN": self.columns, "BK": self.inputs, "GROUP": 8, "BIAS": has_bias}

    def options(self) -> dict[str, int]:
        """Launch options."""
        return matmul_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}


FEW_ROWS = Tile(64, 64, 64, 4, 5)
MANY_ROWS = Tile(128, 128, 64, 8, 4)
GATED_FEW_ROWS = Tile(64, 32, 64, 4, 5)
GATED_MANY_ROWS = Tile(128, 64, 64, 8, 4)
FLOAT32 = Tile(32, 32, 32, 4, 2)
"""No matrix instruction keeps float32 precision (TF32 does not): plain FMA, with small tiles."""

MAX_FEW_ROWS = 64
"""Maximum rows of a matmul with the tiles for few rows."""


def tile_for(num_rows: int, dtype: torch.dtype, *, is_gated: bool) -> Tile:
    """The tile of a matmul of `num_rows` rows."""
    if dtype == torch.float32:
        return FLOAT32
    if is_gated:
        return GATED_FEW_ROWS if num_rows <= MAX_FEW_ROWS else GATED_MANY_ROWS
    return FEW_ROWS if num_rows <= MAX_FEW_ROWS else MANY_ROWS


def shared_bytes(itemsize: int) -> int:
    """Bytes of shared memory of a program with the largest tile, on chips without wgmma or tcgen05, which have the
    least: one stage of operands is in registers.
    """
    tiles = ((FLOAT32, 2),) if itemsize == 4 else ((MANY_ROWS, 1), (GATED_MANY_ROWS, 2))
    return max(
        itemsize * (tile.rows + halves * tile.columns) * tile.inputs * (tile.num_stages - 1) for tile, halves in tiles
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """[..., K] x [N, K] -> [..., N]: see `matmul_kernels.linear`. `tile` None: from `tile_for`."""
    rows = _as_rows(x)
    out = x.new_empty((*x.shape[:-1], len(weight)))
    tile = tile or tile_for(len(rows), x.dtype, is_gated=False)
    sizes = (len(rows), len(weight), rows.shape[1], rows.stride(0), weight.stride(0), len(weight))
    grid = (_num_tiles(len(rows), len(weight), tile, x.device),)
    if out.numel():
        constants, options = tile.constants(bias is not None), tile.options()
        matmul_kernels.linear[grid](rows, weight, bias, out, *sizes, **constants, **options)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """[..., K] x [2 I, K] -> [..., I]: see `matmul_kernels.gated_linear`."""
    rows, width = _as_rows(x), len(weight) // 2
    out = x.new_empty((*x.shape[:-1], width))
    tile = tile or tile_for(len(rows), x.dtype, is_gated=True)
    halves = (
        weight[:width],
        None if bias is None else bias[:width],
        weight[width:],
        bias if bias is None else bias[width:],
    )
    sizes = (len(rows), width, rows.shape[1], rows.stride(0), weight.stride(0), width)
    grid = (_num_tiles(len(rows), width, tile, x.device),)
    if out.numel():
        constants, options = tile.constants(bias is not None), tile.options()
        matmul_kernels.gated_linear[grid](rows, *halves, out, *sizes, **constants, **options)
    return out


def _as_rows(x: Tensor) -> Tensor:
    """[M, K], K contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _num_tiles(num_rows: int, num_columns: int, tile: Tile, device: torch.device) -> int:
    tiles = -(-num_rows // tile.rows) * -(-num_columns // tile.columns)
    return min(tiles, num_programs(device))
