"""Norms, rotary embedding and cache writes on a GPU. One program computes a row, with a shape that depends on the
row's width alone, so its bits do not depend on other rows.

T: tokens; H: width of a row, BH: H up to a power of two; D: head size. One dtype: float16, bfloat16 or float32;
computed in float32.
"""

import triton
import triton.language as tl

from spmd_worker.ops.kernels.triton.cache_kernels import to_cache
from spmd_worker.ops.kernels.triton.norm_kernels import store_normed
from spmd_worker.ops.kernels.triton.tile_kernels import silu_times

LAUNCH = {"enable_fp_fusion": False}


@triton.jit
def add_rms_norm(x, residual, weight, out, H, eps, BH: tl.constexpr, ADDS: tl.constexpr):
    """x [T, H] -> its norm, one program per row. If ADDS, of the sum with `residual` [T, H], which becomes the sum.

    The sum is rounded to the dtype first, the normed row before the weight is applied: `ReferenceKernels.rms_norm` and
    `add_rms_norm`, except for the order in which the squares are added.
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
    """x [T, H] -> `ReferenceKernels.full_norm`, except for the order of sums. One program per row."""
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
def silu_and_mul(gate_up, out, N, stride, BN: tl.constexpr):
    """gate_up [T, 2 N] -> out [T, N] = silu(gate) * up, with the bits of `matmul_kernels.gated_linear`."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    gate = tl.load(gate_up + row * stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + n, mask=inside, other=0.0).to(tl.float32)
    element: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * N + n, silu_times(gate, up, element).to(element), mask=inside)


@triton.jit
def rotate_and_write(
    projected, cos, sin, cache, slots, stride_page,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """One program per token and EACH heads of projected [T, (HEADS + 2 * KV_HEADS) * D]: rotates queries in place,
    writes rotated keys and values to the cache [blocks, 2, KV_HEADS, BLOCK, D].

    cos, sin [T, D / 2] of the dtype of `projected`; HALF: D / 2 up to a power of two. `slots` int32 [T]: block * BLOCK
    + offset; -1 writes nothing: padding of a CUDA graph's batch. Rounds after each multiplication: the bits of
    `ReferenceKernels.rotate`.
    """
    token, head = tl.program_id(0), tl.program_id(1) * EACH + tl.arange(0, EACH)
    half: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < half)[None, :]
    row = projected + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + (head * D)[:, None] + i[None, :]
    first, second = tl.load(row, mask=inside), tl.load(row + half, mask=inside)
    c = tl.load(cos + token * half + i, mask=i < half).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + i, mask=i < half).to(tl.float32)[None, :]
    f, g = first.to(tl.float32), second.to(tl.float32)
    fc, gs = (f * c).to(first.dtype).to(tl.float32), (g * s).to(first.dtype).to(tl.float32)
    gc, fs = (g * c).to(first.dtype).to(tl.float32), (f * s).to(first.dtype).to(tl.float32)
    is_rotated = (head < HEADS + KV_HEADS)[:, None]
    first = tl.where(is_rotated, (fc - gs).to(first.dtype), first)
    second = tl.where(is_rotated, (gc + fs).to(first.dtype), second)
    is_query = inside & (head < HEADS)[:, None]
    tl.store(row, first, mask=is_query)
    tl.store(row + half, second, mask=is_query)
    slot = tl.load(slots + token)
    # Keys of all heads, then values of all heads.
    index = (slot // BLOCK).to(tl.int64) * stride_page + (slot % BLOCK) * D + ((head - HEADS) * (BLOCK * D))[:, None]
    is_cached = inside & (head >= HEADS)[:, None] & (slot >= 0)
    tl.store(cache + index + i[None, :], to_cache(first, cache), mask=is_cached)
    tl.store(cache + index + half + i[None, :], to_cache(second, cache), mask=is_cached)


@triton.jit
def write_rows(
    key, value, cache, slots, stride_key, stride_value, stride_page,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One program per token and head of keys and, with VALUES, values [T, KV_HEADS, D], which it copies to the cache.
    Tokens are `stride_key` and `stride_value` elements apart; DP: D up to a power of two; other arguments: see
    `rotate_and_write`.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    inside = d < D
    slot = tl.load(slots + token)
    if slot >= 0:
        index = (slot // BLOCK).to(tl.int64) * stride_page + head * (BLOCK * D) + (slot % BLOCK) * D
        k = tl.load(key + token.to(tl.int64) * stride_key + head * D + d, mask=inside)
        tl.store(cache + index + d, to_cache(k, cache), mask=inside)
        if VALUES:
            v = tl.load(value + token.to(tl.int64) * stride_value + head * D + d, mask=inside)
            tl.store(cache + index + KV_HEADS * BLOCK * D + d, to_cache(v, cache), mask=inside)
