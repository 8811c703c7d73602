"""Paged attention on a GPU: a query row's bits do not depend on how the work is split.

A row's keys are split at absolute positions into segments of SEGMENT keys, each processed in tiles of TILE keys from a
fresh online softmax (https://arxiv.org/abs/2205.14135); segments are joined in ascending order by one function,
`_join`. A work item is a tile of queries of one sequence against a run of segments: all of them, or one (flash
decoding), whose partial result `join_partials` joins later in the same order with the same function. So one program
for all segments and one program per segment give the same bits, and the choice may follow the load. Tiles that a row
does not see change no bit of it, so a row is the same alone, in a chunk and in a complete prompt.

The sum over a tile's weights is a binary tree whose pairs are in the source (`tree_sum`), because the order of
`tl.sum` is the layout's, which follows the rows of a tile and the warps. A maximum has no order, and the matrix
instructions (mma.sync, wgmma) add alike. So rows of a tile, warps, stages and programs are free: sequences with few
queries, decode, have tiles of fewer rows than prompts. Contraction of mul and add is off (LAUNCH), except for `tl.fma`.

Keys that no row of a tile may see are never multiplied, whatever their blocks contain.
A key that only some rows of a tile see is multiplied by a weight of 0 for the others: if its value is infinite or NaN,
earlier rows of the same sequence and tile are NaN too, although they are not when computed alone.

Shapes, T: tokens; S: sequences; Hq, Hkv: query and key-value heads; G = Hq / Hkv; D and DV: size of a key and of a
value. K0 + K1 and V0 + V1 cover D and DV / PARTS with one or two powers of two (K1 and V1 may be 0), so that 96 or 192
are not padded: scores are one chain over K0, then K1.
LATENT (https://arxiv.org/abs/2405.04434): the first DV elements of a key are its value, there are no others, and all
"key-value heads", groups of G query heads, see the same keys [blocks, BLOCK, D]. A tile of keys is read once where K0
is all of a value.
queries [T, at least Hq * D], a token's heads contiguous; a layer's keys [blocks, Hkv, BLOCK, D] and values [blocks,
Hkv, BLOCK, DV], a block's contiguous, blocks `stride_page` elements apart; tables int32 [S, B]; out [T, Hq, DV].
Queries, keys, values and out are of one dtype: float16, bfloat16 or float32; sums are float32. Keys and values may be
bytes of an FP8 cache instead.
items int32 [.., 8]: sequence, first token, number of tokens, position of the first, end of the keys that the last sees,
first segment, end segment, partial row (-1: final).
joins int32 [.., 3]: token, first partial row, number of segments, one partial row each.
partial rows: float32 sums [.., Hq, DV], maximum scores (top) and softmax denominators [.., Hq].
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.cache_kernels import from_cache

TILE = 64
SEGMENT = 512
LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def tree_sum(x):
    """[ROWS, N] -> [ROWS], N a power of two: columns 2i and 2i + 1, then the upper half of what is left onto the lower,
    and again. Each `tl.sum` is over two numbers, one addition, which commutes: no layout changes a bit.

    Within matrix instructions' layouts the first levels are within a thread, the last two are shuffles.
    """
    sums = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    for _ in tl.static_range(0, 7):
        if sums.shape[1] > 1:
            sums = tl.sum(tl.reshape(sums, [sums.shape[0], 2, sums.shape[1] // 2]), 1)
    return tl.reshape(sums, [x.shape[0]])


@triton.jit
def _scaled(sums, sums2, a, b):
    """sums * a + sums2 * b, the second product fused; [ROWS, N] and [ROWS]."""
    return tl.fma(sums2, tl.broadcast_to(b[:, None], sums2.shape), sums * a[:, None])


@triton.jit
def _join(top, denom, left, right, top2, denom2, left2, right2, V1: tl.constexpr):
    """Join two softmax states, the earlier keys first. An empty state (top = -inf) changes no bit of the other."""
    new_top = tl.maximum(top, top2)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    a, b = tl.exp2(top - safe), tl.exp2(top2 - safe)
    if V1:
        right = _scaled(right, right2, a, b)
    return new_top, tl.fma(denom2, b, denom * a), _scaled(left, left2, a, b), right


@triton.jit
def _finish(top, denom, left, right, sinks, heads, is_head, SINKS: tl.constexpr):
    """The normalised result; a sink is one more score, of a key without a value."""
    if SINKS:
        score = tl.load(sinks + heads, mask=is_head, other=0.0) * 1.4426950408889634
        new_top = tl.maximum(top, score)
        a = tl.exp2(top - new_top)
        denom = tl.fma(denom, a, tl.exp2(score - new_top))
        left, right = left * a[:, None], right * a[:, None]
    whole = tl.where(denom == 0.0, 1.0, denom)[:, None]
    return left / whole, right / whole


@triton.jit
def _fresh(ROWS: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """An empty softmax state: top, denominator, and sums of the two parts of values."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    denom = tl.zeros([ROWS], tl.float32)
    return top, denom, tl.zeros([ROWS, V0], tl.float32), tl.zeros([ROWS, V1 if V1 else 1], tl.float32)


@triton.jit
def _inside(is_row, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """Mask of numbers [FIRST, FIRST + PART) of rows of SIZE."""
    mask = is_row[:, None]
    if FIRST + PART > SIZE:
        mask = mask & (FIRST + tl.arange(0, PART) < SIZE)[None, :]
    return mask


@triton.jit
def load_rows(rows, is_row, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, PART] from pointers to rows of SIZE; zeros past a row's end and where there is no row."""
    d = FIRST + tl.arange(0, PART)
    return tl.load(rows[:, None] + d[None, :], mask=_inside(is_row, FIRST, PART, SIZE), other=0.0)


@triton.jit
def load_cached(rows, is_row, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, ELEMENT: tl.constexpr):
    """`load_rows` from a cache, as numbers of ELEMENT."""
    return from_cache(load_rows(rows, is_row, FIRST, PART, SIZE), ELEMENT)


@triton.jit
def _store(rows, value, is_row, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    d = FIRST + tl.arange(0, PART)
    tl.store(rows[:, None] + d[None, :], value, mask=_inside(is_row, FIRST, PART, SIZE))


@triton.jit
def _segment(
    q0, q1, keys, values, table, biases, position, before, last, first, end, lowest, all_from, all_until, scale, cap,
    most, of_query, of_keys, columns, score_token, stride_page,
    D: tl.constexpr, DV: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CAPPED: tl.constexpr,
    LATENT: tl.constexpr, BIASED: tl.constexpr, OF_QUERIES: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Keys [first, end) of one segment from a fresh state. `first` is a multiple of TILE; keys below `lowest` are not
    read. A row sees keys after `before` up to `last`, every row [all_from, all_until). Scores are exponents of two. If
    BIASED, `biases` [ROWS] point to a row's bias of its own `position`, with `most` on both sides. `of_query` [ROWS]
    and `of_keys` point to scores by column of a row and of the first key (`attend`).
    """
    top, denom, left, right = _fresh(ROWS, V0, V1)
    for start in tl.range(first, end, TILE):
        n = start + tl.arange(0, TILE)
        is_there = (n < end) & (n >= lowest)
        page = tl.load(table + n // BLOCK, mask=is_there, other=0).to(tl.int64) * stride_page
        key_rows, value_rows = keys + (page + (n % BLOCK) * D), values + (page + (n % BLOCK) * (D if LATENT else DV))
        k0 = load_cached(key_rows, is_there, 0, K0, D, q0.dtype)
        scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if K1:
            k1 = load_cached(key_rows, is_there, K0, K1, D, q0.dtype)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        if LATENT and K0 == DV and PARTS == 1:
            v0 = k0
        else:
            v0 = load_cached(value_rows, is_there, 0, V0, DV // PARTS, q0.dtype)
        factor = scale
        if CAPPED:
            # cap * tanh(x), as 1 - 2 / (e^2x + 1).
            scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.8853900817779268)) + 1.0)
            factor = cap
        if OF_QUERIES or OF_KEYS:
            distance = tl.minimum(tl.maximum(n[None, :] - position[:, None], -most), most)
            column = tl.load(columns + (distance + most))
            added = tl.zeros([ROWS, TILE], tl.float32)
            if OF_QUERIES:
                added = tl.load(of_query[:, None] + column).to(tl.float32)
            if OF_KEYS:
                key_scores = of_keys + tl.where(is_there, n, 0).to(tl.int64) * score_token
                added += tl.load(key_scores[None, :] + column).to(tl.float32)
            scores += added
        if BIASED:
            distance = tl.minimum(tl.maximum(n[None, :] - position[:, None], -most), most)
            bias = tl.load(biases[:, None] + distance) * 1.4426950408889634
            scores = tl.fma(scores, tl.full([ROWS, TILE], factor, tl.float32), bias)
            factor = 1.0
        if (start < all_from) | (start + TILE > all_until):
            # Most tiles of prompts are seen completely, and comparisons would cost them a third of their time.
            visible = (n[None, :] > before[:, None]) & (n[None, :] <= last[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        factors, shift = tl.full([ROWS, TILE], factor, tl.float32), tl.broadcast_to(-safe[:, None], [ROWS, TILE])
        p = tl.exp2(tl.fma(scores, factors, shift))
        a = tl.exp2(top - safe)
        denom = tl.fma(denom, a, tree_sum(p))
        weights = p.to(v0.dtype)
        left = tl.dot(weights, v0, left * a[:, None], input_precision="ieee")
        if V1:
            v1 = load_cached(value_rows, is_there, V0, V1, DV // PARTS, q0.dtype)
            right = tl.dot(weights, v1, right * a[:, None], input_precision="ieee")
        top = new_top
    return top, denom, left, right


@triton.jit
def _first_seen(position, window):
    """The first key that a token sees, see `attend`; below 0 for the first of all. `attend` itself is told whether
    there are chunks, because a choice per token takes registers.
    """
    chunk = tl.maximum(-window, 1)
    return tl.where(window < 0, position // chunk * chunk, position - window + 1)


@triton.jit
def _item(
    work, queries, keys, values, tables, items, out, partial_sums, partial_tops, partial_denoms, sinks, biases,
    last_visible, query_scores, key_scores, columns, score_token, score_head, stride_query, stride_page, stride_table,
    window, later, most, scale, cap,
    KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    LATENT: tl.constexpr, CHUNKED: tl.constexpr, SIGHT: tl.constexpr, BIASED: tl.constexpr, OF_QUERIES: tl.constexpr,
    OF_KEYS: tl.constexpr,
):  # fmt: skip
    """One item, key-value head and part of the values, see `attend`."""
    heads: tl.constexpr = KV_HEADS * G
    wide: tl.constexpr = DV // PARTS
    item = items + (work // (KV_HEADS * PARTS)) * 8
    kv_head = work // PARTS % KV_HEADS
    column = work % PARTS * wide
    sequence, token, num_tokens = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_position, seen = tl.load(item + 3), tl.load(item + 4)
    first, end, partial = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    r = tl.arange(0, ROWS)
    is_row = r < num_tokens * G
    head = kv_head * G + r % G
    rows = queries + (token + r // G).to(tl.int64) * stride_query + head * D
    q0 = load_rows(rows, is_row, 0, K0, D)
    q1 = q0
    if K1:
        q1 = load_rows(rows, is_row, K0, K1, D)
    position = first_position + r // G
    last = tl.minimum(position + later, seen - 1)
    if SIGHT:
        given = tl.load(last_visible + token + r // G, mask=is_row, other=0)
        last = tl.where(later > 0, tl.minimum(last, given), given)
    if CHUNKED:
        before = position // -window * -window - 1
        lowest = first_position // -window * -window
        all_from = (first_position + num_tokens - 1) // -window * -window
    else:
        before, lowest = position - window, tl.maximum(first_position - window + 1, 0)
        all_from = first_position + num_tokens - window
    all_until = tl.minimum(first_position + later + 1, seen)
    head_keys, head_values = keys, values + column
    if not LATENT:
        head_keys, head_values = keys + kv_head * (BLOCK * D), values + kv_head * (BLOCK * DV) + column
    table = tables + sequence.to(tl.int64) * stride_table
    head_biases = biases + (head * (2 * most + 1) + most)
    # A sequence with such scores is complete: its first token has its first key.
    own = tl.where(is_row, token + r // G, token).to(tl.int64)
    of_query = query_scores + (own * score_token + head * score_head)
    of_keys = key_scores + ((token - first_position).to(tl.int64) * score_token + kv_head * score_head)
    if ONE:
        top, denom, left, right = _segment(
            q0, q1, head_keys, head_values, table, head_biases, position, before, last,
            tl.maximum(first * SEGMENT, lowest // TILE * TILE), tl.minimum((first + 1) * SEGMENT, seen), lowest,
            all_from, all_until, scale, cap, most, of_query, of_keys, columns, score_token, stride_page, D, DV, K0, K1,
            V0, V1, PARTS, BLOCK, TILE, ROWS, CAPPED, LATENT, BIASED, OF_QUERIES, OF_KEYS,
        )  # fmt: skip
    else:
        top, denom, left, right = _fresh(ROWS, V0, V1)
        for segment in tl.range(first, end):
            top2, denom2, left2, right2 = _segment(
                q0, q1, head_keys, head_values, table, head_biases, position, before, last,
                tl.maximum(segment * SEGMENT, lowest // TILE * TILE), tl.minimum((segment + 1) * SEGMENT, seen), lowest,
                all_from, all_until, scale, cap, most, of_query, of_keys, columns, score_token, stride_page, D, DV, K0,
                K1, V0, V1, PARTS, BLOCK, TILE, ROWS, CAPPED, LATENT, BIASED, OF_QUERIES, OF_KEYS,
            )  # fmt: skip
            top, denom, left, right = _join(top, denom, left, right, top2, denom2, left2, right2, V1)
    if partial < 0:
        left, right = _finish(top, denom, left, right, sinks, head, is_row, SINKS)
        to = out + ((token + r // G) * heads + head).to(tl.int64) * DV + column
        _store(to, left.to(out.dtype.element_ty), is_row, 0, V0, wide)
        if V1:
            _store(to, right.to(out.dtype.element_ty), is_row, V0, V1, wide)
    else:
        part = (partial + r // G) * heads + head
        sums = partial_sums + part.to(tl.int64) * DV + column
        _store(sums, left, is_row, 0, V0, wide)
        if V1:
            _store(sums, right, is_row, V0, V1, wide)
        tl.store(partial_tops + part, top, mask=is_row)
        tl.store(partial_denoms + part, denom, mask=is_row)


@triton.jit(do_not_specialize=["stride_table", "window", "later", "most", "score_token", "score_head"])
def attend(
    queries, keys, values, tables, items, num_items, out, partial_sums, partial_tops, partial_denoms, sinks, biases,
    last_visible, query_scores, key_scores, columns, score_token, score_head, stride_query, stride_page, stride_table,
    window, later, most, scale, cap,
    KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, LOOPS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, LATENT: tl.constexpr, CHUNKED: tl.constexpr, SIGHT: tl.constexpr, BIASED: tl.constexpr,
    OF_QUERIES: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """All items of a step, whose number `num_items` int32 [1] is read here, so that one CUDA graph serves every mix of
    lengths. If it LOOPS, any number of programs share the items; else there is a program for each, which takes fewer
    registers. ONE: no item has more than one segment. The values' columns are computed in PARTS, each
    by itself with the scores again: wide heads' sums need more registers than there are.

    A token sees `later` keys after its own, and of the earlier ones those less than `window` away (2**30 for all) or,
    if CHUNKED, those of its own chunk of -window keys. If SIGHT, it sees keys up to `last_visible`, int32 [T]: its own
    or a later one if `later` is 0; else that is a further bound, the same for all tokens of a sequence.
    `sinks` float32 [Hq]. If BIASED, `biases` float32 [Hq, 2 * most + 1] are added to scores: column most + d, with d
    the key's position less the token's, bounded to [-most, most].
    If OF_QUERIES, `query_scores`, and if OF_KEYS, `key_scores` are added to scores before they are scaled: of a token
    and head, `score_token` and `score_head` elements apart, in the column `columns`, int32 [2 * most + 1], of the same
    distance. Sequences are complete then, and G is 1.
    `scale` is log2(e) * the attention scale, or if CAPPED the attention scale / the cap; `cap` is log2(e) * the cap.
    """
    count = tl.load(num_items) * (KV_HEADS * PARTS)
    work = tl.program_id(0)
    if LOOPS:
        for each in tl.range(work, count, tl.num_programs(0)):
            _item(
                each, queries, keys, values, tables, items, out, partial_sums, partial_tops, partial_denoms, sinks,
                biases, last_visible, query_scores, key_scores, columns, score_token, score_head, stride_query,
                stride_page, stride_table, window, later, most, scale, cap,
                KV_HEADS, G, D, DV, K0, K1, V0, V1, PARTS, BLOCK, TILE, SEGMENT, ROWS, ONE, CAPPED, SINKS, LATENT,
                CHUNKED, SIGHT, BIASED, OF_QUERIES, OF_KEYS,
            )  # fmt: skip
    elif work < count:
        _item(
            work, queries, keys, values, tables, items, out, partial_sums, partial_tops, partial_denoms, sinks,
            biases, last_visible, query_scores, key_scores, columns, score_token, score_head, stride_query,
            stride_page, stride_table, window, later, most, scale, cap,
            KV_HEADS, G, D, DV, K0, K1, V0, V1, PARTS, BLOCK, TILE, SEGMENT, ROWS, ONE, CAPPED, SINKS, LATENT,
            CHUNKED, SIGHT, BIASED, OF_QUERIES, OF_KEYS,
        )  # fmt: skip


@triton.jit
def join_partials(
    joins, num_joins, out, partial_sums, partial_tops, partial_denoms, sinks,
    HEADS: tl.constexpr, HEADS_EACH: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Joins the partial rows of `attend`, HEADS_EACH heads of a token at a time; the grid does not depend on their
    number.
    """
    pieces: tl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    for work in tl.range(tl.program_id(0), tl.load(num_joins) * pieces, tl.num_programs(0)):
        join = joins + work // pieces * 3
        token, partial, count = tl.load(join), tl.load(join + 1), tl.load(join + 2)
        h = work % pieces * HEADS_EACH + tl.arange(0, HEADS_EACH)
        is_head = h < HEADS
        top, denom, left, right = _fresh(HEADS_EACH, V0, V1)
        for segment in tl.range(0, count):
            index = (partial + segment) * HEADS + h
            top2 = tl.load(partial_tops + index, mask=is_head, other=float("-inf"))
            denom2 = tl.load(partial_denoms + index, mask=is_head, other=0.0)
            rows = partial_sums + index.to(tl.int64) * DV
            left2, right2 = load_rows(rows, is_head, 0, V0, DV), right
            if V1:
                right2 = load_rows(rows, is_head, V0, V1, DV)
            top, denom, left, right = _join(top, denom, left, right, top2, denom2, left2, right2, V1)
        left, right = _finish(top, denom, left, right, sinks, h, is_head, SINKS)
        rows = out + (token * HEADS + h).to(tl.int64) * DV
        _store(rows, left.to(out.dtype.element_ty), is_head, 0, V0, DV)
        if V1:
            _store(rows, right.to(out.dtype.element_ty), is_head, V0, V1, DV)


@triton.jit
def _shares(queries, length, window, FEW: tl.constexpr, MANY: tl.constexpr, SEGMENT: tl.constexpr):
    """Sequences with these numbers of queries and keys: segments if the only query may be split, else 0; 1 if one
    item has all queries and one segment, else 0; tiles of MANY queries of the others.
    """
    first = tl.maximum(_first_seen(length - queries, window), 0) // SEGMENT
    segments = (length + SEGMENT - 1) // SEGMENT - first
    split = tl.where((queries == 1) & (segments > 1), segments, 0)
    is_one = (queries > 0) & (queries <= FEW) & (segments == 1)
    tiles = tl.where(is_one | (split > 0), 0, (queries + MANY - 1) // MANY)
    return split, is_one.to(tl.int32), tiles


@triton.jit(do_not_specialize=["S", "num_few", "max_partials", "window", "later"])
def make_items(
    starts, lengths, items, joins, counts, last_visible, S, num_few, max_partials, window, later,
    FEW: tl.constexpr, MANY: tl.constexpr, SEGMENT: tl.constexpr, BATCH: tl.constexpr, EACH: tl.constexpr,
    SIGHT: tl.constexpr,
):  # fmt: skip
    """Items and joins of a step, one program per sequence. Queries starts[i]:starts[i + 1] are at the end of the
    lengths[i] keys of sequence i.

    In items[:num_few]: an item for up to FEW queries which see one segment, and one per segment for the only query of a
    sequence, if the partial rows of all such sequences fit into `max_partials`. In items[num_few:]: an item per MANY
    queries of other sequences, whose last queries, with most keys, come first. `counts` int32 [3]: items of both kinds,
    joins. For the rest see `attend`.
    """
    own = tl.program_id(0)
    partials, joined, ones, many = 0, 0, 0, 0
    partials_before, joined_before, ones_before, many_before = 0, 0, 0, 0
    # Sums over sequences, BATCH at a time, and over those before the own one.
    for batch in tl.range(0, S, BATCH):
        i = batch + tl.arange(0, BATCH)
        inside, before = i < S, i < own
        queries = tl.load(starts + i + 1, mask=inside, other=0) - tl.load(starts + i, mask=inside, other=0)
        length = tl.load(lengths + i, mask=inside, other=0)
        split, one, tiles = _shares(queries, length, window, FEW, MANY, SEGMENT)
        is_split = (split > 0).to(tl.int32)
        partials, partials_before = partials + tl.sum(split), partials_before + tl.sum(tl.where(before, split, 0))
        joined, joined_before = joined + tl.sum(is_split), joined_before + tl.sum(tl.where(before, is_split, 0))
        ones, ones_before = ones + tl.sum(one), ones_before + tl.sum(tl.where(before, one, 0))
        many, many_before = many + tl.sum(tiles), many_before + tl.sum(tl.where(before, tiles, 0))
    splits = partials <= max_partials
    if own == 0:
        tl.store(counts, ones + tl.where(splits, partials, 0))
        tl.store(counts + 1, many + tl.where(splits, 0, joined))
        tl.store(counts + 2, tl.where(splits, joined, 0))
    start, stop, length = tl.load(starts + own), tl.load(starts + own + 1), tl.load(lengths + own)
    split, one, tiles = _shares(stop - start, length, window, FEW, MANY, SEGMENT)
    is_split = (split > 0) & splits
    is_few = is_split | (one > 0)
    num_own = tl.where(is_split, split, one + tiles + tl.where(splits, 0, tl.minimum(split, 1)))
    few_before = ones_before + tl.where(splits, partials_before, 0)
    first = tl.where(is_few, few_before, num_few + many_before + tl.where(splits, 0, joined_before))
    for done in tl.range(0, num_own, EACH):
        number = done + tl.arange(0, EACH)
        token = start + tl.where(is_split, 0, (num_own - 1 - number) * MANY)
        num_tokens = tl.minimum(stop - token, MANY)
        position = length - stop + token
        seen = tl.minimum(position + num_tokens + later, length)
        if SIGHT:
            # In order: the last token sees most.
            given = tl.load(last_visible + token + num_tokens - 1, mask=number < num_own, other=0) + 1
            seen = tl.where(later > 0, tl.minimum(seen, given), given)
        begin = tl.maximum(_first_seen(position, window), 0) // SEGMENT + tl.where(is_split, number, 0)
        end = tl.where(is_split, begin + 1, (seen + SEGMENT - 1) // SEGMENT)
        row, inside = items + (first + number) * 8, number < num_own
        tl.store(row, tl.zeros([EACH], tl.int32) + own, mask=inside)
        tl.store(row + 1, token, mask=inside)
        tl.store(row + 2, num_tokens, mask=inside)
        tl.store(row + 3, position, mask=inside)
        tl.store(row + 4, seen, mask=inside)
        tl.store(row + 5, begin, mask=inside)
        tl.store(row + 6, end, mask=inside)
        tl.store(row + 7, tl.where(is_split, partials_before + number, -1), mask=inside)
    if is_split:
        join = joins + joined_before * 3
        tl.store(join, start)
        tl.store(join + 1, partials_before)
        tl.store(join + 2, split)
