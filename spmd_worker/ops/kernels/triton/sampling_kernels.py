"""Sampling on a GPU: fixed-point probability weights, filters and grammar masks.

The weight of a logit is floor(2^40 * 2^((logit - maximum) * factor)), as in `Kernels.prob_sums`. Sums are exact, so
they depend neither on the programs that share a row nor on the sharding of a vocabulary. The host reads nothing back.

R: rows; V: a row's token ids, rows `stride` elements apart; float16, bfloat16 or float32 logits. PIECE: ids of one sum;
BLOCK: ids that a program loads together.
"""

import triton
import triton.language as tl

PIECE = 1024
BLOCK = 4096
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}
FILTER_LAUNCH = LAUNCH | {"num_warps": 8}
"""Fewer warps spill, with three 64-bit sums per logit."""


@triton.jit
def _prob_weights(x, maximum, factor):
    return (tl.exp2((x.to(tl.float32) - maximum) * factor) * 1099511627776.0).to(tl.int64)


@triton.jit
def prob_sums(logits, maxima, factors, sums, V, stride, num_pieces, PIECE: tl.constexpr):
    """`sums` int64 [R, num_pieces]: sum of the weights of each piece. One program per row and piece."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf"))
    weights = _prob_weights(x, tl.load(maxima + row), tl.load(factors + row))
    tl.store(sums + row * num_pieces + piece, tl.sum(weights, 0))


@triton.jit
def invert_cdf(
    logits, maxima, factors, sums, targets, ids, V, stride, num_pieces, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """`ids` int64 [R]: first index at which the running sum of weights is above `targets` int64 [R], or -1. One program
    per row, which reads the sums of all pieces and the weights of one. PIECES: `num_pieces` up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    p = tl.arange(0, PIECES)
    own = tl.load(sums + row * num_pieces + p, mask=p < num_pieces, other=0)
    is_before = (tl.cumsum(own, 0) <= target) & (p < num_pieces)
    piece = tl.sum(is_before.to(tl.int32), 0)
    is_found = (target >= 0) & (piece < num_pieces)
    target -= tl.sum(tl.where(is_before, own, 0), 0)
    i = piece * PIECE + tl.arange(0, PIECE)
    inside = (i < V) & is_found
    x = tl.load(logits + row * stride + i, mask=inside, other=float("-inf"))
    running = tl.cumsum(_prob_weights(x, tl.load(maxima + row), tl.load(factors + row)), 0)
    index = piece * PIECE + tl.sum(((running <= target) & inside).to(tl.int32), 0)
    tl.store(ids + row, tl.where(is_found, index, -1).to(tl.int64))


@triton.jit
def count_above(logits, values, counts, V, stride, BLOCK: tl.constexpr):
    """`counts` int64 [R]: number of a row's logits above its value, `values` float32 [R]. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(values + row)
    found = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")).to(tl.float32)
        found += (x > limit).to(tl.int32)
    tl.store(counts + row, tl.sum(found, 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["rows", "mask_rows"])
def forbid(logits, allowed, rows, mask_rows, V, stride, first_id, num_words, BLOCK: tl.constexpr):
    """`Kernels.forbid_`: rows, `mask_rows` int64 [n], `allowed` int32 [.., num_words]. One program per n and block."""
    which = tl.program_id(0)
    row, mask_row = tl.load(rows + which), tl.load(mask_rows + which)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first_id + i
    has_word = (i < V) & (token // 32 < num_words)
    word = tl.load(allowed + mask_row * num_words + token // 32, mask=has_word, other=0)
    tl.store(logits + row * stride + i, float("-inf"), mask=(i < V) & ((word >> (token % 32)) & 1 == 0))


@triton.jit
def _in_order(x):
    """Float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _select(row, V, target, maximum, factor, least, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number such that the logits not smaller than it, and not below `least`, weigh `target` or more; each
    weighs its probability weight if BY_WEIGHT, else one. Minus infinity if all weigh less. Finds the bits from the
    highest on, two per pass.
    """
    # Non-negative: the ordered float plus 2^31.
    found = tl.full([], 0, tl.int64)
    for step in tl.range(0, 16):
        one = tl.full([], 1, tl.int64) << (30 - 2 * step)
        # Weights not below each of the three numbers with two more bits.
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        low = found - 2147483648
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            weight = _prob_weights(x, maximum, factor) if BY_WEIGHT else tl.full([BLOCK], 1, tl.int64)
            weight = tl.where((x >= least) & (i < V), weight, 0)
            key = _in_order(x).to(tl.int64)
            first += tl.where(key >= low + one, weight, 0)
            second += tl.where(key >= low + 2 * one, weight, 0)
            third += tl.where(key >= low + 3 * one, weight, 0)
        found += (tl.sum(first, 0) >= target).to(tl.int64) * one
        found += (tl.sum(second, 0) >= target).to(tl.int64) * one
        found += (tl.sum(third, 0) >= target).to(tl.int64) * one
    # Keys below that of minus infinity are NaN.
    key = tl.maximum(found - 2147483648, -2139095041).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def filter_logits(logits, maxima, factors, min_logits, top_k, top_p, V, stride, BLOCK: tl.constexpr):
    """`Kernels.filter_` on float32 logits. One program per row."""
    which = tl.program_id(0).to(tl.int64)
    row = logits + which * stride
    maximum, factor, least = tl.load(maxima + which), tl.load(factors + which), tl.load(min_logits + which)
    count, share = tl.load(top_k + which), tl.load(top_p + which)
    if (count > 0) & (count < V):
        least = tl.maximum(least, _select(row, V, count, maximum, factor, float("-inf"), False, BLOCK))
    if share < 1.0:
        sums = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            sums += tl.where(x >= least, _prob_weights(x, maximum, factor), 0)
        total = tl.sum(sums, 0)
        target = tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)
        nucleus = _select(row, V, tl.maximum(target, 1), maximum, factor, least, True, BLOCK)
        least = tl.maximum(least, nucleus)
    for start in tl.range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        tl.store(row + i, float("-inf"), mask=(i < V) & (x < least))
