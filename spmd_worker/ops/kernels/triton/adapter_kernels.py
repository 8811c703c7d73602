"""Low-rank adapters of a layer on a GPU: all adapters of a step in two launches, after `expert_kernels.count_slots` and
`place_slots` have put the step's rows in order of their adapters, once for all layers.

shrink   grouped GEMM of inputs and A, in pieces of the inputs, float32
expand   sum of the pieces, grouped GEMM with B, added to the layer's outputs

Bits: a number of `shrink` is the sum of pieces of PIECE inputs, each one chain in ascending order, added in ascending
order. Both products are accumulated in float32, and what is between them is not rounded. So a row's outputs depend on
the row and its adapter alone: not on other rows, tiles or grid, nor on zeros that fill up the rank. Rows without an
adapter, and outputs that an adapter has no matrices for, are neither read nor written.

T: rows of the step; S: slots of adapters; P: parts of a merged layer, each with its own A; R: largest rank of an
adapter; K, N: inputs and outputs of the layer.
x [T, K]; a [S, P, R, K]; b [S, N, R], the outputs of all parts; `ranks` int32 [S, P]: rows of A in use, 0 for a part
without matrices; `partials` float32 [pieces, T, P, R], rows by place; `order` int32 [T], `tiles`, `num_tiles`: see
expert_kernels.py. One dtype: float16, bfloat16 or float32.
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["T"])
def shrink(
    x, a, ranks, partials, order, tiles, num_tiles, T, R, K, stride_x,
    PARTS: tl.constexpr, PIECE: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x [T, K] x A of each row's adapter -> `partials`. BK divides PIECE."""
    num_r, num_pieces = tl.cdiv(R, BR), tl.cdiv(K, PIECE)
    num_each = num_pieces * num_r * PARTS
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_each, tl.num_programs(0)):
        at = tiles + work // num_each * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        piece, start = work % num_pieces, work // num_pieces % num_r * BR
        part = adapter * PARTS + work // (num_pieces * num_r) % PARTS
        if start < tl.load(ranks + part):
            r, n = tl.arange(0, BM), start + tl.arange(0, BR)
            row = tl.load(order + first + r, mask=r < places, other=0)
            rows = x + (row.to(tl.int64) * stride_x)[:, None]
            columns = a + ((part.to(tl.int64) * R + tl.where(n < R, n, 0)) * K)[:, None]
            sums = tl.zeros([BM, BR], tl.float32)
            for step in tl.range(0, PIECE, BK):
                k = piece * PIECE + step + tl.arange(0, BK)
                left = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
                right = tl.load(columns + k[None, :], mask=(k < K)[None, :], other=0.0)
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


@triton.jit(do_not_specialize=["T"])
def expand(
    partials, b, ranks, out, columns, order, tiles, num_tiles, T, R, N, num_n, stride_out,
    PARTS: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """`partials` of `shrink` x B -> added to `out` [T, N] in float32, and rounded once. `columns` int32 [num_n, 3]: the
    part that a column tile belongs to, the tile's first output, the part's end.
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
                low = tl.zeros([BM, BR], tl.float32)
                for piece in tl.static_range(PIECES):
                    place = (piece * T + first + r).to(tl.int64) * PARTS + part
                    inside = is_there[:, None] & (k < rank)[None, :]
                    low += tl.load(partials + (place * R)[:, None] + k[None, :], mask=inside, other=0.0)
                inside = (k < R)[None, :]
                sums = _product(
                    low, tl.load(b + (row_of_b * R)[:, None] + k[None, :], mask=inside, other=0.0), sums, SPLITS
                )
            to = out + (row.to(tl.int64) * stride_out)[:, None] + n[None, :]
            inside = is_there[:, None] & (n < end)[None, :]
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32) + sums
            tl.store(to, total.to(out.dtype.element_ty), mask=inside)
