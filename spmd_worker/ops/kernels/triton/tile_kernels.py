"""Tiles of matrices in GPU kernels: which tile a program computes, and loads and stores by descriptor (TMA) or pointer.

A descriptor reads zeros outside the tensor and stores nothing there, so it needs no mask. Both ways move the same
numbers, so a result's bits do not depend on the way.
"""

import triton
import triton.language as tl


@triton.jit
def tile_indices(tile, num_m, num_n, GROUP: tl.constexpr):
    """Row and column of a tile, in groups of GROUP row tiles for reuse of L2; the order changes no bits."""
    per_group = GROUP * num_n
    first = (tile // per_group) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    return first + (tile % per_group) % height, (tile % per_group) // height


@triton.jit
def load_tile(
    source, row, column, num_rows, num_columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_TMA: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """[ROWS, COLUMNS] of `source` [num_rows, num_columns] from (row, column) on: zero past the last column. Past the
    last row, zero by TMA, and by pointer zero if EVEN, which says that no tile passes the last column, else row 0, for
    results that are not stored: a mask over both would stop cp.async.
    """
    if BY_TMA:
        return source.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        if EVEN:
            index = (r.to(tl.int64) * stride)[:, None] + c[None, :]
            return tl.load(source + index, mask=(r < num_rows)[:, None], other=0.0)
        else:
            index = (tl.where(r < num_rows, r, 0).to(tl.int64) * stride)[:, None] + c[None, :]
            return tl.load(source + index, mask=(c < num_columns)[None, :], other=0.0)


@triton.jit
def store_tile(
    to, value, row, column, num_rows, num_columns, stride,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """`value` [ROWS, COLUMNS], rounded to ELEMENT, to [num_rows, num_columns] from (row, column) on."""
    if BY_TMA:
        to.store([row, column], value.to(ELEMENT))
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        index = (r.to(tl.int64) * stride)[:, None] + c[None, :]
        tl.store(to + index, value.to(ELEMENT), mask=(r < num_rows)[:, None] & (c < num_columns)[None, :])


@triton.jit
def silu_times(gate, up, ELEMENT: tl.constexpr):
    """Float32 sums of gate and up -> silu(gate) * up, float32; gate, up and silu are rounded to ELEMENT, as they are if
    each is stored: `ReferenceKernels.silu_and_mul`, except for exp.
    """
    gate = gate.to(ELEMENT).to(tl.float32)
    up = up.to(ELEMENT).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(ELEMENT).to(tl.float32)
    return silu * up
