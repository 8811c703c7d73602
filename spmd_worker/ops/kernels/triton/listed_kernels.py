"""Choice of keys, and lists of them, on a GPU: for tokens that see some keys of a cache alone.

One program computes a token, or a tile of its keys at an absolute number, in one shape: no bit depends on other rows,
on how many programs share a row, or on what the host knows of it. So one CUDA graph serves every mix of lengths.

A key belongs to RATE tokens, and lies in the block of the last of them, at that token's offset divided by RATE; key n
is that of tokens [n * RATE, (n + 1) * RATE). A token sees those that end up to itself.

T: tokens; S: sequences; H, D: heads and size of an indexer; N: numbers of a value. `sequences` and `positions` int32
[T] of tokens, positions below 0 of padding; tables int32 [S, B].
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.attention_kernels import load_cached, load_rows, tree_sum
from spmd_worker.ops.kernels.triton.cache_kernels import to_cache

LAUNCH = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["S", "T"])
def place_tokens(starts, lengths, sequences, positions, S, T, EACH: tl.constexpr, BATCH: tl.constexpr):
    """Sequences and positions of tokens, EACH a program: starts int32 [S + 1], and lengths int32 [S] with the step's
    tokens. Tokens from starts[S] on are padding.
    """
    token = tl.program_id(0) * EACH + tl.arange(0, EACH)
    before = tl.zeros([EACH], tl.int32)
    for batch in tl.range(0, S, BATCH):
        i = batch + tl.arange(0, BATCH)
        ends = tl.load(starts + i + 1, mask=i < S, other=2**30)
        before += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    inside = token < T
    is_there = inside & (before < S)
    length, end = (
        tl.load(lengths + before, mask=is_there, other=0),
        tl.load(starts + before + 1, mask=is_there, other=0),
    )
    tl.store(sequences + token, tl.where(is_there, before, 0), mask=inside)
    tl.store(positions + token, tl.where(is_there, length - end + token, -1), mask=inside)


@triton.jit
def write_places(
    values, cache, cleared, slots, positions, stride_value, stride_page, stride_row, stride_cleared,
    N: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, RATE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """One program per token and EACH numbers: values [T, N] of tokens that end a group to their places in a cache of
    blocks `stride_page` and places `stride_row` elements apart. A block's first token sets CLEARED numbers of the block
    at `cleared` to 0, which no other program of the launch writes. `slots` int32 [T]: block * BLOCK + offset, negative
    ones write nothing.
    """
    token, n = tl.program_id(0), tl.program_id(1) * EACH + tl.arange(0, EACH)
    slot = tl.load(slots + token)
    if slot >= 0:
        page, offset = (slot // BLOCK).to(tl.int64), slot % BLOCK
        if (tl.load(positions + token) + 1) % RATE == 0:
            value = tl.load(values + token.to(tl.int64) * stride_value + n, mask=n < N)
            row = cache + page * stride_page + (offset // RATE) * stride_row
            tl.store(row + n, to_cache(value, cache), mask=n < N)
        if (CLEARED > 0) & (offset == 0):
            block, step = cleared + page * stride_cleared, tl.num_programs(1) * EACH
            for first in tl.range(tl.program_id(1) * EACH, CLEARED, step):
                at = first + tl.arange(0, EACH)
                tl.store(block + at, tl.zeros([EACH], cleared.dtype.element_ty), mask=at < CLEARED)


@triton.jit(do_not_specialize=["first", "num_chosen"])
def score_keys(
    queries, weights, cache, tables, sequences, positions, scores, first, num_chosen, stride_page, stride_row,
    stride_table, stride_scores,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, RATE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scores float32 [.., keys] of tokens from `first` on: sum over heads of weight * relu(query . key), a tree. Of
    queries [T, H, D], weights float32 [T, H], and keys that the token sees, if it sees more than `num_chosen`; HP: H up
    to a power of two. Programs of axis 1 share a token's tiles of TILE keys.
    """
    row = tl.program_id(0)
    token = first + row
    num_seen = (tl.load(positions + token) + 1) // RATE
    if num_seen > num_chosen:
        h = tl.arange(0, HP)
        is_head = h < HEADS
        heads = queries + (token.to(tl.int64) * HEADS + h) * D
        q0 = load_rows(heads, is_head, 0, K0, D)
        q1 = q0
        if K1:
            q1 = load_rows(heads, is_head, K0, K1, D)
        weight = tl.load(weights + token.to(tl.int64) * HEADS + h, mask=is_head, other=0.0)
        table = tables + tl.load(sequences + token).to(tl.int64) * stride_table
        for start in tl.range(tl.program_id(1) * TILE, num_seen, tl.num_programs(1) * TILE):
            n = start + tl.arange(0, TILE)
            is_there = n < num_seen
            at = (n + 1) * RATE - 1
            page = tl.load(table + at // BLOCK, mask=is_there, other=0).to(tl.int64) * stride_page
            keys = cache + page + (at % BLOCK // RATE) * stride_row
            products = tl.dot(load_cached(keys, is_there, 0, K0, D, q0.dtype), tl.trans(q0), input_precision="ieee")
            if K1:
                k1 = load_cached(keys, is_there, K0, K1, D, q0.dtype)
                products = tl.dot(k1, tl.trans(q1), products, input_precision="ieee")
            score = tree_sum(tl.maximum(products, 0.0) * weight[None, :])
            # Zeros of both signs are one score.
            score = tl.where(score == 0.0, 0.0, score)
            tl.store(scores + row.to(tl.int64) * stride_scores + n, score, mask=is_there)


@triton.jit
def _in_order(scores, n, num_seen):
    """Scores of keys n as uint32, which are ordered as they are."""
    bits = tl.load(scores + n, mask=n < num_seen, other=0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first", "num_chosen"])
def choose_keys(
    scores, positions, chosen, first, num_chosen, stride_scores, stride_chosen, RATE: tl.constexpr, BATCH: tl.constexpr
):
    """One program per token from `first` on: numbers of the `num_chosen` keys of the highest scores, ascending, into
    chosen int32 [T, ..]; all that it sees if there are no more. Ties by number.

    The last score that is chosen is found a digit of 8 bits after the other, by counts of keys, which have no order.
    """
    row = tl.program_id(0)
    token = first + row
    num_seen = (tl.load(positions + token) + 1) // RATE
    own, out = scores + row.to(tl.int64) * stride_scores, chosen + token.to(tl.int64) * stride_chosen
    if num_seen <= num_chosen:
        for start in tl.range(0, num_seen, BATCH):
            n = start + tl.arange(0, BATCH)
            tl.store(out + n, n, mask=n < num_seen)
    else:
        bins = tl.arange(0, 256)
        least, wanted = tl.full([], 0, tl.uint32), num_chosen
        for digit in tl.static_range(3, -1, -1):
            counts = tl.zeros([256], tl.int32)
            for start in tl.range(0, num_seen, BATCH):
                n = start + tl.arange(0, BATCH)
                key, inside = _in_order(own, n, num_seen), n < num_seen
                if digit < 3:
                    inside = inside & ((key >> (8 * digit + 8)) == (least >> (8 * digit + 8)))
                counts += tl.histogram(((key >> (8 * digit)) & 255).to(tl.int32), 256, mask=inside)
            # Keys whose digit is not below each.
            not_below = tl.sum(counts) - tl.cumsum(counts) + counts
            found = tl.sum((not_below >= wanted).to(tl.int32)) - 1
            wanted = wanted - tl.sum(tl.where(bins > found, counts, 0))
            least = least | (found.to(tl.uint32) << (8 * digit))
        done, num_ties = 0, 0
        for start in tl.range(0, num_seen, BATCH):
            n = start + tl.arange(0, BATCH)
            key, inside = _in_order(own, n, num_seen), n < num_seen
            is_tie = (inside & (key == least)).to(tl.int32)
            is_first = num_ties + tl.cumsum(is_tie) <= wanted
            taken = ((inside & (key > least)) | ((is_tie > 0) & is_first)).to(tl.int32)
            tl.store(out + done + tl.cumsum(taken) - 1, n, mask=taken > 0)
            done, num_ties = done + tl.sum(taken), num_ties + tl.sum(is_tie)


@triton.jit(do_not_specialize=["window", "most", "first_entry"])
def list_keys(
    numbers, tables, sequences, positions, listed, counts, window, most, first_entry, page, key_row, entry_row,
    stride_numbers, stride_table, stride_listed,
    RATE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One program per token and EACH places of its list: the last `window` tokens' keys, its own included, then at most
    `most` keys of groups, of numbers [T, ..] if CHOSEN, else the first ones; both ascending.

    Keys are listed as units of elements from a layer's first: blocks are `page` units apart, tokens' keys `key_row`,
    those of groups `entry_row`, from `first_entry` on. `counts` int32 [T]: keys of each token.
    """
    token, piece = tl.program_id(0), tl.program_id(1) * EACH
    position = tl.load(positions + token)
    num_last, num_entries = tl.minimum(position + 1, window), tl.minimum((position + 1) // RATE, most)
    count = tl.where(position < 0, 0, num_last + num_entries)
    if piece == 0:
        tl.store(counts + token, count)
    if piece < count:
        j = piece + tl.arange(0, EACH)
        inside, is_last = j < count, j < num_last
        number = j - num_last
        if CHOSEN:
            own = numbers + token.to(tl.int64) * stride_numbers
            number = tl.load(own + number, mask=inside & (number >= 0), other=0)
        at = tl.where(is_last, position + 1 - num_last + j, (number + 1) * RATE - 1)
        table = tables + tl.load(sequences + token).to(tl.int64) * stride_table
        block = tl.load(table + at // BLOCK, mask=inside, other=0)
        offset = at % BLOCK
        place = tl.where(is_last, offset * key_row, first_entry + offset // RATE * entry_row)
        tl.store(listed + token.to(tl.int64) * stride_listed + j, block * page + place, mask=inside)


@triton.jit
def _member(rows, bias, table, d, inside, position, member, part, stride_page, stride_row, BLOCK, WIDTH):
    """Values and gates of the token of a group at `position`, its member `member`, float32."""
    block = tl.load(table + position // BLOCK).to(tl.int64)
    row = rows + block * stride_page + (position % BLOCK) * stride_row + part + d
    value = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(row + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return value, gate + tl.load(bias + member * WIDTH + part + d, mask=inside, other=0.0)


@triton.jit
def compress(
    rows, bias, tables, sequences, positions, out, stride_page, stride_row, stride_table,
    N: tl.constexpr, RATE: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One program per token that ends a group and EACH numbers of its entry: out [T, N] is the mean of the group's
    values by a softmax of their gates, each number by itself; other tokens' rows stay as they are. If it OVERLAPS, of
    the group before, too, whose tokens come first. A token's row is its values, then its gates, of both parts: the
    first N of each are for the group behind, the last for its own. bias float32 [RATE, N or 2 N].
    """
    width: tl.constexpr = N * (1 + OVERLAPS)
    token, d = tl.program_id(0), tl.program_id(1) * EACH + tl.arange(0, EACH)
    position, inside = tl.load(positions + token), d < N
    if (position >= 0) & ((position + 1) % RATE == 0):
        table = tables + tl.load(sequences + token).to(tl.int64) * stride_table
        start = position + 1 - RATE
        top = tl.full([EACH], float("-inf"), tl.float32)
        before = start
        if OVERLAPS:
            # The first group has none before it.
            before = tl.maximum(start - RATE, 0)
        for at in tl.range(before, position + 1):
            part = tl.where(at < start, 0, width - N)
            _, gate = _member(rows, bias, table, d, inside, at, at % RATE, part, stride_page, stride_row, BLOCK, width)
            top = tl.maximum(top, gate)
        total, mean = tl.zeros([EACH], tl.float32), tl.zeros([EACH], tl.float32)
        for at in tl.range(before, position + 1):
            part = tl.where(at < start, 0, width - N)
            value, gate = _member(
                rows, bias, table, d, inside, at, at % RATE, part, stride_page, stride_row, BLOCK, width
            )
            weight = tl.exp(gate - top)
            total += weight
            mean += tl.where(weight > 0, weight * value, 0.0)
        tl.store(out + token.to(tl.int64) * N + d, (mean / total).to(out.dtype.element_ty), mask=inside)
