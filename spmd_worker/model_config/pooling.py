"""Pooling of a row's tokens to one vector, or a vector for each token, read from a model folder: sentence-transformers'
`modules.json`, the score head of a `*ForSequenceClassification` or `*ForTokenClassification`, or the default.

Knows files and rules; `model/pooler.py` computes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.late_interaction import ARTIFACT_FILE, LateInteraction, read_artifact
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.model_config.sentence_folder import (
    MAX_SIZE,
    PLAIN_TEXT,
    POOLING_FILES,
    DenseConfig,
    SentenceFolder,
    TextTransform,
    is_sentence_folder,
    module_folders,
    open_settings,
    outputs_token_types,
    pooling_files,
    read_activation,
    read_sentence_folder,
    tokenizer_length,
)

__all__ = ["POOLING_FILES", "DenseConfig", "TextTransform", "module_folders", "pooling_files"]

logger = logging.getLogger(__name__)

CLASSIFIER: Final = "ForSequenceClassification"
TOKEN_CLASSIFIER: Final = "ForTokenClassification"
COLBERT: Final = "HF_ColBERT"
"""The architecture that ColBERT's authors write for all their encoders."""
COLBERT_ENCODERS: Final = {"bert": "BertModel", "xlm-roberta": "XLMRobertaModel"}
"""These encoders, by model type."""
TOKEN_TASKS: Final = ("token_embed", "token_classify")
"""Tasks with a result for each token of a row."""
VECTORS: Final = ("embed", "token_embed")
"""Tasks of models that give vectors, not scores."""
_HEADS: Final = (CLASSIFIER, TOKEN_CLASSIFIER)
PROCESS_REWARD: Final = "ForProcessRewardModel"
"""Decoders that score the steps of a solution (Qwen2.5-Math-PRM): each token gets two scores, behind a dense layer."""
_LM_HEADS: Final = {"GPT2": "GPT2LMHeadModel"}
"""Names of generating models that do not end as others do."""
_BACKBONE: Final = "Model"
_TRAINED: Final = ("ForMaskedLM", "ForPreTraining")
"""Heads with which encoders are trained, and without which they run."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Part of a classifying encoder between the pooled vector and its scores: a dense layer, `activation` ("tanh" or
    one of `ModelConfig`'s names), and a norm, or None.
    """

    activation: str
    has_bias: bool
    norm: NormConfig | None = None

    def elements(self, hidden_size: int) -> int:
        norm = 0 if self.norm is None else self.norm.has_weight + self.norm.has_bias
        return (hidden_size + self.has_bias + norm) * hidden_size


@dataclass(frozen=True, slots=True)
class ShiftedRow:
    """A row as the decoder of an encoder-decoder model reads it: one token to the right, behind a start token, up to
    the last `eos_token_id`, whose state is pooled. `start_token_id` None: the row's last token but for trailing
    `pad_token_id`.
    """

    eos_token_id: int
    start_token_id: int | None
    pad_token_id: int = 0

    def decoder_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The decoder's ids, as many as the row's up to the last end-of-sequence token. Raises ValueError if the row
        has none.
        """
        if self.eos_token_id not in token_ids:
            raise ValueError(
                f"the row has no token {self.eos_token_id} (eos_token_id of config.json), whose state is classified: "
                f"end it with one, as the model's tokenizer does"
            )
        start = self.start_token_id
        if start is None:
            # By their number, as in transformers.
            start = token_ids[len(token_ids) - token_ids.count(self.pad_token_id) - 1]
        last = len(token_ids) - 1 - token_ids[::-1].index(self.eos_token_id)
        return (start, *token_ids[:last])


@dataclass(frozen=True, slots=True)
class EncoderPooling:
    """Pooling by the family of an encoder, or of an encoder-decoder model that classifies: the head of a classifier,
    its input (`pooling_type`), whether a pair's texts have types of their own, whether the head precedes scores of
    tokens too, and how a decoder reads a row.
    """

    head: HeadConfig | None
    pooling_type: str
    has_token_types: bool
    has_token_head: bool = False
    shifted: ShiftedRow | None = None


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Result of a row with the pooling runner.

    `task` is "embed", a vector, "classify", `num_labels` scores, "token_classify", these scores of each token, or
    "token_embed", a vector of each token, of texts that are encoded as `late` says: its `num_labels` numbers are those
    of a matrix of the checkpoint, unless there are `denses`.
    `pooling_type` is "last", "mean" or "cls", the hidden state of the last token, the mean of all or that of the first,
    "late": the head takes each token, and the scores the mean of its outputs, or "all": nothing is pooled.
    `activation` of scores is "none", "sigmoid" or "softmax". With `label_token_ids`, (no, yes), the score is the
    difference of these tokens' logits. `labels` are the names of the scores in config.json, None for one without a
    name; empty if it has none. `matryoshka_dimensions` are the lengths to which vectors may be cut; `is_matryoshka`:
    any length. Vectors are `hidden_size` long before the `denses`. `max_tokens` of a row, 0 for the model's maximum. A
    `head` precedes the scores of an encoder. `is_encoder`: texts that are scored together are encoded as the tokenizer
    encodes a pair, not concatenated; `has_token_types`: the model accepts token types, and gets them if the tokenizer
    outputs them (`outputs_token_types`). `is_sentence_model`: the folder is of sentence-transformers, which encodes
    texts of decoders like those of encoders. `text` is the transformation of a text before encoding, `similarity` the
    comparison of two vectors. Vectors are cut to `max_dimensions` after the normalisation, 0 for no cut.
    With `shifted` an encoder reads the row, and a decoder the row as this says; `is_encoder` is true for it too.
    """

    task: str
    pooling_type: str
    hidden_size: int
    denses: tuple[DenseConfig, ...] = ()
    is_normalized: bool = False
    num_labels: int = 0
    activation: str = "none"
    label_token_ids: tuple[int, ...] = ()
    matryoshka_dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False
    max_tokens: int = 0
    head: HeadConfig | None = None
    has_score_bias: bool = False
    is_encoder: bool = False
    has_token_types: bool = False
    outputs_token_types: bool = False
    is_sentence_model: bool = False
    text: TextTransform = PLAIN_TEXT
    similarity: str = "cosine"
    max_dimensions: int = 0
    labels: tuple[str | None, ...] = ()
    shifted: ShiftedRow | None = None
    late: LateInteraction | None = None

    @property
    def encodes_inside(self) -> bool:
        """Whether texts are encoded, and cut, as the tokenizer does it: a pair as a pair, special tokens never cut."""
        return self.is_encoder or self.is_sentence_model

    @property
    def has_score_weight(self) -> bool:
        """Whether scores are a matmul with a weight of the checkpoint that is for them alone."""
        return self.num_labels > 0 and not self.label_token_ids and not self.denses

    @property
    def num_float32_elements(self) -> int:
        """Parameters of scores and of the head before them, float32 in every dtype."""
        if not self.has_score_weight:
            return 0
        head = 0 if self.head is None else self.head.elements(self.hidden_size)
        return head + (self.hidden_size + self.has_score_bias) * self.num_labels

    @property
    def size(self) -> int:
        if self.num_labels:
            return self.num_labels
        size = self.denses[-1].num_outputs if self.denses else self.hidden_size
        return min(size, self.max_dimensions or size)

    @property
    def token_size(self) -> int:
        """Numbers of each token, of rows that get some."""
        return {"embed": self.hidden_size, "classify": 0}.get(self.task, self.size)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether hidden states of other tokens than the last count, so that the prefix cache cannot be used."""
        return self.pooling_type != "last"

    @property
    def weight_folders(self) -> tuple[str, ...]:
        """Folders inside the model folder that have weights."""
        return tuple([dense.folder for dense in self.denses])

    @property
    def tasks(self) -> tuple[str, ...]:
        if self.task == "embed":
            return ("embed", "score", "token_embed")
        if self.task == "token_classify":
            return ("token_classify",)
        if self.task == "token_embed":
            return ("token_embed", "score")
        return ("classify", "score", "reward") if self.num_labels == 1 else ("classify",)


def decoder_of(architecture: object) -> str | None:
    """The generating model on whose decoder a pooling one is built, by name; None for other names."""
    for suffix in (*_HEADS, PROCESS_REWARD, _BACKBONE):
        if isinstance(architecture, str) and architecture.endswith(suffix):
            name = architecture.removesuffix(suffix)
            return _LM_HEADS.get(name, f"{name}ForCausalLM")
    return None


def encoder_of(architecture: object) -> str | None:
    """Backbone name of an encoder with or without a head; None for other names."""
    for suffix in (*_HEADS, *_TRAINED, _BACKBONE):
        if isinstance(architecture, str) and architecture.endswith(suffix):
            return f"{architecture.removesuffix(suffix)}{_BACKBONE}"
    return None


def last_token_pooling(hidden_size: int) -> PoolingConfig:
    """Pooling of a decoder without pooling settings."""
    return PoolingConfig("embed", "last", hidden_size, is_normalized=True)


def read_pooling(
    folder: Path,
    config: Mapping[str, Any],
    hidden_size: int,
    *,
    generates: bool,
    encoder: EncoderPooling | None = None,
) -> PoolingConfig | None:
    """Pooling of the folder, whose config.json is `config`; None if it has no settings and the architecture
    `generates`. Raises ModelConfigError naming the file for an unsupported setting.
    """
    is_sentence_model = is_sentence_folder(folder)
    if encoder is None and (not generates or is_sentence_model):
        check_sees_earlier(folder, sees_later(config))
    sentence = read_sentence_folder(folder, hidden_size) if is_sentence_model else None
    names = [str(name) for name in config["architectures"]]
    heads = [each for each in (*_HEADS, PROCESS_REWARD) if any(name.endswith(each) for name in names)]
    is_classifier = not generates and bool(heads)
    if sentence is not None:
        _check_architectures(folder, config, sentence, generates=generates, is_classifier=is_classifier)
    reader = ConfigReader(config, folder / "config.json")
    if is_classifier and heads[0] != CLASSIFIER:
        if sentence is not None:
            raise reader.error("architectures", "is of a model that scores tokens, which modules.json cannot describe")
        pooling = _token_classifier(reader, hidden_size, encoder, is_process_reward=heads[0] == PROCESS_REWARD)
    elif is_classifier:
        pooling = _classifier(reader, hidden_size, sentence, encoder)
    elif sentence is not None:
        pooling = _sentence_model(reader, hidden_size, sentence)
    elif COLBERT in names:
        pooling = _with_dimensions(_colbert(folder, hidden_size), reader)
    elif encoder is not None:
        message = "%s has no pooling settings: a row's vector is the mean of its tokens' states"
        logger.warning(message, folder, extra=SAME_ON_EVERY_RANK)
        pooling = PoolingConfig("embed", "mean", hidden_size)
    elif generates:
        return None
    else:
        pooling = last_token_pooling(hidden_size)
    if sentence is not None:
        pooling = replace(pooling, max_tokens=sentence.max_tokens, text=sentence.text, is_sentence_model=True)
    if encoder is not None:
        has_types = encoder.has_token_types
        outputs_types = has_types and outputs_token_types(folder, config)
        pooling = replace(pooling, is_encoder=True, has_token_types=has_types, outputs_token_types=outputs_types)
    elif pooling.late is not None and pooling.late.expansion is not None:
        raise reader.error(
            "architectures", "is a decoder, for which queries cannot be expanded: do_query_expansion false"
        )
    return pooling if pooling.max_tokens else replace(pooling, max_tokens=tokenizer_length(folder))


def _check_architectures(
    folder: Path, config: Mapping[str, Any], sentence: SentenceFolder, *, generates: bool, is_classifier: bool
) -> None:
    """Check that modules.json and config.json describe the same kind of model."""
    if not {"Transformer": is_classifier, "LogitScore": generates}.get(sentence.kind, not is_classifier):
        raise ModelConfigError(
            f"{folder}: modules.json makes the model one of {sentence.kind}, but config.json has "
            f"architectures={config['architectures']}: save the folder again, so that both name one model"
        )


def sees_later(config: Mapping[str, Any]) -> str | None:
    """The setting by which a decoder's tokens attend to later ones too; None if they do not."""
    plain = {"is_causal": True, "use_bidirectional_attention": False}
    return next((f"{key}={config[key]!r}" for key in plain if config.get(key) not in (None, plain[key])), None)


def check_sees_earlier(folder: Path, setting: str | None) -> None:
    """Raise ModelConfigError for a decoder that pools and has a setting found by `sees_later`."""
    if setting is not None:
        rule = "a token attends to those before it and no other"
        raise ModelConfigError(f"{folder / 'config.json'}: {setting} is not supported: {rule}")


def _classifier(
    reader: ConfigReader, hidden_size: int, sentence: SentenceFolder | None, encoder: EncoderPooling | None
) -> PoolingConfig:
    if encoder is not None and encoder.head is None:
        raise reader.error("architectures", "is not supported: the encoder's family has no score head")
    pooling = _with_labels(PoolingConfig("classify", "last", hidden_size), reader, sentence)
    if encoder is not None:
        pooling = replace(pooling, pooling_type=encoder.pooling_type, shifted=encoder.shifted)
        pooling = replace(pooling, head=encoder.head, has_score_bias=True)
    return pooling


def _token_classifier(
    reader: ConfigReader, hidden_size: int, encoder: EncoderPooling | None, *, is_process_reward: bool
) -> PoolingConfig:
    if encoder is not None and encoder.head is None:
        raise reader.error("architectures", "is not supported: the encoder's family has no scores of tokens")
    pooling = PoolingConfig("token_classify", "all", hidden_size, has_score_bias=True)
    if is_process_reward:
        return replace(pooling, num_labels=2, activation="softmax", head=HeadConfig("relu", has_bias=True))
    pooling = _with_labels(pooling, reader, None)
    if encoder is None:
        return replace(pooling, has_score_bias=reader.flag("token_classification_bias", True))
    return replace(pooling, head=encoder.head if encoder.has_token_head else None)


def _with_labels(pooling: PoolingConfig, reader: ConfigReader, sentence: SentenceFolder | None) -> PoolingConfig:
    """The pooling with the number, the names and the activation of its scores."""
    given = reader.get("id2label")
    names = [given.get(str(index)) for index in range(len(given))] if isinstance(given, Mapping) else []
    num_labels = checked_integer(
        len(names) or reader.config.get("num_labels", 2), reader.where("num_labels"), 1, MAX_SIZE
    )
    activation = _score_activation(reader, num_labels, sentence)
    # Some configurations name a label by a number.
    labels = tuple([None if name is None else str(name) for name in names])
    return replace(pooling, num_labels=num_labels, activation=activation, labels=labels)


def _score_activation(reader: ConfigReader, num_labels: int, sentence: SentenceFolder | None) -> str:
    """Activation of the folder or in config.json, else the default for this number of labels."""
    if sentence is not None and sentence.activation is not None:
        return sentence.activation
    own = reader.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, Mapping) else None
    # Key before sentence-transformers 4.
    given = reader.get("sbert_ce_default_activation_function") if given is None else given
    if given is not None:
        return read_activation(given, reader.where("activation_fn"), of_scores=True)
    problem = reader.get("problem_type")
    if sentence is None and problem in ("regression", "multi_label_classification"):
        return "none" if problem == "regression" else "sigmoid"
    if num_labels == 1:
        return "sigmoid"
    return "softmax" if sentence is None else "none"


def _colbert(folder: Path, hidden_size: int) -> PoolingConfig:
    """A folder of ColBERT's authors: the matrix is in the checkpoint."""
    late, size = read_artifact(open_settings(folder / ARTIFACT_FILE, is_optional=True))
    pooling = PoolingConfig("token_embed", "all", hidden_size, is_normalized=True, num_labels=size, late=late)
    return replace(pooling, max_tokens=late.max_tokens)


def _sentence_model(reader: ConfigReader, hidden_size: int, sentence: SentenceFolder) -> PoolingConfig:
    pooling = PoolingConfig("embed", sentence.pooling_type or "last", hidden_size, sentence.denses)
    if sentence.late is not None:
        pooling = replace(pooling, task="token_embed", pooling_type="all", late=sentence.late)
    elif sentence.kind != "Pooling":
        num_labels = 1 if sentence.kind == "LogitScore" else sentence.denses[-1].num_outputs
        return replace(
            pooling,
            task="classify",
            num_labels=num_labels,
            activation=_score_activation(reader, num_labels, sentence),
            label_token_ids=sentence.label_token_ids,
        )
    return replace(
        _with_dimensions(pooling, reader),
        is_normalized=sentence.is_normalized,
        similarity=sentence.similarity,
        max_dimensions=sentence.max_dimensions,
    )


def _with_dimensions(pooling: PoolingConfig, reader: ConfigReader) -> PoolingConfig:
    """The pooling with the lengths to which config.json allows its vectors to be cut."""
    key = "matryoshka_dimensions"
    sizes = reader.get(key) or []
    if not isinstance(sizes, list):
        raise reader.error(key, "must be a list")
    return replace(
        pooling,
        matryoshka_dimensions=tuple(checked_integer(each, reader.where(key), 1, MAX_SIZE) for each in sizes),
        is_matryoshka=reader.get("is_matryoshka") is True,
    )
