"""The dtype of cached keys and values: the model's, or FP8 (`cache.dtype=fp8`), in half the memory of 16 bits.

A number is rounded to e4m3 (https://arxiv.org/abs/2209.05433) when it is written, to the nearest with ties to even;
finite ones beyond 448 become 448, infinite ones NaN. It is read as the model's dtype, which has every number of e4m3.
Nothing is scaled. All tokens, those of the step included, are read from the cache, so that a row's answer depends on
the row alone here, too.

Caches are tensors of bytes: they are moved as they are, which torch does not do with every tensor of e4m3.
"""

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.uint8
"""Dtype of the tensors of a cache in FP8."""
MOST: Final = 448.0
"""The largest number of e4m3."""


def cache_dtype_of(dtype: torch.dtype, cache_dtype: str) -> torch.dtype:
    """Dtype of the tensors of a cache of a model of `dtype`, by the key `cache.dtype`."""
    return FP8 if cache_dtype == "fp8" else dtype


def cache_constants(cache_dtype: torch.dtype | None) -> dict[str, int]:
    """Constants of a numerical policy with a cache of this dtype: none where it is the model's, or None."""
    return {"fp8_cache": 1} if cache_dtype == FP8 else {}


def to_cache(numbers: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of this dtype holds them."""
    if cache_dtype != FP8:
        return numbers
    wide = numbers.float()
    bounded = torch.where(wide.isinf(), wide.new_tensor(torch.nan).copysign(wide), wide.clamp(-MOST, MOST))
    return bounded.to(torch.float8_e4m3fn).view(FP8)


def from_cache(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of a cache, in `dtype`."""
    return cached.view(torch.float8_e4m3fn).to(dtype) if cached.dtype == FP8 else cached
