"""Low-rank adapters of a layer on a GPU: all adapters of a step in two launches, after `expert_kernels.count_slots` and
`place_slots` have put the step's rows in order of their adapters, once for all layers.

shrink   grouped GEMM of inputs and A, in pieces of the inputs, float32
expand   sum of the pieces, grouped GEMM with B, added to the layer's outputs
join     sum of the pieces alone, of a layer whose inputs ranks share: `expand` adds what all ranks' come to

Bits: a number of `shrink` is the sum of pieces, each one chain in ascending order. Pieces have PIECE inputs and are
added in ascending order; or are the leaves of the layer (ranks/leaves.py), at most PIECE inputs each, and added by a
binary tree over neighbours. Both products are accumulated in float32, and what is between them is not rounded. So a
row's outputs depend on the row and its adapter alone: not on other rows, tiles or grid, nor on zeros that fill up the
rank. Rows without an adapter, and outputs that an adapter has no matrices for, are neither read nor written.

T: rows of the step; S: slots of adapters; P: parts of a merged layer, each with its own A; R: largest rank of an
adapter; K, N: inputs and outputs of the layer. Of experts a row is a token at one of them, and a slot that of an
adapter and an expert.
x [T / EACH, K], each of EACH rows, one behind the other; a [S, P, R, K]; b [S, N, R], the outputs of all parts; `ranks`
int32 [S, P]: rows of A in use, 0 for a part without matrices; `partials` float32 [pieces, T, P, R], rows by place;
`sums` float32 [T, R], rows by number, of a layer of one part; `leaves` int32 [leaves + 1], where they begin and the
last ends, or null; `order` int32 [T], `tiles`, `num_tiles`: see expert_kernels.py. One dtype: float16, bfloat16 or
float32.
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["T"])
def shrink(
    x, a, ranks, partials, leaves, order, tiles, num_tiles, T, R, K, stride_x,
    PARTS: tl.constexpr, PIECE: tl.constexpr, LEAVES: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x [T / EACH, K] x A of each row's adapter -> `partials`. BK divides PIECE. LEAVES: their number, or 0; ALIGNED
    divides where they begin, so that many inputs are loaded together.
    """
    num_r, num_pieces = tl.cdiv(R, BR), tl.cdiv(K, PIECE) if LEAVES == 0 else LEAVES
    num_each = num_pieces * num_r * PARTS
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_each, tl.num_programs(0)):
        at = tiles + work // num_each * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        piece, start = work % num_pieces, work // num_pieces % num_r * BR
        part = adapter * PARTS + work // (num_pieces * num_r) % PARTS
        if start < tl.load(ranks + part):
            r, n = tl.arange(0, BM), start + tl.arange(0, BR)
            row = tl.load(order + first + r, mask=r < places, other=0)
            rows = x + ((row // EACH).to(tl.int64) * stride_x)[:, None]
            columns = a + ((part.to(tl.int64) * R + tl.where(n < R, n, 0)) * K)[:, None]
            begin, end = piece * PIECE, K
            if LEAVES > 0:
                begin = tl.multiple_of(tl.load(leaves + piece), ALIGNED)
                end = tl.multiple_of(tl.load(leaves + piece + 1), ALIGNED)
            sums = tl.zeros([BM, BR], tl.float32)
            for step in tl.range(0, PIECE, BK):
                k = begin + step + tl.arange(0, BK)
                left = tl.load(rows + k[None, :], mask=(k < end)[None, :], other=0.0)
                right = tl.load(columns + k[None, :], mask=(k < end)[None, :], other=0.0)
                sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
            place = (piece * T + first + r).to(tl.int64) * PARTS + work // (num_pieces * num_r) % PARTS
            tl.store(partials + (place * R)[:, None] + n[None, :], sums, mask=(r < places)[:, None] & (n < R)[None, :])


@triton.jit
def _product(low, columns, sums, SPLITS: tl.constexpr):
    """Float32 `low` [BM, BR] x `columns` [BN, BR], added to `sums`. If SPLITS, as the exact sum of three numbers of the
    dtype of `columns`, the smallest first, because no matrix instruction keeps float32; else by plain FMA.
    """
    if SPLITS:
        high = low.to(columns.dtype)
        rest = low - high.to(tl.float32)
        middle = rest.to(columns.dtype)
        last = (rest - middle.to(tl.float32)).to(columns.dtype)
        sums = tl.dot(last, tl.trans(columns), sums)
        sums = tl.dot(middle, tl.trans(columns), sums)
        return tl.dot(high, tl.trans(columns), sums)
    else:
        return tl.dot(low, tl.trans(columns.to(tl.float32)), sums, input_precision="ieee")


@triton.jit
def _sum_of_pieces(first, stride, inside, PIECES: tl.constexpr, IS_TREE: tl.constexpr):
    """The sum of PIECES arrays, one `stride` behind the other, masked by `inside`: in ascending order, or by a binary
    tree over neighbours, of a power of two.
    """
    if IS_TREE and PIECES > 1:
        half: tl.constexpr = PIECES // 2
        lower = _sum_of_pieces(first, stride, inside, half, IS_TREE)
        return lower + _sum_of_pieces(first + stride * half, stride, inside, half, IS_TREE)
    else:
        total = tl.load(first, mask=inside, other=0.0)
        for piece in tl.static_range(1, PIECES):
            total += tl.load(first + stride * piece, mask=inside, other=0.0)
        return total


@triton.jit(do_not_specialize=["T"])
def join(
    partials, ranks, sums, order, tiles, num_tiles, T, R,
    PIECES: tl.constexpr, IS_TREE: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """`partials` of `shrink`, of a layer of one part -> `sums`; other rows, and numbers beyond a rank, stay."""
    num_r = tl.cdiv(R, BR)
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_r, tl.num_programs(0)):
        at = tiles + work // num_r * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        r, k = tl.arange(0, BM), work % num_r * BR + tl.arange(0, BR)
        row = tl.load(order + first + r, mask=r < places, other=0)
        inside = (r < places)[:, None] & (k < tl.load(ranks + adapter))[None, :]
        place = (first + r).to(tl.int64) * R
        total = _sum_of_pieces(partials + place[:, None] + k[None, :], T.to(tl.int64) * R, inside, PIECES, IS_TREE)
        tl.store(sums + (row.to(tl.int64) * R)[:, None] + k[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["T"])
def expand(
    partials, b, ranks, out, columns, order, tiles, num_tiles, T, R, N, num_n, stride_out,
    PARTS: tl.constexpr, PIECES: tl.constexpr, IS_TREE: tl.constexpr, BY_ROW: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`partials` of `shrink`, or if BY_ROW `sums`, x B -> added to `out` [T, N] in float32, and rounded once. `columns`
    int32 [num_n, 3]: the part that a column tile belongs to, the tile's first output, the part's end.
    """
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_n, tl.num_programs(0)):
        at, of_columns = tiles + work // num_n * 3, columns + work % num_n * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        part, start, end = tl.load(of_columns), tl.load(of_columns + 1), tl.load(of_columns + 2)
        rank = tl.load(ranks + adapter * PARTS + part)
        if rank > 0:
            r, n = tl.arange(0, BM), start + tl.arange(0, BN)
            is_there, row_of_b = r < places, adapter.to(tl.int64) * N + tl.where(n < end, n, start)
            row = tl.load(order + first + r, mask=is_there, other=0)
            sums = tl.zeros([BM, BN], tl.float32)
            # Not pipelined: there are few steps, and programs of a multiprocessor hide each other's loads.
            for step in tl.range(0, rank, BR, num_stages=1):
                k = step + tl.arange(0, BR)
                place = ((row if BY_ROW else first + r).to(tl.int64) * PARTS + part) * R
                inside = is_there[:, None] & (k < rank)[None, :]
                stride = T.to(tl.int64) * PARTS * R
                low = _sum_of_pieces(partials + place[:, None] + k[None, :], stride, inside, PIECES, IS_TREE)
                inside = (k < R)[None, :]
                sums = _product(
                    low, tl.load(b + (row_of_b * R)[:, None] + k[None, :], mask=inside, other=0.0), sums, SPLITS
                )
            to = out + (row.to(tl.int64) * stride_out)[:, None] + n[None, :]
            inside = is_there[:, None] & (n < end)[None, :]
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32) + sums
            tl.store(to, total.to(out.dtype.element_ty), mask=inside)
