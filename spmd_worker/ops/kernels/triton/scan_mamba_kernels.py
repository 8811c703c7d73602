"""The recurrences of Mamba2 and of Mamba over a step's sequences on a GPU. One program computes some rows of the state
of one head, or some channels, of one sequence, token after token; a prompt and a decoding sequence are computed by the
same kernel, so a number's bits do not depend on where its prompt is cut, nor on the rows of a tile and warps: sums are
trees in the source. The next token is read while one changes the state.

H, P: heads and their size; G: groups; N: size of a state; BP: rows of a tile; C: channels of Mamba, BC those of a tile;
BN: N up to a power of two.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.scan_delta_kernels import softplus, tree_sum

BP = 8
TILE = 512
"""Numbers of a tile of channels: as many as registers hold beside the next token."""
LAUNCH = {"enable_fp_fusion": False, "num_warps": 1}


@triton.jit
def _read(
    inputs, dt, row, is_there, head, group, p, n, is_row, is_column, H, G, stride_mixed, stride_dt, P: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """x, B, C and the projected dt of one token; zeros if it is not there."""
    own = inputs + row * stride_mixed
    x = tl.load(own + head * P + p, mask=is_row & is_there, other=0.0)
    b = tl.load(own + H * P + group * N + n, mask=is_column & is_there, other=0.0)
    c = tl.load(own + H * P + (G + group) * N + n, mask=is_column & is_there, other=0.0)
    return x, b, c, tl.load(dt + row * stride_dt + head, mask=is_there, other=0.0)


@triton.jit
def _advanced(state, x, b, c, step, rate, factor, bias, least, most):
    """The state after a token, and its result."""
    x, b, c = x.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
    step = softplus(step.to(tl.float32) + bias)
    # By comparisons that leave NaN.
    step = tl.where(step < least, least, step)
    step = tl.where(step > most, most, step)
    state = state * tl.exp(-step * rate) + (step * x)[:, None] * b[None, :]
    return state, tree_sum(state * c[None, :]) + factor * x


@triton.jit
def scan_mamba(
    mixed,
    dt,
    a_log,
    dt_bias,
    skip,
    states,
    slots,
    starts,
    firsts,
    kept,
    out,
    H,
    G,
    stride_mixed,
    stride_dt,
    least,
    most,
    P: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """mixed [T, H P + 2 G N] and dt [T, H] in rows of their strides, states [slots, H, P, N] -> out [T, H P]:
    `RecurrentKernels.scan_mamba`. One program for each BP rows of the state of a head and sequence.
    """
    head, segment = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        p, n = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BN)
        is_row, is_column = p < P, n < N
        inside = is_row[:, None] & is_column[None, :]
        place = states + ((slot * H + head) * P + p)[:, None] * N + n[None, :]
        state = tl.load(place, mask=inside & (tl.load(firsts + segment) > 0), other=0.0)
        rate, factor = tl.exp(tl.load(a_log + head)), tl.load(skip + head)
        bias, group = tl.load(dt_bias + head), head * G // H
        row, count = start.to(tl.int64), stop - start
        if HAS_KEPT:
            num_kept = tl.load(kept + segment)
        x, b, c, step = _read(
            mixed, dt, row, count > 0, head, group, p, n, is_row, is_column, H, G, stride_mixed, stride_dt, P, N
        )
        for token in range(count):
            following = _read(
                mixed, dt, row + token + 1, token + 1 < count, head, group, p, n, is_row, is_column, H, G, stride_mixed,
                stride_dt, P, N,
            )  # fmt: skip
            state, result = _advanced(state, x, b, c, step, rate, factor, bias, least, most)
            to = out + (row + token) * (H * P) + head * P + p
            tl.store(to, result.to(out.dtype.element_ty), mask=is_row)
            if HAS_KEPT:  # noqa: SIM102  # the outer one is compiled away
                if token + 1 == num_kept:
                    tl.store(place, state, mask=inside)
            x, b, c, step = following
        if HAS_KEPT == 0:
            tl.store(place, state, mask=inside)


@triton.jit
def _read_channels(
    inputs, dt, shared, row, is_there, channel, n, is_row, is_column, stride_x, stride_dt, stride_shared,
    N: tl.constexpr,
):  # fmt: skip
    """x, the projected dt, B and C of one token; zeros if it is not there."""
    x = tl.load(inputs + row * stride_x + channel, mask=is_row & is_there, other=0.0)
    step = tl.load(dt + row * stride_dt + channel, mask=is_row & is_there, other=0.0)
    b = tl.load(shared + row * stride_shared + n, mask=is_column & is_there, other=0.0)
    return x, step, b, tl.load(shared + row * stride_shared + N + n, mask=is_column & is_there, other=0.0)


@triton.jit
def _advanced_channels(state, x, step, b, c, rate, factor, bias):
    """The state after a token, and its result."""
    x, b, c = x.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
    step = softplus(step.to(tl.float32) + bias)
    state = state * tl.exp(-step[:, None] * rate) + (step * x)[:, None] * b[None, :]
    return state, tree_sum(state * c[None, :]) + factor * x


@triton.jit
def scan_mamba1(
    inputs,
    dt,
    shared,
    a_log,
    dt_bias,
    skip,
    states,
    slots,
    starts,
    firsts,
    kept,
    out,
    C,
    stride_x,
    stride_dt,
    stride_shared,
    N: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """x (`inputs`) and dt [T, C], shared [T, 2 N] in rows of their strides, states [slots, C, N] -> out [T, C]:
    `RecurrentKernels.scan_mamba1`. One program for each BC channels of a sequence.
    """
    segment = tl.program_id(1)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        channel, n = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BN)
        is_row, is_column = channel < C, n < N
        inside = is_row[:, None] & is_column[None, :]
        of_channel = channel[:, None] * N + n[None, :]
        place = states + slot * C * N + of_channel
        state = tl.load(place, mask=inside & (tl.load(firsts + segment) > 0), other=0.0)
        rate = tl.exp(tl.load(a_log + of_channel, mask=inside, other=0.0))
        factor = tl.load(skip + channel, mask=is_row, other=0.0)
        bias = tl.load(dt_bias + channel, mask=is_row, other=0.0)
        row, count = start.to(tl.int64), stop - start
        if HAS_KEPT:
            num_kept = tl.load(kept + segment)
        x, step, b, c = _read_channels(
            inputs, dt, shared, row, count > 0, channel, n, is_row, is_column, stride_x, stride_dt, stride_shared, N
        )
        for token in range(count):
            following = _read_channels(
                inputs, dt, shared, row + token + 1, token + 1 < count, channel, n, is_row, is_column, stride_x,
                stride_dt, stride_shared, N,
            )  # fmt: skip
            state, result = _advanced_channels(state, x, step, b, c, rate, factor, bias)
            tl.store(out + (row + token) * C + channel, result.to(out.dtype.element_ty), mask=is_row)
            if HAS_KEPT:  # noqa: SIM102  # the outer one is compiled away
                if token + 1 == num_kept:
                    tl.store(place, state, mask=inside)
            x, step, b, c = following
        if HAS_KEPT == 0:
            tl.store(place, state, mask=inside)
