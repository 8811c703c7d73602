"""The recurrence of Mamba2 over a step's sequences on a GPU. One program computes some rows of the state of one head of
one sequence, token after token; a prompt and a decoding sequence are computed by the same kernel, so a number's bits do
not depend on where its prompt is cut.

H, P: heads and their size; G: groups; N: size of a state; BP: rows of a tile; BN: N up to a power of two.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.scan_delta_kernels import softplus

BP = 32
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}


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
):
    """mixed [T, H P + 2 G N] and dt [T, H] in rows of their strides, states [slots, H, P, N] -> out [T, H P]:
    `RecurrentKernels.scan_mamba`. One program for each sequence, head and BP rows of its state.
    """
    segment, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        p, n = tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN)
        is_row, is_column = p < P, n < N
        inside = is_row[:, None] & is_column[None, :]
        place = states + ((slot * H + head) * P + p)[:, None] * N + n[None, :]
        state = tl.load(place, mask=inside & (tl.load(firsts + segment) > 0), other=0.0)
        rate, factor = tl.exp(tl.load(a_log + head)), tl.load(skip + head)
        bias, group = tl.load(dt_bias + head), head * G // H
        for token in range(stop - start):
            row = start.to(tl.int64) + token
            inputs = mixed + row * stride_mixed
            x = tl.load(inputs + head * P + p, mask=is_row, other=0.0).to(tl.float32)
            b = tl.load(inputs + H * P + group * N + n, mask=is_column, other=0.0).to(tl.float32)
            c = tl.load(inputs + H * P + (G + group) * N + n, mask=is_column, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt + row * stride_dt + head).to(tl.float32) + bias)
            # By comparisons that leave NaN.
            step = tl.where(step < least, least, step)
            step = tl.where(step > most, most, step)
            state = state * tl.exp(-step * rate) + (step * x)[:, None] * b[None, :]
            result = tl.sum(state * c[None, :], axis=1) + factor * x
            tl.store(out + row * (H * P) + head * P + p, result.to(out.dtype.element_ty), mask=is_row)
        tl.store(place, state, mask=inside)
