"""The hot operations of a decoder layer behind one interface, so that a device can bring its own.

T: tokens of the step; H: hidden size; D: head size. Every operation is row-wise: what is computed for one token does
not depend on the tokens beside it. Knows nothing about layers, attention or ranks.
"""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """One implementation per kind of device; passed as an argument to the layers."""

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in], once it is loaded, in the layout in which this implementation multiplies fastest.

        What comes back is for `linear` alone: it may have no elements to look at. It may also be `weight` itself.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] x [out, in] -> [T, out]. `weight` as it is or from `pack`."""

    def pack_gated(self, weight: Tensor) -> Tensor:
        """As `pack`, for `gated_linear` alone: the first half of the rows are gates, the second what they open."""

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] x [2 I, in] -> [T, I]: `silu_and_mul` of the product. `weight` as it is or from `pack_gated`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H], computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """[T, H] + [T, H] -> the norm of the sum, and the sum."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] turned by angles whose cosines and sines are [T, D / 2], halves paired as Hugging Face pairs
        them.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu of the first half times the second."""

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R, V] -> of each row the largest, float32 [R], and its first place, int64 [R]. NaN is the largest."""
