"""Matmuls on a GPU: rows do not depend on other rows.

One output element is one chain of sums over K in steps of the matrix instruction, in ascending order, in float32
accumulators that stay in registers: no split of K, so the chain depends on neither tile sizes nor grid, and tiles may
depend on the number of rows. scripts/gpu_probe.py checks on a GPU that the bits of wgmma do not depend on its N.

x [M, K] and weight [N, K], K contiguous in both, of one dtype: float16, bfloat16 or float32 -> out [M, N].
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def _tile_indices(tile, num_m, num_n, GROUP: tl.constexpr):
    """Row and column of a tile, in groups of GROUP row tiles for reuse of L2; the order changes no bits."""
    per_group = GROUP * num_n
    first = (tile // per_group) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    return first + (tile % per_group) % height, (tile % per_group) // height


@triton.jit
def _columns(weight, bias, n, N, k, stride_weight, BIAS: tl.constexpr):
    """Addresses of rows `n` of the weight, and their biases or zeros."""
    index = (tl.where(n < N, n, 0).to(tl.int64) * stride_weight)[:, None] + k[None, :]
    if BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        added = tl.zeros(n.shape, tl.float32)
    return weight + index, added


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, bias, out, M, N, K, stride_x, stride_weight, stride_out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Persistent. The bias is added to the sum in float32, before it is rounded."""
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = _tile_indices(tile, num_m, num_n, GROUP)
        m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
        rows = x + (tl.where(m < M, m, 0).to(tl.int64) * stride_x)[:, None] + k[None, :]
        columns, added = _columns(weight, bias, n, N, k, stride_weight, BIAS)
        sums = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK):
            is_there = (k < K - start)[None, :]
            a = tl.load(rows + start, mask=is_there, other=0.0)
            b = tl.load(columns + start, mask=is_there, other=0.0)
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        if BIAS:
            sums += added[None, :]
        index = (m.to(tl.int64) * stride_out)[:, None] + n[None, :]
        tl.store(out + index, sums.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def gated_linear(
    x, weight, bias, up_weight, up_bias, out, M, N, K, stride_x, stride_weight, stride_out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`weight` of the gate and `up_weight`, [N, K] each -> out [M, N] = silu(gate) * up. Gate, up and silu are rounded
    to the dtype: `ReferenceKernels.gated_linear`, except for the chain of sums and exp.
    """
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = _tile_indices(tile, num_m, num_n, GROUP)
        m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
        rows = x + (tl.where(m < M, m, 0).to(tl.int64) * stride_x)[:, None] + k[None, :]
        gates, gate_added = _columns(weight, bias, n, N, k, stride_weight, BIAS)
        ups, up_added = _columns(up_weight, up_bias, n, N, k, stride_weight, BIAS)
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK):
            is_there = (k < K - start)[None, :]
            a = tl.load(rows + start, mask=is_there, other=0.0)
            b = tl.load(gates + start, mask=is_there, other=0.0)
            c = tl.load(ups + start, mask=is_there, other=0.0)
            gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
            up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
        if BIAS:
            gate += gate_added[None, :]
            up += up_added[None, :]
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        index = (m.to(tl.int64) * stride_out)[:, None] + n[None, :]
        tl.store(out + index, (silu * up).to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
