"""Launches of head_kernels.py."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from spmd_worker.ops.kernels.triton import head_kernels


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Rows, columns and inputs of a step of a program's tile, warps, pipeline stages. Bits do not depend on it."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        return {"BM": self.rows, "BN": self.columns, "BK": self.inputs}

    def options(self) -> dict[str, int]:
        return head_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}


FLOAT32: Final = HeadTile(16, 32, 32, 4, 2)
"""Plain FMA."""
FEW: Final = HeadTile(16, 128, 64, 4, 3)
MANY: Final = HeadTile(64, 128, 64, 4, 3)


def tile_for(num_rows: int, itemsize: int) -> HeadTile:
    """The tile of a step of so many rows."""
    if itemsize > 2:
        return FLOAT32
    return FEW if num_rows <= FEW.rows else MANY


def linear_of_heads(x: Tensor, weight: Tensor, out: Tensor, tile: HeadTile | None = None) -> None:
    """x [T, heads, K] by weight [heads, N, K] into `out` [T, heads, N]: see `head_kernels.linear_of_heads`. `tile`
    None: from `tile_for`.
    """
    num_tokens, num_heads, num_columns = out.shape
    assert weight.shape == (num_heads, num_columns, x.shape[2]), (weight.shape, x.shape, out.shape)
    assert x.stride(2) == out.stride(2) == 1, (x.stride(), out.stride())
    if not out.numel():
        return
    tile = tile or tile_for(num_tokens, x.element_size())
    grid = (-(-num_tokens // tile.rows), -(-num_columns // tile.columns), num_heads)
    head_kernels.linear_of_heads[grid](
        *(x, weight, out, num_tokens, num_columns, x.shape[2], x.stride(0), x.stride(1)),
        *(*weight.stride(), out.stride(0), out.stride(1)),
        **tile.constants(),
        **tile.options(),
    )
