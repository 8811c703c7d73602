"""Matmuls on a GPU: rows do not depend on other rows.

One output element is one chain of sums over K in steps of the matrix instruction, in ascending order, in float32
accumulators that stay in registers: no split of K, so the chain depends on neither tile sizes nor grid, and tiles may
depend on the number of rows. Tiles of 16 rows (mma.sync) and of 64 and more (wgmma) have the same bits on sm_90.

A tile that would pass the last row or column is moved back until it ends there: what it has in common with the tile
before is computed twice, with the same bits, and stored twice. Reads by TMA past the end of a tensor take several times
as long as others.

x [M, K] and weight [N, K], K contiguous in both, of one dtype: float16, bfloat16 or float32 -> out [M, N]. An operand
is a tensor descriptor if its `_BY_TMA` is true, else a pointer. EVEN: BK divides K.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.tile_kernels import load_tile, silu_times, store_tile, tile_indices

LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def biases_of(bias, n, N, BN: tl.constexpr):
    """Biases of columns `n` to `n` + BN, [1, BN]."""
    c = n + tl.arange(0, BN)
    return tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, rest_weight, bias, out, rest_out, M, N, K, stride_x, stride_weight, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REST: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, X_BY_TMA: tl.constexpr,
    WEIGHT_BY_TMA: tl.constexpr, OUT_BY_TMA: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Persistent. A tile has BN and REST columns beside each other, in accumulators of their own, because a block's
    sides are powers of two; REST may be 0. `rest_weight` and `rest_out` are `weight` and `out`, with boxes of REST
    columns if they are descriptors. The bias is added to the sum in float32, before it is rounded. SPECIALIZED: one
    flattened loop over tiles and K, whose loads have warps of their own.
    """
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN + REST)
    last_m, last_n = tl.maximum(M - BM, 0), tl.maximum(N - BN - REST, 0)
    for tile in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=SPECIALIZED, warp_specialize=SPECIALIZED
    ):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        m, n = tl.minimum(tile_m * BM, last_m), tl.minimum(tile_n * (BN + REST), last_n)
        sums = tl.zeros([BM, BN], tl.float32)
        if REST > 0:
            rest = tl.zeros([BM, REST], tl.float32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, m, k, M, K, stride_x, BM, BK, X_BY_TMA, EVEN)
            b = load_tile(weight, n, k, N, K, stride_weight, BN, BK, WEIGHT_BY_TMA, EVEN)
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
            if REST > 0:
                c = load_tile(rest_weight, n + BN, k, N, K, stride_weight, REST, BK, WEIGHT_BY_TMA, EVEN)
                rest = tl.dot(a, tl.trans(c), rest, input_precision="ieee")
        if BIAS:
            sums += biases_of(bias, n, N, BN)
            if REST > 0:
                rest += biases_of(bias, n + BN, N, REST)
        store_tile(out, sums, m, n, M, N, stride_out, ELEMENT, BM, BN, OUT_BY_TMA)
        if REST > 0:
            store_tile(rest_out, rest, m, n + BN, M, N, stride_out, ELEMENT, BM, REST, OUT_BY_TMA)


@triton.jit(do_not_specialize=["M"])
def gated_linear(
    x, weight, bias, up_weight, up_bias, out, M, N, K, stride_x, stride_weight, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, X_BY_TMA: tl.constexpr, WEIGHT_BY_TMA: tl.constexpr,
    OUT_BY_TMA: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """`weight` of the gate and `up_weight`, [N, K] each -> out [M, N] = silu(gate) * up. Gate, up and silu are rounded
    to the dtype: `ReferenceKernels.gated_linear`, except for the chain of sums and exp.
    """
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    last_m, last_n = tl.maximum(M - BM, 0), tl.maximum(N - BN, 0)
    for tile in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=SPECIALIZED, warp_specialize=SPECIALIZED
    ):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        m, n = tl.minimum(tile_m * BM, last_m), tl.minimum(tile_n * BN, last_n)
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, m, k, M, K, stride_x, BM, BK, X_BY_TMA, EVEN)
            b = load_tile(weight, n, k, N, K, stride_weight, BN, BK, WEIGHT_BY_TMA, EVEN)
            c = load_tile(up_weight, n, k, N, K, stride_weight, BN, BK, WEIGHT_BY_TMA, EVEN)
            gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
            up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
        if BIAS:
            gate += biases_of(bias, n, N, BN)
            up += biases_of(up_bias, n, N, BN)
        store_tile(out, silu_times(gate, up, ELEMENT), m, n, M, N, stride_out, ELEMENT, BM, BN, OUT_BY_TMA)
