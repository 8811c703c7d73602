"""Config of one layer: its weights, norms, rotary embedding and attention window. One for each layer of a model.

Needs no torch: the plan of a run counts weights from the fields (`layer_elements.py`) that layers are built from.

A layer is attention and a feed-forward on a residual stream. Each kind of model has a norm at some of four positions:
before attention, after it, before the feed-forward, after it.
"""

from dataclasses import dataclass, replace
from typing import Final

from spmd_worker.model_config.rope import RopeParameters
from spmd_worker.model_config.stream_config import (
    BalancedStreamsConfig,
    GatedStreamsConfig,
    NgramConfig,
    PredictedStreamsConfig,
)

_PANEL: Final = 16
"""Outputs of a panel of weights."""
LATENT_NORM_EPS: Final = 1e-6
"""Epsilon of the norms of latents, whatever the file has for others."""


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

    `score` is "softmax" over all experts, "softmax_chosen" over the chosen, "sigmoid", "sigmoid_chosen",
    "sqrt_softplus" (the root of the softplus) or "sparsemixer". "sigmoid_chosen" chooses by what the sigmoid is of.
    With `weighs_inputs` weights are of an expert's input, not of its output. The top scores are chosen, after a bias
    with `has_choice_bias`, in the `num_chosen_groups` best groups of neighbours, by the sum of a group's two best or,
    with `groups_by_best`, by its best; ties by number. Weights are the scores, with `renormalises` divided by their
    sum, or `min_sum` if that is more, times `scaling`. `sum_eps` is added to a sum of sigmoids, or of roots.
    "sparsemixer" (https://arxiv.org/abs/2409.12136): of two chosen, each has the weight of a softmax of its own, over
    the scores that were left to choose from and are at most 2 * `jitter` below the best, as shares of the larger of the
    best and their own magnitude.

    `limit` above 0: gate and up columns alternate, and both are bounded by it: gate * sigmoid(1.702 * gate) * (up + 1).
    `bound` is as in `LayerConfig`. `shared_size` columns are of the expert that every token visits, 0 for none. Experts
    that are not `is_gated` have no gate: the activation is between two GEMMs. With `latent_size` above 0 routed
    experts, but not the shared one, work in a space of this size, between two projections of the layer.

    `are_beside_dense` (Gemma 4): the layer has a dense feed-forward too. The router reads the stream, in a norm of its
    own with a weight, by the root of the hidden size; experts read it in another norm; each of the two outputs is
    normed before they are added, and weights are multiplied by a number of each expert.

    With `num_listed_tokens` above 0 the experts of a token are those that a table of so many rows lists for its id, and
    the router weighs them alone.

    With `skips_layer` (LongCat-Flash) the layer has a dense feed-forward too, and the output of experts is added to the
    stream behind the layer after it. A token may also choose one of `num_identity` experts behind the others, which
    have no weights and whose output is their input.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    score: str = "softmax"
    renormalises: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    groups_by_best: bool = False
    has_choice_bias: bool = False
    has_router_bias: bool = False
    has_bias: bool = False
    limit: float = 0.0
    shared_size: int = 0
    has_shared_gate: bool = False
    is_gated: bool = True
    latent_size: int = 0
    has_shared_bias: bool = False
    min_sum: float = 0.0
    sum_eps: float = 1e-20
    jitter: float = 0.0
    bound: float = 0.0
    are_beside_dense: bool = False
    num_listed_tokens: int = 0
    skips_layer: bool = False
    num_identity: int = 0
    weighs_inputs: bool = False

    @property
    def num_choices(self) -> int:
        """Experts that a token chooses from."""
        return self.num_experts + self.num_identity

    @property
    def added_to_sum(self) -> float:
        """Number that is added to the sum of the weights before they are divided by it."""
        return self.sum_eps if self.score in ("sigmoid", "sqrt_softplus") else 0.0

    def router_elements(self, hidden_size: int) -> int:
        """Parameters of the router, and of the shared expert's gate. They are float32 in every dtype."""
        biases = self.num_choices * (self.has_router_bias + self.has_choice_bias + self.are_beside_dense)
        biases += self.num_listed_tokens * self.num_chosen
        return (self.num_choices + self.has_shared_gate + self.are_beside_dense) * hidden_size + biases

    def elements(self, hidden_size: int, share: "ExpertShare") -> int:
        """Parameters of a rank with this share, the router's included."""
        shared = (2 + self.is_gated) * hidden_size * share.num_shared_columns
        if self.has_shared_bias and share.num_shared_columns:
            shared += (1 + self.is_gated) * share.num_shared_columns + hidden_size
        others = 2 * self.latent_size * hidden_size + self.router_elements(hidden_size)
        return self.routed_elements(hidden_size, share) + shared + others

    def routed_elements(self, hidden_size: int, share: "ExpertShare") -> int:
        """Parameters of the routed experts of a rank with this share."""
        columns, size = share.num_columns, self.latent_size or hidden_size
        each = (2 + self.is_gated) * size * columns + (2 * columns + size) * self.has_bias
        return share.num_experts * each

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
class ConvConfig:
    """A gated short convolution over the hidden size (LFM2, https://arxiv.org/abs/2511.23404), of `kernel_size` taps;
    `has_bias`: the convolution and both projections have biases.
    """

    kernel_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """A gated delta net (https://arxiv.org/abs/2412.06464): a state [`key_size`, `value_size`] for each value head,
    neighbours of which share a key head, behind a convolution of `kernel_size` taps.

    `beta_scale` 2 allows negative eigenvalues. `norm_eps` is of the gated norm, whose gate passes through
    `gate_activation`, "silu" or "sigmoid". `is_per_channel`: each channel of a key decays by itself (Kimi's KDA,
    https://arxiv.org/abs/2510.26692). Gates of outputs and steps are projected from `gate_rank` numbers each; 0: from
    the hidden state. `decay_bound` below 0 is the least logarithm of a decay, times the sigmoid of the step at the
    head's rate; 0: decays have no least one. The checkpoint has one number a head for rates that `are_flat`.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    norm_eps: float
    kernel_size: int = 4
    beta_scale: float = 1.0
    gate_activation: str = "silu"
    is_per_channel: bool = False
    gate_rank: int = 0
    decay_bound: float = 0.0
    are_flat: bool = False

    @property
    def num_channels(self) -> int:
        """Inputs of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_size + self.num_columns

    @property
    def num_columns(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_size

    @property
    def num_steps(self) -> int:
        """Numbers of all value heads by which states decay."""
        return self.num_value_heads * (self.key_size if self.is_per_channel else 1)

    @property
    def num_projected(self) -> int:
        """Outputs of projections: queries, keys, values, gates of outputs, beta, steps, and numbers between two."""
        gates = self.num_columns + self.num_value_heads + self.num_steps
        return self.num_channels + gates + 2 * self.gate_rank

    @property
    def num_float32_elements(self) -> int:
        """Parameters that are float32 in every dtype: the rate of each head, and the biases of steps."""
        return self.num_value_heads + self.num_steps

    def share(self, num_ranks: int) -> "DeltaConfig":
        """Sizes of one of these ranks. Value heads divide evenly; of more ranks than key heads several have one."""
        num_key_heads = max(self.num_key_heads // num_ranks, 1)
        return replace(self, num_key_heads=num_key_heads, num_value_heads=self.num_value_heads // num_ranks)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba2 (https://arxiv.org/abs/2405.21060): a state [`head_size`, `state_size`] for each head, neighbours of which
    share inputs B and C in `num_groups` groups, behind a convolution of `kernel_size` taps.

    `has_bias` and `has_output_bias` are of the first and of the last projection. `norm` of the gated output is
    "grouped", a group by itself after the gate; "grouped_first", before the gate; or "none", the gate alone. With
    `norm_rounds_once` it is float32 until its end.
    `multipliers` scale z, x, B, C and dt, outputs of the projection; `in_multiplier` its input
    and `out_multiplier` the output of the layer. dt is bounded by `dt_limits`.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    norm_eps: float
    kernel_size: int = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    has_output_bias: bool = False
    norm: str = "grouped"
    norm_rounds_once: bool = False
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def num_columns(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Inputs of the convolution: x, B, C."""
        return self.num_columns + 2 * self.num_groups * self.state_size

    @property
    def num_projected(self) -> int:
        """Outputs of the first projection: z, x, B, C, dt."""
        return self.num_columns + self.num_channels + self.num_heads

    @property
    def num_float32_elements(self) -> int:
        """Parameters that are float32 in every dtype: A, D and the bias of dt of each head."""
        return 3 * self.num_heads

    def share(self, num_ranks: int) -> "MambaConfig":
        """Sizes of one of these ranks. Heads divide evenly; of more ranks than groups several have one."""
        num_groups = max(self.num_groups // num_ranks, 1)
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=num_groups)


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Mamba (https://arxiv.org/abs/2312.00752): a state of `state_size` numbers for each of `num_channels`, behind a
    convolution of `kernel_size` taps. dt of each channel comes from `dt_rank` numbers of a token; these, B and C from a
    projection of the channels.

    `norm` of the three: "none", "bare" (without weights) or "weighted", with `norm_eps`. `has_bias` and
    `has_output_bias` are of the first and of the last projection.
    """

    num_channels: int
    state_size: int
    dt_rank: int
    kernel_size: int = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    has_output_bias: bool = False
    norm: str = "none"
    norm_eps: float = 1e-6

    @property
    def num_parameters_of_scan(self) -> int:
        """Numbers that dt, B and C of a token are made from."""
        return self.dt_rank + 2 * self.state_size

    @property
    def num_float32_elements(self) -> int:
        """Parameters that are float32 in every dtype: A, D and the bias of dt of each channel."""
        return self.num_channels * (self.state_size + 2)

    def share(self, num_ranks: int) -> "Mamba1Config":
        """Sizes of one of these ranks. Channels divide evenly."""
        return replace(self, num_channels=self.num_channels // num_ranks)


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Choice of the keys that a token sees (https://arxiv.org/abs/2512.02556): the `num_chosen` ones of the highest
    scores, ties by position, all if there are no more.

    `num_heads` queries of `head_size` numbers are compared with one key of a token, which is cached beside its latent,
    or its keys and values. The first numbers of both are rotated like the layer's queries, as many; neighbours are
    paired if `is_interleaved`. A layer whose choice `is_shared` takes that of the layer before it, and has no
    projections and no such key. `norms_input`: queries come from the layer's input, in a norm of its own, not from the
    latent of queries.

    With `run_length` above 1 keys are chosen by runs of so many tokens, and a run has one key, the normed mean of its
    tokens'. Tokens behind the last complete run are seen besides.

    If the choice `is_by_head`, each key-value head has a query of its own and chooses runs by their best key; the
    token's own run and those before it, `num_local` in all and at least one, precede others, and nothing is seen
    besides.

    A token has `num_slots` such keys beside its latent, one for each indexer of the layers that read that latent, of
    which the layer's own is at `slot`.
    """

    num_heads: int
    head_size: int
    num_chosen: int
    is_interleaved: bool
    is_shared: bool = False
    norms_input: bool = False
    slot: int = 0
    num_slots: int = 1
    run_length: int = 1
    is_by_head: bool = False
    num_local: int = 0

    @property
    def cached_size(self) -> int:
        """Numbers of all indexers' keys that are cached of a token."""
        return self.num_slots * self.head_size

    @property
    def num_runs(self) -> int:
        """Runs that are chosen."""
        return self.num_chosen // self.run_length

    @property
    def most_seen(self) -> int:
        """Keys that a token sees at most."""
        return self.num_chosen + (0 if self.is_by_head else self.run_length - 1)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434): keys and values of all heads come from one latent
    of `rank` numbers, which is cached with `rope_size` rotated numbers that the heads share.

    `nope_size` numbers of a query head are not rotated; `value_size` are of a head's value. Queries come from a latent
    of `query_rank` numbers; 0: from the hidden state. Norms of latents have `norm_eps`, and normed latents of keys are
    multiplied by `multiplier`. An `indexer` chooses the keys; without
    `norms_input` it needs the latent of queries. `grows_by_head`: queries of each head, and those of each of an
    indexer's heads, are multiplied by scale * log(1 + position) + bias, two numbers of the head.
    """

    rank: int
    nope_size: int
    rope_size: int
    value_size: int
    query_rank: int = 0
    indexer: IndexerConfig | None = None
    norm_eps: float = LATENT_NORM_EPS
    multiplier: float = 1.0
    grows_by_head: bool = False

    @property
    def query_size(self) -> int:
        """Numbers of a query head as it is projected."""
        return self.nope_size + self.rope_size

    @property
    def key_size(self) -> int:
        """Numbers that are cached of a token, without an indexer's."""
        return self.rank + self.rope_size

    @property
    def own_indexer(self) -> IndexerConfig | None:
        """The indexer, if the layer does not take the choice of another."""
        return None if self.indexer is None or self.indexer.is_shared else self.indexer

    @property
    def index_size(self) -> int:
        """Numbers of all indexers' keys that are cached beside a latent."""
        return 0 if self.indexer is None else self.indexer.cached_size


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Attention to the last `window` tokens and, where `rate` is above 0, to an entry for each complete group of `rate`
    tokens before (DeepSeek V4). One key-value head, whose keys are its values.

    The last `rope_size` numbers of a head are rotated, and rotated back behind attention. Queries come from a latent of
    `query_rank` numbers. Outputs are projected in `num_groups` groups of neighbouring heads to `output_rank` numbers
    each, and these to the hidden size. An entry is a mean of its group's tokens, by a softmax of gates, each number by
    itself, and rotated by `rope` at the group's first position; one that `overlaps` is of the group before, too, with
    other projections. An `indexer` chooses the entries that a token sees; without one it sees all.
    """

    window: int
    rope_size: int
    query_rank: int
    num_groups: int
    output_rank: int
    rate: int = 0
    overlaps: bool = False
    rope: RopeParameters | None = None
    indexer: IndexerConfig | None = None

    @property
    def index_size(self) -> int:
        """Numbers of an indexer's key; 0 without one."""
        return 0 if self.indexer is None else self.indexer.head_size

    def row_size(self, head_size: int) -> int:
        """Numbers that are cached of a token so that entries can be made of it, an indexer's too: its part of a mean,
        and gates.
        """
        return 2 * (1 + self.overlaps) * (head_size + self.index_size) if self.rate else 0

    @property
    def reach(self) -> int:
        """Tokens whose keys or rows a token and its entry may need, itself among them."""
        return max(self.window, self.rate * (1 + self.overlaps))

    def num_entries(self, block_size: int) -> int:
        """Places for entries in a block of so many tokens: an entry lies where its group's last token does."""
        return -(-block_size // self.rate) if self.rate else 0

    def entry_share(self, head_size: int, block_size: int) -> int:
        """Numbers of a token that are its share of its block's entries."""
        return -(-self.num_entries(block_size) * (head_size + self.index_size) // block_size)

    def beside_key(self, head_size: int, block_size: int) -> int:
        """Numbers of a token that are cached beside its key: its row, and its share of its block's entries."""
        return self.row_size(head_size) + self.entry_share(head_size, block_size)


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A number a head for each bucket of distances between query and key, added to scaled scores
    (https://arxiv.org/abs/1910.10683): small distances have a bucket each, larger ones share buckets by their
    logarithm, and those of `max_distance` and more have the last. In an encoder half of the buckets are of later keys.
    All layers have one table, or each its own if it `is_of_layer`.
    """

    num_buckets: int
    max_distance: int
    is_of_layer: bool = False

    def elements(self, num_heads: int, *, of_layer: bool = False) -> int:
        """Elements of the table of so many heads that all layers have, or with `of_layer` of that of each layer."""
        return self.num_buckets * num_heads * (self.is_of_layer == of_layer)


@dataclass(frozen=True, slots=True)
class DistanceConfig:
    """Embedded distances between query and key (https://arxiv.org/abs/2006.03654), a table of 2 * `span` rows for all
    layers. To scores are added, before they are scaled, queries times rows as keys if it `has_keys`, and keys times
    rows as queries if it `has_queries`. The query's position less the key's has row `span` + distance, bounded; with
    `max_distance` above 0 distances from `span` // 2 on share rows by their logarithm up to that one.

    Rows have a norm of their own with `has_norm`, and are projected like tokens if the layer `shares_projections`, else
    by projections of their own.
    """

    span: int
    max_distance: int
    has_keys: bool
    has_queries: bool
    shares_projections: bool
    has_norm: bool

    @property
    def num_products(self) -> int:
        """Scores of a token and a distance."""
        return self.has_keys + self.has_queries

    @property
    def num_projections(self) -> int:
        """Projections of rows alone."""
        return 0 if self.shares_projections else self.num_products

    def elements(self, hidden_size: int) -> int:
        """Elements of the table and its norm."""
        return (2 * self.span + 2 * self.has_norm) * hidden_size

    def num_columns(self, longest: int) -> int:
        """Rows of the table that a step whose longest sequence has so many tokens may need, in whole panels of 16."""
        return -(-min(2 * self.span, 2 * longest) // _PANEL) * _PANEL


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A tensor-parallel rank's share of one layer: heads, columns of a dense feed-forward, and experts of a sparse one,
    None for a dense one. Of what is divided evenly it has the `num_ranks`th part.
    """

    num_heads: int
    num_kv_heads: int
    num_columns: int
    experts: ExpertShare | None = None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of the full layer, not of a rank's share.

    `mixer` mixes tokens: "attention", "latent", "compressed", "conv", "delta", "mamba1", "mamba" (Mamba2),
    "attention_and_mamba" (the sum of both) or "none"; `latent`, `compressed`, `conv`, `delta`, `mamba1` and `mamba` are
    its sizes. `has_feed_forward`: the layer has a second part. With `streams` there are several residual streams.
    `output_gate`: outputs of attention are multiplied by the sigmoid of a gate, "head" (one number a head, projected
    from the layer's input), "number" (one each, from a second half of each head of `q_proj`) or "projected" (one each,
    projected as those of heads); with `gate_activation` "softplus" by the softplus of it.

    Attention's input and output are scaled by `attention_multipliers`, keys by `key_multiplier`, gates of the dense
    feed-forward and its output by `mlp_multipliers`. A layer of latent attention has one key-value head; `head_size` is
    then the size of its keys, and of queries that are compared with them.

    `window` is the range of attention, tokens, 0 for all; with `chunk` above 0 a token sees those of its own chunk of
    so many positions. `rope` is the index in `ModelConfig.ropes`, None if positions are not rotated. `scale` multiplies
    attention scores, which `score_cap`, if above 0, then bounds: cap * tanh(score / cap). `qk_norm` is "none", "head"
    (each head by itself), "head_after_rope", "bare_after_rope" (without weights), "each_head" (each by itself, with
    weights of its own and no biases) or "flat" (all heads as one row). `norms` are the used ones of the four positions.
    `activation` is one of `kernels.api.Kernels.activate`, or "xielu", which has four numbers of its own; without
    `is_gated` it is between two GEMMs, without a gate. `residual_multiplier` scales the outputs of attention and
    feed-forward before they are added. `is_parallel`: both read the layer's input, the feed-forward through the third
    norm or, without one, through the first. Queries, keys and values are bounded by `qkv_clip`, if above 0.
    `has_sinks`: each head has one more score, of a key without a value. `experts` None: the feed-forward is dense.
    `norms_sums`: the norms after attention and after the feed-forward (the second and the fourth) norm the sum of the
    stream and the output, and replace the stream. An encoder's `window` applies to each side, the token itself counted
    in both. `bound`, if above 0, bounds the two factors of a dense feed-forward, or of the shared expert:
    min(act(gate), bound) * max(min(up, bound), -bound). Below 0, minus it bounds gates before the activation. The
    activation "swigluoai" is that of `ExpertsConfig.limit`, but with all gates before all ups: its `bound` is of the
    gate itself. With `has_down_bias` the output of a dense feed-forward has a bias, also where the other parts have
    none (`has_mlp_bias`).

    `norms_values`: values have a norm of each head, without weights; `values_are_keys`: they are the projected keys, as
    they are before their own norm. `has_scalar`: the stream is multiplied by a number behind the layer. A layer with a
    `kv_layer` has no keys and values of its own and reads those of the layer of this index, which is before it. With
    `input_size` above 0 each token has as many numbers for this layer alone, which add to the stream behind the
    feed-forward.

    Heads of values have `value_size` numbers, 0 for the head size; they are multiplied by `value_multiplier` and cached
    with zeros behind them, as wide as keys.

    Without `has_key_bias` keys have no bias where queries and values have one. `has_cross_attention`: between attention
    and feed-forward the layer attends to the rows of an encoder, with as many heads and the same biases; `cross_norms`
    are the used ones of the two norms before and after that. `relative_bias` is added to scores of self-attention, and
    so are products with embedded `distances`. With `alibi` above 0 these lose that many slopes of their head for each
    token of distance (`alibi_slopes`).

    An `indexer` chooses the keys that tokens see in a layer of attention by runs. With `streams` the layer has
    several residual streams, and no norms but theirs; with `ngrams` it begins with adding embedded n-grams to them.
    With `predicted_streams` it has several too, and norms. With a `gate_cutoff` gates of a dense feed-forward are that
    by which they exceed their row's mean plus so many of its standard deviations, and 0 below.
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
    has_down_bias: bool = False
    qk_norm: str = "none"
    window: int = 0
    chunk: int = 0
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
    mixer: str = "attention"
    has_feed_forward: bool = True
    latent: LatentConfig | None = None
    compressed: CompressedConfig | None = None
    conv: ConvConfig | None = None
    delta: DeltaConfig | None = None
    mamba1: Mamba1Config | None = None
    mamba: MambaConfig | None = None
    output_gate: str = ""
    gate_activation: str = "sigmoid"
    value_size: int = 0
    value_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_multipliers: tuple[float, float] = (1.0, 1.0)
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    norms_values: bool = False
    values_are_keys: bool = False
    has_scalar: bool = False
    kv_layer: int | None = None
    input_size: int = 0
    has_key_bias: bool = True
    has_cross_attention: bool = False
    cross_norms: tuple[bool, bool] = (False, False)
    relative_bias: RelativeBias | None = None
    distances: DistanceConfig | None = None
    alibi: float = 0.0
    indexer: IndexerConfig | None = None
    streams: GatedStreamsConfig | BalancedStreamsConfig | None = None
    ngrams: NgramConfig | None = None
    predicted_streams: PredictedStreamsConfig | None = None
    gate_cutoff: float | None = None

    @property
    def num_streams(self) -> int:
        """Residual streams of a token."""
        streams = self.streams or self.predicted_streams
        return 1 if streams is None else streams.num_streams

    @property
    def pairs_gates(self) -> bool:
        """Whether gates and ups of a dense feed-forward, or of the shared expert, alternate in a packed weight."""
        return self.is_gated and self.activation == "silu" and not self.bound and self.gate_cutoff is None

    @property
    def value_head_size(self) -> int:
        """Numbers of a head's values, and of its output."""
        return self.value_size or self.head_size

    @property
    def num_key_projections(self) -> int:
        """Projections to keys and to values."""
        return 0 if self.kv_layer is not None else 2 - self.values_are_keys

    @property
    def has_dense(self) -> bool:
        """Whether the layer has a dense feed-forward, alone or beside experts."""
        experts = self.experts
        return self.has_feed_forward and (experts is None or experts.are_beside_dense or experts.skips_layer)

    @property
    def has_states(self) -> bool:
        """Whether a sequence has a recurrent state in this layer."""
        return self.mixer in ("conv", "delta", "mamba1", "mamba", "attention_and_mamba")

    @property
    def full_share(self) -> LayerShare:
        """The share of a rank that has the complete layer."""
        experts = None if self.experts is None else self.experts.full_share
        return LayerShare(self.num_heads, self.num_kv_heads, self.intermediate_size, experts)

    @property
    def has_attention(self) -> bool:
        """Whether the layer keeps keys and values of its heads."""
        return self.mixer in ("attention", "attention_and_mamba")

    @property
    def attends(self) -> bool:
        """Whether a token attends to others in this layer: keys and values, or latents, are cached."""
        return self.has_attention or self.mixer in ("latent", "compressed")

    @property
    def has_entries(self) -> bool:
        """Whether compressed entries are cached beside keys."""
        return self.compressed is not None and self.compressed.rate > 0

    @property
    def chooser(self) -> IndexerConfig | None:
        """The indexer by whose choice a token sees keys."""
        return self.indexer if self.latent is None else self.latent.indexer

    @property
    def takes_choice(self) -> bool:
        """Whether a token sees the keys that another layer has chosen for it."""
        return self.chooser is not None and self.chooser.is_shared

    @property
    def is_plain_attention(self) -> bool:
        """Whether rotary embedding, cache writes and attention can be one call, if the angles allow it."""
        return self.has_plain_heads and self.qk_norm == "none" and self.rope is not None and not self.score_cap

    @property
    def has_plain_heads(self) -> bool:
        """Whether heads are at most normed, each by itself, and rotated, and scores at most scaled and bounded."""
        return (
            self.mixer == "attention"
            and self.qk_norm in ("none", "head")
            and not self.has_distance_bias
            and self.distances is None
            and not (self.has_sinks or self.qkv_clip or self.output_gate or self.norms_values or self.values_are_keys)
            and self.kv_layer is None
            and self.indexer is None
            and not self.value_size
            and {self.key_multiplier, self.value_multiplier, *self.attention_multipliers, *self.mlp_multipliers}
            == {1.0}
        )

    @property
    def has_distance_bias(self) -> bool:
        """Whether scores depend on the distance of the key, too."""
        return self.relative_bias is not None or self.alibi > 0

    @property
    def is_plain_wiring(self) -> bool:
        """Whether an output can wait to be added with the next norm."""
        is_plain = self.norm.is_plain and self.norms == (True, False, True, False)
        skips = self.experts is not None and self.experts.skips_layer
        return is_plain and not (self.is_parallel or self.has_cross_attention or self.streams or skips)
