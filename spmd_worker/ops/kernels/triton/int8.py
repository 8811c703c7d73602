"""Launches of int8_kernels.py: quantised activations, and tiles by shape."""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from spmd_worker.ops.kernels.triton import int8_kernels
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS, can_describe, describe
from spmd_worker.ops.kernels.triton.fp8 import num_warps
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two

_HOPPER: Final = (9, 0)
_MOST_IN_REGISTERS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """Rows and columns of a program's tile, inputs of a step, warps, pipeline stages."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """Constexprs of the kernel that follow from the tile."""
        return {"BM": self.rows, "BN": self.columns, "BK": self.inputs, "GROUP": 8}

    def options(self) -> dict[str, Any]:
        """Launch options."""
        return int8_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}


OTHER_CHIPS: Final = Int8Tile(64, 64, 128, 4, 3)
"""Without wgmma there is no table yet, and shared memory may be 99 KB."""
_FEW: Final = Int8Tile(16, 64, 256, 4, 4)
_FEW_WIDE: Final = Int8Tile(16, 128, 128, 4, 4)
_FEW_GATED: Final = Int8Tile(16, 64, 256, 4, 3)
_SOME: Final = Int8Tile(64, 128, 128, 4, 4)
_SOME_WIDE: Final = Int8Tile(128, 128, 128, 8, 4)
_SOME_GATED: Final = Int8Tile(64, 64, 128, 4, 4)
_MANY: Final = Int8Tile(128, 256, 128, 8, 4)
_MANY_GATED: Final = Int8Tile(128, 128, 128, 8, 3)
HOPPER_TILES: Final = (_FEW, _FEW_WIDE, _SOME, _SOME_WIDE, _MANY)
HOPPER_GATED_TILES: Final = (_FEW_GATED, _SOME_GATED, _MANY_GATED)


def tile_for(device: torch.device, num_rows: int, num_columns: int, *, is_gated: bool) -> Int8Tile:
    """The tile of a matmul of this shape; measured on an H200 for the shapes of an 8B model, but for gates. Sums are
    exact, so tiles of any instruction have the same bits.
    """
    if capability(device) not in (_HOPPER, (0, 0)):
        return OTHER_CHIPS
    if is_gated:
        return _FEW_GATED if num_rows <= 16 else _SOME_GATED if num_rows <= 512 else _MANY_GATED
    is_wide = num_columns >= _FEW_WIDE.columns * num_programs(device)
    if num_rows <= 16:
        return _FEW_WIDE if is_wide else _FEW
    if num_rows <= 512:
        return _SOME_WIDE if is_wide and num_rows > 64 else _SOME
    return _MANY


def quantise(x: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[M, K] -> int8 [M, K] and float32 scales [M]. `maxima`: of the rows of which x is a part, float32 [M]."""
    num_rows, num_inputs = x.shape
    out = torch.empty((num_rows, num_inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, scales
    block = min(power_of_two(num_inputs), _MOST_IN_REGISTERS)
    constants = {"BLOCK": block, "IS_WHOLE": num_inputs <= block, "HAS_MAXIMA": maxima is not None}
    options = int8_kernels.LAUNCH | {"num_warps": num_warps(block)}
    int8_kernels.quantise_rows[(num_rows,)](x, maxima, out, scales, num_inputs, x.stride(0), **constants, **options)
    return out, scales


def multiply(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
    tile: Int8Tile | None = None,
    by_tma: bool | None = None,
) -> Tensor:
    """Int8 [M, K] x [N, K] with scales from `quantise` and float32 [N, 1] -> [M, N], or [M, N / 2] of gate and up.
    `dtype` int32: the sums. `tile` and `by_tma` None: as is best.
    """
    num_rows, num_inputs = x.shape
    num_columns = len(weight) // (1 + is_gated)
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = tile or tile_for(x.device, num_rows, num_columns, is_gated=is_gated)
    by_tma = can_describe(x, weight) if by_tma is None else by_tma
    sizes = (num_rows, num_columns, num_inputs, x.stride(0), weight.stride(0), scales.stride(0), out.stride(0))
    operands = (x, weight)
    if by_tma:
        operands = (describe(x, tile.rows, tile.inputs), describe(weight, tile.columns, tile.inputs))
    constants = tile.constants() | {"IS_GATED": is_gated, "BIAS": bias is not None, "BY_TMA": by_tma}
    is_sum = dtype == torch.int32
    constants |= {"ELEMENT": tl.int32 if is_sum else ELEMENTS[dtype], "SUMS": is_sum}
    num_tiles = -(-num_rows // tile.rows) * -(-num_columns // tile.columns)
    grid = (min(num_tiles, num_programs(x.device)),)
    int8_kernels.linear[grid](*operands, x_scales, scales, bias, out, *sizes, **constants, **tile.options())
    return out
