"""Sampling on a GPU: maxima, fixed-point probability weights, random numbers, filters, grammar masks, top logits.

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
SMALL_LAUNCH = LAUNCH | {"num_warps": 1}
PART = 16384
"""Ids of one program that looks for a maximum."""
FILTER_LAUNCH = LAUNCH | {"num_warps": 8}
"""Fewer warps spill, with three 64-bit sums per logit."""
FILTER_BLOCK = 2048
LISTED = 2048
"""Logits that a filter looks at together, when it has found that the last ones kept are among them."""


@triton.jit
def _in_order(x):
    """Float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(x, i, inside):
    """Int64 in the order of logits, then of descending ids: no two are equal. Zeros are one number, and NaN is the
    largest. The least key where not `inside`.
    """
    x = x.to(tl.float32) + 0.0
    ordered = tl.where(x == x, _in_order(x), 0x7FC00000).to(tl.int64)
    return tl.where(inside, (ordered << 32) - i, -9223372036854775807)


@triton.jit
def _key_id(key):
    return (-key) & 0xFFFFFFFF


@triton.jit
def _key_value(key):
    """The logit, float32."""
    ordered = ((key + _key_id(key)) >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def part_maxima(logits, keys, V, stride, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """`keys` int64 [R, num_parts]: the largest key of each part of a row. One program per row and part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], -9223372036854775807, tl.int64)
    for start in tl.range(0, PART, BLOCK):
        i = part * PART + start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf"))
        best = tl.maximum(best, _key(x, i, i < V))
    tl.store(keys + row * num_parts + part, tl.max(best, 0))


@triton.jit
def join_maxima(keys, values, columns, num_parts, PARTS: tl.constexpr):
    """`values` float32 [R] and `columns` int64 [R] of each row's largest key. PARTS: a power of two."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    key = tl.max(tl.load(keys + row * num_parts + p, mask=p < num_parts, other=-9223372036854775807), 0)
    tl.store(values + row, _key_value(key))
    tl.store(columns + row, _key_id(key))


@triton.jit(do_not_specialize=["count"])
def top_logits(logits, pairs, V, stride, count, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """`pairs` float64 [R, count, 2]: value and id of each row's largest logits; -1 for both after the last, and for
    NaN. One program per row: the best of each block, then each time the next of the block that the last was in.
    BLOCKS: `num_blocks` up to a power of two.
    """
    which = tl.program_id(0).to(tl.int64)
    row = logits + which * stride
    b = tl.arange(0, BLOCKS)
    best = tl.full([BLOCKS], -9223372036854775807, tl.int64)
    for block in tl.range(0, num_blocks):
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        best = tl.where(b == block, tl.max(_key(x, i, i < V), 0), best)
    for n in tl.range(0, count):
        key = tl.max(best, 0)
        value, token = _key_value(key), _key_id(key)
        is_there = (key > -9223372036854775807) & (value == value)
        to = pairs + (which * count + n) * 2
        tl.store(to, tl.where(is_there, value.to(tl.float64), -1.0))
        tl.store(to + 1, tl.where(is_there, token.to(tl.float64), -1.0))
        # The least key, when there are no more, has no id.
        block = tl.where(key > -9223372036854775807, token // BLOCK, 0).to(tl.int32)
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        others = _key(x, i, i < V)
        others = tl.where(others < key, others, -9223372036854775807)
        best = tl.where(b == block, tl.max(others, 0), best)


@triton.jit
def _random_bits(stream, sample, position):
    """53 bits of Philox 4x32-10: `kernels/random.py`. Words of 32 bits in uint64; `stream` int64."""
    low = tl.full([], 0xFFFFFFFF, tl.uint64)
    k0, k1 = stream.to(tl.uint64) & low, stream.to(tl.uint64) >> 32
    c0, c1 = position.to(tl.uint64) & low, sample.to(tl.uint64) & low
    c2, c3 = tl.full([], 0, tl.uint64), tl.full([], 0, tl.uint64)
    for _ in tl.static_range(10):
        product0, product1 = tl.full([], 0xD2511F53, tl.uint64) * c0, tl.full([], 0xCD9E8D57, tl.uint64) * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & low, (product0 >> 32) ^ c3 ^ k1, product0 & low
        k0 = (k0 + tl.full([], 0x9E3779B9, tl.uint64)) & low
        k1 = (k1 + tl.full([], 0xBB67AE85, tl.uint64)) & low
    return (((c0 << 32) | c1) >> 11).to(tl.int64)


@triton.jit(do_not_specialize=["step", "num_rows"])
def random_bits(keys, bits, step, num_rows):
    """`bits` int64 [R] of `keys` int64 [3, R]: stream, sample, position before `step` is added."""
    row = tl.program_id(0)
    position = tl.load(keys + 2 * num_rows + row) + step
    tl.store(bits + row, _random_bits(tl.load(keys + row), tl.load(keys + num_rows + row), position))


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
    index = _inverted(
        logits + row * stride, tl.load(maxima + row), tl.load(factors + row), sums + row * num_pieces,
        tl.load(targets + row), V, num_pieces, PIECE, PIECES,
    )  # fmt: skip
    tl.store(ids + row, index)


@triton.jit
def _inverted(row, maximum, factor, sums, target, V, num_pieces, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """First index at which a row's running sum of weights is above `target`, int64, or -1."""
    p = tl.arange(0, PIECES)
    own = tl.load(sums + p, mask=p < num_pieces, other=0)
    is_before = (tl.cumsum(own, 0) <= target) & (p < num_pieces)
    piece = tl.sum(is_before.to(tl.int32), 0)
    is_found = (target >= 0) & (piece < num_pieces)
    target -= tl.sum(tl.where(is_before, own, 0), 0)
    i = piece * PIECE + tl.arange(0, PIECE)
    inside = (i < V) & is_found
    x = tl.load(row + i, mask=inside, other=float("-inf"))
    running = tl.cumsum(_prob_weights(x, maximum, factor), 0)
    index = piece * PIECE + tl.sum(((running <= target) & inside).to(tl.int32), 0)
    return tl.where(is_found, index, -1).to(tl.int64)


@triton.jit(do_not_specialize=["step", "otherwise", "num_rows"])
def draw(
    logits, maxima, columns, factors, sums, keys, ids, step, otherwise, num_rows, V, stride, num_pieces,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """`Kernels.draw`: `maxima` float32 and `columns` int64 [R] from `argmax`, `sums` from `prob_sums`; `ids` int64 [R].
    One program per row.
    """
    which = tl.program_id(0).to(tl.int64)
    maximum, factor = tl.load(maxima + which), tl.load(factors + which)
    chosen = tl.load(columns + which)
    if factor > 0.0:
        p = tl.arange(0, PIECES)
        own = sums + which * num_pieces
        total = tl.sum(tl.load(own + p, mask=p < num_pieces, other=0), 0)
        position = tl.load(keys + 2 * num_rows + which) + step
        bits = _random_bits(tl.load(keys + which), tl.load(keys + num_rows + which), position)
        # floor(bits x total / 2^53), exactly, in numbers of 64 bits: `sampler.py`.
        high, low = bits >> 26, bits & 67108863
        upper, lower = total >> 30, total & 1073741823
        rest = (low * upper << 4) + high * lower + (low * lower >> 26)
        target = (high * upper << 3) + (rest >> 27)
        chosen = _inverted(logits + which * stride, maximum, factor, own, target, V, num_pieces, PIECE, PIECES)
    is_finite = (maximum - maximum) == 0.0
    tl.store(ids + which, tl.where(is_finite, chosen, otherwise).to(tl.int64))


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
def _ordered_value(key):
    """Number of `_in_order` -> float32."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, inside, maximum, factor, BY_WEIGHT: tl.constexpr):
    """Probability weights, or ones; zero where not `inside`."""
    if BY_WEIGHT:
        return tl.where(inside, _prob_weights(x, maximum, factor), 0)
    else:
        return inside.to(tl.int64)


@triton.jit
def _between(low, high, by_value):
    """Three numbers that cut [low, high), of 2 or more, in quarters of values or of numbers; none is `low`."""
    least, most = _ordered_value(low), _ordered_value(high - 1)
    one = _in_order(least + (most - least) * 0.25).to(tl.int64)
    two = _in_order(least + (most - least) * 0.5).to(tl.int64)
    three = _in_order(least + (most - least) * 0.75).to(tl.int64)
    one = tl.where(by_value, one, low + (high - low) // 4)
    two = tl.where(by_value, two, low + (high - low) // 2)
    three = tl.where(by_value, three, low + (high - low) // 4 * 3)
    one = tl.minimum(tl.maximum(one, low + 1), high - 1)
    two = tl.minimum(tl.maximum(two, one), high - 1)
    return one, two, tl.minimum(tl.maximum(three, two), high - 1)


@triton.jit
def _select_listed(
    listed, num_listed, base, target, low, high, maximum, factor, BY_WEIGHT: tl.constexpr, LISTED: tl.constexpr
):
    """`_select` among a few logits; `base` is the weight of others that are `high` or more."""
    c = tl.arange(0, LISTED)
    x = tl.load(listed + c, mask=c < num_listed, other=float("-inf"))
    weight = _weights(x, c < num_listed, maximum, factor, BY_WEIGHT)
    key = _in_order(x).to(tl.int64)
    while high - low > 1:
        one, two, three = _between(low, high, False)
        first = base + tl.sum(tl.where(key >= one, weight, 0), 0) >= target
        second = base + tl.sum(tl.where(key >= two, weight, 0), 0) >= target
        third = base + tl.sum(tl.where(key >= three, weight, 0), 0) >= target
        high = tl.where(third, high, tl.where(second, three, tl.where(first, two, one)))
        low = tl.where(third, three, tl.where(second, two, tl.where(first, one, low)))
    return low


@triton.jit
def _select(
    row, listed, V, target, maximum, factor, least, low, high, num_low,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The largest number in [low, high) such that the logits not smaller than it, and not below `least`, weigh `target`
    or more; each weighs its probability weight if BY_WEIGHT, else one. Those of `low` do, of which there are `num_low`,
    and none is `high`. Numbers are of `_in_order`. Also how many of the logits from `low` on are in `listed`, or -1.

    Quarters the range, by value at first, until few logits are left in it; these are listed, and looked at alone.
    """
    above, num_high, step = tl.full([], 0, tl.int64), num_low * 0, 0
    while (high - low > 1) & (num_low - num_high > LISTED):
        one, two, three = _between(low, high, step < 6)
        first, second, third = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        num_1, num_2, num_3 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            inside = (x >= least) & (i < V)
            key = _in_order(x).to(tl.int64)
            num_1 += ((key >= one) & inside).to(tl.int32)
            num_2 += ((key >= two) & inside).to(tl.int32)
            num_3 += ((key >= three) & inside).to(tl.int32)
            if BY_WEIGHT:
                weight = _weights(x, inside, maximum, factor, True)
                first += tl.where(key >= one, weight, 0)
                second += tl.where(key >= two, weight, 0)
                third += tl.where(key >= three, weight, 0)
        n1, n2, n3 = tl.sum(num_1, 0), tl.sum(num_2, 0), tl.sum(num_3, 0)
        if BY_WEIGHT:
            w1, w2, w3 = tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)
        else:
            w1, w2, w3 = n1.to(tl.int64), n2.to(tl.int64), n3.to(tl.int64)
        is_1, is_2, is_3 = w1 >= target, w2 >= target, w3 >= target
        above = tl.where(is_3, above, tl.where(is_2, w3, tl.where(is_1, w2, w1)))
        num_high = tl.where(is_3, num_high, tl.where(is_2, n3, tl.where(is_1, n2, n1)))
        num_low = tl.where(is_3, n3, tl.where(is_2, n2, tl.where(is_1, n1, num_low)))
        high = tl.where(is_3, high, tl.where(is_2, three, tl.where(is_1, two, one)))
        low = tl.where(is_3, three, tl.where(is_2, two, tl.where(is_1, one, low)))
        step += 1
    num_listed = -1
    if high - low > 1:
        takes_all = num_low <= LISTED
        end = tl.where(takes_all, tl.full([], 1 << 32, tl.int64), high)
        count = num_low * 0
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            key = _in_order(x).to(tl.int64)
            is_listed = ((x >= least) & (i < V) & (key >= low) & (key < end)).to(tl.int32)
            found = tl.sum(is_listed, 0)
            if found > 0:
                tl.store(listed + count + tl.cumsum(is_listed, 0) - 1, x, mask=is_listed == 1)
            count += found
        # Threads read what others of this program wrote.
        tl.debug_barrier()
        base = tl.where(takes_all, 0, above)
        low = _select_listed(listed, count, base, target, low, high, maximum, factor, BY_WEIGHT, LISTED)
        num_listed = tl.where(takes_all, count, -1)
    return low, num_listed


@triton.jit
def filter_logits(
    logits, maxima, factors, min_logits, top_k, top_p, lists, V, stride, BLOCK: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """`Kernels.filter_` on float32 logits, whose `maxima` are theirs. `lists` float32 [R, LISTED] is scratch. One
    program per row.
    """
    which = tl.program_id(0).to(tl.int64)
    row, listed = logits + which * stride, lists + which * LISTED
    maximum, factor, least = tl.load(maxima + which) + 0.0, tl.load(factors + which), tl.load(min_logits + which)
    count, share = tl.load(top_k + which), tl.load(top_p + which)
    has_count = (count > 0) & (count < V)
    low, num_low, num_listed = tl.full([], 0, tl.int64), 0, -1
    high = _in_order(maximum).to(tl.int64) + 1
    total = tl.full([], 0, tl.int64)
    if has_count | (share < 1.0):
        lowest, num, sums = (
            tl.full([BLOCK], float("inf"), tl.float32),
            tl.zeros([BLOCK], tl.int32),
            tl.zeros([BLOCK], tl.int64),
        )
        for start in tl.range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            inside = (x >= least) & (x > float("-inf")) & (i < V)
            lowest = tl.minimum(lowest, tl.where(inside, x, float("inf")))
            num += inside.to(tl.int32)
            sums += _weights(x, inside, maximum, factor, True)
        low, num_low, total = _in_order(tl.min(lowest, 0)).to(tl.int64), tl.sum(num, 0), tl.sum(sums, 0)
    if has_count & (num_low > count):
        low, num_listed = _select(
            row, listed, V, count, maximum, factor, least, low, high, num_low, False, BLOCK, LISTED
        )
        least = tl.maximum(least, _ordered_value(low))
        if share < 1.0:
            if num_listed >= 0:
                c = tl.arange(0, LISTED)
                x = tl.load(listed + c, mask=c < num_listed, other=float("-inf"))
                total = tl.sum(_weights(x, (c < num_listed) & (x >= least), maximum, factor, True), 0)
            else:
                num, sums = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
                for start in tl.range(0, V, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    x = tl.load(row + i, mask=i < V, other=float("-inf"))
                    inside = (x >= least) & (i < V)
                    num += inside.to(tl.int32)
                    sums += _weights(x, inside, maximum, factor, True)
                num_low, total = tl.sum(num, 0), tl.sum(sums, 0)
    if share < 1.0:
        target = tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)
        target = tl.maximum(target, 1)
        if num_listed >= 0:
            # Logits below `low` are listed too; a number from `low` on is sought.
            low = _select_listed(listed, num_listed, total * 0, target, low, high, maximum, factor, True, LISTED)
        else:
            low, num_listed = _select(
                row, listed, V, target, maximum, factor, least, low, high, num_low, True, BLOCK, LISTED
            )
        least = tl.maximum(least, _ordered_value(low))
    for start in tl.range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        tl.store(row + i, float("-inf"), mask=(i < V) & (x < least))
