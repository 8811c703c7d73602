"""The last operations of every kernel that norms a row, shared so that the bits are the same."""

import triton
import triton.language as tl


@triton.jit
def store_normed(value, weight, to, h, inside, H, eps):
    """The root-mean-square norm of a row of H numbers, float32 `value` at `h`, goes to `to`: rounded to its dtype
    before the weight is applied, and after. Returns what was stored.
    """
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    normed = (value * scale).to(to.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    stored = scaled.to(to.dtype.element_ty)
    tl.store(to + h, stored, mask=inside)
    return stored
