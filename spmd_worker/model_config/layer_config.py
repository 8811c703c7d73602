"""One decoder layer in numbers: what it multiplies, norms, turns and looks at. One for each layer of a model.

Needs no torch: the plan of a run counts weights with `layer_elements`, the layers are built from the same fields.

A layer is attention and a feed-forward on a residual stream. Each kind of model fills some of four places with a norm:
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
        """Whether it is the norm that sums and whole layers are joined with."""
        return self.kind == "rms" and self.has_weight and not (self.offset or self.rounds_once or self.has_bias)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of the whole layer, not of a rank's share.

    `window` is what attention looks back at, tokens, 0 for all; `rope` the index in `ModelConfig.ropes`, None where
    positions are not turned. `scale` multiplies attention scores, which `score_cap`, where above 0, then bounds:
    cap * tanh(score / cap). `qk_norm` is "none", "head" (each head by itself), "head_after_rope" or "flat" (all heads
    as one row). `norms` says which of the four places have one. `activation` is one of `kernels.api.Kernels.activate`;
    without `is_gated` it is between two products, not a gate beside the first. `residual_multiplier` is of what
    attention and feed-forward add. `is_parallel`: both look at what the layer was given, the feed-forward through the
    third norm or, without one, through the first. Queries, keys and values are bounded by `qkv_clip`, where above 0.
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

    @property
    def is_plain_wiring(self) -> bool:
        """Whether what a part gives can wait to be added with the next norm."""
        return self.norm.is_plain and self.norms == (True, False, True, False) and not self.is_parallel


def layer_elements(layer: LayerConfig, hidden_size: int, num_heads: int, num_kv_heads: int, num_columns: int) -> int:
    """Elements of the parameters of a layer of which a rank has so many heads and columns of the feed-forward."""
    size, num_gates = layer.head_size, 1 + layer.is_gated
    query, key_value = num_heads * size, num_kv_heads * size
    weights = hidden_size * (2 * query + 2 * key_value) + (num_gates + 1) * hidden_size * num_columns
    biases = (query + 2 * key_value) * layer.has_qkv_bias + hidden_size * layer.has_output_bias
    biases += (num_gates * num_columns + hidden_size) * layer.has_mlp_bias
    norms = sum(layer.norms) * hidden_size * (layer.norm.has_weight + layer.norm.has_bias)
    if layer.qk_norm in ("head", "head_after_rope"):
        norms += 2 * size
    elif layer.qk_norm == "flat":
        norms += (layer.num_heads + layer.num_kv_heads) * size
    return weights + biases + norms
