"""Gates of a layer, by row-wise operations of any kernels: bits of a token do not depend on the other tokens.

T: tokens of the step; I: columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def sigmoid(numbers: Tensor) -> Tensor:
    """Sigmoid as a softmax of two, which is row-wise: torch's sigmoid uses another function for the last few elements
    of a tensor, so that bits would depend on the number of rows.
    """
    return torch.stack((numbers, torch.zeros_like(numbers)), dim=-1).softmax(-1)[..., 0]


def bounded_gates(columns: Tensor, activation: str, bound: float, activate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Columns [T, 2 I], gates before ups -> [T, I]: min(act(gate), bound) * max(min(up, bound), -bound). `activate` is
    that of the kernels.
    """
    gates, ups = columns.chunk(2, dim=-1)
    return activate(gates.contiguous(), activation).clamp(max=bound) * ups.clamp(-bound, bound)
