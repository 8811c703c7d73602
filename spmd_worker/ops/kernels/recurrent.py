"""Protocol of kernels of layers with recurrent states: convolution, scans, gated norm.

One kernel serves prompts and decode: a decoding sequence is a segment of one token. Two kernels of the same formula
would add in two orders. What is computed for a sequence depends on its own tokens and its own slot alone, and not on
where a prompt is cut.

T: tokens; S: sequences; K: taps of a convolution, C its channels; Hk, Hv: key and value heads, dk, dv their sizes;
H, P, G, n: heads of Mamba2, their size, groups, and size of a state; C, n: channels of Mamba, and numbers of each.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig


@dataclass(frozen=True, slots=True)
class StateSegments:
    """The tokens of a step by sequence, int32 on the device of the model: those of sequence i are `starts[i]` to
    `starts[i + 1]` [S + 1], the first of them at position `firsts[i]` [S] of the sequence, whose state is in slot
    `slots[i]` [S].

    A sequence whose first position is 0 begins from zeros, whatever its slot holds. A negative slot is padding: its
    tokens get any result, and nothing is read or written.

    `kept` [S]: the slot gets the state, and the tail, after so many leading tokens of the segment, at least 1; those
    behind get their results all the same. Both have the bits that two segments cut there would have. Nothing reads it
    for padding and sequences without tokens. None: after all of them.
    """

    slots: Tensor
    starts: Tensor
    firsts: Tensor
    kept: Tensor | None = None


class DeltaRates(NamedTuple):
    """Projected gates of a gated delta rule, and weights in float32, shaped as in `RecurrentKernels.scan_delta`."""

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


class MambaRates(NamedTuple):
    """Projected steps of a Mamba layer, and weights in float32, of which `skip` is D: `RecurrentKernels.scan_mamba`."""

    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True)
class NormRule:
    """A gated norm of `num_groups` groups of a row; `activation` of the gate is "silu" or "sigmoid".

    `gates_first`: rms(x * act(gate)) * weight. Otherwise rms(x), rounded, times weight, then times act(gate) in
    float32, rounded. With `rounds_once` both are float32 until the end.
    """

    eps: float
    num_groups: int
    activation: str
    gates_first: bool
    rounds_once: bool = False

    def __post_init__(self) -> None:
        assert self.activation in ("silu", "sigmoid"), self.activation


class RecurrentKernels(Protocol):
    """States and tails are changed in place, those of the step's slots alone. Sizes are a rank's share."""

    def numerics(self) -> Region:
        """Their region of a numerical policy."""

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        segments: StateSegments,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Causal depthwise convolution: x [T, C], weight [C, K], bias [C] -> [T, C], the sum over j of weight[:, j] *
        x[t - K + 1 + j], in float32 from the oldest tap to the newest, then the bias, then silu, rounded once.

        `tails` [slots, K - 1, C], of the dtype of x: the inputs before a segment, zeros before position 0; then the
        last K - 1 inputs up to the last kept token.
        """

    def scan_delta(
        self, mixed: Tensor, rates: DeltaRates, states: Tensor, segments: StateSegments, config: DeltaConfig
    ) -> Tensor:
        """Gated delta rule (https://arxiv.org/abs/2412.06464): mixed [T, 2 Hk dk + Hv dv] has queries, keys and values,
        a and b [T, Hv] are projected gates, float32 a_log and dt_bias [Hv] -> [T, Hv, dv].

        In float32: q and k of length 1, q / sqrt(dk); beta = beta_scale * sigmoid(b), rounded as `b` before it is
        scaled; g = -exp(a_log) * softplus(a + dt_bias), or, with a `decay_bound`, that times sigmoid(exp(a_log) * (a +
        dt_bias)); S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q.
        With `is_per_channel` a is [T, Hv dk], dt_bias [Hv dk], and g one number a channel of a key.
        `states` float32 [slots, Hv, dk, dv].
        """

    def scan_mamba(
        self, mixed: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments, config: MambaConfig
    ) -> Tensor:
        """Mamba2 (https://arxiv.org/abs/2405.21060): mixed [T, H P + 2 G n] has x, B and C, dt [T, H]; float32 a_log,
        dt_bias and skip (D) [H] -> [T, H P].

        In float32: dt = softplus(dt + dt_bias) bounded by `dt_limits`; S = exp(-dt exp(a_log)) S + (dt x) B^T; o = S C
        + D x. `states` float32 [slots, H, P, n].
        """

    def scan_mamba1(
        self, x: Tensor, shared: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments
    ) -> Tensor:
        """Mamba (https://arxiv.org/abs/2312.00752): x and dt [T, C] of each channel, shared [T, 2 n] has B and C, which
        all channels share; float32 a_log [C, n], dt_bias and skip (D) [C] -> [T, C].

        In float32: dt = softplus(dt + dt_bias); S = exp(-dt exp(a_log)) S + (dt x) B; o = S . C + D x.
        `states` float32 [slots, C, n].
        """

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
        """x and gate [T, N], each group of a row normed by itself (https://arxiv.org/abs/1910.07467), weight
        [N / num_groups] or [N] -> [T, N].
        """
