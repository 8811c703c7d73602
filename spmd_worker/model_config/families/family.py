"""What one family of models does differently from Llama's decoder, as data: a row of the table in `table.py`.

A family says two things. How config.json is read: which key means what, and what a key means that is left out (a file
of the hub leaves out what its class has as a default). And what the checkpoint calls its tensors: layers are built with
names of our own, which are Llama's, and `Names` has the others. Reading gives one `LayerConfig` for each layer, so
layers of one model may differ; the layers know no family.

Entries that end in `_key` are keys of config.json, "" where the family has no such thing. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor

NORM_PLACES: Final = ("input_layernorm", "attention_output_norm", "post_attention_layernorm", "mlp_output_norm")
"""Our names for the norms before attention, after it, before the feed-forward and after it."""


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


def inside(names: Names, prefix: str) -> Names:
    """The names of a model that is a part of another."""
    tops = {name: prefix + getattr(names, name) for name in ("embedding", "layers", "norm", "head")}
    return replace(names, **tops)  # type: ignore[arg-type]  # texts, all of them


def beside(names: Names, *others: str) -> Names:
    """The names of `model.language_model` beside `others`, which are for other input, with its head outside."""
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
    says. `bias` of the dense layer is as of `Family`.
    """

    activation: str = "tanh"
    activation_key: str = ""
    pooling_key: str = ""
    bias: bool | str = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What one family of models does differently from the plain decoder. `models` are its names, for people.

    `*_bias` True is always, False never, a text the key of config.json that says. `default_head_size` 0 means hidden
    size / heads. `sliding_window` says when the window applies: "never", "always", "late_layers" (from layer
    `max_window_layers` on), "even_layers" (layers 0, 2, 4 and so on before `max_window_layers`), "in_use" (every layer)
    or "layer_types" (all but every `full_attention_every`th layer, which `full_attention_every_key` may say too).
    "late_layers", "even_layers" and "in_use" need `use_sliding_window` too. A list in the file, `layer_types`, goes
    before all but "never" and "in_use".

    `norm_kind` to `norm_has_bias` are as in `NormConfig`, `qk_norm`, `is_gated` as in `LayerConfig`. `has_rope` False:
    positions are learned, a table of `max_position_embeddings` rows. `has_local_rope`: sliding layers have a rope of
    their own. `rope_layers_key` lists 1 for each layer that turns and 0 for each that does not, else every
    `rope_interval_key`th does not. `activation_words` are what the file's words for activations mean here.
    `may_have_partial_rope`: `partial_rotary_factor` counts. `scale_key` is the scale of attention scores,
    `scale_root_key` what it is the inverse root of; without both it is the head size. `intermediate_factor`, times the
    hidden size, is the intermediate size where the file names none. `embeds_by_root`: embeddings are multiplied by the
    root of the hidden size, rounded to the dtype. `is_text_part`: the model takes images too and runs with text alone;
    its sizes are in `text_config`, or in older files where those of other models are. `image_layers_key` lists layers
    that look at images alone, which text passes by; `num_image_embeddings` rows of the table of embeddings, behind
    those of the vocabulary, are of tokens that no text has. `tie_of_text` says whether the text's `tie_word_embeddings`
    counts beside that of the whole file: "never", or "also" (one of both is enough). `ties_by_default`: where the whole
    says nothing its class ties, so the head is the embedding if the files have no other, whatever the text says.
    Without files the text says it, else `defaults`.

    `defaults` is what keys mean that config.json leaves out, where transformers takes another value than the plain
    decoder's; `spelled` the file's words for keys of ours, "" for those that it does not have; `required` keys that
    must have one value if they are there. With `qk_norm_key`, false there is no norm of queries and keys. `experts`
    None: every layer is dense.

    `eps` is that of norms where no key says. `is_parallel`, `qkv_clip_key` are as in `LayerConfig`, `norm_has_weight`
    as in `NormConfig`; `has_one_norm_in_parallel`: the feed-forward has none of its own then. `rope_layers` says which
    layers turn: "all", "sliding" ones or "sliding_or_all", all where the file has no window. `has_rope_alpha`: `alpha`
    makes a dynamic rope one that is stretched once. `has_query_growth`: queries grow with their position. Of a table of
    learned positions the first `position_offset` rows are nobody's. `num_kv_heads` above 0: always so many.
    `full_attention_first`: of every `full_attention_every` layers the first is the full one, not the last.
    `logit_multiplier_key` is the inverse of `logit_divisor_key`. `text_families`: the text part is one of several
    families; by `model_type` of the text, the architecture whose row says all but names. The first where it says none.
    `text_defaults` is, by `model_type` too, what keys of the text mean that are left out beside what the row says.
    `embedding_size_key` is how wide embeddings are, projected to the hidden size. `rope_rounding` is as in
    `RopeParameters`.
    `turned_size_key`: how many numbers of a head are turned, in older files. `forms` are other rows of the
    architecture, of which a file takes the first that is for it.

    `is_encoder`: tokens see those behind them too, and half of `sliding_window` is to each side. `norms_sums` is as in
    `LayerConfig`. Without `has_first_norm` the first layer has none before attention; with `has_embedding_norm` there
    is one before the layers, and without a name of `norm` none behind them. `token_types_key`: how many types of
    token have embeddings. `counts_offset`: `max_position_embeddings` counts the rows that are nobody's, and tokens of
    the last one's number have no position. `classifier` is the head of an encoder that classifies.
    """

    models: str = "Llama 2, 3 and 3.x, and what is built like them"
    names: Names = Names()
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    norm_rounds_once: bool = False
    norm_has_bias: bool | str = False
    eps_key: str = "rms_norm_eps"
    qk_norm: str = "none"
    default_head_size: int = 0
    sliding_window: str = "never"
    full_attention_every: int = 1
    full_attention_every_key: str = ""
    has_rope: bool = True
    has_local_rope: bool = False
    rope_layers_key: str = ""
    rope_interval_key: str = ""
    has_interleaved_rope: bool = False
    rope_rounding: str = "each step"
    may_have_partial_rope: bool = False
    scale_key: str = ""
    scale_root_key: str = ""
    score_cap_key: str = ""
    activation_key: str = "hidden_act"
    activation_words: Mapping[str, str] = field(default_factory=dict)
    is_gated: bool = True
    intermediate_factor: int = 0
    embeds_by_root: bool = False
    is_text_part: bool = False
    image_layers_key: str = ""
    num_image_embeddings: int = 0
    tie_of_text: str = "never"
    ties_by_default: bool = False
    embedding_multiplier_key: str = ""
    residual_multiplier_key: str = ""
    logit_divisor_key: str = ""
    logit_cap_key: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    eps: float = 1e-6
    is_parallel: bool | str = False
    has_one_norm_in_parallel: bool = False
    qkv_clip_key: str = ""
    norm_has_weight: bool = True
    rope_layers: str = "all"
    has_rope_alpha: bool = False
    has_query_growth: bool = False
    position_offset: int = 0
    num_kv_heads: int = 0
    full_attention_first: bool = False
    has_head_bias: bool = False
    logit_multiplier_key: str = ""
    text_families: Mapping[str, str] = field(default_factory=dict)
    qk_norm_key: str = ""
    has_sinks: bool = False
    experts: ExpertsFamily | None = None
    turned_size_key: str = ""
    text_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    norms_sums: bool = False
    embedding_size_key: str = ""
    forms: "tuple[Form, ...]" = ()
    is_encoder: bool = False
    has_first_norm: bool = True
    has_embedding_norm: bool = False
    token_types_key: str = ""
    counts_offset: bool = False
    classifier: ClassifierFamily | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """The row of files in which each key of `where` has its value."""

    where: Mapping[str, Any]
    family: Family
