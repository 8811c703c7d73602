"""Config of one layer: its weights, norms, rotary embedding and attention window. One for each layer of a model.

Needs no torch: the plan of a run counts weights with `layer_elements`, the layers are built from the same fields.

A layer is attention and a feed-forward on a residual stream. Each kind of model has a norm at some of four positions:
before attention, after it, before the feed-forward, after it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm over the hidden size. `kind` is "rms" (https://arxiv.org/abs/1910.07467) or "layer"
    (https://arxiv.org/abs/1607.06450).

    `offset` is added to the weight in float32. `rounds_once`: the normed numbers are multiplied with the weight before
    they are rounded to the dtype, not after; a layer norm always does so. Without `has_weight` it is 1.
    """

    kind: str = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    rounds_once: bool = False
    has_bias: bool = False
    has_weight: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is the norm that can be fused with sums and full layers."""
        return self.kind == "rms" and self.has_weight and not (self.offset or self.rounds_once or self.has_bias)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts of a sparse layer, with `intermediate_size` columns each, and the choice of a token's `num_chosen`
    (https://arxiv.org/abs/2101.03961).

    `score` is "softmax" over all experts, "softmax_chosen" over the chosen, "sigmoid" or "sparsemixer". The top scores
    are chosen, after a bias with `has_choice_bias`, in the `num_chosen_groups` best groups of neighbours; ties by
    number. Weights are the scores, divided by their sum, `min_sum` or more, with `renormalises`, times `scaling`.
    "sparsemixer" (https://arxiv.org/abs/2409.12136): of two chosen, each has the weight of a softmax of its own, over
    the scores that were left to choose from and are at most 2 * `jitter` below the best, as shares of the larger of the
    best and their own magnitude.

    `limit` above 0: gate and up columns alternate, and both are bounded by it: gate * sigmoid(1.702 * gate) * (up + 1).
    `bound` is as in `LayerConfig`. `shared_size` columns are of the expert that every token visits, 0 for none.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    score: str = "softmax"
    renormalises: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_choice_bias: bool = False
    has_router_bias: bool = False
    has_bias: bool = False
    limit: float = 0.0
    shared_size: int = 0
    has_shared_gate: bool = False
    has_shared_bias: bool = False
    min_sum: float = 0.0
    jitter: float = 0.0
    bound: float = 0.0

    def router_elements(self, hidden_size: int) -> int:
        """Parameters of the router, and of the shared expert's gate. They are float32 in every dtype."""
        biases = self.num_experts * (self.has_router_bias + self.has_choice_bias)
        return (self.num_experts + self.has_shared_gate) * hidden_size + biases

    def elements(self, hidden_size: int, share: "ExpertShare") -> int:
        """Parameters of a rank with this share, the router's included."""
        columns = share.num_columns
        each = 3 * hidden_size * columns + (2 * columns + hidden_size) * self.has_bias
        shared = 3 * hidden_size * share.num_shared_columns
        if self.has_shared_bias and share.num_shared_columns:
            shared += 2 * share.num_shared_columns + hidden_size
        return share.num_experts * each + shared + self.router_elements(hidden_size)

    @property
    def full_share(self) -> "ExpertShare":
        """The share of a rank that has all experts."""
        return ExpertShare(self.num_experts, self.intermediate_size, self.shared_size)


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """A rank's share of a sparse layer: its experts, their columns, and columns of the shared expert."""

    num_experts: int
    num_columns: int
    num_shared_columns: int


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A tensor-parallel rank's share of one layer: heads, columns of a dense feed-forward, and experts of a sparse one,
    None for a dense one.
    """

    num_heads: int
    num_kv_heads: int
    num_columns: int
    experts: ExpertShare | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of the full layer, not of a rank's share.

    `window` is the range of attention, tokens, 0 for all; `rope` the index in `ModelConfig.ropes`, None if positions
    are not rotated. `scale` multiplies attention scores, which `score_cap`, if above 0, then bounds: cap * tanh(score /
    cap). `qk_norm` is "none", "head" (each head by itself), "head_after_rope", "each_head" (each by itself, with
    weights of its own and no biases) or "flat" (all heads as one row). `norms` are the used ones of the four positions.
    `activation` is one of `kernels.api.Kernels.activate`, or "xielu", which has four numbers of its own; without
    `is_gated` it is between two GEMMs, without a gate. `residual_multiplier` scales the outputs of attention and
    feed-forward before they are added. `is_parallel`: both read the layer's input, the feed-forward through the third
    norm or, without one, through the first. Queries, keys and values are bounded by `qkv_clip`, if above 0.
    `has_sinks`: each head has one more score, of a key without a value. `experts` None: the feed-forward is dense.
    `norms_sums`: the norms after attention and after the feed-forward (the second and the fourth) norm the sum of the
    stream and the output, and replace the stream. An encoder's `window` applies to each side, the token itself counted
    in both. `bound`, if above 0, bounds the two factors of a dense feed-forward, or of the shared expert:
    min(act(gate), bound) * max(min(up, bound), -bound). `output_gate` "head": a head's output is multiplied by the
    sigmoid of a number that is projected from the layer's input; "" for no gate.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    scale: float
    norm: NormConfig
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: str = "none"
    window: int = 0
    rope: int | None = 0
    score_cap: float = 0.0
    norms: tuple[bool, bool, bool, bool] = (True, False, True, False)
    activation: str = "silu"
    is_gated: bool = True
    residual_multiplier: float = 1.0
    is_parallel: bool = False
    qkv_clip: float = 0.0
    has_sinks: bool = False
    experts: ExpertsConfig | None = None
    norms_sums: bool = False
    bound: float = 0.0
    output_gate: str = ""

    @property
    def full_share(self) -> LayerShare:
        """The share of a rank that has the complete layer."""
        experts = None if self.experts is None else self.experts.full_share
        return LayerShare(self.num_heads, self.num_kv_heads, self.intermediate_size, experts)

    @property
    def is_plain_attention(self) -> bool:
        """Whether rotary embedding, cache writes and attention can be one call, if the angles allow it."""
        return (
            self.qk_norm == "none" and self.rope is not None and not (self.has_sinks or self.score_cap or self.qkv_clip)
        )

    @property
    def is_plain_wiring(self) -> bool:
        """Whether an output can wait to be added with the next norm."""
        return self.norm.is_plain and self.norms == (True, False, True, False) and not self.is_parallel


def layer_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Elements of a layer's parameters on a rank with this share of it."""
    size, num_gates = layer.head_size, 1 + layer.is_gated
    query, key_value = share.num_heads * size, share.num_kv_heads * size
    weights = hidden_size * (2 * query + 2 * key_value) + share.num_heads * layer.has_sinks
    weights += hidden_size * share.num_heads * (layer.output_gate == "head")
    biases = (query + 2 * key_value) * layer.has_qkv_bias + hidden_size * layer.has_output_bias
    if layer.experts is not None:
        assert share.experts is not None, share
        weights += layer.experts.elements(hidden_size, share.experts)
    else:
        weights += (num_gates + 1) * hidden_size * share.num_columns
        biases += (num_gates * share.num_columns + hidden_size) * layer.has_mlp_bias
    norms = sum(layer.norms) * hidden_size * (layer.norm.has_weight + layer.norm.has_bias)
    if layer.qk_norm in ("head", "head_after_rope"):
        norms += 2 * size * (layer.norm.has_weight + layer.norm.has_bias)
    elif layer.qk_norm == "each_head":
        norms += (share.num_heads + share.num_kv_heads) * size
    elif layer.qk_norm == "flat":
        norms += (layer.num_heads + layer.num_kv_heads) * size
    return weights + biases + norms + 4 * (layer.activation == "xielu")


def float32_elements(layer: LayerConfig, hidden_size: int, share: LayerShare) -> int:
    """Number of these that are float32 in every dtype."""
    router = 0 if layer.experts is None else layer.experts.router_elements(hidden_size)
    return router + share.num_heads * layer.has_sinks
