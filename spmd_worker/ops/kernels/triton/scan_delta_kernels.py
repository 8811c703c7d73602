"""The gated delta rule over a step's sequences on a GPU, and the gated norm behind it. One program computes some
columns of the state of one head of one sequence, token after token; a prompt and a decoding sequence are computed by
the same kernel, so a number's bits do not depend on where its prompt is cut.

DK, DV: sizes of keys and values; HK, HV: key and value heads; BK: DK up to a power of two; BV: columns of a tile.
"""

import triton
import triton.language as tl

BV = 32
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + 2 artanh(y / (2 + y)) with y = e^-|x|, by the series of native/scan_delta.cpp."""
    y = tl.exp(-tl.abs(x))
    ratio = y / (2.0 + y)
    square = ratio * ratio
    series = 1.0 / 11.0 + square * (1.0 / 13.0)
    series = 1.0 / 9.0 + square * series
    series = 1.0 / 7.0 + square * series
    series = 1.0 / 5.0 + square * series
    series = 1.0 / 3.0 + square * series
    series = 1.0 + square * series
    return tl.where(x > 0, x, 0.0 * x) + 2.0 * ratio * series


@triton.jit
def _unit(x, scale):
    """The vector with length `scale`."""
    return x * (scale * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit
def scan_delta(
    mixed,
    a,
    b,
    a_log,
    dt_bias,
    states,
    slots,
    starts,
    firsts,
    out,
    HK,
    HV,
    stride_mixed,
    stride_a,
    stride_b,
    beta_scale,
    query_scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """mixed [T, 2 HK DK + HV DV], a [T, HV] or [T, HV DK], b [T, HV], in rows of their strides; states [slots, HV, DK,
    DV] -> out [T, HV, DV]: `RecurrentKernels.scan_delta`. One program for each sequence, value head and BV columns.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        channels, columns = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
        is_channel, is_column = channels < DK, columns < DV
        inside = is_channel[:, None] & is_column[None, :]
        place = states + (slot * HV + head) * DK * DV + channels[:, None] * DV + columns[None, :]
        state = tl.load(place, mask=inside & (tl.load(firsts + segment) > 0), other=0.0)
        rate = tl.exp(tl.load(a_log + head))
        key_head = head * HK // HV
        if IS_PER_CHANNEL:
            bias = tl.load(dt_bias + head * DK + channels, mask=is_channel, other=0.0)
        else:
            bias = tl.load(dt_bias + head)
        for token in range(stop - start):
            row = start.to(tl.int64) + token
            keys = mixed + row * stride_mixed + key_head * DK + channels
            query = _unit(tl.load(keys, mask=is_channel, other=0.0).to(tl.float32), query_scale)
            key = _unit(tl.load(keys + HK * DK, mask=is_channel, other=0.0).to(tl.float32), 1.0)
            values = mixed + row * stride_mixed + 2 * HK * DK + head * DV + columns
            value = tl.load(values, mask=is_column, other=0.0).to(tl.float32)
            gate = tl.load(b + row * stride_b + head)
            beta = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32) * beta_scale
            if IS_PER_CHANNEL:
                steps = tl.load(a + row * stride_a + head * DK + channels, mask=is_channel, other=0.0)
                state = state * tl.exp(-rate * softplus(steps.to(tl.float32) + bias))[:, None]
            else:
                step = tl.load(a + row * stride_a + head).to(tl.float32)
                state = state * tl.exp(-rate * softplus(step + bias))
            change = (value - tl.sum(state * key[:, None], axis=0)) * beta
            state = state + key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], axis=0).to(out.dtype.element_ty)
            tl.store(out + (row * HV + head) * DV + columns, result, mask=is_column)
        tl.store(place, state, mask=inside)


@triton.jit
def gated_norm(
    x,
    gate,
    weight,
    out,
    SIZE,
    stride_x,
    stride_gate,
    stride_weight,
    eps,
    BN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
):
    """x and gate [T, groups SIZE] in rows of their strides, weight in groups of `stride_weight` -> out [T, groups
    SIZE]: `RecurrentKernels.gated_norm`. One program for each row and group.
    """
    row, group, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BN)
    inside, place = n < SIZE, group * SIZE + n
    value = tl.load(x + row * stride_x + place, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * stride_gate + place, mask=inside, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        gates = 1.0 / (1.0 + tl.exp(-gates))
    else:
        gates = gates / (1.0 + tl.exp(-gates))
    if GATES_FIRST:
        value = value * gates
    normal = value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    factor = tl.load(weight + group * stride_weight + n, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS_ONCE == 0:
        normal = normal.to(out.dtype.element_ty).to(tl.float32)
    result = normal * factor
    if GATES_FIRST == 0:
        if ROUNDS_ONCE == 0:
            result = result.to(out.dtype.element_ty).to(tl.float32)
        result = result * gates
    tl.store(out + row * (tl.num_programs(1) * SIZE) + place, result.to(out.dtype.element_ty), mask=inside)
