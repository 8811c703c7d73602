"""What tokens are drawn by, on a GPU: masses as whole numbers, what filters leave, and what a form forbids.

The mass of a logit is floor(2^40 * 2^((logit - largest) * factor)), as in `Kernels.prob_sums`. Sums of masses are exact,
so neither how programs share out a row nor how a vocabulary is cut over ranks enters them. Nothing is read back.

R: rows; V: a row's token ids, a row `stride` elements apart; float16, bfloat16 or float32 logits. PIECE: ids whose
masses are added up by themselves; BLOCK: ids that a program looks at together.
"""

import triton
import triton.language as tl

PIECE = 1024
BLOCK = 4096
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}
FILTER_LAUNCH = LAUNCH | {"num_warps": 8}
"""Three sums of 64 bits a number: fewer warps spill."""


@triton.jit
def _prob_weights(x, largest, factor):
    return (tl.exp2((x.to(tl.float32) - largest) * factor) * 1099511627776.0).to(tl.int64)


@triton.jit
def prob_sums(logits, largest, factors, sums, V, stride, num_pieces, PIECE: tl.constexpr):
    """`sums` int64 [R, num_pieces]: of each piece of a row the sum of its masses. A program a row and piece."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf"))
    mass = _prob_weights(x, tl.load(largest + row), tl.load(factors + row))
    tl.store(sums + row * num_pieces + piece, tl.sum(mass, 0))


@triton.jit
def invert_cdf(
    logits, largest, factors, sums, targets, ids, V, stride, num_pieces, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """`ids` int64 [R]: the first index at which the running mass is above `targets` int64 [R], or -1. A program a row,
    which looks at the sums of all pieces and the masses of one. PIECES: `num_pieces` to a power of two.
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
    running = tl.cumsum(_prob_weights(x, tl.load(largest + row), tl.load(factors + row)), 0)
    index = piece * PIECE + tl.sum(((running <= target) & inside).to(tl.int32), 0)
    tl.store(ids + row, tl.where(is_found, index, -1).to(tl.int64))


@triton.jit
def count_above(logits, values, counts, V, stride, BLOCK: tl.constexpr):
    """`counts` int64 [R]: how many logits of a row are larger than its value, `values` float32 [R]. A program a row."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(values + row)
    found = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")).to(tl.float32)
        found += (x > limit).to(tl.int32)
    tl.store(counts + row, tl.sum(found, 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["rows", "places"])
def forbid(logits, allowed, rows, places, V, stride, first_id, num_words, BLOCK: tl.constexpr):
    """Minus infinity, in rows `rows` int64 [n], for each token from `first_id` on whose bit is not set in the row of
    `allowed` int32 [.., num_words] that `places` int64 [n] names. A program an n and block.
    """
    which = tl.program_id(0)
    row, place = tl.load(rows + which), tl.load(places + which)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first_id + i
    has_word = (i < V) & (token // 32 < num_words)
    word = tl.load(allowed + place * num_words + token // 32, mask=has_word, other=0)
    tl.store(logits + row * stride + i, float("-inf"), mask=(i < V) & ((word >> (token % 32)) & 1 == 0))


@triton.jit
def _in_order(x):
    """Float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _select(row, V, target, largest, factor, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number such that what is not smaller, and not below `least`, weighs `target` or more: a mass each, or
    one each. Minus infinity where all of it does not. Its bits are found from the highest on, two in a pass.
    """
    # As a number that is not negative: the float in order, and 2^31.
    found = tl.full([], 0, tl.int64)
    for step in tl.range(0, 16):
        one = tl.full([], 1, tl.int64) << (30 - 2 * step)
        # What is not below each of the three numbers with these two bits more.
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        low = found - 2147483648
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            weight = _prob_weights(x, largest, factor) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
            weight = tl.where((x >= least) & (i < V), weight, 0)
            key = _in_order(x).to(tl.int64)
            first += tl.where(key >= low + one, weight, 0)
            second += tl.where(key >= low + 2 * one, weight, 0)
            third += tl.where(key >= low + 3 * one, weight, 0)
        found += (tl.sum(first, 0) >= target).to(tl.int64) * one
        found += (tl.sum(second, 0) >= target).to(tl.int64) * one
        found += (tl.sum(third, 0) >= target).to(tl.int64) * one
    # Below minus infinity there are only numbers that are none.
    key = tl.maximum(found - 2147483648, -2139095041).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def filter_logits(logits, largest, factors, lowest, top_k, top_p, V, stride, BLOCK: tl.constexpr):
    """Minus infinity in float32 logits in place of what each row's filters drop: `Kernels.filter_`. A program a row."""
    which = tl.program_id(0).to(tl.int64)
    row = logits + which * stride
    most, factor, least = tl.load(largest + which), tl.load(factors + which), tl.load(lowest + which)
    count, share = tl.load(top_k + which), tl.load(top_p + which)
    if (count > 0) & (count < V):
        least = tl.maximum(least, _select(row, V, count, most, factor, float("-inf"), False, BLOCK))
    if share < 1.0:
        sums = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            sums += tl.where(x >= least, _prob_weights(x, most, factor), 0)
        total = tl.sum(sums, 0)
        target = tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)
        nucleus = _select(row, V, tl.maximum(target, 1), most, factor, least, True, BLOCK)
        least = tl.maximum(least, nucleus)
    for start in tl.range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        tl.store(row + i, float("-inf"), mask=(i < V) & (x < least))
