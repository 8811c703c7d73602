"""Matmuls of each head's rows with the head's own weight, on a GPU, for latent attention
(https://arxiv.org/abs/2405.04434).

One output is one chain of sums over K in steps of the matrix instruction, in ascending order, as in matmul_kernels.py:
neither rows of a tile nor the grid change it.

x [T, HEADS, K], weight [HEADS, N, K] -> out [T, HEADS, N], of one dtype: float16, bfloat16 or float32. K is contiguous
in x, N in out; weights of heads and their rows may be strided.
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["T"])
def linear_of_heads(
    x, weight, out, T, N, K, x_token, x_head, weight_head, weight_row, weight_column, out_token, out_head,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows, tile of outputs and head. Strides are in elements."""
    head = tl.program_id(2).to(tl.int64)
    t, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rows = x + head * x_head + (tl.where(t < T, t, 0).to(tl.int64) * x_token)[:, None]
    columns = weight + head * weight_head + (tl.where(n < N, n, 0).to(tl.int64) * weight_row)[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        b = tl.load(columns + (k * weight_column)[:, None], mask=(k < K)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    to = out + head * out_head + (t.to(tl.int64) * out_token)[:, None] + n[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(t < T)[:, None] & (n < N)[None, :])
