"""Gates of a layer, by row-wise operations of any kernels: bits of a token do not depend on the other tokens.

T: tokens of the step; I: columns.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

GATE_SLOPE: Final = 1.702
"""Slope of the sigmoid of clamped gates (https://arxiv.org/abs/2508.10925)."""


def sigmoid(numbers: Tensor) -> Tensor:
    """Sigmoid as a softmax of two, which is row-wise: torch's sigmoid uses another function for the last few elements
    of a tensor, so that bits would depend on the number of rows.
    """
    return torch.stack((numbers, torch.zeros_like(numbers)), dim=-1).softmax(-1)[..., 0]


def bounded_gates(columns: Tensor, activation: str, bound: float, activate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Columns [T, 2 I], gates before ups -> [T, I]: min(act(gate), bound) * max(min(up, bound), -bound), or clamped
    gates with the activation "swigluoai". `activate` is that of the kernels.
    """
    gates, ups = columns.chunk(2, dim=-1)
    if activation == "swigluoai":
        return clamped_gates(gates, ups, bound, activate)
    return activate(gates.contiguous(), activation).clamp(max=bound) * ups.clamp(-bound, bound)


def clamped_gates(gates: Tensor, ups: Tensor, limit: float, activate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """[T, I] and [T, I] -> gate * sigmoid(1.702 * gate) * (up + 1) of bounded factors, in float32, rounded once."""
    # x * sigmoid(a * x) is silu(a * x) / a: silu is a row-wise kernel, as torch's sigmoid is not.
    scaled = (gates.float().clamp(max=limit) * GATE_SLOPE).contiguous()
    gated = activate(scaled, "silu") / GATE_SLOPE * (ups.float().clamp(-limit, limit) + 1.0)
    return gated.to(gates.dtype)
