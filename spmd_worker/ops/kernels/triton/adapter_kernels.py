"""Low-rank adapters of a layer on a GPU: all adapters of a step in two launches, after `expert_kernels.count_slots` and
`place_slots` have put the step's rows in order of their adapters, once for all layers.

shrink   grouped GEMM of inputs and A, in pieces of the inputs, float32
expand   sum of the pieces, grouped GEMM with B, added to the layer's outputs

Bits: a number of `shrink` is the sum of pieces of PIECE inputs, each one chain in ascending order, added in ascending
order. Both products are accumulated in float32, and what is between them is not rounded. So a row's outputs depend on
the row and its adapter alone: not on other rows, tiles or grid, nor on the rank that A and B are filled up to with
zeros. Rows without an adapter are not read or written.

T: rows of the step; S: adapters; R: largest rank of an adapter; P: parts of a merged layer, each with its own A; K, N:
inputs and outputs of the layer.
x [T, K]; A [S, P * R, K]; B [S, N, R], outputs of all parts; `scales` float32 [S, P]; `order` int32 [T], `tiles`,
`num_tiles`: see expert_kernels.py. One dtype: float16, bfloat16 or float32.
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["T"])
def shrink(
    x, a, partials, order, tiles, num_tiles, T, N, K, stride_x,
    PIECE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x [T, K], a [S, N, K] -> `partials` float32 [pieces, T, N] by place; N is P * R. BK divides PIECE."""
    num_n, num_pieces = tl.cdiv(N, BN), tl.cdiv(K, PIECE)
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_n * num_pieces, tl.num_programs(0)):
        # Tiles of one row tile follow each other: they read the same rows.
        piece, tile_n = work % num_pieces, work // num_pieces % num_n
        at = tiles + work // (num_pieces * num_n) * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        r, n = tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
        row = tl.load(order + first + r, mask=r < places, other=0)
        rows = x + (row.to(tl.int64) * stride_x)[:, None]
        columns = a + ((adapter.to(tl.int64) * N + tl.where(n < N, n, 0)) * K)[:, None]
        sums = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, PIECE, BK):
            k = piece * PIECE + start + tl.arange(0, BK)
            left = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            right = tl.load(columns + k[None, :], mask=(k < K)[None, :], other=0.0)
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        to = partials + ((piece.to(tl.int64) * T + first + r) * N)[:, None] + n[None, :]
        tl.store(to, sums, mask=(r < places)[:, None] & (n < N)[None, :])


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
    partials, b, scales, out, order, tiles, num_tiles, T, N, R, num_first, num_second, stride_out,
    PARTS: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """`partials` of `shrink`, b [S, N, R] -> added to `out` [T, N], in float32, rounded once. The first PARTS - 1 of at
    most three parts have `num_first` and `num_second` outputs. BR: steps along R.
    """
    tiles_first, tiles_second = tl.cdiv(num_first, BN), tl.cdiv(num_second, BN)
    num_n = tiles_first + tiles_second + tl.cdiv(N - num_first - num_second, BN)
    for work in tl.range(tl.program_id(0), tl.load(num_tiles) * num_n, tl.num_programs(0)):
        at = tiles + work // num_n * 3
        adapter, first, places = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        tile_n = work % num_n
        # No tile has outputs of two parts.
        part, start, end = 0, tile_n * BN, num_first
        if PARTS > 1:
            if tile_n >= tiles_first:
                part, start, end = 1, num_first + (tile_n - tiles_first) * BN, num_first + num_second
            if tile_n >= tiles_first + tiles_second:
                part, start, end = 2, num_first + num_second + (tile_n - tiles_first - tiles_second) * BN, N
        r, n = tl.arange(0, BM), start + tl.arange(0, BN)
        is_there = r < places
        row = tl.load(order + first + r, mask=is_there, other=0)
        scale = tl.load(scales + adapter * PARTS + part)
        sums = tl.zeros([BM, BN], tl.float32)
        # Not pipelined: there are few steps, and several programs of a multiprocessor hide each other's loads.
        for rank in tl.range(0, R, BR, num_stages=1):
            k = rank + tl.arange(0, BR)
            at_low = partials + ((first + r).to(tl.int64) * (PARTS * R))[:, None] + (part * R + k)[None, :]
            inside = is_there[:, None] & (k < R)[None, :]
            low = tl.zeros([BM, BR], tl.float32)
            for piece in tl.static_range(PIECES):
                low += tl.load(at_low + piece * T.to(tl.int64) * (PARTS * R), mask=inside, other=0.0)
            at_b = b + ((adapter.to(tl.int64) * N + tl.where(n < end, n, 0)) * R)[:, None] + k[None, :]
            columns = tl.load(at_b, mask=(k < R)[None, :], other=0.0)
            sums = _product(low, columns, sums, SPLITS)
        to = out + (row.to(tl.int64) * stride_out)[:, None] + n[None, :]
        stored = is_there[:, None] & (n < end)[None, :]
        total = tl.load(to, mask=stored, other=0.0).to(tl.float32) + sums * scale
        tl.store(to, total.to(out.dtype.element_ty), mask=stored)
