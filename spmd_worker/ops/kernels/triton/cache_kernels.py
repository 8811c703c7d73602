"""Numbers of an FP8 cache on a GPU, as bytes of e4m3 (ops/attention/cache_dtype.py), by operations that every GPU has;
see `native/e4m3.h`.
"""

import triton
import triton.language as tl


@triton.jit
def to_cache(value, cache):
    """Numbers as the cache at pointer `cache` holds them: as they are, or bytes of e4m3."""
    if cache.dtype.element_ty == tl.uint8:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        size = magnitude.to(tl.float32, bitcast=True)
        capped = tl.where(size > 448.0, 0x43E00000, magnitude)
        normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - 960
        # Below 2^-6 a number is a multiple of 2^-9, the last place of 2^14.
        small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF
        number = tl.where(size < 0.015625, small, normal)
        # Infinities and NaN.
        number = tl.where(magnitude < 0x7F800000, number, 0x7F)
        value = (number | ((bits >> 24) & 0x80)).to(tl.uint8)
    return value


@triton.jit
def from_cache(cached, ELEMENT: tl.constexpr):
    """Numbers of ELEMENT, from those of a cache."""
    if cached.dtype == tl.uint8:
        wide = cached.to(tl.uint16)
        # 2^-8 times the number, subnormal ones too.
        halves = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
        numbers = halves.to(tl.float32) * 256.0
        cached = tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers).to(ELEMENT)
    return cached
