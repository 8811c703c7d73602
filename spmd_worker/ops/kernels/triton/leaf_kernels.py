"""Matmuls whose inputs are summed in leaves (`ranks/leaves.py`): the same bits for any number of ranks, and of rows.

A leaf's sum is one float32 chain in ascending K, as in matmul_kernels.py, from zero. Sums of leaves are added by a
binary tree of neighbours, ((0 + 1) + (2 + 3)) + ..., as a binary counter adds: the sum of leaf i is added to those of
levels 0, 1, ... as long as i has ones there, and is kept at the level of its first zero. So levels, the logarithm of
the number of leaves, are kept besides the sum that grows. The two kernels differ in where: all in registers, or all but
the first in scratch memory. Neither that nor tiles change a bit.

x [M, K] and weight [N, K] as in matmul_kernels.py -> out [M, N], of ELEMENT: their dtype, or float32. Leaf i begins at
UNIT * (i * base + min(i, longer)): the first `longer` leaves have a unit more than `base`. LEAVES, 1 << LEVELS of them,
end at K. The bias is added to the first leaf's sum. EVEN: BK divides each leaf, so that no step passes its end; else
both operands are zero past it, and zeros change no sum.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.matmul_kernels import biases_of
from spmd_worker.ops.kernels.triton.tile_kernels import load_tile, store_tile, tile_indices


@triton.jit
def _leaf_start(leaf, base, longer, UNIT: tl.constexpr):
    return UNIT * (leaf * base + tl.minimum(leaf, longer))


@triton.jit
def _kept(total, leaf, level_0, level_1, level_2, LEVELS: tl.constexpr):
    """The levels with the sum of a leaf that is not the last."""
    if leaf % 2 == 0:
        level_0 = total
    elif LEVELS > 1:
        total = level_0 + total
        if leaf % 4 == 1:
            level_1 = total
        elif LEVELS > 2:
            level_2 = level_1 + total
    return level_0, level_1, level_2


@triton.jit(do_not_specialize=["M", "base", "longer"])
def linear_of_leaves(
    x, weight, bias, out, M, N, K, base, longer, stride_x, stride_weight, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr, X_BY_TMA: tl.constexpr,
    WEIGHT_BY_TMA: tl.constexpr, OUT_BY_TMA: tl.constexpr,
):  # fmt: skip
    """Persistent, EVEN: 1 to 3 levels, in registers. One loop over K, whose loads do not stop at a leaf's end."""
    tl.static_assert(EVEN and LEVELS >= 1 and LEVELS <= 3)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    last_m, last_n = tl.maximum(M - BM, 0), tl.maximum(N - BN, 0)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        m, n = tl.minimum(tile_m * BM, last_m), tl.minimum(tile_n * BN, last_n)
        sums = tl.zeros([BM, BN], tl.float32)
        level_0 = tl.zeros([BM, BN], tl.float32)
        level_1, level_2 = level_0, level_0
        leaf = 0
        end = _leaf_start(1, base, longer, UNIT)
        for k in tl.range(0, K, BK):
            if k == end:
                if BIAS:
                    sums = tl.where(leaf == 0, sums + biases_of(bias, n, N, BN), sums)
                level_0, level_1, level_2 = _kept(sums, leaf, level_0, level_1, level_2, LEVELS)
                sums = tl.zeros([BM, BN], tl.float32)
                leaf += 1
                end = _leaf_start(leaf + 1, base, longer, UNIT)
            a = load_tile(x, m, k, M, K, stride_x, BM, BK, X_BY_TMA, EVEN)
            b = load_tile(weight, n, k, N, K, stride_weight, BN, BK, WEIGHT_BY_TMA, EVEN)
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        sums = level_0 + sums
        if LEVELS > 1:
            sums = level_1 + sums
        if LEVELS > 2:
            sums = level_2 + sums
        store_tile(out, sums, m, n, M, N, stride_out, ELEMENT, BM, BN, OUT_BY_TMA)


@triton.jit
def _leaf_sum(
    x, weight, m, n, leaf, M, N, base, longer, stride_x, stride_weight, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, X_BY_TMA: tl.constexpr, WEIGHT_BY_TMA: tl.constexpr,
):  # fmt: skip
    end = _leaf_start(leaf + 1, base, longer, UNIT)
    sums = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(_leaf_start(leaf, base, longer, UNIT), end, BK):
        a = load_tile(x, m, k, M, end, stride_x, BM, BK, X_BY_TMA, EVEN)
        b = load_tile(weight, n, k, N, end, stride_weight, BN, BK, WEIGHT_BY_TMA, EVEN)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["M", "base", "longer"])
def linear_of_leaf_pairs(
    x, weight, bias, out, scratch, M, N, K, base, longer, stride_x, stride_weight, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr, X_BY_TMA: tl.constexpr,
    WEIGHT_BY_TMA: tl.constexpr, OUT_BY_TMA: tl.constexpr,
):  # fmt: skip
    """Persistent, of one level or more: the first is in registers, the others in `scratch`, float32 [programs,
    LEVELS - 1, BM, BN]. A loop over K for each leaf.
    """
    tl.static_assert(LEVELS >= 1)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    last_m, last_n = tl.maximum(M - BM, 0), tl.maximum(N - BN, 0)
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    own = scratch + tl.program_id(0).to(tl.int64) * ((LEVELS - 1) * BM * BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        m, n = tl.minimum(tile_m * BM, last_m), tl.minimum(tile_n * BN, last_n)
        for pair in tl.range(0, 1 << (LEVELS - 1)):
            left = _leaf_sum(
                x, weight, m, n, 2 * pair, M, N, base, longer, stride_x, stride_weight, BM, BN, BK, EVEN, UNIT,
                X_BY_TMA, WEIGHT_BY_TMA,
            )  # fmt: skip
            if BIAS:
                left = tl.where(pair == 0, left + biases_of(bias, n, N, BN), left)
            right = _leaf_sum(
                x, weight, m, n, 2 * pair + 1, M, N, base, longer, stride_x, stride_weight, BM, BN, BK, EVEN, UNIT,
                X_BY_TMA, WEIGHT_BY_TMA,
            )  # fmt: skip
            sums = left + right
            level = 0
            for lower in tl.static_range(LEVELS - 1):
                # Bits 0 to `lower` are set.
                if (pair + 1) % (2 << lower) == 0:
                    sums = tl.load(own + lower * (BM * BN) + inside) + sums
                    level = lower + 1
            if level < LEVELS - 1:
                tl.store(own + level * (BM * BN) + inside, sums)
                # Another thread may read it.
                tl.debug_barrier()
            else:
                store_tile(out, sums, m, n, M, N, stride_out, ELEMENT, BM, BN, OUT_BY_TMA)
