"""What one family of models does differently from Llama's decoder, as data: a row of the table in `table.py`.

A family says two things. How config.json is read: which key means what, and what a key means that is left out (a file
of the hub leaves out what its class has as a default). And what the checkpoint calls its tensors: layers are built with
names of our own, which are Llama's, and `Names` has the others. Reading gives one `LayerConfig` for each layer, so
layers of one model may differ; the layers know no family.

Entries that end in `_key` are keys of config.json, "" where the family has no such thing. Needs no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.rope import RopeParameters, all_layers

NORM_PLACES: Final = ("input_layernorm", "attention_output_norm", "post_attention_layernorm", "mlp_output_norm")
"""Our names for the norms before attention, after it, before the feed-forward and after it."""


QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Our names of the projections to queries, keys and values."""
GATE_UP: Final = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names. Those of a layer follow `layers` and its index.

    `norms` are the four places of `NORM_PLACES`, "" where there is no norm. `parts` renames modules of a layer, by our
    name. `fused` are tensors that hold several of ours, one below the other. `are_transposed`: matrices of a layer are
    [inputs, outputs]. Some files leave out `optional_prefix`. Tensors that end in one of `ignored` are derived here,
    those that begin with one of `ignored_prefixes` are for other input than text. `aliases` are beginnings of names
    that newer releases of transformers give the same tensors, in memory and in files, by the beginning here; those of
    `layer_aliases` begin what follows the index. Of `fused` tensors, those in `by_kv_head` hold one key-value head
    after the other, each with all of its parts.

    Names of experts have {} for the number in `parts`, which may hold whole names too. `stacked` are the tensors of
    experts that are not separate; of separate ones transformers has stacked tensors in memory, see `CheckpointNames`.
    `ignores_later_layers`: files may have layers beyond the model's, which speculate. `embedding_norm` and
    `token_types` are of encoders; so are `head_dense` and `head_norm`, which come before `classifier`, the scores of a
    model that classifies. Endings in `ending_aliases` are what older files have for those on the right.

    A module of a layer with {} in its name in `parts` has each row of ours in a tensor of its own, by its number.
    `project_in` and `project_out` are between embeddings, or logits, and layers, where these are of another size.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    parts: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    are_transposed: bool = False
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    by_kv_head: tuple[str, ...] = ()
    layer_aliases: Mapping[str, str] = field(default_factory=dict)
    stacked: tuple[StackedTensor, ...] = ()
    ignores_later_layers: bool = False
    embedding_norm: str = ""
    token_types: str = ""
    classifier: str = "score"
    head_dense: str = ""
    head_norm: str = ""
    ending_aliases: Mapping[str, str] = field(default_factory=dict)
    project_in: str = ""
    project_out: str = ""

    def canonical(self, name: str) -> str:
        """`name`, or that of which it is an alias."""
        for ending, ours in self.ending_aliases.items():
            if name.endswith(ending):
                name = name.removesuffix(ending) + ours
        for beginning, ours in self.aliases.items():
            if name.startswith(beginning):
                return ours + name.removeprefix(beginning)
        if not self.layer_aliases or not name.startswith(f"{self.layers}."):
            return name
        index, _, rest = name.removeprefix(f"{self.layers}.").partition(".")
        for beginning, ours in self.layer_aliases.items():
            if rest.startswith(beginning):
                return f"{self.layers}.{index}.{ours}{rest.removeprefix(beginning)}"
        return name


def next_to(names: Names, *others: str) -> Names:
    """The names of `model.language_model` next to `others`, which are for other input, with its head outside."""
    return replace(
        names,
        embedding="model.language_model.embed_tokens",
        layers="model.language_model.layers",
        norm="model.language_model.norm",
        ignored_prefixes=tuple(f"model.{other}." for other in others),
    )


@dataclass(frozen=True, slots=True)
class ClassifierFamily:
    """What is between the hidden states of an encoder and its scores: a dense layer with `activation`, or what
    `activation_key` says, and a norm where `has_norm`. It is given the first token's, or with `pooling_key` what that
    says. `bias` is of the dense layer.
    """

    activation: str = "tanh"
    activation_key: str = ""
    pooling_key: str = ""
    bias: bool | str = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """`*_bias` True is always, False never, a text the key of config.json that says, here and below.

    `head_size` 0 means hidden size / heads, where no key says. `num_kv_heads` above 0: always so many. `qk_norm` and
    `has_sinks` are as in `LayerConfig`; with `qk_norm_key`, false there is no norm of queries and keys. `scale_key` is
    the scale of attention scores, `scale_root_key` what it is the inverse root of; without both it is the head size.
    `score_cap_key` and `qkv_clip_key` bound scores, and queries, keys and values.
    """

    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    qk_norm: str = "none"
    qk_norm_key: str = ""
    head_size: int = 0
    num_kv_heads: int = 0
    scale_key: str = ""
    scale_root_key: str = ""
    score_cap_key: str = ""
    qkv_clip_key: str = ""
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers that look back `sliding_window` tokens alone; half of it is to each side in an encoder.

    `rule`: "never", "always", "late_layers" (from layer `max_window_layers` on), "even_layers" (layers 0, 2, 4 and so
    on before `max_window_layers`), "in_use" (every layer) or "layer_types" (all but every `full_every`th layer, which
    `full_every_key` may say too; where `is_full_first`, of so many the first is the full one, not the last).
    "late_layers", "even_layers" and "in_use" need `use_sliding_window` too. A list in the file, `layer_types`, goes
    before all but "never" and "in_use".
    """

    rule: str = "never"
    full_every: int = 1
    full_every_key: str = ""
    is_full_first: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """`has_local`: sliding layers have a rope of their own; else `layers` finds which layers turn, from the file and
    their windows. `may_be_partial`: `partial_rotary_factor` counts, or in older files `turned_size_key`, how many
    numbers of a head are turned. `is_interleaved` and `rounding` are as in `RopeParameters`. `adjust` is what an
    architecture alone makes of the rope, from the file and the head size.
    """

    has_local: bool = False
    layers: Callable[[ConfigReader, Sequence[int]], Sequence[bool]] = all_layers
    is_interleaved: bool = False
    rounding: str = "each step"
    may_be_partial: bool = False
    turned_size_key: str = ""
    adjust: Callable[[RopeParameters, ConfigReader, int], RopeParameters] | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """`kind` to `has_weight` are as in `NormConfig`, `eps` is that of norms where no key says. `are_of_sums` is
    `LayerConfig.norms_sums`. Without `has_first` the first layer has none before attention. Which of the four places of
    a layer have one, and whether there is one behind the layers, the names say.
    """

    kind: str = "rms"
    offset: float = 0.0
    rounds_once: bool = False
    has_bias: bool | str = False
    has_weight: bool = True
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    are_of_sums: bool = False
    has_first: bool = True


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`is_gated` is as in `LayerConfig`. `activation_words` are what the file's words for activations mean here.
    `size_factor`, times the hidden size, is the intermediate size where the file names none.
    """

    bias: bool | str = "mlp_bias"
    is_gated: bool = True
    activation_key: str = "hidden_act"
    activation_words: Mapping[str, str] = field(default_factory=dict)
    size_factor: int = 0


@dataclass(frozen=True, slots=True)
class Wiring:
    """`is_parallel` is as in `LayerConfig`; `has_one_norm_in_parallel`: the feed-forward has none of its own then.
    `residual_multiplier_key` is of what attention and feed-forward add.
    """

    is_parallel: bool | str = False
    has_one_norm_in_parallel: bool = False
    residual_multiplier_key: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """`by_root`: embeddings are multiplied by the root of the hidden size, rounded to the dtype; else by what
    `multiplier_key` says. `size_key` is how wide they are, projected to the hidden size. Of a table of learned
    positions the first `position_offset` rows are nobody's. `has_norm`: there is a norm before the layers.
    """

    by_root: bool = False
    multiplier_key: str = ""
    size_key: str = ""
    position_offset: int = 0
    has_norm: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """Logits are divided by `divisor_key`, of which `multiplier_key` is the inverse, and bounded by `cap_key`."""

    divisor_key: str = ""
    multiplier_key: str = ""
    cap_key: str = ""
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class TextPart:
    """The model takes images too and runs with text alone; its sizes are in `text_config`, or in older files where
    those of other models are.

    `tie` says whether the text's `tie_word_embeddings` counts beside that of the whole file: "never", or "also" (one of
    both is enough). `ties_by_default`: where the whole says nothing its class ties, so the head is the embedding if the
    files have no other, whatever the text says. Without files the text says it, else `defaults` of the row. `families`:
    the text part is one of several; by `model_type` of the text, the architecture whose row says all but names. The
    first where it says none. `defaults` is, by `model_type` too, what keys of the text mean that are left out beside
    what the row says.
    """

    tie: str = "never"
    ties_by_default: bool = False
    families: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageLayers:
    """`key` lists layers that look at images alone, which text passes by. `num_embeddings` rows of the table of
    embeddings, behind those of the vocabulary, are of tokens that no text has.
    """

    key: str = ""
    num_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tokens see those behind them too. `token_types_key`: how many types of token have embeddings. `counts_offset`:
    `max_position_embeddings` counts the rows that are nobody's, and tokens of the last one's number have no position.
    `classifier` is the head of one that classifies.
    """

    token_types_key: str = ""
    counts_offset: bool = False
    classifier: ClassifierFamily | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: its differences from the plain decoder, by part of it. `models` are its names, for
    people. `rope` None: positions are learned, a table of `max_position_embeddings` rows. `experts` None: every layer
    is dense. The other parts are None where there is no such part.

    `defaults` is what keys mean that config.json leaves out, where transformers takes another value than the plain
    decoder's; `spelled` the file's words for keys of ours, "" for those that it does not have; `required` keys that
    must have one value if they are there. `forms` are other rows of the architecture, of which a file takes the first
    that is for it.
    """

    models: str = "Llama 2, 3 and 3.x, and what is built like them"
    names: Names = Names()
    attention: Attention = Attention()
    windows: Windows = Windows()
    rope: Rope | None = Rope()
    norms: Norms = Norms()
    feed_forward: FeedForward = FeedForward()
    experts: ExpertsFamily | None = None
    wiring: Wiring = Wiring()
    embedding: Embedding = Embedding()
    head: Head = Head()
    text: TextPart | None = None
    images: ImageLayers | None = None
    encoder: Encoder | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forms: "tuple[Form, ...]" = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The row of files in which each key of `where` has its value."""

    where: Mapping[str, Any]
    family: Family
