"""Sparse layers on a GPU: all experts of a rank in five launches, with no number on the host that depends on routing.

count_slots    how many slots chose each expert                  a program an expert
place_slots    slots in stable order by expert, and row tiles    a program an own expert
gate_up        grouped GEMM over these tiles, then the gate      persistent
expert_linear  grouped GEMM over these tiles                     persistent
weighted_sum   a token's outputs in ascending order of ids       a program a token and BH columns

Where adapters add to the outputs of both projections (adapter_kernels.py) these are two `expert_linear`, by slot, and
between them is what `gate_up` does at last, with its bits: `row_kernels.silu_and_mul`, or `clamp_columns`.

Bits: an output element is one chain over K, in the order of `matmul_kernels.linear`, so an expert's rows have the bits
of its dense GEMM in any tile and beside any other rows. Slots are sorted by counting, without atomics.

T: tokens; C: experts of a token; S = T * C slots, slot s is choice s % C of token s // C; E: experts of the layer; own:
this rank's experts, in ascending order of ids; H: hidden size; I: intermediate size on this rank; N, K: outputs and
inputs of a GEMM.
x [T, H]; ids [T, C] of any integer type, ascending in each row; `slots` int32 [T]: a token's cache slot, negative for
padding, which no expert computes; gate_up weight [own, 2 I, H], gates before ups, or in turns if CLAMPED; down weight
[own, H, I];
Weights may be stored in MXFP4 or FP8 (STORED): numbers, and scales apart, `model_config/stored_format.py`, which
stored_kernels.py decodes into the tile that would be loaded of the dequantised weight.
`order` int32 [S]: slots by place; `tiles` int32 [most tiles, 3]: index of an own expert, first place, number of places.
One dtype: float16, bfloat16 or float32.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.stored_kernels import (
    MXFP4,
    PLAIN,
    fp8_factors,
    fp8_values,
    mxfp4_factors,
    mxfp4_values,
)
from spmd_worker.ops.kernels.triton.tile_kernels import silu_times

LAUNCH = {"enable_fp_fusion": False}
BLOCK = 1024
"""Slots that a program loads together."""


@triton.jit
def _chosen(ids, slots, s, S, CHOSEN: tl.constexpr, PADDED: tl.constexpr):
    """Expert ids of slots `s`, -1 for slots of padding tokens and beyond the last."""
    chosen = tl.load(ids + s, mask=s < S, other=-1).to(tl.int32)
    if PADDED:
        chosen = tl.where(tl.load(slots + s // CHOSEN, mask=s < S, other=-1) < 0, -1, chosen)
    return chosen


@triton.jit(do_not_specialize=["S"])
def count_slots(
    ids, slots, counts, totals, S, CHOSEN: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`counts` int32 [E] of this step, which are added to `totals` int64 [E], if given: a program reads all ids."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, S, BLOCK):
        chosen = _chosen(ids, slots, start + tl.arange(0, BLOCK), S, CHOSEN, PADDED)
        found += (chosen == expert).to(tl.int32)
    count = tl.sum(found, 0)
    tl.store(counts + expert, count)
    if totals is not None:
        tl.store(totals + expert, tl.load(totals + expert) + count)


@triton.jit(do_not_specialize=["S"])
def place_slots(
    ids, slots, counts, own, order, tiles, num_tiles, S,
    OWN: tl.constexpr, OWN_PADDED: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`own` int32 [OWN]: ids of this rank's experts, None: all -> `order`, `tiles` of at most BM places, `num_tiles`
    int32 [1]. OWN_PADDED: OWN up to a power of two.
    """
    index = tl.program_id(0)
    n = tl.arange(0, OWN_PADDED)
    ids_of = n if own is None else tl.load(own + n, mask=n < OWN, other=0)
    count_of = tl.load(counts + ids_of, mask=n < OWN, other=0)
    tiles_of = (count_of + BM - 1) // BM
    place = tl.sum(tl.where(n < index, count_of, 0), 0)
    first_tile = tl.sum(tl.where(n < index, tiles_of, 0), 0)
    count = tl.sum(tl.where(n == index, count_of, 0), 0)
    if index == 0:
        tl.store(num_tiles, tl.sum(tiles_of, 0))
    for tile in tl.range(0, (count + BM - 1) // BM):
        to = tiles + (first_tile + tile) * 3
        tl.store(to, index)
        tl.store(to + 1, place + tile * BM)
        tl.store(to + 2, tl.minimum(count - tile * BM, BM))
    expert = index if own is None else tl.load(own + index)
    for start in tl.range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        is_mine = (_chosen(ids, slots, s, S, CHOSEN, PADDED) == expert).to(tl.int32)
        # Places in ascending order of slots: a stable sort.
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, s, mask=is_mine == 1)
        place += tl.sum(is_mine, 0)


@triton.jit
def expert_tile(work, tiles, num_m, num_n, GROUP: tl.constexpr):
    """Expert, first place, places and column tile. GROUP row tiles, of one expert if it has as many, share a column
    tile of weights in L2; the order changes no bits.
    """
    per_group = GROUP * num_n
    first = (work // per_group) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    at = tiles + (first + (work % per_group) % height) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), (work % per_group) // height


@triton.jit
def _numbers(
    weight, expert, row, rows, column, columns, k, K,
    BN: tl.constexpr, BK: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of an expert's [rows, columns], from `row` and column + k on, k below K. By TMA it may reach into the
    next expert's rows, whose results are not stored, or past K, where `x` is zero.
    """
    if BY_TMA:
        return weight.load([expert * rows + row, column + k])
    else:
        n, c = row + tl.arange(0, BN), k + tl.arange(0, BK)
        at = ((expert.to(tl.int64) * rows + tl.where(n < rows, n, 0)) * columns)[:, None] + (column + c)[None, :]
        return tl.load(weight + at, mask=(c < K)[None, :], other=0)


@triton.jit
def _weights(
    weight, scales, expert, row, rows, part, k, K, ELEMENT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BY_TMA: tl.constexpr, PARTS: tl.constexpr, IN_TURNS: tl.constexpr,
    STORED: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_INPUTS: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of an expert's matrix of PARTS * rows outputs: outputs of `part` from `row` on, inputs from k on. Parts
    are one behind the other, or IN_TURNS, when a row of `weight` is an output of each.
    """
    per_byte: tl.constexpr = 2 if STORED == MXFP4 else 1
    bytes_of_step: tl.constexpr = BK // per_byte
    width, at = K // per_byte, k // per_byte
    first = part if IN_TURNS else part * rows
    stride: tl.constexpr = PARTS if IN_TURNS else 1
    if IN_TURNS:
        numbers = _numbers(weight, expert, row, rows, part * width, PARTS * width, at, width, BN, bytes_of_step, BY_TMA)
    else:
        numbers = _numbers(weight, expert, first + row, PARTS * rows, 0, width, at, width, BN, bytes_of_step, BY_TMA)
    if STORED == PLAIN:
        return numbers
    elif STORED == MXFP4:
        factors = mxfp4_factors(scales, expert, first, stride, row, rows, PARTS * rows, k, K, BN, BK)
        return mxfp4_values(numbers, factors, ELEMENT, BN, BK)
    else:
        factors = fp8_factors(
            scales, expert, first, stride, row, rows, PARTS * rows, k, K, BN, GROUP_ROWS, GROUP_INPUTS
        )
        return fp8_values(numbers, factors, ELEMENT)


@triton.jit
def _bias(bias, expert, first, step, n, size, width):
    """Biases `first` + n * `step` of an expert's `width`, float32, for n below `size`."""
    return tl.load(bias + expert * width + first + n * step, mask=n < size, other=0.0).to(tl.float32)


@triton.jit
def gate_up(
    x, weight, scales, bias, out, order, tiles, num_tiles, N, K, limit,
    CHOSEN: tl.constexpr, ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, BY_TMA: tl.constexpr,
    STORED: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_INPUTS: tl.constexpr,
):  # fmt: skip
    """x [T, K] -> out [S, N] by place: silu(gate) * up, rounded as in `ReferenceKernels.gated_linear`. If CLAMPED, as
    in `_ClampedGates`, except for exp and divisions: rows 2 i and 2 i + 1 of [2 N, K] are row i of [N, 2 K].

    Rows of `x` are gathered by pointers: sm_90 has no gather by TMA.
    """
    num_n, num_m = tl.cdiv(N, BN), tl.load(num_tiles)
    step: tl.constexpr = 2 if CLAMPED else 1
    for work in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, first, places, tile_n = expert_tile(work, tiles, num_m, num_n, GROUP)
        r = tl.arange(0, BM)
        slot = tl.load(order + first + r, mask=r < places, other=0)
        source = x + (slot // CHOSEN).to(tl.int64)[:, None] * K
        row, n = tile_n * BN, tile_n * BN + tl.arange(0, BN)
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            c = k + tl.arange(0, BK)
            a = tl.load(source + c[None, :], mask=(c < K)[None, :], other=0.0)
            gates = _weights(
                weight, scales, expert, row, N, 0, k, K, ELEMENT, BN, BK, BY_TMA, 2, CLAMPED,
                STORED, GROUP_ROWS, GROUP_INPUTS,
            )  # fmt: skip
            ups = _weights(
                weight, scales, expert, row, N, 1, k, K, ELEMENT, BN, BK, BY_TMA, 2, CLAMPED,
                STORED, GROUP_ROWS, GROUP_INPUTS,
            )  # fmt: skip
            gate = tl.dot(a, tl.trans(gates), gate, input_precision="ieee")
            up = tl.dot(a, tl.trans(ups), up, input_precision="ieee")
        if BIAS:
            gate += _bias(bias, expert, 0, step, n, N, 2 * N)[None, :]
            up += _bias(bias, expert, 1 if CLAMPED else N, step, n, N, 2 * N)[None, :]
        if CLAMPED:
            value = _clamped(gate.to(ELEMENT).to(tl.float32), up.to(ELEMENT).to(tl.float32), limit)
        else:
            value = silu_times(gate, up, ELEMENT)
        to = out + (first + r).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, value.to(ELEMENT), mask=(r < places)[:, None] & (n < N)[None, :])


@triton.jit
def _clamped(gate, up, limit):
    """gate * sigmoid(1.702 * gate) * (up + 1) of bounded columns; NaN stays NaN."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL) * 1.702
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) / 1.702 * (up + 1.0)


@triton.jit
def clamp_columns(columns, out, N, limit, BN: tl.constexpr):
    """Columns [S, 2 N] of gates and ups in turns -> out [S, N], as CLAMPED `gate_up` does, BN of a row a program."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    gate = tl.load(columns + row * 2 * N + 2 * n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(columns + row * 2 * N + 2 * n + 1, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, _clamped(gate, up, limit).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def expert_linear(
    x, weight, scales, bias, out, order, tiles, num_tiles, N, K,
    CHOSEN: tl.constexpr, ELEMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, GATHERS: tl.constexpr, BY_SLOT: tl.constexpr, BY_TMA: tl.constexpr,
    STORED: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_INPUTS: tl.constexpr,
):  # fmt: skip
    """`weight` [own, N, K]; x [T, K] if GATHERS, or [S, K] by slot with CHOSEN = 1, else [S, K] by place -> out [S, N]
    by place, or BY_SLOT, where rows of other ranks' experts and of padding stay as they are.
    """
    num_n, num_m = tl.cdiv(N, BN), tl.load(num_tiles)
    for work in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, first, places, tile_n = expert_tile(work, tiles, num_m, num_n, GROUP)
        r = tl.arange(0, BM)
        slot = tl.load(order + first + r, mask=r < places, other=0)
        row, n = tile_n * BN, tile_n * BN + tl.arange(0, BN)
        if GATHERS:
            source = x + (slot // CHOSEN).to(tl.int64)[:, None] * K
        elif not BY_TMA:
            source = x + tl.where(r < places, first + r, first).to(tl.int64)[:, None] * K
        sums = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            if BY_TMA and not GATHERS:
                # Rows of the next expert may follow: their results are not stored.
                a = x.load([first, k])
            else:
                c = k + tl.arange(0, BK)
                a = tl.load(source + c[None, :], mask=(c < K)[None, :], other=0.0)
            columns = _weights(
                weight, scales, expert, row, N, 0, k, K, ELEMENT, BN, BK, BY_TMA, 1, False,
                STORED, GROUP_ROWS, GROUP_INPUTS,
            )  # fmt: skip
            sums = tl.dot(a, tl.trans(columns), sums, input_precision="ieee")
        if BIAS:
            sums += _bias(bias, expert, 0, 1, n, N, N)[None, :]
        place = slot if BY_SLOT else first + r
        to = out + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, sums.to(ELEMENT), mask=(r < places)[:, None] & (n < N)[None, :])


@triton.jit
def weighted_sum(
    results, ids, weights, slots, is_own, out, H,
    CHOSEN: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """results [S, H] by slot, float32 weights [T, C] -> out [T, H], added in float32 from a token's first expert to its
    last, and rounded; zeros for padding. Unless ALL, only experts for which `is_own`
    int32 [E] is 1: the others' results are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros([BH], tl.float32)
    inside = h < H
    if PADDED:
        inside = inside & (tl.load(slots + token) >= 0)
    for choice in tl.static_range(CHOSEN):
        slot = token * CHOSEN + choice
        is_read = inside
        if not ALL:
            is_read = inside & (tl.load(is_own + tl.load(ids + slot)) == 1)
        # What is not read counts as zero, as it does where experts are called one by one.
        row = tl.load(results + slot * H + h, mask=is_read, other=0.0).to(tl.float32)
        total += row * tl.load(weights + slot)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)
