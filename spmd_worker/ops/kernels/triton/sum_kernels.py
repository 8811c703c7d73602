"""Sums over ranks on GPUs that can read each other's memory: each number is summed in one order, in float32, and
rounded once, independent of the rank that does it and of the size of the sum.

The order is that of the ranks; BY_TREE, a binary tree over them, ((0 + 1) + (2 + 3)) + ..., which continues that over
leaves (`ranks/leaves.py`). `parts`: int64 [RANKS], addresses of the ranks' parts, which have one layout: the dtype of
`out`, or float32 BY_TREE.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.norm_kernels import store_normed

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK = 1024
"""Numbers of a program: enough for loads of 16 bytes per thread."""
MAX_TREE = 64
"""Most ranks of a tree: powers of two."""


@triton.jit
def _of_rank(parts, rank: tl.constexpr, at, inside, PART: tl.constexpr):
    part = tl.load(parts + rank).to(tl.pointer_type(PART))
    return tl.load(part + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _of_two(parts, rank: tl.constexpr, at, inside):
    return _of_rank(parts, rank, at, inside, tl.float32) + _of_rank(parts, rank + 1, at, inside, tl.float32)


@triton.jit
def _of_four(parts, rank: tl.constexpr, at, inside):
    return _of_two(parts, rank, at, inside) + _of_two(parts, rank + 2, at, inside)


@triton.jit
def _of_eight(parts, rank: tl.constexpr, at, inside):
    return _of_four(parts, rank, at, inside) + _of_four(parts, rank + 4, at, inside)


@triton.jit
def _of_sixteen(parts, rank: tl.constexpr, at, inside):
    return _of_eight(parts, rank, at, inside) + _of_eight(parts, rank + 8, at, inside)


@triton.jit
def _of_tree(parts, at, inside, RANKS: tl.constexpr):
    if RANKS == 2:
        return _of_two(parts, 0, at, inside)
    elif RANKS == 4:
        return _of_four(parts, 0, at, inside)
    elif RANKS == 8:
        return _of_eight(parts, 0, at, inside)
    elif RANKS == 16:
        return _of_sixteen(parts, 0, at, inside)
    elif RANKS == 32:
        return _of_sixteen(parts, 0, at, inside) + _of_sixteen(parts, 16, at, inside)
    else:
        tl.static_assert(RANKS == 64)
        left = _of_sixteen(parts, 0, at, inside) + _of_sixteen(parts, 16, at, inside)
        return left + (_of_sixteen(parts, 32, at, inside) + _of_sixteen(parts, 48, at, inside))


@triton.jit
def _total(parts, at, inside, PART: tl.constexpr, RANKS: tl.constexpr, BY_TREE: tl.constexpr, BLOCK: tl.constexpr):
    if BY_TREE:
        return _of_tree(parts, at, inside, RANKS)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            total += _of_rank(parts, rank, at, inside, PART)
        return total


@triton.jit
def add_parts(parts, out, first, N, RANKS: tl.constexpr, BLOCK: tl.constexpr, BY_TREE: tl.constexpr = False):
    """Numbers [first, first + N) of the parts -> out [N], which may be in a part. One program per block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    total = _total(parts, first + at, inside, out.dtype.element_ty, RANKS, BY_TREE, BLOCK)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_and_norm(
    parts, residual, weight, out, first, H, eps, RANKS: tl.constexpr, BH: tl.constexpr, BY_TREE: tl.constexpr = False
):  # fmt: skip
    """Rows [T, H] of the parts from number `first` on, plus `residual` [T, H], which becomes the sum -> its norm: the
    bits of `add_parts` followed by `row_kernels.add_rms_norm`. One program per row.
    """
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    inside = h < H
    total = _total(parts, first + row + h, inside, out.dtype.element_ty, RANKS, BY_TREE, BH)
    value = total.to(out.dtype.element_ty).to(tl.float32)
    value += tl.load(residual + row + h, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(residual + row + h, rounded, mask=inside)
    store_normed(rounded.to(tl.float32), weight, out + row, h, inside, H, eps)
