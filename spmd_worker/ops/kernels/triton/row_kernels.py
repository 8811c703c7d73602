"""What a layer does beside matmuls and attention, on a GPU. A row is one program's, of a shape that its width fixes, so
no other row enters its bits.

T: tokens; H: width of a row, BH: H to a power of two; D: head size. One dtype: float16, bfloat16 or float32; float32
inside.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.norm_kernels import store_normed

LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def add_rms_norm(x, residual, weight, out, H, eps, BH: tl.constexpr, ADDS: tl.constexpr):
    """x [T, H], with `residual` [T, H] where ADDS, which becomes the sum -> its norm. A program a row.

    The sum is rounded to the dtype first, the normed row before the weight is applied: `ReferenceKernels.rms_norm` and
    `add_rms_norm`, but for the order in which the squares are added.
    """
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    inside = h < H
    value = tl.load(x + row + h, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row + h, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(residual + row + h, rounded, mask=inside)
        value = rounded.to(tl.float32)
    store_normed(value, weight, out + row, h, inside, H, eps)


@triton.jit
def full_norm(x, weight, bias, out, H, eps, offset, BH: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr):
    """x [T, H] -> `ReferenceKernels.full_norm`, but for the order of sums. A program a row."""
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    inside = h < H
    value = tl.load(x + row + h, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / H, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    value = value * scale * (tl.load(weight + h, mask=inside, other=0.0).to(tl.float32) + offset)
    if BIAS:
        value += tl.load(bias + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + h, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_write(
    projected, cos, sin, cache, slots, stride_page,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token and head of projected [T, (HEADS + 2 * KV_HEADS) * D]: queries turned where they are, keys
    turned into the cache [blocks, 2, KV_HEADS, BLOCK, D], values into the cache.

    cos, sin [T, D / 2] of the dtype of `projected`; HALF: D / 2 to a power of two. `slots` int32 [T]: block * BLOCK +
    offset; -1 writes nothing: rows that only fill a CUDA graph's batch. Rounded after each product, as
    `ReferenceKernels.rotate` is, whose bits these are.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    inside = i < half
    row = projected + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + head * D
    first, second = tl.load(row + i, mask=inside), tl.load(row + half + i, mask=inside)
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + token * half + i, mask=inside).to(tl.float32)
        s = tl.load(sin + token * half + i, mask=inside).to(tl.float32)
        f, g = first.to(tl.float32), second.to(tl.float32)
        fc, gs = (f * c).to(first.dtype).to(tl.float32), (g * s).to(first.dtype).to(tl.float32)
        gc, fs = (g * c).to(first.dtype).to(tl.float32), (f * s).to(first.dtype).to(tl.float32)
        first, second = (fc - gs).to(first.dtype), (gc + fs).to(first.dtype)
    if head < HEADS:
        tl.store(row + i, first, mask=inside)
        tl.store(row + half + i, second, mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            plane = head - HEADS  # keys of all heads, then values of all heads
            place = (slot // BLOCK).to(tl.int64) * stride_page + plane * (BLOCK * D) + (slot % BLOCK) * D
            tl.store(cache + place + i, first, mask=inside)
            tl.store(cache + place + half + i, second, mask=inside)


@triton.jit
def write_rows(
    key, value, cache, slots, stride_key, stride_value, stride_page,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token and head of keys and values [T, KV_HEADS, D], which go into the cache as they are. Tokens lie
    `stride_key` and `stride_value` elements apart; DP: D to a power of two; the rest as of `rotate_and_write`.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    inside = d < D
    slot = tl.load(slots + token)
    if slot >= 0:
        place = (slot // BLOCK).to(tl.int64) * stride_page + head * (BLOCK * D) + (slot % BLOCK) * D
        k = tl.load(key + token.to(tl.int64) * stride_key + head * D + d, mask=inside)
        v = tl.load(value + token.to(tl.int64) * stride_value + head * D + d, mask=inside)
        tl.store(cache + place + d, k, mask=inside)
        tl.store(cache + place + KV_HEADS * BLOCK * D + d, v, mask=inside)
