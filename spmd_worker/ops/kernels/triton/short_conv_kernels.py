"""The causal depthwise convolution of a step's sequences on a GPU. One program computes some channels of one sequence,
token after token of a tile; a number's bits depend neither on the tile nor on where its prompt is cut. A decoding
sequence has no tile: most of its rows would be empty.

T: tokens; C: channels; K: taps, of which TAPS; BT, BC: tokens and channels of a tile.
"""

import triton
import triton.language as tl

BT, BC = 32, 64
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}


@triton.jit
def _inputs(x, tail, source, start, c, C, stride_x, wanted, goes_on, TAPS: tl.constexpr):
    """Rows `source` [n] of a sequence, those before `start` from the tail, or zero if it does not go on -> [n, BC]."""
    is_new = (source >= start)[:, None]
    new = tl.load(x + source.to(tl.int64)[:, None] * stride_x + c[None, :], mask=wanted & is_new, other=0.0)
    place = (source - start + TAPS - 1)[:, None] * C + c[None, :]
    return tl.where(is_new, new, tl.load(tail + place, mask=wanted & (is_new == 0) & goes_on, other=0.0))


@triton.jit
def _finished(total, bias, HAS_SILU: tl.constexpr):
    total += bias
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def short_conv(
    x,
    weight,
    bias,
    tails,
    slots,
    starts,
    firsts,
    kept,
    out,
    C,
    stride_x,
    TAPS: tl.constexpr,
    PAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """x [T, C] in rows of `stride_x`, weight [C, TAPS], tails [slots, TAPS - 1, C] -> out [T, C]:
    `RecurrentKernels.short_conv`. One program for each sequence and BC channels. PAST: TAPS - 1 up to a power of two.
    """
    segment, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    slot = tl.load(slots + segment).to(tl.int64)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    if slot >= 0 and start < stop:
        goes_on = tl.load(firsts + segment) > 0
        inside = c < C
        tail = tails + slot * (TAPS - 1) * C
        # Adding -0.0 changes no bit.
        added = tl.full([BC], -0.0, tl.float32)
        if HAS_BIAS:
            added = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        if stop - start == 1:
            total = tl.zeros([BC], dtype=tl.float32)
            own = start.to(tl.int64)
            for tap in tl.static_range(TAPS):
                if tap == TAPS - 1:
                    value = tl.load(x + own * stride_x + c, mask=inside, other=0.0)
                else:
                    value = tl.load(tail + tap * C + c, mask=inside & goes_on, other=0.0)
                total += value.to(tl.float32) * tl.load(weight + c * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            total = _finished(total, added, HAS_SILU)
            tl.store(out + own * C + c, total.to(out.dtype.element_ty), mask=inside)
        else:
            for first in range(start, stop, BT):
                t = first + tl.arange(0, BT)
                is_token = (t < stop)[:, None] & inside[None, :]
                total = tl.zeros((BT, BC), dtype=tl.float32)
                for tap in tl.static_range(TAPS):
                    source = t - (TAPS - 1) + tap
                    value = _inputs(x, tail, source, start, c, C, stride_x, is_token, goes_on, TAPS)
                    factor = tl.load(weight + c * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
                    total += value.to(tl.float32) * factor[None, :]
                total = _finished(total, added[None, :], HAS_SILU)
                tl.store(out + t.to(tl.int64)[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=is_token)
        row = tl.arange(0, PAST)
        if HAS_KEPT:
            stop = start + tl.load(kept + segment)
        source = stop - (TAPS - 1) + row
        is_row = (row < TAPS - 1)[:, None] & inside[None, :]
        last = _inputs(x, tail, source, start, c, C, stride_x, is_row, goes_on, TAPS)
        # Other threads read rows of the tail that this one writes.
        tl.debug_barrier()
        tl.store(tail + row[:, None] * C + c[None, :], last, mask=is_row)
