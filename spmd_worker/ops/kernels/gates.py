"""Gates of a layer, by row-wise operations of any kernels: bits of a token do not depend on the other tokens.

T: tokens of the step; I: columns.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

GATE_SLOPE: Final = 1.702
"""Slope of the sigmoid of clamped gates (https://arxiv.org/abs/2508.10925)."""
_LINEAR: Final = 20.0
"""Numbers from which on softplus is its argument, as in torch."""


def sigmoid(numbers: Tensor) -> Tensor:
    """Sigmoid as a softmax of two, which is row-wise: torch's sigmoid uses another function for the last few elements
    of a tensor, so that bits would depend on the number of rows.
    """
    return torch.stack((numbers, torch.zeros_like(numbers)), dim=-1).softmax(-1)[..., 0]


def sqrt_softplus(numbers: Tensor) -> Tensor:
    """The root of log(1 + exp(x)) of float32 numbers, row-wise as torch's softplus is not."""
    return torch.where(numbers > _LINEAR, numbers, numbers.clamp(max=_LINEAR).exp().log1p()).sqrt()


def bounded_gates(columns: Tensor, activation: str, bound: float, activate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Columns [T, 2 I], gates before ups -> [T, I]: min(act(gate), bound) * max(min(up, bound), -bound); with a `bound`
    below 0 act(min(gate, -bound)) * max(min(up, -bound), bound). The activation "swigluoai" is `clamped_gates`.
    `activate` is that of the kernels.
    """
    gates, ups = columns.chunk(2, dim=-1)
    if activation == "swigluoai":
        return clamped_gates(gates, ups, bound, activate)
    if bound < 0:
        return activate(gates.clamp(max=-bound), activation) * ups.clamp(bound, -bound)
    return activate(gates.contiguous(), activation).clamp(max=bound) * ups.clamp(-bound, bound)


def clamped_gates(gates: Tensor, ups: Tensor, limit: float, activate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """[T, I] and [T, I] -> gate * sigmoid(1.702 * gate) * (up + 1) of bounded factors, in float32, rounded once."""
    # x * sigmoid(a * x) is silu(a * x) / a: silu is a row-wise kernel, as torch's sigmoid is not.
    scaled = (gates.float().clamp(max=limit) * GATE_SLOPE).contiguous()
    gated = activate(scaled, "silu") / GATE_SLOPE * (ups.float().clamp(-limit, limit) + 1.0)
    return gated.to(gates.dtype)
