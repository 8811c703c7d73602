"""Int8 matmuls on a GPU, with the sums of `ops/kernels/int8.py` and, but for silu, its rounding.

x [M, K] and weight [N, K] in int8 -> out [M, N]. Sums are int32 and exact, so neither tiles nor the number of ranks
change bits, nor whether a GPU or a CPU adds. Scales are float32: maximum magnitude of a row / 127.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.expert_kernels import expert_tile
from spmd_worker.ops.kernels.triton.tile_kernels import load_tile, silu_times, store_tile, tile_indices

LAUNCH = {"enable_fp_fusion": False}
_LARGEST = tl.constexpr(127.0)
_LEAST = tl.constexpr(1e-30)
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 x 2^23: the sum with a number below 2^22 is rounded to a whole one, ties to even."""


@triton.jit
def quantise_rows(
    x, maxima, out, scales, K, stride_x, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_MAXIMA: tl.constexpr
):  # fmt: skip
    """x [M, K] -> int8 out [M, K], contiguous, and float32 scales [M]; a program a row. HAS_MAXIMA: `maxima` float32
    [M] are the maximum magnitudes of rows of which x is a part. IS_WHOLE: BLOCK holds a row, which is read once.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if IS_WHOLE:
        value = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_MAXIMA:
        maximum = tl.load(maxima + row)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        is_broken = tl.zeros([BLOCK], tl.int32)
        if IS_WHOLE:
            largest = tl.abs(value)
            is_broken = (value != value).to(tl.int32)
        else:
            for start in tl.range(0, K, BLOCK):
                some = tl.load(x + row * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(some))
                is_broken |= (some != some).to(tl.int32)
        maximum = tl.where(tl.max(is_broken, 0) > 0, float("nan"), tl.max(largest, 0))
    is_usable = (maximum >= _LEAST) & (maximum < float("inf"))
    factor = tl.where(is_usable, tl.div_rn(tl.zeros_like(maximum) + _LARGEST, maximum), 0.0)
    if IS_WHOLE:
        number = tl.where(is_usable, (value * factor + _ROUNDS) - _ROUNDS, 0.0)
        tl.store(out + row * K + k, number.to(tl.int8), mask=k < K)
    else:
        for start in tl.range(0, K, BLOCK):
            some = tl.load(x + row * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            number = tl.where(is_usable, (some * factor + _ROUNDS) - _ROUNDS, 0.0)
            tl.store(out + row * K + start + k, number.to(tl.int8), mask=start + k < K)
    scale = tl.div_rn(maximum, tl.zeros_like(maximum) + _LARGEST)
    tl.store(scales + row, tl.where(maximum < _LEAST, 0.0, scale))


@triton.jit
def _result(sums, x_scales, scales, bias, m, n, M, N, stride_scales, BIAS: tl.constexpr):
    """Int32 sums -> float32, scaled, with the bias."""
    of_rows = tl.load(x_scales + m, mask=m < M, other=0.0)
    of_columns = tl.load(scales + n.to(tl.int64) * stride_scales, mask=n < N, other=0.0)
    result = sums.to(tl.float32) * of_rows[:, None] * of_columns[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, x_scales, scales, bias, out, M, N, K, stride_x, stride_weight, stride_scales, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    IS_GATED: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """Persistent. SUMS: out is int32, the sums. IS_GATED: rows of the up projection are N rows behind the gate's, and
    out [M, N] = silu(gate) * up. `scales` float32 at a distance of `stride_scales`.
    """
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    num_weights = N * (2 if IS_GATED else 1)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        row, column = tile_m * BM, tile_n * BN
        m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
        sums = tl.zeros([BM, BN], tl.int32)
        if IS_GATED:
            up_sums = tl.zeros([BM, BN], tl.int32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, row, k, M, K, stride_x, BM, BK, BY_TMA)
            b = load_tile(weight, column, k, num_weights, K, stride_weight, BN, BK, BY_TMA)
            sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
            if IS_GATED:
                b = load_tile(weight, column + N, k, num_weights, K, stride_weight, BN, BK, BY_TMA)
                up_sums = tl.dot(a, tl.trans(b), up_sums, out_dtype=tl.int32)
        if SUMS:
            store_tile(out, sums, row, column, M, N, stride_out, ELEMENT, BM, BN, False)
        else:
            result = _result(sums, x_scales, scales, bias, m, n, M, num_weights, stride_scales, BIAS)
            if IS_GATED:
                up = _result(up_sums, x_scales, scales, bias, m, n + N, M, num_weights, stride_scales, BIAS)
                result = silu_times(result, up, ELEMENT)
            store_tile(out, result, row, column, M, N, stride_out, ELEMENT, BM, BN, False)


@triton.jit
def expert_linear(
    x, x_scales, base, weights, biases, out, order, tiles, num_tiles, N, K, row_bytes,
    CHOSEN: tl.constexpr, ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, GATHERS: tl.constexpr, BY_SLOT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`expert_kernels.expert_linear` of int8. `weights` int64 [own] are addresses of packed weights [N, row_bytes], a
    row of K numbers and a float32 scale (`byte_rows.py`), `biases` of ELEMENT [N], both in bytes from the pointer
    `base` on, multiples of 16: an address alone would tell the compiler nothing of alignment. x is int8 and `x_scales`
    float32, of tokens (or by slot, with CHOSEN = 1) if it GATHERS, else by place; outputs are BY_SLOT or by place.
    """
    num_n, num_m = tl.cdiv(N, BN), tl.load(num_tiles)
    for work in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, first, places, tile_n = expert_tile(work, tiles, num_m, num_n, GROUP)
        r = tl.arange(0, BM)
        slot = tl.load(order + first + r, mask=r < places, other=0)
        source = slot // CHOSEN if GATHERS else tl.where(r < places, first + r, first)
        n = tile_n * BN + tl.arange(0, BN)
        row = tl.where(n < N, n, 0).to(tl.int64) * row_bytes
        weight = base + tl.multiple_of(tl.load(weights + expert), 16)
        sums = tl.zeros([BM, BN], tl.int32)
        for k in tl.range(0, K, BK):
            c = k + tl.arange(0, BK)
            inside = (c < K)[None, :]
            a = tl.load(x + source.to(tl.int64)[:, None] * K + c[None, :], mask=inside, other=0)
            b = tl.load(weight + row[:, None] + c[None, :], mask=inside, other=0)
            sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
        of_rows = tl.load(x_scales + source)
        of_columns = tl.load((weight + row + K).to(tl.pointer_type(tl.float32), bitcast=True))
        result = sums.to(tl.float32) * of_rows[:, None] * of_columns[None, :]
        if BIAS:
            bias = (base + tl.multiple_of(tl.load(biases + expert), 16)).to(tl.pointer_type(ELEMENT), bitcast=True)
            result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        to = out + (slot if BY_SLOT else first + r).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, result.to(ELEMENT), mask=(r < places)[:, None] & (n < N)[None, :])
