"""FP8 matmuls on a GPU: activations quantised by row or by groups of 128, sums in a fixed order.

x [M, K] and weight [N, K] in e4m3 -> out [M, N]. A scale belongs to a row of each, or to each group of 128 numbers
along K of a row.

Hopper's matrix unit adds products of e4m3 with fewer bits than float32 has (https://arxiv.org/abs/2412.19437, section
3.3.2), so how long it adds by itself fixes bits. Here: CHAIN numbers along K from zero in the matrix unit, or 128 if
groups have scales, then one float32 addition to the sum, ascending. CHAIN and STEP are so part of the definition, and a
row's bits depend on the row alone: tiles, warps, stages, the number of steps in an iteration, TMA or pointers and the
grid change none, as long as all tiles take the same instruction: wgmma on sm_90, which needs 64 rows, of x or swapped
of the weight. mma.sync of e4m3 is one of float16 there, with other bits.

A chain's sum is carried through the loop and leaves the unit under an `if`: so the compiler waits for the step before
the last one only, and the unit is at work while operands of the next step arrive. Scales of groups need each step's
own sum, and so wait for each step.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.norm_kernels import store_normed
from spmd_worker.ops.kernels.triton.tile_kernels import load_tile, silu_times, store_tile, tile_indices

LAUNCH = {"enable_fp_fusion": False}
STEP = tl.constexpr(128)
OF_ROWS, OF_GROUPS, OF_BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of scales."""
_LARGEST = tl.constexpr(448.0)
_PER_SCALE = tl.constexpr(1.0 / 448.0)
_USUAL_LEAST, _USUAL_MOST = tl.constexpr(1e-25), tl.constexpr(1e25)


@triton.jit
def _scales_of(largest):
    """Scales of these maximum magnitudes; 1 of zero."""
    scale = largest * _PER_SCALE
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _quotients(value, scale, smallest, largest):
    """value / scale by IEEE division, within what e4m3 holds; NaN stays NaN. `scale` broadcasts to `value`; scales are
    from `smallest` to `largest`.

    The product with the rounded reciprocal is within one ulp, and corrected once it is the quotient
    (https://doi.org/10.1147/rd.341.0111), in fewer instructions than a division of each value, unless numbers near the
    ends of float32's range are lost. What may differ below 2^-10 is zero as e4m3.
    """
    if (smallest > _USUAL_LEAST) & (largest < _USUAL_MOST):
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        of_each, scale_of_each = tl.zeros_like(value) + inverse, tl.zeros_like(value) + scale
        quotient = value * of_each
        quotient = tl.fma(tl.fma(-quotient, scale_of_each, value), of_each, quotient)
        # The correction loses the sign of zero.
        quotient = tl.where(value == 0.0, value, quotient)
    else:
        quotient = tl.div_rn(value, tl.zeros_like(value) + scale)
    lowest = tl.full(quotient.shape, -_LARGEST, tl.float32)
    quotient = tl.maximum(quotient, lowest, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(quotient, -lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantise_rows(x, out, scales, K, stride_x, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """x [M, K] -> out [M, K], contiguous, and float32 scales [M]; a program a row. IS_WHOLE: BLOCK holds a row, which
    is read once. A maximum has no order, so BLOCK and warps change no bits.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if IS_WHOLE:
        value = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
        scale = _scales_of(tl.max(tl.abs(value), 0))
        quotient = _quotients(value, scale, scale, scale)
        tl.store(out + row * K + k, quotient.to(out.dtype.element_ty), mask=k < K)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, K, BLOCK):
            value = tl.load(x + row * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        scale = _scales_of(tl.max(largest, 0))
        for start in tl.range(0, K, BLOCK):
            value = tl.load(x + row * stride_x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            quotient = _quotients(value, scale, scale, scale)
            tl.store(out + row * K + start + k, quotient.to(out.dtype.element_ty), mask=start + k < K)
    tl.store(scales + row, scale)


@triton.jit
def quantise_groups(x, out, scales, K, stride_x, BLOCK: tl.constexpr):
    """x [M, K] -> out [M, K], contiguous, and float32 scales [M, K / 128]; a program a row and BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    groups: tl.constexpr = BLOCK // STEP
    k, group = start + tl.arange(0, BLOCK), start // STEP + tl.arange(0, groups)
    value = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    value = tl.reshape(value, [groups, STEP])
    scale = _scales_of(tl.max(tl.abs(value), 1))
    quotient = _quotients(value, scale[:, None], tl.min(scale, 0), tl.max(scale, 0))
    tl.store(out + row * K + k, tl.reshape(quotient, [BLOCK]).to(out.dtype.element_ty), mask=k < K)
    tl.store(scales + row * (K // STEP) + group, scale, mask=group < K // STEP)


@triton.jit
def _store_quantised(
    value, numbers, scales, row, K, BLOCK: tl.constexpr, IS_GROUPED: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Float32 `value` [BLOCK], a row of K and zeros, as `quantise_rows` or `quantise_groups` stores it."""
    # As many together as of the row itself, else the compiler would add up its squares in another order.
    k = tl.max_contiguous(tl.arange(0, BLOCK), TOGETHER)
    if IS_GROUPED:
        groups: tl.constexpr = BLOCK // STEP
        group = tl.arange(0, groups)
        value = tl.reshape(value, [groups, STEP])
        scale = _scales_of(tl.max(tl.abs(value), 1))
        quotient = _quotients(value, scale[:, None], tl.min(scale, 0), tl.max(scale, 0))
        quotient = tl.reshape(quotient, [BLOCK])
        tl.store(scales + row * (K // STEP) + group, scale, mask=group < K // STEP)
    else:
        scale = _scales_of(tl.max(tl.abs(value), 0))
        quotient = _quotients(value, scale, scale, scale)
        tl.store(scales + row, scale)
    tl.store(numbers + row * K + k, quotient.to(numbers.dtype.element_ty), mask=k < K)


@triton.jit
def add_rms_norm(
    x, residual, weight, out, numbers, scales, H, eps, BH: tl.constexpr, IS_GROUPED: tl.constexpr
):  # fmt: skip
    """`row_kernels.add_rms_norm`, whose rows are quantised too, with the bits of a launch of their own."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    inside = h < H
    value = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * H + h, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(residual + row * H + h, rounded, mask=inside)
    stored = store_normed(rounded.to(tl.float32), weight, out + row * H, h, inside, H, eps)
    together: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    _store_quantised(stored.to(tl.float32), numbers, scales, row, H, BH, IS_GROUPED, together)


@triton.jit
def silu_and_mul(gate_up, out, numbers, scales, N, stride, BN: tl.constexpr, IS_GROUPED: tl.constexpr):
    """`row_kernels.silu_and_mul`, whose rows are quantised too; a program a row."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    inside = n < N
    gate = tl.load(gate_up + row * stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + n, mask=inside, other=0.0).to(tl.float32)
    element: tl.constexpr = out.dtype.element_ty
    stored = silu_times(gate, up, element).to(element)
    tl.store(out + row * N + n, stored, mask=inside)
    _store_quantised(stored.to(tl.float32), numbers, scales, row, N, BN, IS_GROUPED, BN)


@triton.jit
def _scales_at(scales, rows, num_rows, stride, group, num_groups):
    """Float32 scales of `rows` in one group, zero past the last row and the last group."""
    inside = (rows < num_rows) & (group < num_groups)
    return tl.load(scales + rows.to(tl.int64) * stride + group, mask=inside, other=0.0)


@triton.jit
def _products(a, b, part, SWAPPED: tl.constexpr):
    """`part` and products of a [BM, inputs] and b [BN, inputs]: [BM, BN], or SWAPPED [BN, BM]."""
    if SWAPPED:
        return tl.dot(b, tl.trans(a), part)
    else:
        return tl.dot(a, tl.trans(b), part)


@triton.jit
def _added(
    sums, part, x_scales, scales, row, column, M, N, num_groups, stride_scales, group,
    BM: tl.constexpr, BN: tl.constexpr, SCALES: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """The sum with one step's part, scaled: one rounding."""
    # Steps go on past the last group if STEPS does not divide their number: what lies there is another row's.
    of_rows = _scales_at(x_scales, row + tl.arange(0, BM), M, num_groups, group, num_groups)
    if SCALES == OF_BLOCKS:
        factors = of_rows * _scales_at(scales, column, N, stride_scales, group, num_groups)
        factors = factors[None, :] if SWAPPED else factors[:, None]
    else:
        of_columns = _scales_at(scales, column + tl.arange(0, BN), N, stride_scales, group, num_groups)
        factors = of_columns[:, None] * of_rows[None, :] if SWAPPED else of_rows[:, None] * of_columns[None, :]
    return tl.fma(part, tl.broadcast_to(factors, sums.shape), sums)


@triton.jit
def _result(
    sums, x_scales, scales, bias, row, column, M, N, stride_scales,
    BM: tl.constexpr, BN: tl.constexpr, SCALES: tl.constexpr, SWAPPED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Float32 sums -> [BM, BN], scaled, with the bias."""
    # Here, and not before the loop, where they would take registers from the sums.
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if SWAPPED:
        sums = tl.trans(sums)
    if SCALES == OF_ROWS:
        of_rows, of_columns = _scales_at(x_scales, m, M, 1, 0, 1), _scales_at(scales, n, N, stride_scales, 0, 1)
        sums = sums * of_rows[:, None] * of_columns[None, :]
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, x_scales, scales, bias, out, M, N, K, stride_x, stride_weight, stride_scales, stride_out,
    ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INPUTS: tl.constexpr, CHAIN: tl.constexpr,
    GROUP: tl.constexpr, IS_PAIRED: tl.constexpr, IS_GATED: tl.constexpr, SCALES: tl.constexpr, SWAPPED: tl.constexpr,
    FLATTEN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, X_BY_TMA: tl.constexpr, BY_TMA: tl.constexpr,
    STORES_BY_TMA: tl.constexpr,
):  # fmt: skip
    """Persistent. INPUTS of an iteration: a multiple of STEP that divides CHAIN, inputs that the matrix unit adds up
    by itself unless groups have scales. IS_PAIRED: a program has two tiles of BN columns, which share the tile of x;
    with scales of groups, one step's parts are in registers one after the other, so that two sums fit. IS_GATED, which
    is paired: the second tile is that of the up projection, N rows behind the gate's, and out [M, N] = silu(gate) * up.
    SWAPPED: rows of the weight are the matrix instruction's rows, of which it has 64 at least, so that few rows of x
    take few columns.

    `x_scales` float32 [M] or [M, K / 128], contiguous; `scales` the same of N rows at a distance of `stride_scales`.
    SCALES: OF_ROWS; OF_GROUPS of 128 inputs of a row; OF_BLOCKS, which 128 rows from a multiple of 128 on share: then
    BN and the gates' N divide and are divided by 128. EVEN: INPUTS divides K.
    """
    columns: tl.constexpr = BN * (2 if IS_PAIRED and not IS_GATED else 1)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, columns)
    num_weights = N * (2 if IS_GATED else 1)
    num_groups = K // STEP
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_indices(tile, num_m, num_n, GROUP)
        # As in matmul_kernels.py: TMA is slow past the last row. Columns stay where blocks of scales begin.
        row, column = tl.minimum(tile_m * BM, tl.maximum(M - BM, 0)), tile_n * columns
        second = column + (N if IS_GATED else BN)
        zeros = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
        sums = zeros
        if IS_PAIRED:
            second_sums = zeros
        if SCALES == OF_ROWS:
            part = zeros
            if IS_PAIRED:
                second_part = zeros
            for k in tl.range(0, K, INPUTS):
                a = load_tile(x, row, k, M, K, stride_x, BM, INPUTS, X_BY_TMA, EVEN)
                b = load_tile(weight, column, k, num_weights, K, stride_weight, BN, INPUTS, BY_TMA, EVEN)
                part = _products(a, b, part, SWAPPED)
                if IS_PAIRED:
                    b = load_tile(weight, second, k, num_weights, K, stride_weight, BN, INPUTS, BY_TMA, EVEN)
                    second_part = _products(a, b, second_part, SWAPPED)
                if (k + INPUTS) % CHAIN == 0:
                    sums, part = sums + part, zeros
                    if IS_PAIRED:
                        second_sums, second_part = second_sums + second_part, zeros
            # The last chain, if it is shorter, else zeros: the sum is no negative zero.
            sums += part
            if IS_PAIRED:
                second_sums += second_part
        else:
            for start in tl.range(0, K, INPUTS):
                for step in tl.static_range(INPUTS // STEP):
                    k = start + step * STEP
                    a = load_tile(x, row, k, M, K, stride_x, BM, STEP, X_BY_TMA)
                    b = load_tile(weight, column, k, num_weights, K, stride_weight, BN, STEP, BY_TMA)
                    sums = _added(
                        sums, _products(a, b, zeros, SWAPPED), x_scales, scales, row, column, M, num_weights,
                        num_groups, stride_scales, k // STEP, BM, BN, SCALES, SWAPPED,
                    )  # fmt: skip
                    if IS_PAIRED:
                        b = load_tile(weight, second, k, num_weights, K, stride_weight, BN, STEP, BY_TMA)
                        second_sums = _added(
                            second_sums, _products(a, b, zeros, SWAPPED), x_scales, scales, row, second, M,
                            num_weights, num_groups, stride_scales, k // STEP, BM, BN, SCALES, SWAPPED,
                        )  # fmt: skip
        result = _result(
            sums, x_scales, scales, bias, row, column, M, num_weights, stride_scales, BM, BN, SCALES, SWAPPED, BIAS
        ).to(ELEMENT)
        if IS_PAIRED:
            other = _result(
                second_sums, x_scales, scales, bias, row, second, M, num_weights, stride_scales, BM, BN, SCALES,
                SWAPPED, BIAS,
            ).to(ELEMENT)  # fmt: skip
        if IS_GATED:
            result = silu_times(result, other, ELEMENT)
        elif IS_PAIRED:
            store_tile(out, other, row, second, M, N, stride_out, ELEMENT, BM, BN, STORES_BY_TMA)
        store_tile(out, result, row, column, M, N, stride_out, ELEMENT, BM, BN, STORES_BY_TMA)
