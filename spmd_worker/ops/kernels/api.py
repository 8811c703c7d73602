"""The hot operations of a decoder layer behind one interface, so that a device can bring its own.

T: tokens of the step; H: hidden size; D: head size. Every operation is row-wise: what is computed for one token does
not depend on the tokens beside it.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from spmd_worker.model_config.layer_config import LayerConfig

MASS_BITS: Final = 40
"""Of the largest mass of a row."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What the layers of a model have in common, as one rank has it. `eps` is that of the norms, `scale` that of
    attention scores.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer of one rank: weights as `pack` and `pack_gated` left them, biases that this rank adds.

    `window` is what `AttentionBackend.attend` takes.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    norm: Tensor
    gates: Tensor
    gates_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int


class JoinableLayer(Protocol):
    """A decoder layer, as whoever joins layers asks for it: first what it is, then the rest."""

    @property
    def config(self) -> LayerConfig:
        """The kind of layer."""

    def weights(self) -> LayerWeights:
        """Weights of a dense layer with gates and plain norms before attention and feed-forward."""

    def sizes(self) -> LayerSizes:
        """Sizes as this rank has them."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What filters leave of R rows of logits. `largest` and `factors` float32 [R] as of `Kernels.masses`; `lowest`
    float32 [R], or minus infinity; `top_k` int64 [R], 0 for all; `top_p` float64 [R], 1 for all.
    """

    largest: Tensor
    factors: Tensor
    lowest: Tensor
    top_k: Tensor
    top_p: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order above."""
        return self.largest, self.factors, self.lowest, self.top_k, self.top_p


class Kernels(Protocol):
    """One implementation per kind of device; passed as an argument to the layers."""

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in], once it is loaded, in the layout in which this implementation multiplies fastest.

        What comes back is for the methods below alone: it may have no elements to look at. It may also be `weight`
        itself.
        """

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the weight that `pack` or `pack_gated` was given, bit for bit, [stop - start, in].

        A copy, or a view where `packed` is the weight itself.
        """

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """Make `rows` [n, in], of the weight's dtype and device, its rows from `start` on.

        In place: `packed` has the same storage afterwards, so addresses that were taken of it stay good.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
        """[T, in] x [out, in] -> [T, out]. `weight` as it is, from `pack` or from `pack_gated`.

        `room`, of the result's shape and dtype, is where it should be put; an implementation that cannot lets it be.
        """

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[R, in] x [V, in] -> `largest` of each row of the product among its first `count` columns."""

    def argmax_module(self, weight: Tensor) -> nn.Module | None:
        """A module that replaces `linear_argmax` for a weight from `pack`: the same bits, faster by buffers that it
        keeps. None if there is no faster way.

        It is called with x, the weight and `count`; then the weight before `pack`, or None if the caller has none; and
        the number of writes to the weight so far, which tells it that its buffers are stale.
        """

    def pack_gated(self, weight: Tensor) -> Tensor:
        """As `pack`, for `gated_linear` alone: the first half of the rows are gates, the second what they open."""

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] x [2 I, in] -> [T, I]: `silu_and_mul` of the product. `weight` as it is or from `pack_gated`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H], computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, H] + [T, H] -> the norm of the sum. `residual` becomes the sum, and what `x` held may be gone."""

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        """[..., H] -> [..., H]: rows without their mean, where `is_centred`, and of unit variance, times weight and
        offset together, plus bias; computed in float32 and rounded once (https://arxiv.org/abs/1607.06450).
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] turned by angles whose cosines and sines are [T, D / 2], halves paired as Hugging Face pairs
        them.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu of the first half times the second."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """[T, I] -> [T, I]: `activation` is "silu", "gelu_tanh", "gelu" (https://arxiv.org/abs/1606.08415), "relu" or
        "relu2", its square (https://arxiv.org/abs/2109.08668).
        """

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2 I] -> [T, I]: the activation of the first half times the second."""

    def bound(self, x: Tensor, cap: float) -> Tensor:
        """[R, V] -> [R, V]: cap * tanh(x / cap), computed in float32."""

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R, V] -> of each row the largest, float32 [R], and its first place, int64 [R]. NaN is the largest."""

    def masses(self, logits: Tensor, largest: Tensor, factors: Tensor) -> Tensor:
        """[R, V], float32 [R], float32 [R] -> what each row's tokens are drawn by, int64 [R, n], n as an implementation
        likes: the row's n sums are those of the masses of as many pieces of it.

        A mass is floor(2^40 x 2^((logit - largest) x factor)); V is at most 2^22, and no logit is NaN. The sums are
        exact, so neither the order nor how a vocabulary is cut enters them.
        """

    def find_mass(self, logits: Tensor, largest: Tensor, factors: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
        """Of each row the first place at which its running mass is above its target, int64 [R] -> int64 [R]: -1 where
        there is none, or the target is below 0. `masses` are those of the same logits.
        """

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        """[R, V], float32 [R] -> int64 [R]: how many of each row's logits are larger than its value. NaN is not."""

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, places: Tensor, first_id: int) -> None:
        """[K, V], whose columns are tokens from `first_id` on: minus infinity, in rows `rows`, for each token whose bit
        is not set in the row of `allowed` that `places` names. Int32 [M, words], token t is bit t % 32 of word t / 32,
        and what has no word is not allowed; int64 [n], int64 [n].
        """

    def cut_(self, logits: Tensor, cuts: "Cuts") -> None:
        """Float32 [R, V], without NaN: minus infinity in place of what each row's filters drop. A row keeps what is not
        below `lowest`, of that the `top_k` largest, and of these the fewest that hold `top_p` of their `masses`; what
        is equal to something that is kept is kept.
        """


class QuantisedKernels(Kernels, Protocol):
    """Kernels whose packed weights are int8, with a scale an output: what they stand for is near what was packed.

    `unpack` shows that, in `dtype`, which all else is computed in. `repack_` leaves rows as they are that are equal to
    what it shows; others are quantised anew.
    Whoever has some inputs of every row alone, of a weight or of what it multiplies, says what the largest magnitudes
    of the whole rows are, and adds sums of whole numbers: so what comes out does not depend on how many share a row.
    """

    dtype: torch.dtype

    def pack_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        """As `pack`, of some inputs of rows that have these largest magnitudes in all, float32 [out]."""

    def repack_part_(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        """As `repack_`, of some inputs of rows [n, in] that have these largest magnitudes in all, float32 [n]: all of
        them are quantised anew.
        """

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> bool:
        """Whether any of `rows` [n, in] is not what `unpack` shows from `start` on."""

    def row_maxima(self, x: Tensor) -> Tensor:
        """[T, in] -> the largest magnitudes of rows, float32 [T]; NaN where a number is none."""

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        """[T, in], of rows with these largest magnitudes, float32 [T], x packed [out, in] -> int32 [T, out]."""

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sums of each share of the inputs, int32 [shares, T, out] -> what `linear` gives of all of them, [T, out]."""
