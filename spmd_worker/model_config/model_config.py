"""Model config: the sizes of a model, read from a model folder's `config.json`.

One decoder architecture, of which every family states only its difference (`families/`), and one `LayerConfig` for each
layer. A model folder is data: its code (`auto_map`) is never run.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from spmd_worker.base import files
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.decoder_generation import DecoderGeneration, read_decoder_generation
from spmd_worker.model_config.encoder_part import AudioInput, EncoderPart
from spmd_worker.model_config.experts_reader import read_experts
from spmd_worker.model_config.families.audio_rows import AUDIO_ROWS
from spmd_worker.model_config.families.encoder_decoder_rows import ENCODER_PARTS, classifying_of, generating_of
from spmd_worker.model_config.families.encoder_rows import ENCODERS
from spmd_worker.model_config.families.family import (
    Attention,
    ClassifierFamily,
    Embedding,
    EncoderDecoder,
    Family,
    Head,
    Names,
    Rope,
    TextPart,
    Windows,
)
from spmd_worker.model_config.families.table import CLASSES_OF_OTHERS, FAMILIES, UNSUPPORTED
from spmd_worker.model_config.families.vision_rows import read_vision
from spmd_worker.model_config.layer_config import LayerConfig, NormConfig
from spmd_worker.model_config.layer_elements import layer_elements
from spmd_worker.model_config.pooling import (
    COLBERT,
    COLBERT_ENCODERS,
    EncoderPooling,
    HeadConfig,
    PoolingConfig,
    ShiftedRow,
    decoder_of,
    encoder_of,
    read_pooling,
    sees_later,
)
from spmd_worker.model_config.quantization import MODELOPT_FILE, describes_quantization, read_quantization
from spmd_worker.model_config.rope import (
    STRETCHED_ROPE_TYPES,
    RopeParameters,
    read_local_rope,
    read_rope,
    rotated_layers,
    with_sections,
)
from spmd_worker.model_config.sentence_folder import pooling_files
from spmd_worker.model_config.stream_config import BalancedStreamsConfig, GatedStreamsConfig
from spmd_worker.model_config.tensor_names import state_names, tensor_names
from spmd_worker.model_config.tower_elements import encoder_elements, tower_elements
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.model_config.weight_format import Quantization

__all__ = ["DTYPE_BYTES", "ENCODERS", "FAMILIES", "ModelConfig", "ModelFiles", "RopeParameters"]

logger = logging.getLogger(__name__)

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Name in config.json -> name in the kernels."""
_POINTWISE: Final = tuple(name for name in _ACTIVATIONS if name != "xielu")
"""Those without weights: xielu is a layer with weights, which no family has as a gate."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder, or of an encoder.

    `norm` is the last one's. `ropes` are those that layers name. `num_positions` is the number of rows of a table of
    learned positions, 0 for none; the first `position_offset` rows are unused. Embeddings are multiplied by
    `embedding_multiplier`, rounded to the dtype first with `rounds_multiplier`; logits are divided by `logit_divisor`
    and, if `logit_cap` is above 0, bounded by it: cap * tanh(logit / cap). `quantization` describes stored weights that
    are not plain; the model computes the bits of dequantised ones. `variant` is the number of the architecture's
    variant, from 1; 0 is its main row. With `pooling` the model outputs vectors and has no token head. Embeddings, and
    the head's inputs, are `own_embedding_size` wide and projected to and from the hidden size; 0 if they have the
    hidden size. With `projects_sum` the sum of embeddings, positions and types is normed and projected, and nothing is
    projected back. With `shares_layers` all layers are one: their weights are loaded once. Without `has_last_norm` the
    last layer's output is not normed.

    With `num_layer_inputs` above 0, a second table of as many rows, and a projection of the embedding, give each token
    the numbers of `LayerConfig.input_size` for every layer; tokens beyond that table have the first row.

    `image_layers` are layers of the checkpoint, by number, that text skips: none of `layers` is one of them. The table
    of embeddings has `num_image_embeddings` rows after those of the vocabulary, which text never uses.

    `vision` is how the model takes images, None for a model that runs with text alone. `encoder_part` is the encoder
    of an encoder-decoder model, whose decoder the other fields describe.

    With a `sinusoid` positions are sines, then cosines, of `max_position_embeddings` positions behind `position_offset`
    (https://arxiv.org/abs/1706.03762), which the files do not have: "exact", or "fairseq", whose last angle is the
    position / 10,000 and whose frequencies are rounded.

    `is_encoder`: a token sees all of its row, so a row is computed in one step, nothing of it is cached, and its only
    result is a vector. `num_token_types` have embeddings; tokens of the id `unplaced_token` have no position, -1 where
    all have. With `has_embedding_norm` there is a norm before the layers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_position_embeddings: int
    ropes: tuple[RopeParameters, ...]
    has_tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    num_positions: int = 0
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    quantization: Quantization | None = None
    position_offset: int = 0
    has_head_bias: bool = False
    variant: int = 0
    pooling: PoolingConfig | None = None
    is_encoder: bool = False
    num_token_types: int = 0
    unplaced_token: int = -1
    has_embedding_norm: bool = False
    own_embedding_size: int = 0
    projects_sum: bool = False
    shares_layers: bool = False
    has_last_norm: bool = True
    image_layers: tuple[int, ...] = ()
    num_image_embeddings: int = 0
    num_layer_inputs: int = 0
    vision: VisionConfig | None = None
    sinusoid: str = ""
    encoder_part: EncoderPart | None = None

    @property
    def names(self) -> Names:
        names = self._family.names
        if self.pooling is not None and self.pooling.late is not None:
            # Folders of ColBERT's authors have the matrix, also beside a Dense that is the same.
            is_own = self.pooling.has_score_weight
            ignored = names.ignored_prefixes if is_own else (*names.ignored_prefixes, f"{_MATRIX}.")
            return replace(names, classifier=_MATRIX if is_own else "", ignored_prefixes=ignored)
        if self.pooling is None or self.pooling.task != "token_classify":
            return names
        if self.pooling.head is not None and not self.is_encoder:
            # A process reward model, whose layers are one `Sequential`.
            return replace(names, head_dense="score.0", classifier="score.2")
        return replace(names, classifier=names.token_classifier or names.classifier)

    @property
    def layer(self) -> str:
        """Kind of layer (`Family.layer`)."""
        return self._family.layer

    @property
    def hears(self) -> bool:
        """Whether prompts of this architecture may have audio where those of others have images."""
        return self._family.vision in AUDIO_ROWS

    @property
    def media(self) -> tuple[str, ...]:
        """Media of the architecture's prompts, "image", "audio" or both, in the order of `VisionConfig.parts`."""
        rows = (self._family.vision, self._family.audio)
        return tuple(["audio" if row in AUDIO_ROWS else "image" for row in rows if row])

    @property
    def _family(self) -> Family:
        family = family_of(self.architecture)
        return family.variants[self.variant - 1].family if self.variant else family

    @property
    def embedding_size(self) -> int:
        """Elements of an embedding."""
        return self.own_embedding_size or self.hidden_size

    @property
    def output_size(self) -> int:
        """Elements of the head's input, or of a pooled vector."""
        return self.hidden_size if self.projects_sum else self.embedding_size

    @property
    def sum_size(self) -> int:
        """Elements of positions, of token types and of the norm before the layers."""
        return self.embedding_size if self.projects_sum else self.hidden_size

    @property
    def stream_size(self) -> int:
        """Elements of a token between layers: of all residual streams."""
        return self.hidden_size * self.layers[0].num_streams

    @property
    def takes_ids(self) -> bool:
        """Whether layers need ids of tokens, which embeddings in their place do not have."""
        experts = (layer.experts for layer in self.layers)
        lists_experts = any(each is not None and each.num_listed_tokens > 0 for each in experts)
        return self.num_layer_inputs > 0 or lists_experts or any(layer.ngrams is not None for layer in self.layers)

    @property
    def num_text_ids(self) -> int:
        """Ids of the vocabulary that prompts of text may have, the first ones: in a model beside which there are towers
        those without inputs of layers have embeddings of their own, in tables for images and audio.
        """
        is_part = self._family.text is not None and self.num_layer_inputs > 0
        return min(self.num_layer_inputs, self.vocab_size) if is_part else self.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of `layers` in the checkpoint."""
        if self.shares_layers:
            return (0,) * self.num_layers
        if self.layers_in_one > 1:
            return tuple([index // self.layers_in_one for index in range(self.num_layers)])
        numbers = range(self.num_layers + len(self.image_layers))
        return tuple(number for number in numbers if number not in self.image_layers)

    @property
    def layers_in_one(self) -> int:
        """Layers that are one in the checkpoint, and on one pipeline stage."""
        return self._family.names.layers_in_one

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size + self.num_image_embeddings

    @property
    def num_heads(self) -> int:
        """The most query heads of a layer. Layers may differ: only reports use this and the next two sizes."""
        return max(layer.num_heads for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def head_size(self) -> int:
        return max(layer.head_size for layer in self.layers)

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length that the model supports, tokens, rotary scaling included."""
        # A model with several ropes gives the length after scaling.
        if len(self.ropes) != 1 or self.ropes[0].rope_type not in STRETCHED_ROPE_TYPES:
            return self.max_position_embeddings
        (rope,) = self.ropes
        if not rope.original_max_position_embeddings:
            return self.max_position_embeddings
        base = rope.original_max_position_embeddings if rope.rope_type == "yarn" else self.max_position_embeddings
        return max(self.max_position_embeddings, int(base * rope.factor))

    def rope_regime(self, num_prompt_tokens: int, most_tokens: int) -> int:
        """A number, fixed at admission, on which the rotary angles of a row depend besides positions. The row begins
        with `num_prompt_tokens`, and `most_tokens` at most are computed, prompt and output.

        `dynamic` scaling: the prompt's length if it exceeds the model's own, tokens: its tokens use the base of the
        full prompt. `longrope`: 1 if the row may grow past the original length. 0 if positions alone decide.
        """
        regimes = (rope.regime(num_prompt_tokens, most_tokens, self.max_position_embeddings) for rope in self.ropes)
        return max(regimes, default=0)

    @property
    def bounds_rows(self) -> bool:
        """Whether rows end at `max_model_len` at the latest: relative positions alone have no end, nor have states."""
        first = self.layers[0]
        is_relative = first.relative_bias is not None or first.distances is not None
        return self.num_positions > 0 or not (self.is_attention_free or is_relative)

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states, in some layer."""
        return any(layer.has_states for layer in self.layers)

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer attends: sequences have states alone, and no blocks."""
        return not any(layer.attends for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model, tied embeddings counted once."""
        bias, distances = self.layers[0].relative_bias, self.layers[0].distances
        tables = self.num_embedding_parameters + (0 if bias is None else bias.elements(self.layers[0].num_heads))
        tables += 0 if distances is None else distances.elements(self.hidden_size)
        norms = self.has_last_norm * self.norm_parameters + self.embedding_norm_parameters
        norms += self.num_rope_parameters + self.num_stream_head_parameters
        return tables + sum(self.layer_parameters[: 1 if self.shares_layers else None]) + norms

    @property
    def num_tower_parameters(self) -> int:
        """Parameters of the tower, or of the encoder but for a table of embeddings that is the decoder's, which
        `num_parameters` does not count; 0 without one.
        """
        if self.encoder_part is not None:
            return encoder_elements(self.encoder_part)
        parts = () if self.vision is None else self.vision.parts
        return sum(tower_elements(each, self.embedding_size) for each in parts)

    @property
    def num_embedding_parameters(self) -> int:
        """Embeddings, of positions too, their projections and head together."""
        num_tables = 1 if self.has_tied_embeddings or self.pooling is not None else 2
        tables = (self.vocab_size * num_tables + self.num_image_embeddings) * self.embedding_size
        tables += (self.num_positions + self.num_token_types) * self.sum_size
        tables += self.num_layer_inputs * self.layer_inputs_size + self.num_layer_input_parameters
        tables += self.num_outer_stream_parameters
        projections = (2 - self.projects_sum) * self.num_projection_parameters
        return tables + projections + self.vocab_size * self.has_head_bias

    @property
    def layer_inputs_size(self) -> int:
        """Numbers of a token for all layers together (`LayerConfig.input_size`)."""
        return sum(layer.input_size for layer in self.layers)

    @property
    def num_layer_input_parameters(self) -> int:
        """Parameters of the projection to these, and of their norm; not of their table."""
        return self.layer_inputs_size * self.hidden_size + self.layers[0].input_size

    @property
    def num_outer_stream_parameters(self) -> int:
        """Parameters of the projections to and from further streams; 0 for none."""
        streams = self.layers[0].predicted_streams
        return 0 if streams is None else streams.outer_elements(self.hidden_size)

    @property
    def num_projection_parameters(self) -> int:
        """Parameters of each of the projections from embeddings to layers and from layers to logits; 0 for none."""
        return (self.own_embedding_size + self.projects_sum) * self.hidden_size

    @property
    def num_rope_parameters(self) -> int:
        """Logarithms by which learned frequencies differ from the file's, float32 on each stage; 0 for none."""
        return sum(rope.rotary_size // 2 for rope in self.ropes if rope.has_learned_factors)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each decoder layer, all experts counted."""
        of_kind = {
            layer: layer_elements(layer, self.hidden_size, layer.full_share) for layer in dict.fromkeys(self.layers)
        }
        return tuple(of_kind[layer] for layer in self.layers)

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of the routed experts of all layers; 0 for a dense model."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        return sum(each.routed_elements(self.hidden_size, each.full_share) for each in experts)

    @property
    def num_stream_head_parameters(self) -> int:
        """Parameters, float32 in every dtype, that sum several residual streams behind the last layer."""
        streams = self.layers[0].streams
        return streams.head_elements(self.hidden_size) if isinstance(streams, BalancedStreamsConfig) else 0

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of the stream, or of the last mean of several streams."""
        streams = self.layers[0].streams
        if isinstance(streams, GatedStreamsConfig):
            return streams.elements(self.hidden_size, injects=False)
        return self.hidden_size * (self.norm.has_weight + self.norm.has_bias)

    @property
    def embedding_norm_parameters(self) -> int:
        """Parameters of the norm before the layers; 0 for none."""
        return self.has_embedding_norm * self.sum_size * (self.norm.has_weight + self.norm.has_bias)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a model folder's `config.json` and `generation_config.json` ({} without the second), and a digest of
    their bytes and of the pooling files'. `generates`: the architecture has a token head; `model_config.pooling` is the
    folder's pooling, and `sees_later` the setting by which a decoder's tokens see later ones too. `decoder` is how
    answers of an encoder-decoder model are generated.
    """

    model_config: ModelConfig
    generation_config: Mapping[str, Any]
    digest: str
    generates: bool = True
    sees_later: str | None = None
    decoder: DecoderGeneration | None = None


def config_path(model_folder: Path) -> Path:
    """The folder's config.json. Raises ModelConfigError if there is none."""
    if not model_folder.is_dir():
        where = "" if model_folder.is_absolute() else f" in {os.getcwd()}"
        raise ModelConfigError(f"model.path={model_folder} is not a folder{where}: give a Hugging Face model folder")
    path = model_folder / "config.json"
    if not path.exists():
        raise ModelConfigError(f"{path} does not exist: a model folder needs it")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The object in a model's config.json, which may be a link. Raises ModelConfigError naming the file."""
    return _json_object(_content(path), path)


def read_model_files(model_folder: Path, *, with_images: bool = False, with_audio: bool = False) -> ModelFiles:
    """Read each file once. The end-of-sequence ids of `generation_config.json` come before those of `config.json`.
    Without `with_images` a model that takes them runs with text alone, and without `with_audio` one that hears beside
    text: its tower is not loaded.

    Raises ModelConfigError.
    """
    path, generation_path = config_path(model_folder), model_folder / "generation_config.json"
    text = _content(path)
    has_generation = generation_path.exists()
    generation_text = _content(generation_path) if has_generation else b""
    given = config = dict(_opened(_json_object(text, path), path))
    generation = _json_object(generation_text, generation_path) if has_generation else {}
    # If it is null, config.json's counts.
    config = given | {key: generation[key] for key in _OF_GENERATION if generation.get(key) is not None}
    others = b"".join(_content(each) for each in pooling_files(model_folder))
    quantised = model_folder / MODELOPT_FILE
    if not describes_quantization(config) and quantised.is_file():
        quantised_text = _content(quantised)
        config[MODELOPT_FILE], others = _json_object(quantised_text, quantised), others + quantised_text
    digest = blake2b(b"%d\0%s%s%s" % (len(text), text, generation_text, others), digest_size=16).hexdigest()
    model_config = model_config_of(config, path, with_images=with_images, with_audio=with_audio)
    family = family_of(model_config.architecture)
    names = tensor_names(model_folder) if _is_tied_by_class(config, family) else ()
    if names:
        model_config = replace(model_config, has_tied_embeddings=not _has_head(names, family.names))
    model_config = _with_positions(_with_head(model_config, family, model_folder), model_folder)
    own_rows = [_own_row(name, config.get("model_type")) for name in config["architectures"]]
    is_named = model_config.architecture in own_rows or model_config.encoder_part is not None
    classifies = model_config.encoder_part is not None and _classifies(config["architectures"])
    generates = is_named and not (model_config.is_encoder or classifies)
    encoder = _encoder_pooling(config, path, model_config) if model_config.is_encoder else None
    # Its class reads no generation_config.json.
    encoder = _decoder_pooling(given, path, model_config) if classifies else encoder
    pooling = read_pooling(model_folder, config, model_config.output_size, generates=generates, encoder=encoder)
    model_config = model_config if pooling is None else replace(model_config, pooling=pooling)
    if config.get("auto_map"):
        logger.info("%s: auto_map is ignored: code in a model folder is never run", path)
    decoder = None if classifies else _decoder_generation(generation, config, model_folder, model_config)
    return ModelFiles(model_config, generation, digest, generates, None if encoder else sees_later(config), decoder)


def _decoder_generation(
    generation: Mapping[str, Any], config: Mapping[str, Any], folder: Path, model_config: ModelConfig
) -> DecoderGeneration | None:
    part = model_config.encoder_part
    if part is None:
        return None
    return read_decoder_generation(
        *(generation, config, folder),
        start_token_id=part.start_token_id,
        is_speech=part.audio is not None,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_positions=model_config.max_position_embeddings,
    )


def _with_head(model_config: ModelConfig, family: Family, model_folder: Path) -> ModelConfig:
    """The config with what files alone say of the head: whether it has a bias, and whether a sharded state ties it."""
    names, parameters = tensor_names(model_folder), state_names(model_folder)
    if family.names.head_bias and (names or parameters):
        has_bias = family.names.head_bias in names or "lm_head.bias" in parameters
        model_config = replace(model_config, has_head_bias=has_bias)
    if family.head.ties_by_files and parameters:
        model_config = replace(model_config, has_tied_embeddings="lm_head.weight" not in parameters)
    return model_config


def _with_positions(model_config: ModelConfig, model_folder: Path) -> ModelConfig:
    """The config with computed positions, where the files could have a table of them and have none."""
    part = model_config.encoder_part
    if part is None or not family_of(model_config.architecture).embedding.sinusoid:
        return model_config
    names, parameters = tensor_names(model_folder), state_names(model_folder)
    has_table = any(each.endswith("embed_positions.weight") for each in (*names, *parameters))
    if has_table or not (names or parameters):
        return model_config
    return replace(_computed(model_config), encoder_part=replace(part, stack=_computed(part.stack)))


def _computed(model_config: ModelConfig) -> ModelConfig:
    sinusoid = family_of(model_config.architecture).embedding.sinusoid
    return replace(model_config, num_positions=0, sinusoid=sinusoid)


def _is_tied_by_class(config: Mapping[str, Any], family: Family) -> bool:
    """Whether the head is tied by its class's default alone; then the names in the files decide."""
    if family.head.ties_by_files:
        return True
    text = config.get("text_config")
    own = text.get(_TIE) if isinstance(text, Mapping) else None
    # If the text config counts too, its class has the same default.
    is_silent = config.get(_TIE) is None or (_tie_also_counts(family) and config[_TIE] is False and own is None)
    return family.text is not None and family.text.ties_by_default and is_silent


def _tie_also_counts(family: Family) -> bool:
    """Whether the tie counts if either the text config or the file has it."""
    return family.text is not None and family.text.tie == "also"


def _has_head(names: Sequence[str], ours: Names) -> bool:
    return any(ours.canonical(name).startswith(f"{ours.head}.") for name in names)


def _content(path: Path) -> bytes:
    try:
        return files.read_regular_file(path)
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None


def _json_object(text: bytes, path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelConfigError naming the file."""
    try:
        return files.parse_json_object(text, allows_nan=True)
    except files.JsonError as error:
        raise ModelConfigError(f"{path} {error}") from None


def model_config_of(
    config: Mapping[str, Any], path: Path, *, with_images: bool = False, with_audio: bool = False
) -> ModelConfig:
    """Model config of `config`, the contents of `path`, which is used in errors alone. `with_images`, `with_audio`: see
    `read_model_files`.
    """
    given = config = _opened(config, path)
    architecture, quantization = _architecture(config, path), read_quantization(config, path)
    family = family_of(architecture)
    media_rows = _media_rows(family, with_images=with_images, with_audio=with_audio)
    if family.text is not None:
        config = _text_part(config, path, family)
        family = _family_of_text(family.text, given, path) if family.text.families else family
    variant = _variant(family, config)
    family = family.variants[variant - 1].family if variant else family
    config = config if family.newer is None else family.newer(config, path)
    found = _stack(config, path, architecture, family)
    vision = _vision(media_rows, given, path, found)
    part = None if family.encoder_part is None else _encoder_part(config, path, family, variant, found)
    return replace(found, quantization=quantization, variant=variant, vision=vision, encoder_part=part)


def _media_rows(family: Family, *, with_images: bool, with_audio: bool) -> list[str]:
    """Rows of `vision_rows.py` by which the model takes the media that it should."""
    rows = (family.vision, family.audio)
    return [row for row in rows if row and (with_audio if row in AUDIO_ROWS else with_images)]


def _vision(rows: Sequence[str], config: Mapping[str, Any], path: Path, found: ModelConfig) -> VisionConfig | None:
    """The media of these rows, images first; None without any."""
    read = [read_vision(row, config, path, found.hidden_size, found.norm.eps) for row in rows]
    lengths = [layer.indexer.run_length for layer in found.layers if layer.indexer is not None]
    parts = [replace(each, run_length=max(lengths, default=1)) for each in read if each is not None]
    return replace(parts[0], beside=parts[1]) if len(parts) > 1 else parts[0] if parts else None


def _encoder_part(
    config: Mapping[str, Any], path: Path, family: Family, variant: int, decoder: ModelConfig
) -> EncoderPart:
    """The encoder whose rows this decoder reads; both are rows of the same variant."""
    rule = family.encoder_part
    assert rule is not None, family
    row = ENCODER_PARTS[rule.row]
    row = row.variants[variant - 1].family if variant else row
    stack = replace(_stack(config, path, rule.row, row), variant=variant, has_tied_embeddings=True)
    reader = ConfigReader({**family.defaults, **config}, path)
    most = decoder.vocab_size - 1
    shares = stack.names.embedding == family.names.embedding
    return EncoderPart(stack, _max_rows(reader, rule), _start_token(reader, most), shares, _audio(reader, rule))


def _start_token(reader: ConfigReader, most: int) -> int:
    start = reader.get("decoder_start_token_id", reader.get("bos_token_id"))
    return checked_integer(start, reader.where("decoder_start_token_id"), 0, most)


def _max_rows(reader: ConfigReader, rule: EncoderDecoder) -> int:
    return reader.count(rule.max_rows_key) if rule.max_rows_key else 0


def _audio(reader: ConfigReader, rule: EncoderDecoder) -> AudioInput | None:
    if not rule.mel_bins_key:
        return None
    return AudioInput(reader.count(rule.mel_bins_key), 2 * reader.count(rule.max_rows_key))


def _reader(config: Mapping[str, Any], path: Path, family: Family) -> ConfigReader:
    older = {ours: old for ours, old in family.older_keys.items() if config.get(ours) is None and old in config}
    return ConfigReader({**family.defaults, **config}, path, {**family.file_keys, **older})


def _stack(config: Mapping[str, Any], path: Path, architecture: str, family: Family) -> ModelConfig:
    """Sizes of the layers and tables that the row describes."""
    reader = _reader(config, path, family)
    _check_required(reader, family)
    max_positions = _max_positions(reader, family)
    layers, ropes = _layers(reader, family, max_positions)
    encoder = family.encoder
    hidden_size = reader.count("hidden_size")
    vocab_size = reader.count("vocab_size")
    own_embedding_size = _own_embedding_size(reader, family, hidden_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        norm=layers[0].norm,
        max_position_embeddings=max_positions,
        ropes=ropes,
        has_tied_embeddings=reader.flag("tie_word_embeddings", False),
        dtype=_checkpoint_dtype(reader),
        eos_token_ids=_eos_token_ids(reader, vocab_size),
        num_positions=max_positions + family.embedding.position_offset if family.names.positions else 0,
        embedding_multiplier=_embedding_multiplier(reader, family.embedding, hidden_size),
        rounds_multiplier=family.embedding.by_root,
        logit_divisor=_logit_divisor(reader, family.head, hidden_size),
        logit_cap=_number(reader, family.head.cap_key, 0.0),
        position_offset=family.embedding.position_offset,
        sinusoid="" if family.names.positions else family.embedding.sinusoid,
        has_head_bias=_flag(reader, family.head.has_bias),
        is_encoder=encoder is not None,
        num_token_types=_num_token_types(reader, family),
        unplaced_token=family.embedding.position_offset - 1 if _counts_offset(family) else -1,
        has_embedding_norm=family.embedding.has_norm,
        has_last_norm=family.names.norm != "",
        own_embedding_size=own_embedding_size,
        projects_sum=family.embedding.projects_sum and own_embedding_size > 0,
        shares_layers=family.shares_layers,
        image_layers=_image_layers(reader, family),
        num_image_embeddings=0 if family.images is None else family.images.num_embeddings,
        num_layer_inputs=_num_layer_inputs(reader, layers, 1 if family.embedding.inputs_may_end else vocab_size),
    )


def _embedding_multiplier(reader: ConfigReader, embedding: Embedding, hidden_size: int) -> float:
    is_root = embedding.by_root or (embedding.root_key != "" and reader.flag(embedding.root_key, False))
    return hidden_size**0.5 if is_root else _number(reader, embedding.multiplier_key, 1.0)


def _logit_divisor(reader: ConfigReader, head: Head, hidden_size: int) -> float:
    if head.root_key and reader.flag(head.root_key, False):
        return float(hidden_size**0.5)
    return _number(reader, head.divisor_key, 1.0) / _number(reader, head.multiplier_key, 1.0)


def family_of(architecture: str) -> Family:
    """The row of a supported architecture, or of the encoder of one."""
    tables = (ENCODERS, ENCODER_PARTS, FAMILIES)
    return next(table[architecture] for table in tables if architecture in table)


def _max_positions(reader: ConfigReader, family: Family) -> int:
    num_rows, offset = reader.count("max_position_embeddings", 2048), family.embedding.position_offset
    if not _counts_offset(family):
        return num_rows
    return checked_integer(num_rows, reader.where("max_position_embeddings"), offset + 1, MAX_INT) - offset


def _num_token_types(reader: ConfigReader, family: Family) -> int:
    key = "" if family.encoder is None else family.encoder.token_types_key
    return checked_integer(reader.get(key), reader.where(key), 0, MAX_INT) if key else 0


def _counts_offset(family: Family) -> bool:
    return family.encoder is not None and family.encoder.counts_offset


def _encoder_pooling(config: Mapping[str, Any], path: Path, model_config: ModelConfig) -> EncoderPooling:
    """Pooling of an encoder: the part after its layers."""
    family, has_types = family_of(model_config.architecture), model_config.num_token_types > 1
    rule = None if family.encoder is None else family.encoder.classifier
    if rule is None:
        return EncoderPooling(None, "cls", has_types)
    reader = _reader(config, path, family)
    pooling_type = rule.poolings[reader.choice(rule.pooling_key, (*rule.poolings,))] if rule.pooling_key else "cls"
    head = _head(reader, rule, model_config.norm)
    return EncoderPooling(head, pooling_type, has_types, has_token_head=rule.precedes_tokens)


def _head(reader: ConfigReader, rule: ClassifierFamily, norm: NormConfig) -> HeadConfig:
    activation = rule.activation
    if rule.activation_key:
        activation = _known_activation(reader, rule.activation_key, reader.get(rule.activation_key), _POINTWISE)
    return HeadConfig(activation, _flag(reader, rule.bias), norm if rule.has_norm else None)


def _classifies(architectures: Sequence[Any]) -> bool:
    """Whether the first name of an encoder-decoder model is of one that classifies."""
    known = (each for each in architectures if each in FAMILIES or generating_of(each) or classifying_of(each))
    return classifying_of(next(known, None)) is not None


def _decoder_pooling(config: Mapping[str, Any], path: Path, model_config: ModelConfig) -> EncoderPooling:
    """Pooling of an encoder-decoder model that classifies: of the decoder's state at the last end of the row."""
    family, most = family_of(model_config.architecture), model_config.vocab_size - 1
    part = family.encoder_part
    assert part is not None, family
    assert part.classifier is not None, family
    reader = _reader(config, path, family)
    eos = checked_integer(reader.get("eos_token_id"), reader.where("eos_token_id"), 0, most)
    pad = checked_integer(reader.get("pad_token_id", 0), reader.where("pad_token_id"), 0, MAX_INT)
    start = None if part.starts_with_last else _start_token(reader, most)
    head = _head(reader, part.classifier, model_config.norm)
    return EncoderPooling(head, "last", has_token_types=False, shifted=ShiftedRow(eos, start, pad))


def _num_layer_inputs(reader: ConfigReader, layers: Sequence[LayerConfig], least: int) -> int:
    key = "vocab_size_per_layer_input"
    if not layers[0].input_size:
        return 0
    num_rows = reader.count(key)
    if num_rows < least:
        raise reader.error(key, f"must be vocab_size={least} or more: each token needs a row")
    return num_rows


def _own_embedding_size(reader: ConfigReader, family: Family, hidden_size: int) -> int:
    key = family.embedding.size_key
    size = reader.count(key, hidden_size) if key else hidden_size
    return 0 if size == hidden_size and not family.embedding.always_projects else size


def _layers(
    reader: ConfigReader, family: Family, max_positions: int
) -> tuple[tuple[LayerConfig, ...], tuple[RopeParameters, ...]]:
    """All layers, and the ropes. Layers with equal window, rope, experts, first norm and bound share one object."""
    num_layers, num_heads = reader.count("num_hidden_layers"), reader.count("num_attention_heads")
    hidden_size = reader.count("hidden_size")
    attention, norms, feed_forward = family.attention, family.norms, family.feed_forward
    num_kv_heads = attention.num_kv_heads or reader.count("num_key_value_heads", num_heads)
    _check_groups(reader, "num_attention_heads", num_heads, num_kv_heads)
    head_size = _head_size(reader, family, hidden_size, num_heads)
    is_parallel = _flag(reader, family.wiring.is_parallel)
    scale = _scale(reader, attention, head_size)
    if attention.alibi and max_positions > _MOST_DISTANCES:
        rule = f"must be at most {_MOST_DISTANCES}: each distance has a number in a table (alibi)"
        raise reader.error("max_position_embeddings", rule)
    layer = LayerConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=reader.count("intermediate_size", feed_forward.size_factor * hidden_size or None),
        scale=scale,
        alibi={"": 0.0, "added": 1.0, "scaled": scale}[attention.alibi],
        norm=NormConfig(
            norms.kind,
            reader.number(norms.eps_key, norms.eps),
            norms.offset,
            norms.rounds_once,
            _flag(reader, norms.has_bias),
            norms.has_weight,
        ),
        has_qkv_bias=_flag(reader, attention.qkv_bias),
        has_output_bias=_flag(reader, attention.output_bias),
        has_mlp_bias=_flag(reader, feed_forward.bias),
        has_down_bias=feed_forward.has_down_bias,
        qk_norm=_qk_norm(reader, attention),
        score_cap=_number(reader, attention.score_cap_key, 0.0),
        norms=_norms(family, is_parallel),
        activation=_activation(reader, family),
        is_gated=feed_forward.is_gated,
        residual_multiplier=_number(reader, family.wiring.residual_multiplier_key, 1.0),
        is_parallel=is_parallel,
        qkv_clip=_number(reader, attention.qkv_clip_key, 0.0),
        has_sinks=attention.has_sinks,
        output_gate=attention.output_gate,
        norms_sums=norms.are_of_sums,
        has_key_bias=attention.has_key_bias,
        has_cross_attention=family.encoder_part is not None,
        cross_norms=(family.names.cross_norms[0] != "", family.names.cross_norms[1] != ""),
    )
    thetas = reader.amounts(family.rope.thetas_key, num_layers) if family.rope is not None else None
    if family.ropes is None:
        ropes = _ropes(reader, family.rope, max_positions, head_size, thetas)
    else:
        ropes = family.ropes(reader, max_positions, head_size)
    windows = _sliding_windows(reader, family, num_layers)
    sliding_heads = reader.count(attention.sliding_heads_key, num_heads)
    _check_groups(reader, attention.sliding_heads_key, sliding_heads, num_kv_heads)
    bounds = reader.amounts(feed_forward.bounds_key, num_layers) or (0.0,) * num_layers
    experts = read_experts(reader, family.experts, num_layers)
    first_norms = [(index > 0 or norms.has_first) and layer.norms[0] for index in range(num_layers)]
    skipped = _image_layers(reader, family)
    rope_indices = _ropes_of_layers(reader, family.rope, windows, ropes, thetas)
    of_all = zip(windows, rope_indices, experts, first_norms, bounds, strict=True)
    kinds = [kind for number, kind in enumerate(of_all) if number not in skipped]
    layers = {
        kind: replace(
            layer,
            num_heads=sliding_heads if kind[0] else num_heads,
            window=kind[0],
            rope=kind[1],
            experts=kind[2],
            norms=(kind[3], *layer.norms[1:]),
            bound=kind[4],
        )
        for kind in dict.fromkeys(kinds)
    }
    ordered = tuple(layers[kind] for kind in kinds)
    return ordered if family.layers is None else family.layers(reader, ordered), ropes


def _check_groups(reader: ConfigReader, key: str, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        kv_key = reader.file_keys.get("num_key_value_heads", "num_key_value_heads")
        raise reader.error(key, f"is not a multiple of {kv_key}={num_kv_heads}")


def _image_layers(reader: ConfigReader, family: Family) -> tuple[int, ...]:
    """Layers of the file that text skips, in order; numbers beyond the last layer are ignored."""
    if family.images is None:
        return ()
    num_layers, listed = reader.count("num_hidden_layers"), reader.get(family.images.key)
    where = reader.where(family.images.key)
    if not isinstance(listed, list):
        raise reader.error(family.images.key, "must be a list of layers, from 0 on")
    numbers = {checked_integer(number, where, 0, MAX_INT) for number in listed}
    if numbers.issuperset(range(num_layers)):
        raise reader.error(family.images.key, f"leaves none of num_hidden_layers={num_layers} for text")
    return tuple(sorted(number for number in numbers if number < num_layers))


def _norms(family: Family, is_parallel: bool) -> tuple[bool, bool, bool, bool]:
    first, second, third, fourth = (name != "" for name in family.names.norms)
    return (first, second, third and not (is_parallel and family.wiring.has_one_norm_in_parallel), fourth)


def _ropes_of_layers(
    reader: ConfigReader,
    rope: Rope | None,
    windows: tuple[int, ...],
    ropes: tuple[RopeParameters, ...],
    thetas: tuple[float, ...] | None,
) -> tuple[int | None, ...]:
    """Rope index of each layer: sliding layers use the second of two, others the one with their base."""
    if rope is None:
        return (None,) * len(windows)
    if rope.has_local:
        return tuple(int(window > 0) for window in windows)
    if thetas is not None:
        index_of = {each.rope_theta: index for index, each in enumerate(ropes)}
        return tuple(index_of.get(theta) for theta in thetas)
    return tuple(0 if is_rotated else None for is_rotated in rotated_layers(reader, rope.layers, windows))


def _ropes(
    reader: ConfigReader, rope: Rope | None, max_positions: int, head_size: int, thetas: tuple[float, ...] | None
) -> tuple[RopeParameters, ...]:
    """The ropes that layers name: one, one for each kind of layer, or one for each of the layers' `thetas`."""
    if rope is None:
        return ()
    if rope.has_local:
        ropes = read_local_rope(reader, max_positions, head_size, may_be_partial=rope.may_be_partial)
        return tuple([replace(each, rounding=rope.rounding) for each in ropes])
    found = read_rope(reader, max_positions, head_size, rope.rotary_size_key, may_be_partial=rope.may_be_partial)
    found = found if rope.adjust is None else rope.adjust(found, reader, head_size)
    found = replace(found, is_interleaved=rope.is_interleaved, is_backward=rope.is_backward, rounding=rope.rounding)
    if rope.sections:
        found = with_sections(found, reader, rope.sections, interleaves=rope.interleaves_sections)
    if thetas is None:
        return (found,)
    if found.rope_type == "yarn" and any(0 < theta <= 1 for theta in thetas):
        raise reader.error(rope.thetas_key, "must be above 1, or 0, with rope_type yarn: its logarithm divides")
    return tuple(replace(found, rope_theta=theta) for theta in sorted({theta for theta in thetas if theta}))


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    """The row for `architectures`: a name of its own, else the base of an encoder's or of a decoder's name."""
    given = config.get("architectures")
    names = given if isinstance(given, list) else []
    if COLBERT in names:
        names = [COLBERT_ENCODERS.get(str(config.get("model_type")), COLBERT)]
    kinds = (
        *((FAMILIES, lambda name: name), (ENCODERS, encoder_of)),
        *((FAMILIES, generating_of), (FAMILIES, classifying_of), (FAMILIES, decoder_of)),
    )
    for table, base_of in kinds:
        bases = [base_of(name) for name in names]
        for architecture in table:
            if architecture in bases:
                return _own_row(architecture, config.get("model_type"))
    reasons = [reason for reason, unsupported in UNSUPPORTED.items() if any(name in unsupported for name in names)]
    rule = f"is not supported: {reasons[0]}" if reasons else "is unknown"
    rule = rule if isinstance(given, list) else "must be a list of names"
    if config.get("auto_map"):
        rule += ", and code from the model folder (auto_map) is never run, whatever trust_remote_code says"
    # One that is known as unsupported suggests no other.
    raise ModelConfigError(f"{path}: architectures={shown(given)} {rule}{_near([] if reasons else names)}")


def _own_row(architecture: str, model_type: Any) -> str:
    """The row of a model that transformers builds by the class of another family's."""
    borrowed, own = CLASSES_OF_OTHERS.get(model_type if isinstance(model_type, str) else "", ("", ""))
    return own if architecture == borrowed else architecture


def _near(names: Sequence[Any]) -> str:
    """Architectures of similar names, and the list of all."""
    known = [*FAMILIES, *ENCODERS]
    found = [each for name in names[:_MAX_NAMES] for each in get_close_matches(str(name)[:100], known, n=3)]
    near = f"; the nearest that run are {', '.join(dict.fromkeys(found))}" if found else ""
    return f"{near}: `spmd-worker families` lists the {len(known)} that run"


_MATRIX: Final = "linear"
"""Name of the matrix from states of tokens to their vectors, in files of ColBERT's authors."""
_MAX_NAMES: Final = 4
_MOST_DISTANCES: Final = 1 << 17
_OF_GENERATION: Final = ("eos_token_id", "decoder_start_token_id")
_OF_THE_FILE: Final = ("eos_token_id", "dtype", "torch_dtype")
_TIE: Final = "tie_word_embeddings"


def _opened(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The contents of a file with its parts where the row reads them."""
    text = family_of(_architecture(config, path)).text
    return config if text is None or text.opened is None else text.opened(config, path)


def _text_part(config: Mapping[str, Any], path: Path, family: Family) -> Mapping[str, Any]:
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise ModelConfigError(f"{path}: text_config must be an object")
    tie, own_tie = config.get(_TIE), text.get(_TIE)
    counts = _is_tied_by_class(config, family) or (_tie_also_counts(family) and tie in (None, False))
    tie = own_tie if counts and own_tie is not None else tie
    kept = {key: value for key, value in text.items() if key != _TIE}
    shared = {key: config[key] for key in _OF_THE_FILE if config.get(key) is not None}
    return {**kept, **shared, **({} if tie is None else {_TIE: tie})}


def _family_of_text(part: TextPart, config: Mapping[str, Any], path: Path) -> Family:
    """The row of the text part, with its defaults."""
    kinds, text = part.families, config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(kind, str | None) or kind not in (*kinds, None):
        raise ModelConfigError(
            f"{path}: text_config.model_type={shown(kind)} is not supported, only {', '.join(kinds)}"
        )
    kind = next(iter(kinds)) if kind is None else kind
    row = FAMILIES[kinds[kind]]
    return replace(row, defaults={**row.defaults, **part.defaults.get(kind, {})})


def _variant(family: Family, config: Mapping[str, Any]) -> int:
    for number, variant in enumerate(family.variants, start=1):
        if all(config.get(key, family.defaults.get(key)) == value for key, value in variant.keys.items()):
            return number
    return 0


def _check_required(reader: ConfigReader, family: Family) -> None:
    for key, value in family.required.items():
        if reader.get(key, value) != value:
            raise reader.error(key, f"is not supported, only {value!r}")


def _head_size(reader: ConfigReader, family: Family, hidden_size: int, num_heads: int) -> int:
    head_size = reader.count("head_dim", family.attention.head_size or max(hidden_size // num_heads, 1))
    is_derived = reader.get("head_dim", family.attention.head_size or None) is None
    if is_derived and family.rope is None and hidden_size % (2 * num_heads):
        key = reader.key("hidden_size")
        raise reader.error("num_attention_heads", f"must divide {key}={hidden_size} into heads of an even size")
    if head_size % 2:
        raise ModelConfigError(
            f"{reader.where('head_dim')}={head_size}, with {reader.key('hidden_size')}={hidden_size}, must be even: "
            f"rotary embedding rotates pairs"
        )
    return head_size


def _qk_norm(reader: ConfigReader, attention: Attention) -> str:
    return attention.qk_norm if not attention.qk_norm_key or reader.flag(attention.qk_norm_key, False) else "none"


def _scale(reader: ConfigReader, attention: Attention, head_size: int) -> float:
    if attention.scale:
        return attention.scale
    if attention.scale_key and (not attention.scale_root_key or reader.get(attention.scale_key) is not None):
        return reader.number(attention.scale_key, 1.0)
    root = reader.number(attention.scale_root_key, float(head_size)) if attention.scale_root_key else head_size
    return float(root**-0.5)


def _activation(reader: ConfigReader, family: Family) -> str:
    rule = family.feed_forward
    name = reader.get(rule.activation_key, family.defaults.get(rule.activation_key, "silu"))
    name = rule.activation_words.get(name, name) if isinstance(name, str) else name
    return _known_activation(reader, rule.activation_key, name, _POINTWISE if rule.is_gated else (*_ACTIVATIONS,))


def _known_activation(reader: ConfigReader, key: str, name: Any, known: Sequence[str]) -> str:
    if not isinstance(name, str) or name not in known:
        raise ModelConfigError(f"{reader.where(key)}={shown(name)} is not supported, only {', '.join(known)}")
    return _ACTIVATIONS[name]


def _number(reader: ConfigReader, key: str, neutral: float) -> float:
    """`neutral` if the family has no such key, or config.json has null there."""
    return reader.number(key) if key and reader.get(key) is not None else neutral


def _flag(reader: ConfigReader, rule: bool | str) -> bool:
    return reader.flag(rule, False) if isinstance(rule, str) else rule


def _sliding_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int, ...]:
    """Window of each layer, 0 for full attention."""
    rule = family.windows.rule
    needs_flag = rule in ("late_layers", "even_layers", "in_use")
    is_used = rule != "never" and (not needs_flag or reader.flag("use_sliding_window", False))
    if not is_used or reader.get("sliding_window") is None:
        _check_none_slides(reader, rule, "use_sliding_window" if not is_used else "sliding_window")
        return (0,) * num_layers
    window = reader.count("sliding_window")
    # An encoder's counts both sides together, without the token itself.
    window = window // 2 + 1 if family.encoder is not None else window
    return tuple(window if slides else 0 for slides in _sliding_layers(reader, family.windows, num_layers))


def _sliding_layers(reader: ConfigReader, windows: Windows, num_layers: int) -> Sequence[bool]:
    """Whether each layer slides; the newer `layer_types` list takes precedence over the family's older rule."""
    layer_types, layers = reader.get("layer_types"), range(num_layers)
    if layer_types is not None and windows.rule != "in_use":
        known = ("full_attention", "sliding_attention", *windows.others)
        is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
        if not is_list or any(kind not in known for kind in layer_types):
            raise ModelConfigError(f"{reader.path}: layer_types must list {num_layers} of {', '.join(known)}")
        return [kind == "sliding_attention" for kind in layer_types]
    if windows.rule == "layer_types":
        every, key = windows.full_every, windows.full_every_key
        every = reader.count(key, every) if key else every
        return [(layer + (not windows.is_full_first)) % every != 0 for layer in layers]
    if windows.rule in ("always", "in_use"):
        return [True] * num_layers
    bound = checked_integer(reader.get("max_window_layers", 28), reader.where("max_window_layers"), 0, MAX_INT)
    if windows.rule == "even_layers":
        return [layer < bound and layer % 2 == 0 for layer in layers]
    return [layer >= bound for layer in layers]


def _check_none_slides(reader: ConfigReader, rule: str, key: str) -> None:
    """Reject layers listed as sliding without a window, by the setting `key`: transformers computes no such model."""
    layer_types, is_read = reader.get("layer_types"), rule in ("late_layers", "even_layers", "layer_types")
    if is_read and isinstance(layer_types, list) and "sliding_attention" in layer_types:
        right = "a number" if key == "sliding_window" else "true"
        rule = "leaves sliding_attention in layer_types without a window"
        raise reader.error(key, f"{rule}: set {reader.key(key)} to {right}, or list full_attention there")


def _checkpoint_dtype(reader: ConfigReader) -> str:
    """Dtype of the checkpoint: float32 if the file names none, or, with a warning, a type that no run computes in."""
    key = "dtype" if reader.get("dtype") is not None else "torch_dtype"
    given = reader.get(key, "float32")
    if not isinstance(given, str):
        raise reader.error(key, "must be the name of a type, such as bfloat16")
    name = given.removeprefix("torch.")
    if name in DTYPE_BYTES:
        return name
    logger.warning(
        "%s=%s is not one of %s: model.dtype=auto uses float32, set model.dtype to compute in another",
        *(reader.where(key), shown(given), ", ".join(DTYPE_BYTES)),
        extra=SAME_ON_EVERY_RANK,
    )
    return "float32"


def _eos_token_ids(reader: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    value = reader.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise reader.error("eos_token_id", "must be a token id or a list of them")
    # Some models name an id outside their vocabulary. It can never be sampled, so nothing is lost.
    return tuple(token for token in ids if 0 <= token < vocab_size)
