"""Paged attention on a GPU: a query row's bits do not depend on how the work is split.

A row's keys are split at absolute positions into segments of SEGMENT keys, each processed in tiles of TILE keys from a
fresh online softmax (https://arxiv.org/abs/2205.14135); segments are joined in ascending order by one function,
`_join`. A work item is a tile of queries of one sequence against a run of segments: all of them, or one (flash
decoding), whose partial result `join_partials` joins later in the same order with the same function. So one program
for all segments and one program per segment give the same bits, and the choice may follow the load. Tiles that a row
does not see change no bit of it, so a row is the same alone, in a chunk and in a complete prompt.

All items have one instruction shape, ROWS = 64 query rows (wgmma on sm_90, mma.sync on sm_80), also in decode: missing
rows cost tensor-core time that decode does not need. Contraction of mul and add is off (LAUNCH), except for `tl.fma`.
Keys that no row of a tile may see are never multiplied, whatever their blocks contain.
A key that only some rows of a tile see is multiplied by a weight of 0 for the others: if its value is infinite or NaN,
earlier rows of the same sequence and tile are NaN too, although they are not when computed alone.

Shapes, T: tokens; S: sequences; Hq, Hkv: query and key-value heads; G = Hq / Hkv; D: head size; DP: D to a power of
two.
queries [T, at least Hq * D], a token's heads contiguous; one layer's cache [blocks, 2, Hkv, BLOCK, D], a block's
values after its keys, contiguous, blocks `stride_page` elements apart; tables int32 [S, B]; out [T, Hq, D]. Queries,
cache and out are of one dtype: float16, bfloat16 or float32; sums are float32.
items int32 [.., 6]: sequence, first token, number of tokens, first segment, end segment, partial row (-1: final).
joins int32 [.., 3]: token, first partial row, number of segments, one partial row each.
partial rows: float32 sums [.., Hq, D], maximum scores (top) and softmax denominators [.., Hq].
"""

import triton
import triton.language as tl

ROWS = 64
TILE = 64
SEGMENT = 512
LAUNCH = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


@triton.jit
def _join(top, denom, sums, top2, denom2, sums2):
    """Join two softmax states, the earlier keys first. An empty state (top = -inf) changes no bit of the other."""
    new_top = tl.maximum(top, top2)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    a, b = tl.exp2(top - safe), tl.exp2(top2 - safe)
    joined = tl.fma(sums2, tl.broadcast_to(b[:, None], sums2.shape), sums * a[:, None])
    return new_top, tl.fma(denom2, b, denom * a), joined


@triton.jit
def _finish(top, denom, sums, sinks, heads, is_head, SINKS: tl.constexpr):
    """The normalised result; a sink is one more score, of a key without a value."""
    if SINKS:
        score = tl.load(sinks + heads, mask=is_head, other=0.0) * 1.4426950408889634
        new_top = tl.maximum(top, score)
        a = tl.exp2(top - new_top)
        denom = tl.fma(denom, a, tl.exp2(score - new_top))
        sums = sums * a[:, None]
    return sums / tl.where(denom == 0.0, 1.0, denom)[:, None]


@triton.jit
def _segment(
    q, keys, values, table, position, first, end, lowest, window, scale, cap,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    stride_page, CAPPED: tl.constexpr,
):  # fmt: skip
    """Keys [first, end) of one segment from a fresh state. `first` is a multiple of TILE; keys below `lowest` and from
    `end` on are masked. Scores are exponents of two.
    """
    top = tl.full([ROWS], float("-inf"), tl.float32)
    denom = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DP], tl.float32)
    d = tl.arange(0, DP)
    for start in tl.range(first, end, TILE):
        n = start + tl.arange(0, TILE)
        is_there = (n < end) & (n >= lowest)
        page = tl.load(table + n // BLOCK, mask=is_there, other=0).to(tl.int64)
        offset = (page * stride_page + (n % BLOCK) * D)[:, None] + d[None, :]
        inside = is_there[:, None] & (d[None, :] < D)
        k = tl.load(keys + offset, mask=inside, other=0.0)
        v = tl.load(values + offset, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            # cap * tanh(x), as 1 - 2 / (e^2x + 1).
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
        visible = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible & is_there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - safe[:, None])
        a = tl.exp2(top - safe)
        denom = tl.fma(denom, a, tl.sum(p, 1))
        sums = tl.dot(p.to(values.dtype.element_ty), v, sums * a[:, None], input_precision="ieee")
        top = new_top
    return top, denom, sums


@triton.jit(do_not_specialize=["stride_table", "window"])
def attend(
    queries, cache, tables, items, num_items, starts, lengths, out, partial_sums, partial_tops, partial_denoms, sinks,
    stride_query, stride_page, stride_table, window, scale, cap,
    KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Persistent: the grid does not depend on the batch, so that one CUDA graph serves every mix of lengths.

    `num_items` int32 [1]; `starts` int32 [S + 1], the first token of each sequence; `lengths` int32 [S], its keys;
    `window`: number of visible keys, 2**30 for all; `sinks` float32 [Hq]. `scale` is log2(e) * the attention scale, or
    if CAPPED the attention scale / the cap; `cap` is log2(e) * the cap.
    """
    heads: tl.constexpr = KV_HEADS * G
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    count = tl.load(num_items) * KV_HEADS
    for work in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * 6
        kv_head = work % KV_HEADS
        sequence, token, num_tokens = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        first, end, partial = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        first_position = tl.load(lengths + sequence) - tl.load(starts + sequence + 1) + token
        lowest = tl.maximum(first_position - window + 1, 0)
        seen = first_position + num_tokens
        position = first_position + r // G
        is_row = r < num_tokens * G
        head = kv_head * G + r % G
        inside = is_row[:, None] & (d[None, :] < D)
        row = (token + r // G).to(tl.int64) * stride_query + head * D
        q = tl.load(queries + row[:, None] + d[None, :], mask=inside, other=0.0)
        keys = cache + kv_head * (BLOCK * D)
        values = keys + KV_HEADS * BLOCK * D
        top = tl.full([ROWS], float("-inf"), tl.float32)
        denom = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, DP], tl.float32)
        for segment in tl.range(first, end):
            top2, denom2, sums2 = _segment(
                q, keys, values, tables + sequence.to(tl.int64) * stride_table, position,
                tl.maximum(segment * SEGMENT, lowest // TILE * TILE), tl.minimum((segment + 1) * SEGMENT, seen), lowest,
                window, scale, cap, D, DP, BLOCK, TILE, ROWS, stride_page, CAPPED,
            )  # fmt: skip
            top, denom, sums = _join(top, denom, sums, top2, denom2, sums2)
        if partial < 0:
            result = _finish(top, denom, sums, sinks, head, is_row, SINKS).to(out.dtype.element_ty)
            index = ((token + r // G) * heads + head).to(tl.int64) * D
            tl.store(out + index[:, None] + d[None, :], result, mask=inside)
        else:
            part = (partial + r // G) * heads + head
            tl.store(partial_sums + (part.to(tl.int64) * D)[:, None] + d[None, :], sums, mask=inside)
            tl.store(partial_tops + part, top, mask=is_row)
            tl.store(partial_denoms + part, denom, mask=is_row)


@triton.jit
def join_partials(
    joins, num_joins, out, partial_sums, partial_tops, partial_denoms, sinks,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Joins the partial rows of `attend`. One token at a time; the grid does not depend on their number. HEADS_PADDED
    is a power of two.
    """
    h = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, DP)
    is_head = h < HEADS
    inside = is_head[:, None] & (d[None, :] < D)
    for work in tl.range(tl.program_id(0), tl.load(num_joins), tl.num_programs(0)):
        token, partial, count = tl.load(joins + work * 3), tl.load(joins + work * 3 + 1), tl.load(joins + work * 3 + 2)
        top = tl.full([HEADS_PADDED], float("-inf"), tl.float32)
        denom = tl.zeros([HEADS_PADDED], tl.float32)
        sums = tl.zeros([HEADS_PADDED, DP], tl.float32)
        for segment in tl.range(0, count):
            index = (partial + segment) * HEADS + h
            top2 = tl.load(partial_tops + index, mask=is_head, other=float("-inf"))
            denom2 = tl.load(partial_denoms + index, mask=is_head, other=0.0)
            sums2 = tl.load(partial_sums + (index.to(tl.int64) * D)[:, None] + d[None, :], mask=inside, other=0.0)
            top, denom, sums = _join(top, denom, sums, top2, denom2, sums2)
        result = _finish(top, denom, sums, sinks, h, is_head, SINKS).to(out.dtype.element_ty)
        row = (token * HEADS + h).to(tl.int64) * D
        tl.store(out + row[:, None] + d[None, :], result, mask=inside)
