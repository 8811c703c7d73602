"""Means over rows by element-wise additions alone, halves of a row added until one number is left: a row's result has
the same bits on every device, whatever the other rows are. For few sums a layer; kernels with sums of their own are
faster.
"""

import torch
from torch import Tensor


def row_means(x: Tensor) -> Tensor:
    """[..., n] -> float32 [..., 1]."""
    count, sums = x.shape[-1], x.float()
    while (size := sums.shape[-1]) > 1:
        half = size // 2
        added = sums[..., :half] + sums[..., half : 2 * half]
        sums = added if size % 2 == 0 else torch.cat((added, sums[..., 2 * half :]), dim=-1)
    return sums / count


def row_lengths(x: Tensor) -> Tensor:
    """[..., n] -> the root of the mean square, float32 [..., 1]."""
    wide = x.float()
    return torch.sqrt(row_means(wide * wide))
