"""Sums over ranks on GPUs that can read each other's memory: each number is summed in the order of the ranks, in
float32, and rounded once, independent of the rank that does it and of the size of the sum.

`parts`: int64 [RANKS], addresses of the ranks' parts, which have one layout and the dtype of `out`.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.norm_kernels import store_normed

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK = 1024
"""Numbers of a program: enough for loads of 16 bytes per thread."""


@triton.jit
def add_parts(parts, out, first, N, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [first, first + N) of the parts -> out [N], which may be in a part. One program per block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        part = tl.load(parts + rank).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(part + first + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_and_norm(
    parts, residual, weight, out, first, H, eps, RANKS: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Rows [T, H] of the parts from number `first` on, plus `residual` [T, H], which becomes the sum -> its norm: the
    bits of `add_parts` followed by `row_kernels.add_rms_norm`. One program per row.
    """
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    inside = h < H
    total = tl.zeros((BH,), tl.float32)
    for rank in tl.static_range(RANKS):
        part = tl.load(parts + rank).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(part + first + row + h, mask=inside, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty).to(tl.float32)
    value += tl.load(residual + row + h, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(residual + row + h, rounded, mask=inside)
    store_normed(rounded.to(tl.float32), weight, out + row, h, inside, H, eps)
