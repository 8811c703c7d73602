"""The gated delta rule over a step's sequences on a GPU, and the gated norm behind it. One program computes some
columns of the state of one head of one sequence, token after token; a prompt and a decoding sequence are computed by
the same kernel, so a number's bits do not depend on where its prompt is cut.

Sums over channels are binary trees whose pairs are in the source (`upper_onto_lower`, `tree_sum`): columns of a tile
and warps are free. The next tokens are read, and their vectors brought to length 1, while a token changes the state.

DK, DV: sizes of keys and values; HK, HV: key and value heads; BK: DK up to a power of two; BV: columns of a tile.
"""

import triton
import triton.language as tl

BV = 8
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}
SCAN = {"enable_fp_fusion": False, "num_warps": 1}
"""A warp waits for no other one, twice a sum."""


@triton.jit
def upper_onto_lower(x):
    """[N, M] -> [M], N a power of two: the upper half of the rows onto the lower, and again. Each `tl.sum` is over two
    numbers, one addition, which commutes: no layout changes a bit.
    """
    for _ in tl.static_range(0, 10):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def tree_sum(x):
    """[M, N] -> [M], N a power of two: columns 2i and 2i + 1, twice, then the upper half of what is left onto the
    lower, and again. See `upper_onto_lower`.
    """
    for _ in tl.static_range(0, 2):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    for _ in tl.static_range(0, 10):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


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
    x = x.to(tl.float32)
    length = tree_sum(tl.reshape(x * x, [1, x.shape[0]]))
    return x * tl.broadcast_to(scale * tl.rsqrt(length + 1e-6), [x.shape[0]])


@triton.jit
def _read(
    mixed, a, b, row, is_there, key_head, head, channels, columns, is_channel, is_column, HK, stride_mixed, stride_a,
    stride_b, DK: tl.constexpr, DV: tl.constexpr, IS_PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Query, key, value, and the projections of decay and beta of one token; zeros if it is not there."""
    keys = mixed + row * stride_mixed + key_head * DK + channels
    query = tl.load(keys, mask=is_channel & is_there, other=0.0)
    key = tl.load(keys + HK * DK, mask=is_channel & is_there, other=0.0)
    values = mixed + row * stride_mixed + 2 * HK * DK + head * DV + columns
    value = tl.load(values, mask=is_column & is_there, other=0.0)
    if IS_PER_CHANNEL:
        step = tl.load(a + row * stride_a + head * DK + channels, mask=is_channel & is_there, other=0.0)
    else:
        step = tl.load(a + row * stride_a + head, mask=is_there, other=0.0)
    return query, key, value, step, tl.load(b + row * stride_b + head, mask=is_there, other=0.0)


@triton.jit
def _prepared(
    query, key, value, step, gate, rate, bias, query_scale, beta_scale, decay_bound, IS_BOUNDED: tl.constexpr
):  # fmt: skip
    """A token's query and key with their lengths, value, decay and beta, float32."""
    beta = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32) * beta_scale
    step = step.to(tl.float32) + bias
    if IS_BOUNDED:
        decay = tl.exp(decay_bound / (1.0 + tl.exp(-rate * step)))
    else:
        decay = tl.exp(-rate * softplus(step))
    return _unit(query, query_scale), _unit(key, 1.0), value.to(tl.float32), decay, beta


@triton.jit
def _advanced(state, query, key, value, decay, beta, IS_PER_CHANNEL: tl.constexpr):
    """The state after a token, and its result."""
    if IS_PER_CHANNEL:
        state = state * decay[:, None]
    else:
        state = state * decay
    change = (value - upper_onto_lower(state * key[:, None])) * beta
    state = state + key[:, None] * change[None, :]
    return state, upper_onto_lower(state * query[:, None])


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
    kept,
    out,
    HK,
    HV,
    stride_mixed,
    stride_a,
    stride_b,
    beta_scale,
    query_scale,
    decay_bound,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """mixed [T, 2 HK DK + HV DV], a [T, HV] or [T, HV DK], b [T, HV], in rows of their strides; states [slots, HV, DK,
    DV] -> out [T, HV, DV]: `RecurrentKernels.scan_delta`. One program for each BV columns, value head and sequence.
    """
    head, segment = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        channels, columns = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
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
        row, count = start.to(tl.int64), stop - start
        if HAS_KEPT:
            num_kept = tl.load(kept + segment)
        query, key, value, step, gate = _read(
            mixed, a, b, row, count > 0, key_head, head, channels, columns, is_channel, is_column, HK, stride_mixed,
            stride_a, stride_b, DK, DV, IS_PER_CHANNEL,
        )  # fmt: skip
        now_query, now_key, now_value, decay, beta = _prepared(
            query, key, value, step, gate, rate, bias, query_scale, beta_scale, decay_bound, IS_BOUNDED
        )
        query, key, value, step, gate = _read(
            mixed, a, b, row + 1, count > 1, key_head, head, channels, columns, is_channel, is_column, HK, stride_mixed,
            stride_a, stride_b, DK, DV, IS_PER_CHANNEL,
        )  # fmt: skip
        for token in range(count - 1):
            after = _read(
                mixed, a, b, row + token + 2, token + 2 < count, key_head, head, channels, columns, is_channel,
                is_column, HK, stride_mixed, stride_a, stride_b, DK, DV, IS_PER_CHANNEL,
            )  # fmt: skip
            following = _prepared(
                query, key, value, step, gate, rate, bias, query_scale, beta_scale, decay_bound, IS_BOUNDED
            )
            state, result = _advanced(state, now_query, now_key, now_value, decay, beta, IS_PER_CHANNEL)
            to = out + ((row + token) * HV + head) * DV + columns
            tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
            if HAS_KEPT:  # noqa: SIM102  # the outer one is compiled away
                if token + 1 == num_kept:
                    tl.store(place, state, mask=inside)
            now_query, now_key, now_value, decay, beta = following
            query, key, value, step, gate = after
        state, result = _advanced(state, now_query, now_key, now_value, decay, beta, IS_PER_CHANNEL)
        to = out + ((row + count - 1) * HV + head) * DV + columns
        tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
        if HAS_KEPT:
            inside = inside & (count == num_kept)
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
