"""Protocols of a device's kernels: the hot operations of a decoder layer, the head and the sampler.

T: tokens of the step; H: hidden size; D: head size. Every operation is row-wise: the result for a token does not depend
on the other tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from spmd_worker.base.numerical_policy import Region
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig, NormConfig
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels.adapters import AdapterKernels, AdapterStack, AddsToExperts
from spmd_worker.ops.kernels.recurrent import RecurrentKernels
from spmd_worker.ops.kernels.sample_row import SampleRow

MAX_LOGIT: Final = 1e30
"""Bound of penalised logits: infinity minus infinity is NaN."""
PROB_WEIGHT_BITS: Final = 40
"""Bits of the probability weight of a row's most probable token."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes and kinds that all layers of a model share, on one rank. `norm` is the kind of all norms; `scale` and
    `score_cap`, 0 for none, are of attention; `activation` is one of `Kernels.activate`; outputs of attention and
    feed-forward are scaled by `multiplier`. Layers that `defer` leave an output to be added with the next norm.
    `output_leaf_ends` and `down_leaf_ends`: see `Kernels.linear_of_leaves`. A layer with experts has an
    `intermediate_size` of 0, SiLU and no `down_leaf_ends`.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    norm: NormConfig
    scale: float
    score_cap: float
    activation: str
    multiplier: float
    defers: bool
    output_leaf_ends: tuple[int, ...]
    down_leaf_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer of one rank: weights from `pack`, gates of SiLU from `pack_gated`, biases that this rank adds;
    norms of the stream, of outputs before they are added, and of each query and key head.

    `gates` and `down` are None in a layer with experts, which are no part of the call. `window`: see
    `AttentionBackend.attend`; `rope`: index of its angles, -1 if heads are not rotated.
    """

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    attention_output_norm: Tensor | None
    feed_forward_norm: Tensor | None
    gates: Tensor | None
    gates_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    feed_forward_output_norm: Tensor | None
    window: int
    rope: int


FeedExperts = Callable[[int, Tensor], Tensor | None]
"""Number of a joined layer with experts, and its normed stream [T, hidden], which is overwritten afterwards -> their
part that is still to be added, [T, hidden], or None if it was added.
"""


class JoinableLayer(Protocol):
    """A decoder layer that may be computed in one call with others. `config` says whether; the rest is asked after."""

    @property
    def config(self) -> LayerConfig:
        """The kind of layer."""

    def weights(self) -> LayerWeights:
        """Weights of a layer with a gated feed-forward or experts."""

    def sizes(self) -> LayerSizes:
        """Sizes on this rank."""

    def adapter_stacks(self) -> tuple[AdapterStack | None, ...]:
        """Adapters of the projections to queries, keys and values, of the output's, of gates and of the projection
        down.
        """


@dataclass(frozen=True, slots=True)
class LogitFilters:
    """Filters of R rows of logits: `maxima` and `factors` float32 [R], see `Kernels.prob_sums`; `min_logits` float32
    [R], or minus infinity; `top_k` int64 [R], 0 keeps all; `top_p` float64 [R], 1 keeps all.
    """

    maxima: Tensor
    factors: Tensor
    min_logits: Tensor
    top_k: Tensor
    top_p: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, in order."""
        return self.maxima, self.factors, self.min_logits, self.top_k, self.top_p


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Weights of a rank's own experts of a sparse layer, one behind the other. N: own experts, in ascending order of
    their ids; I: intermediate size on this rank.

    `ids` int32 [N]; `gate_up` [N, 2 I, H], gates before ups, or in turns if `limit` is above 0 (`ExpertsConfig.limit`);
    `down` [N, H, I]; biases [N, 2 I] and [N, H], None if this rank adds none. `activation` is of the gates without a
    limit; `bound`: see `gates.bounded_gates`, 0 for none. With `stored` both weights are bytes of numbers in that
    format, which have `gate_up_scales` and `down_scales`, [N, ...] of `StoredFormat.scales_shape`. Experts that are
    not `is_gated` have ups alone, [N, I, H].
    """

    ids: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: str
    limit: float
    stored: StoredFormat | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    bound: float = 0.0
    is_gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert of one rank: weights from `pack`, gates of SiLU from `pack_gated`, and biases that this rank adds."""

    gates: Tensor
    gates_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields, in order."""
        return self.gates, self.gates_bias, self.down, self.down_bias


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes and kinds that all experts of a layer share, on one rank. `activation`, `limit`, `bound` and `is_gated`:
    see `ExpertStack`. `leaf_ends`: see `Kernels.linear_of_leaves`, empty without leaves; outputs are of `part_dtype`.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    limit: float
    bound: float
    is_gated: bool
    leaf_ends: tuple[int, ...]
    dtype: torch.dtype
    part_dtype: torch.dtype


class JoinedExperts(Protocol):
    """The experts of a sparse layer in one call, with their weights. T, C and E as in `ExpertKernels`; S = T * C."""

    takes_activation: bool
    """Whether `outputs` takes one of the caller's, with the same bits."""

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        totals: Tensor,
        slots: Tensor | None = None,
        activated: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x [T, H], `ids` int64 [T, C] -> outputs [T * C, H] of each token's experts, of `ExpertSizes.part_dtype`, with
        the bits that each has by itself; zero for experts of other ranks. Adds the tokens of each expert, on any rank,
        to `totals`, int64 [E]. `slots` as of `ExpertKernels`, where steps are padded: outputs of padding are zero.
        `activated` replaces the activation: [S, outputs of the gate and up projections] -> inputs of the down
        projections [S, I].
        """

    def weighted_sum(self, results: Tensor, weights: Tensor) -> Tensor:
        """Outputs [T * C, H] of the model's dtype and float32 weights [T, C] -> [T, H]: products added in float32 from
        a token's first expert to its last, then rounded.
        """


class ExpertKernels(Protocol):
    """The router and all experts of a sparse layer at once, with launches that depend on the number of tokens alone.

    C: experts of a token; E: experts of the layer; `ids` int32 or int64 [T, C], ascending in each row. `slots` int32
    [T]: negative for padding tokens, which have no experts; None: there are none.
    """

    def route(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        choice_bias: Tensor | None,
        experts: ExpertsConfig,
        add: Callable[[Tensor], Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, H], float32 weight [E, H] or [E + 1, H], biases float32 [E] -> ids int64 [T, C] and weights float32
        [T, C] of `model.layers.experts.select_experts`, and the shared expert's gate, float32 [T, 1], or None. `add`
        adds adapters in place to what the logits are sums of, float32 [T, E] or [T, E + 1], before they have biases.
        """

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        stack: ExpertStack,
        slots: Tensor | None,
        totals: Tensor,
        *,
        others_are_zero: bool,
        added: AddsToExperts | None = None,
    ) -> Tensor:
        """x [T, H] -> outputs [T * C, H] of each token's experts, with the bits of `gated_linear` (or the two
        operations that it replaces) and `linear`. Outputs of other ranks' experts and padding are zero if
        `others_are_zero`, else arbitrary. Adds the tokens of each expert, on any rank, to `totals`, int64 [E]. With
        `added` outputs have what adapters add, and rows without any the same bits.
        """

    def weighted_sum(
        self, results: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None, is_own: Tensor | None
    ) -> Tensor:
        """Outputs [T * C, H] and float32 weights [T, C] -> [T, H]: products added in float32 from a token's first
        expert to its last, then rounded. `is_own` int32 [E], 1 for experts whose outputs are there: others count as
        zero; None: all are.
        """


class StoredPanels(Protocol):
    """Weights that stay in memory as their file has them, in panels, and that products expand to the values of
    dequantised ones as they go: the bits are the same. `stored` is "int4", "nf4", "e2m1", one of GGUF's, or "e4m3" with
    scales of single rows.

    n: rows; I: inputs of a weight; G: its groups of inputs.
    """

    def empty(self, stored: StoredFormat, shape: tuple[int, int], device: torch.device, *, is_gated: bool) -> Tensor:
        """Memory for a weight [outputs, I], for `linear` or, if it `is_gated`, for `gated_linear`; not initialised."""

    def write_rows(self, packed: Tensor, stored: StoredFormat, start: int, numbers: Tensor, scales: Tensor) -> None:
        """Replace rows from `start` on by a file's: numbers uint8 [n, I / 2], two a byte, the first in the low bits, of
        "e4m3" and "affine8" [n, I]; scales of "int4" float32 [n, G, 2], a scale and a zero point of 0 to 16 each; of
        "nf4" the same with zeros; of "e2m1" exponents, uint8 [n, G]; of "e4m3" float32 [n, G]; of GGUF's those of
        `stored_weights.affine_scales`.
        """

    def read_values(self, packed: Tensor, stored: StoredFormat, num_inputs: int, rows: tuple[int, int]) -> Tensor:
        """Float32 values of some rows [n, I] of a weight of I inputs, not rounded."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Numbers by which R rows choose their tokens: `factors` float32 [R], see `Kernels.prob_sums`, 0 for a greedy row;
    `keys` int64 [3, R] and `step`, see `Kernels.random_bits`; `otherwise`, the id of a row without a finite maximum.
    """

    factors: Tensor
    keys: Tensor
    step: int
    otherwise: int


class RowHistories(Protocol):
    """Tokens of rows with logits processors, kept on the device, so that a step sends and reads nothing."""

    def prepare(self, sample_rows: Sequence[SampleRow]) -> Any:
        """Rows of a step, in the order of their logits. The host must know the tokens of a row that is new."""

    def is_next(self, prepared: Any) -> bool:
        """Whether these rows continue, each by the token that it was given last: then no `prepare` is needed."""

    def process_(self, logits: Tensor, prepared: Any) -> None:
        """`sampling.processors.process_logits` of float32 [R, V]: the bits that it has on the CPU."""

    def append_(self, prepared: Any, token_ids: Tensor) -> None:
        """The tokens sampled for the rows, int64 [R]; negative for a row that has ended."""


class Kernels(Protocol):
    """The kernels of one kind of device; passed as an argument to the layers."""

    samples_on_device: bool
    """Whether `draw`, `random_bits` and `top_logits` take few launches, and the device keeps histories."""

    @property
    def plain(self) -> "Kernels":
        """These kernels, or the same device's if they quantise the weights that they pack."""

    def new_histories(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> RowHistories:
        """An empty one; only if `samples_on_device`."""

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        """Regions of a numerical policy that these kernels compute in a model of this dtype."""

    def pack(self, weight: Tensor) -> Tensor:
        """A loaded weight [out, in] in the layout in which these kernels multiply fastest.

        The result is for the methods below alone: its elements may not be accessible. It may be `weight` itself.
        """

    def empty_packed(self, weight: Tensor, *, is_gated: bool) -> Tensor | None:
        """Zeros in the layout of `pack`, or `pack_gated`, for `repack_` of all rows; None if only filled weights can be
        packed, or if packing changes nothing. `weight` need not be filled.
        """

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the weight given to `pack` or `pack_gated`, bit for bit, [stop - start, in].

        A copy, or a view if `packed` is the weight itself.
        """

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """Replace rows from `start` on by `rows` [n, in], of the weight's dtype and device.

        In place: `packed` keeps its storage, so its address stays valid.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[T, in] x [out, in] -> [T, out]. `weight` is plain, or from `pack` or `pack_gated`.

        `out`, of the result's shape and dtype, is a suggestion: kernels may return another tensor.
        """

    def pack_leaves(self, weight: Tensor) -> Tensor:
        """`pack` for `linear_of_leaves`, of a weight [out, in]."""

    def linear_of_leaves(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Sequence[int],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """`linear` with the inputs in leaves (`ranks/leaves.py`) that end at `ends`, a power of two of them: a float32
        chain in each, the bias added to the first, a binary tree over them -> [T, out] of `dtype`: that of x, rounded
        once, or float32, a part of a sum over ranks. `weight` is plain or from `pack_leaves`.

        `out`, of the result's shape and dtype, is a suggestion: kernels may return another tensor.
        """

    def pack_heads(self, weight: Tensor) -> Tensor:
        """Weights of heads [heads, out, in], of the model's dtype, packed for `linear_of_heads`: [heads, ...], of as
        many elements. They are not quantised.
        """

    def unpack_heads(self, packed: Tensor) -> Tensor:
        """The weights given to `pack_heads`, bit for bit: a copy, or a view."""

    def linear_of_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """`out` [T, heads, outputs] = x [T, heads, in] by each head's weight, from `pack_heads`. The last dimension of
        x and `out` is contiguous.
        """

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[R, in] x [V, in] -> `argmax` of each row of the result over its first `count` columns."""

    def argmax_module(self, weight: Tensor) -> nn.Module | None:
        """A module that replaces `linear_argmax` for a weight from `pack`: the same bits, faster by buffers that it
        keeps. None if there is no faster way.

        It is called with x, the weight and `count`; then the weight before `pack`, or None if the caller has none; and
        the number of writes to the weight so far, which tells it that its buffers are stale.
        """

    def pack_gated(self, weight: Tensor) -> Tensor:
        """`pack` for `gated_linear`: the first half of the rows are the gate, the second half the up projection."""

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] x [2 I, in] -> [T, I]: `silu_and_mul` of the GEMM. `weight` is plain or from `pack_gated`."""

    def stored_panels(self, dtype: torch.dtype) -> StoredPanels | None:
        """Weights that `linear`, `gated_linear`, `linear_of_leaves` and `join_experts` take as they are stored, for a
        model of this dtype; None: they take none. `unpack` and `repack_` do not take them either.
        """

    def expert_kernels(self) -> ExpertKernels | None:
        """Kernels for all experts of a layer at once; None: experts are called one by one, by the methods above."""

    def join_experts(self, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes) -> JoinedExperts | None:
        """A rank's own experts by their ids, ascending, as one call; None if these kernels have none for such weights
        or gates. The weights keep their addresses from now on.
        """

    def adapter_kernels(self) -> AdapterKernels:
        """Kernels of low-rank adapters."""

    def recurrent_kernels(self) -> RecurrentKernels:
        """Kernels of layers with recurrent states."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] -> [..., H], computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, H] + [T, H] -> the norm of the sum. `residual` becomes the sum; `x` may be overwritten."""

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        """[..., H] -> [..., H]: rows minus their mean if `is_centred`, scaled to unit variance, times weight plus
        offset, plus bias; computed in float32 and rounded once (https://arxiv.org/abs/1607.06450).
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] rotated by angles of cosines and sines [T, D / 2], halves paired as Hugging Face pairs them."""

    def rotate_once(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rotate` by float32 angles, computed in float32 and rounded once."""

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, H] += [T, H], rounded; returns x."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu of the first half times the second."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """[T, I] -> [T, I]: `activation` is "silu", "gelu_tanh", "gelu" (https://arxiv.org/abs/1606.08415), "relu",
        "relu2", its square (https://arxiv.org/abs/2109.08668), or "quick_gelu", x * sigmoid(1.702 * x).
        """

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2 I] -> [T, I]: the activation of the first half times the second."""

    def bound(self, x: Tensor, cap: float) -> Tensor:
        """[R, V] -> [R, V]: cap * tanh(x / cap), computed in float32."""

    def argmax(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R, V] -> maximum of each row, float32 [R], and its first index, int64 [R]. NaN is the maximum."""

    def prob_sums(self, logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
        """[R, V], float32 [R], float32 [R] -> int64 [R, n]: sums of each row's probability weights over n pieces of
        the row; the kernels choose n.

        The weight of a token is the fixed-point number floor(2^40 x 2^((logit - maximum) x factor)); V is at most 2^22,
        and no logit is NaN. The sums are exact, so they depend neither on the order nor on how a vocabulary is sharded.
        """

    def invert_cdf(self, logits: Tensor, maxima: Tensor, factors: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
        """First index of each row at which the running sum of its weights is above its target, int64 [R] -> int64 [R];
        -1 if there is none or the target is below 0. `sums`: from `prob_sums` of the same logits.
        """

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        """[R, V], float32 [R] -> int64 [R]: number of each row's logits that are larger than its value. NaN is not."""

    def random_bits(self, keys: Tensor, step: int) -> Tensor:
        """`kernels.random.random_bits` of streams, as signed numbers, samples and positions, int64 [3, R], with `step`
        added to the positions -> int64 [R].
        """

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """[R, V] of complete rows -> token ids, int64 [R], and maxima, float32 [R]: `argmax` of greedy rows, and
        `invert_cdf` of the others at a random share of their sum.
        """

    def top_logits(self, logits: Tensor, count: int) -> Tensor:
        """[R, V] -> float64 [R, count, 2]: value and id of each row's `count` largest logits, ties by ascending id;
        -1 for both if there are no more or a value is NaN.
        """

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, mask_rows: Tensor, first_id: int) -> None:
        """Set logits [K, V] of forbidden tokens to minus infinity; columns are tokens from `first_id` on.

        `rows` int64 [n] have masks; `mask_rows` int64 [n] are their rows of `allowed`, int32 [M, words], where token t
        is bit t % 32 of word t / 32. Tokens beyond the last word are forbidden.
        """

    def filter_(self, logits: Tensor, filters: LogitFilters) -> None:
        """Set float32 logits [R, V], without NaN, that each row's filters drop to minus infinity. A row keeps those not
        below `min_logits`, of these the `top_k` largest, and of these the fewest that hold `top_p` of the probability
        weights; ties with a kept logit are kept.
        """


class QuantisedKernels(Kernels, Protocol):
    """Kernels whose packed weights are int8 or FP8 with scales: an approximation of the weight that was packed.

    `unpack` returns that approximation in `dtype`, which the rest of a model computes in. `repack_` leaves rows as they
    are that are equal to it; others are quantised again.
    """

    dtype: torch.dtype

    @property
    def integer(self) -> "IntegerKernels | None":
        """These kernels, if ranks that share a row add integer sums. Otherwise a rank's share of a row is a row of its
        own, of weights and of activations, and ranks add results as they do without quantisation.
        """

    @property
    def stored(self) -> "StoredScaleKernels | None":
        """These kernels, if they compute with FP8 numbers of a checkpoint as they are."""

    @property
    def head(self) -> Kernels | None:
        """Kernels of the token head, if it keeps the model's dtype; None: it is quantised too."""

    def repack_part_(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        """`repack_` for some inputs of rows [n, in] whose maximum magnitudes are `maxima`, float32 [n]: quantises all
        of them again.
        """

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> bool:
        """Whether any of `rows` [n, in] differs from `unpack` from `start` on."""


class StoredScaleKernels(QuantisedKernels, Protocol):
    """Quantised kernels that take scales of a checkpoint, and so its FP8 numbers as they are."""

    def pack_stored(self, weight: Tensor, scales: Tensor) -> Tensor:
        """`pack` of a weight that was dequantised with `scales`, float32 [out, 1] or of groups [out, in / 128]."""

    def repack_stored_(self, packed: Tensor, start: int, rows: Tensor, scales: Tensor) -> None:
        """`repack_` of `rows` [n, in] that were dequantised with `scales`; quantises all of them again."""


class IntegerKernels(QuantisedKernels, Protocol):
    """A rank that has some inputs of a row alone, of a weight or of activations, passes the maximum magnitudes of
    complete rows and adds integer sums: so results do not depend on the number of ranks that share a row.
    """

    def pack_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        """`pack` for some inputs of rows whose maximum magnitudes are `maxima`, float32 [out]."""

    def row_maxima(self, x: Tensor) -> Tensor:
        """[T, in] -> maximum magnitudes of rows, float32 [T]; NaN if an element is NaN."""

    def sums(self, x: Tensor, maxima: Tensor, weight: Tensor) -> Tensor:
        """[T, in], of rows with these maximum magnitudes, float32 [T], x packed [out, in] -> int32 [T, out]."""

    def scaled(self, parts: Tensor, maxima: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sums of each rank's inputs, int32 [ranks, T, out] -> the result of `linear` for all inputs, [T, out]."""
