"""The differences of one family of models from Llama's decoder, as data: a row of the table in `table.py`.

A row describes how config.json is read: the meaning of its keys, and the defaults of missing ones (files of the hub
leave out the defaults of their class). It also maps tensor names: layers are built with our names, which are Llama's,
and `Names` has the checkpoint's. Reading gives one `LayerConfig` for each layer, so layers of one model may differ; the
layers know no family.

Entries that end in `_key` are keys of config.json, "" if the family has none. Needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.rope import RopeParameters

NORM_POSITIONS: Final = ("input_layernorm", "attention_output_norm", "post_attention_layernorm", "mlp_output_norm")
"""Our names of the norms before attention, after it, before the feed-forward and after it."""
CROSS_NORM_POSITIONS: Final = ("cross_attention_norm", "cross_attention_output_norm")
"""Our names of the norms before and after attention to an encoder's rows."""


QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Our names of the projections to queries, keys and values."""
GATE_UP: Final = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class AudioNames:
    """Two convolutions over frames, and the table of positions behind them, of an encoder of audio."""

    convolutions: tuple[str, str] = ("", "")
    positions: str = ""


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names. Those of a layer follow `layers` and its index.

    `norms` are in the order of `NORM_POSITIONS`, "" for no norm. `parts` renames modules of a layer, by our name.
    `fused` tensors are several of ours, concatenated by rows; those in `by_kv_head` hold one key-value head (or key
    head of a gated delta net) after the other, each with all of its parts. `are_transposed`: matrices of a layer are
    [inputs, outputs]. Some files leave out `optional_prefix`. Tensors that end in one of `ignored` are derived here;
    those that begin with one of `ignored_prefixes` are for other input than text. `aliases` map beginnings of names in
    newer releases of transformers, in memory and in files, to the ones here; `layer_aliases` do so after a layer's
    index, `ending_aliases` for the endings in older files.

    Names of experts have {} for the number in `parts`, which may hold full names too. `stacked` are the tensors of
    experts that are not separate; transformers stacks separate ones in memory (`CheckpointNames`). A module of a layer
    with {} in its name in `parts` has each of our rows in a tensor of its own, by number. Tensors in `as_rows`, by our
    name in a layer, are parameters [1, n], not buffers [n], and those in `as_parameters` parameters [n]. `joined` are
    stacks that are one tensor in memory, by its name in a layer, outputs one behind the other; `joined_rows` are other
    tensors that are one in memory. `separate` are modules in memory whose rows a tensor of `fused` has, each with ours
    in it, one behind the other.
    `mixer_aliases` are `layer_aliases` of layers with one mixer. `ignores_later_layers`: files may have layers after
    the model's last, for speculative decoding. `embedding_norm` and `token_types` are of encoders. `head_dense` and
    `head_norm` precede `classifier`, the scores of a model that classifies; `token_classifier` are those of one that
    classifies tokens, "" if they have the same name. `project_in` and `project_out`
    are between embeddings, or logits, and layers of another size. `layer_inputs` are the table, the projection and the
    norm of numbers for each layer (`LayerConfig.input_size`), `outer_streams` the projections to and from further
    streams (`LayerConfig.predicted_streams`), each with a number. `cross_norms` are the norms before and after
    attention to an encoder's rows, "" for no norm; `relative_bias` is the full name of the table of
    `LayerConfig.relative_bias`, `distances` those of the table and the norm of `LayerConfig.distances`.
    `head_bias` is the full name of the token head's bias if it is a buffer [1, tokens] of its own, which files may
    leave out; "" if it is named after the head. `embedding_copies` are tensors that equal the embedding, by full name:
    files may have any of them, or one in its place. Names of the weights that sum several streams behind the last layer
    begin with `stream_head`. `rope_factors` is the module of `RopeParameters.has_learned_factors`. As many of our
    layers as `layers_in_one` have one number in the checkpoint: in names of norms and `parts` "#" is which of them,
    from 0 on, and experts are the first one's.
    """

    layers_in_one: int = 1
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
    as_rows: tuple[str, ...] = ()
    as_parameters: tuple[str, ...] = ()
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined_rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    separate: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixer_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    layer_aliases: Mapping[str, str] = field(default_factory=dict)
    stacked: tuple[StackedTensor, ...] = ()
    ignores_later_layers: bool = False
    embedding_norm: str = ""
    token_types: str = ""
    classifier: str = "score"
    token_classifier: str = ""
    head_dense: str = ""
    head_norm: str = ""
    ending_aliases: Mapping[str, str] = field(default_factory=dict)
    project_in: str = ""
    project_out: str = ""
    layer_inputs: tuple[str, str, str] = ("", "", "")
    outer_streams: tuple[str, str] = ("", "")
    cross_norms: tuple[str, str] = ("", "")
    relative_bias: str = ""
    distances: tuple[str, str] = ("", "")
    head_bias: str = ""
    embedding_copies: tuple[str, ...] = ()
    rope_factors: str = ""
    audio: AudioNames = AudioNames()
    stream_head: str = ""

    def in_layer(self, index: int, name: str) -> str:
        """The name inside of its layer of what layer `index` of ours has."""
        return name.replace("#", str(index % self.layers_in_one))

    def canonical(self, name: str) -> str:
        """The name here, of which `name` may be an alias."""
        for ending, ours in self.ending_aliases.items():
            if name.endswith(ending):
                name = name.removesuffix(ending) + ours
        for beginning, ours in self.aliases.items():
            if name.startswith(beginning):
                name = ours + name.removeprefix(beginning)
                break
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
    """The layers between the hidden states of an encoder and its scores: a dense layer with `activation`, or the one
    named by `activation_key`, and a norm with `has_norm`. The input is the first token's hidden state, or the pooling
    named by `pooling_key`, in words of `poolings`: "late" is the mean behind these layers. `bias` is of the dense
    layer. `precedes_tokens`: scores of tokens have these layers too.
    """

    activation: str = "tanh"
    activation_key: str = ""
    pooling_key: str = ""
    poolings: Mapping[str, str] = field(default_factory=lambda: {"cls": "cls", "mean": "mean"})
    bias: bool | str = True
    has_norm: bool = False
    precedes_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """A `*_bias`, here and below, is True or False in every file, or the key of config.json that has the flag.

    `head_size` 0 means hidden size / heads, unless a key has it. `num_kv_heads` above 0 is the same in every file.
    `qk_norm`, `has_sinks`, `output_gate` and `has_key_bias` are as in `LayerConfig`; if `qk_norm_key` is false, queries
    and keys have no norm. `scale_key` is the scale of attention scores, `scale_root_key` the number of which it is the
    inverse root, in a family with both for files without the first; without both it is the head size. A `scale` above 0
    is the same in every file. `score_cap_key` and `qkv_clip_key` bound scores, and queries, keys and values. Layers
    with a window have `sliding_heads_key` query heads, if a file has that key. `alibi`: scores have slopes by distance,
    "added" to scaled scores, or "scaled" with them; "" for none.
    """

    qkv_bias: bool | str = "attention_bias"
    has_key_bias: bool = True
    output_bias: bool | str = "attention_bias"
    qk_norm: str = "none"
    qk_norm_key: str = ""
    head_size: int = 0
    num_kv_heads: int = 0
    scale: float = 0.0
    scale_key: str = ""
    scale_root_key: str = ""
    score_cap_key: str = ""
    qkv_clip_key: str = ""
    has_sinks: bool = False
    sliding_heads_key: str = ""
    output_gate: str = ""
    alibi: str = ""


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers with sliding-window attention, over `sliding_window` tokens; in an encoder half of it to each side.

    `rule`: "never", "always", "late_layers" (from layer `max_window_layers` on), "even_layers" (layers 0, 2, 4 and so
    on before `max_window_layers`), "in_use" (every layer) or "layer_types" (all but every `full_every`th layer, or the
    number in `full_every_key`; with `is_full_first` the first layer of each group is the full one, not the last).
    "late_layers", "even_layers" and "in_use" need `use_sliding_window` too. A list `layer_types` in the file takes
    precedence over all but "never" and "in_use"; it may have `others`, of layers without attention.
    """

    rule: str = "never"
    full_every: int = 1
    full_every_key: str = ""
    is_full_first: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `has_local`: sliding layers have a rope of their own. Otherwise `layers` are those with rotated
    queries and keys: "all", "sliding", "sliding_or_all" (all if the file has no window), or "listed" (SmolLM3:
    `no_rope_layers` has 1 for each of them and 0 for the others; without the list every `no_rope_layer_interval`th
    layer has none). `thetas_key` lists the base of each layer, 0 for one without. `may_be_partial`:
    `partial_rotary_factor` counts, or in older files `rotary_size_key`, the number of rotated elements of a head.
    `is_interleaved`, `is_backward` and `rounding` are as in `RopeParameters`. `adjust` changes the rope for one
    architecture, from the file and the head size. `sections`, of models whose tokens have three positions, are those of
    files that have none (`RopeParameters.sections`), and interleaved where the class does so.
    """

    has_local: bool = False
    layers: str = "all"
    is_interleaved: bool = False
    is_backward: bool = False
    thetas_key: str = ""
    rounding: str = "each step"
    may_be_partial: bool = False
    rotary_size_key: str = ""
    adjust: Callable[[RopeParameters, ConfigReader, int], RopeParameters] | None = None
    sections: tuple[int, ...] = ()
    interleaves_sections: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """`kind` to `has_weight` are as in `NormConfig`; `eps` is that of the norms if no key has it. `are_of_sums` is
    `LayerConfig.norms_sums`. Without `has_first` the first layer has no norm before attention. `Names` determines the
    norms of a layer, and whether there is one after the last.
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
    """`is_gated` and `has_down_bias` are as in `LayerConfig`. `activation_words` maps the file's names of activations
    to those in `ModelConfig`. `size_factor`, times the hidden size, is the intermediate size if the file has none.
    `bounds_key` lists `LayerConfig.bound` of each layer, null or 0 for none.
    """

    bias: bool | str = "mlp_bias"
    has_down_bias: bool = False
    is_gated: bool = True
    activation_key: str = "hidden_act"
    activation_words: Mapping[str, str] = field(default_factory=dict)
    size_factor: int = 0
    bounds_key: str = ""


@dataclass(frozen=True, slots=True)
class Wiring:
    """`is_parallel` is as in `LayerConfig`; `has_one_norm_in_parallel`: the feed-forward then has no norm of its own.
    `residual_multiplier_key` scales the outputs of attention and feed-forward.
    """

    is_parallel: bool | str = False
    has_one_norm_in_parallel: bool = False
    residual_multiplier_key: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """`by_root`: embeddings are multiplied by the root of the hidden size, rounded to the dtype; otherwise by
    `multiplier_key`, or by the root as it is if the flag `root_key` is true. `size_key` is their width, projected to
    the hidden size; with `projects_sum` positions, token types and the norm before the layers have that width too,
    their sum is projected, with a bias, and nothing is projected back; with `always_projects` also if it has the hidden
    size already. The first `position_offset` rows of a table of
    positions are unused. `has_norm`: there is a norm before the layers. `sinusoid` is as in `ModelConfig`, of files
    without the table of positions in `Names`, if that has one. `inputs_may_end`: tokens beyond the table of layers'
    inputs have those of token 0.
    """

    by_root: bool = False
    multiplier_key: str = ""
    root_key: str = ""
    size_key: str = ""
    projects_sum: bool = False
    always_projects: bool = False
    position_offset: int = 0
    has_norm: bool = False
    sinusoid: str = ""
    inputs_may_end: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """Logits are divided by `divisor_key`, of which `multiplier_key` is the inverse, or by the root of the hidden size
    if the flag `root_key` is true, and bounded by `cap_key`. A tied head, too, may have a bias of its own. With
    `ties_by_files` the head is the embedding unless the files have another; without files the file's flag decides.
    """

    divisor_key: str = ""
    root_key: str = ""
    ties_by_files: bool = False
    multiplier_key: str = ""
    cap_key: str = ""
    has_bias: bool | str = False


@dataclass(frozen=True, slots=True)
class TextPart:
    """The model accepts images too and runs with text alone. Its sizes are in `text_config`, or in older files where
    those of other models are.

    `tie` determines whether `tie_word_embeddings` of the text counts in addition to the file's: "never", or "also"
    (either is enough). `ties_by_default`: if the file has no such key, its class ties, so the head is the embedding
    unless the files have another, whatever the text config says. Without weight files the text config decides, then
    `defaults` of the row. `families`: the text model is one of several; `model_type` of the text -> the architecture
    whose row has everything but names; the first if it is missing. `defaults`, by `model_type` too, are those of keys
    of the text that are missing, before the row's. `opened` gives the contents of the file, whose path is for
    errors, with the parts where this row reads them, if other files have them elsewhere.
    """

    tie: str = "never"
    ties_by_default: bool = False
    families: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    opened: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ImageLayers:
    """`key` lists layers that attend to images alone, which text skips. The last `num_embeddings` rows of the table
    of embeddings, after the vocabulary's, are of tokens that no text has.
    """

    key: str = ""
    num_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tokens attend to later ones too. `token_types_key` is the number of token types that have embeddings.
    `counts_offset`: `max_position_embeddings` counts the unused rows, and tokens of the last such row's number have no
    position. `classifier` is the head of a model that classifies.
    """

    token_types_key: str = ""
    counts_offset: bool = False
    classifier: ClassifierFamily | None = None


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """The model has an encoder: `row` of `ENCODER_PARTS`, read from the same file. `max_rows_key` bounds its rows, ""
    for no bound. `mel_bins_key`: it reads audio, of two frames a row; "" for text. `classifier` is the head of a model
    that classifies; then the decoder's start token is the row's last with `starts_with_last`, else the file's.
    """

    row: str
    max_rows_key: str = ""
    mel_bins_key: str = ""
    classifier: ClassifierFamily | None = None
    starts_with_last: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: its differences from the plain decoder, by part. `models` are its names, for people. `rope`
    None: positions are learned, a table of `max_position_embeddings` rows. `experts` None: every layer is dense. Other
    parts are None if the model has no such part.

    `defaults` are those of keys missing in config.json, where transformers has another value than the plain decoder's.
    `file_keys` are the file's names of our keys, "" for keys that it does not have; `older_keys` are other names of
    theirs, which count in files that lack the newer ones. `required` keys must have one value
    if they are there. `variants` are other rows of the architecture; a file uses the first that matches it.

    `layers` changes the layers that the other parts describe, for a family in which they mix tokens in several ways:
    from the file and the layers, in order. `ropes` gives all ropes instead of `rope`; of several, `layers` sets each
    layer's.

    `vision` is the row of `vision_rows.py` by which the model takes images, "" for text alone; `audio` that by which it
    takes audio beside images.

    `layer` names the kind of layer if it has arithmetic that no part describes, "" for the plain one: a model's layers
    are then the `Layer` of the module of this name next to the decoder. Plans do not count the weights that it adds.

    `shares_layers`: all layers are one, whose tensors files have once.

    `newer` gives the contents of the file, whose path is for errors, with the keys and lists that this row reads, where
    older files have others.
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
    vision: str = ""
    audio: str = ""
    images: ImageLayers | None = None
    encoder: Encoder | None = None
    encoder_part: EncoderDecoder | None = None
    file_keys: Mapping[str, str] = field(default_factory=dict)
    older_keys: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    variants: "tuple[Variant, ...]" = ()
    layer: str = ""
    shares_layers: bool = False
    layers: Callable[[ConfigReader, tuple[LayerConfig, ...]], tuple[LayerConfig, ...]] | None = None
    ropes: Callable[[ConfigReader, int, int], tuple[RopeParameters, ...]] | None = None
    """Its arguments are the file, the number of positions and the head size."""
    newer: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """The row of files in which each of `keys` has this value."""

    keys: Mapping[str, Any]
    family: Family
