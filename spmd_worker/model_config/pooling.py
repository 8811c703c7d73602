"""How the tokens of a row become one vector, read from a model folder: sentence-transformers' `modules.json`, the score
head of a `*ForSequenceClassification`, or nothing of the kind.

Knows files and rules; `models/pooler.py` computes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker import files
from spmd_worker.errors import ModelConfigError
from spmd_worker.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.layer_config import NormConfig

logger = logging.getLogger(__name__)

POOLING_TYPES: Final = ("last", "mean", "cls")
"""The hidden state of the last token, the mean of all, that of the first."""

CLASSIFIER: Final = "ForSequenceClassification"
_BACKBONE: Final = "Model"
_MASKED: Final = "ForMaskedLM"
_MODULES_FILE: Final = "modules.json"
POOLING_FILES: Final = (_MODULES_FILE, "sentence_bert_config.json", "config_sentence_transformers.json")
"""Beside config.json. Without the first the others say nothing."""
_MOST_SIZE: Final = 2**20

_MODES: Final = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_MODES: Final = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys of sentence-transformers before 5.3: one flag for each way."""

_ACTIVATIONS: Final = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid"}
"""Last words of torch's class names."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One linear layer behind the pooled vector, whose weights are in `folder` of the model folder. `activation` is
    "none", "tanh" or "sigmoid".
    """

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What an encoder that classifies has between the pooled vector and its scores: a dense layer, `activation` ("tanh"
    or one of `ModelConfig`'s words), and a norm, or None.
    """

    activation: str
    has_bias: bool
    norm: NormConfig | None = None

    def elements(self, hidden_size: int) -> int:
        """Its parameters."""
        norm = 0 if self.norm is None else self.norm.has_weight + self.norm.has_bias
        return (hidden_size + self.has_bias + norm) * hidden_size


@dataclass(frozen=True, slots=True)
class EncoderPooling:
    """What an encoder's family says: the head of one that classifies, what that is given (`pooling_type`), and whether
    a pair's texts have types of their own.
    """

    head: HeadConfig | None
    pooling_type: str
    has_token_types: bool


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What a run with the pooling runner gives for a row.

    `task` is "embed", a vector, or "classify", `num_labels` scores. `pooling_type` is one of `POOLING_TYPES`.
    `activation` of scores is "none", "sigmoid" or "softmax". With `label_token_ids`, (no, yes), the score is the
    difference of these tokens' logits. `matryoshka_dimensions` are the lengths to which vectors may be cut;
    `is_matryoshka`: any length. Vectors are `hidden_size` long before the `denses`. `max_tokens` of a row, 0 for as
    many as the model takes. A `head` is before the scores of an encoder. `is_encoder`: texts that are scored together
    are encoded as the tokenizer encodes a pair, not one text behind the other; `has_token_types`: the model is told
    which token is of which.
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

    @property
    def num_float32_elements(self) -> int:
        """Parameters of scores and of what is before them, float32 in every dtype."""
        if self.label_token_ids or not self.num_labels:
            return 0
        head = 0 if self.head is None else self.head.elements(self.hidden_size)
        return head + (self.hidden_size + self.has_score_bias) * self.num_labels

    @property
    def size(self) -> int:
        """Numbers of a row's vector."""
        if self.task == "classify":
            return self.num_labels
        return self.denses[-1].num_outputs if self.denses else self.hidden_size

    @property
    def needs_all_tokens(self) -> bool:
        """Whether hidden states of other tokens than the last count, so that none may be found in the prefix cache."""
        return self.pooling_type != "last"

    @property
    def weight_folders(self) -> tuple[str, ...]:
        """Folders inside the model folder that have weights."""
        return tuple([dense.folder for dense in self.denses])

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked for."""
        if self.task == "embed":
            return ("embed", "score")
        return ("classify", "score", "reward") if self.num_labels == 1 else ("classify",)


def decoder_of(architecture: object) -> str | None:
    """The generating model on whose decoder a pooling one is built, by name; None for other names."""
    for suffix in (CLASSIFIER, _BACKBONE):
        if isinstance(architecture, str) and architecture.endswith(suffix):
            return f"{architecture.removesuffix(suffix)}ForCausalLM"
    return None


def encoder_of(architecture: object) -> str | None:
    """The encoder, by the name of its backbone, that a model with or without a head is; None for other names."""
    for suffix in (CLASSIFIER, _MASKED, _BACKBONE):
        if isinstance(architecture, str) and architecture.endswith(suffix):
            return f"{architecture.removesuffix(suffix)}{_BACKBONE}"
    return None


def mean_pooling(hidden_size: int) -> PoolingConfig:
    """Of an encoder that says nothing of pooling: what sentence-transformers does with one."""
    return PoolingConfig("embed", "mean", hidden_size)


def last_token_pooling(hidden_size: int) -> PoolingConfig:
    """Of a model that says nothing of pooling."""
    return PoolingConfig("embed", "last", hidden_size, is_normalized=True)


def read_pooling(
    folder: Path,
    config: Mapping[str, Any],
    hidden_size: int,
    *,
    generates: bool,
    encoder: EncoderPooling | None = None,
) -> PoolingConfig | None:
    """What the folder says, `config` being its config.json; None where it says nothing and the architecture
    `generates`. Raises ModelConfigError naming the file for what is not run.
    """
    if encoder is not None:
        return _of_encoder(folder, config, hidden_size, encoder)
    if not generates or (folder / _MODULES_FILE).exists():
        check_sees_earlier(folder, sees_later(config))
    if not generates and any(str(name).endswith(CLASSIFIER) for name in config["architectures"]):
        return _classifier(config, folder / "config.json", hidden_size)
    if (folder / _MODULES_FILE).exists():
        return _modules(folder, config, hidden_size)
    return None if generates else last_token_pooling(hidden_size)


def sees_later(config: Mapping[str, Any]) -> str | None:
    """The setting by which a decoder's tokens see later ones too; None where they do not."""
    plain = {"is_causal": True, "use_bidirectional_attention": False}
    return next((f"{key}={config[key]!r}" for key in plain if config.get(key) not in (None, plain[key])), None)


def check_sees_earlier(folder: Path, setting: str | None) -> None:
    """Raise ModelConfigError for a decoder that pools and has what `sees_later` found."""
    if setting is not None:
        raise ModelConfigError(
            f"{folder / 'config.json'}: {setting} is not run: a token sees those before it and no other"
        )


def _of_encoder(folder: Path, config: Mapping[str, Any], hidden_size: int, encoder: EncoderPooling) -> PoolingConfig:
    if any(str(name).endswith(CLASSIFIER) for name in config["architectures"]):
        if encoder.head is None:
            raise ModelConfigError(f"{folder / 'config.json'}: architectures={config['architectures']} is not run")
        plain = _classifier(config, folder / "config.json", hidden_size)
        pooling = replace(plain, pooling_type=encoder.pooling_type, head=encoder.head, has_score_bias=True)
    elif (folder / _MODULES_FILE).exists():
        pooling = _modules(folder, config, hidden_size)
    else:
        message = "%s says nothing of pooling: a row's vector is the mean of its tokens'"
        logger.warning(message, folder, extra=SAME_ON_EVERY_RANK)
        pooling = mean_pooling(hidden_size)
    return replace(pooling, is_encoder=True, has_token_types=encoder.has_token_types)


def pooling_files(folder: Path) -> list[Path]:
    """The files that say it, beside config.json, in an order that is the same everywhere."""
    if not (folder / _MODULES_FILE).exists():
        return []
    inside = [f"{name}/config.json" for name in module_folders(folder)]
    return [path for name in (*POOLING_FILES, *inside) if (path := folder / name).exists()]


def module_folders(folder: Path, *kinds: str) -> list[str]:
    """Names of the folders inside, of the modules of `kinds`, or of all, that `modules.json` lists; [] without the
    file. What may be no such name is passed over. Raises ModelConfigError for a file that cannot be read.
    """
    path = folder / _MODULES_FILE
    listed = _listed(path) if path.exists() else []
    names = [each.get("path") for each in listed if not kinds or _word(each.get("type")) in kinds]
    return [str(name) for name in names if _is_folder_name(name)]


def _classifier(config: Mapping[str, Any], path: Path, hidden_size: int) -> PoolingConfig:
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, Mapping) and labels else config.get("num_labels", 2)
    num_labels = _whole(num_labels, f"{path}: num_labels")
    problem = config.get("problem_type")
    own = config.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, Mapping) else None
    # Its name before sentence-transformers 4.
    given = config.get("sbert_ce_default_activation_function") if given is None else given
    if given is not None:
        activation = _activation(given, f"{path}: activation_fn")
    elif problem in ("regression", "multi_label_classification"):
        activation = "none" if problem == "regression" else "sigmoid"
    else:
        activation = "sigmoid" if num_labels == 1 else "softmax"
    return PoolingConfig("classify", "last", hidden_size, num_labels=num_labels, activation=activation)


def _modules(folder: Path, config: Mapping[str, Any], hidden_size: int) -> PoolingConfig:
    path = folder / _MODULES_FILE
    modules = [(_word(each.get("type")), each.get("path")) for each in _listed(path)]
    kinds = [kind for kind, _ in modules]
    num_denses = kinds.count("Dense")
    tail = ["Normalize"] if "Normalize" in kinds else []
    if kinds != ["Transformer", "Pooling", *["Dense"] * num_denses, *tail]:
        raise ModelConfigError(
            f"{path}: modules {', '.join(kinds) or 'none'} are not run: only Transformer, Pooling, then Dense any "
            f"number of times, then Normalize or not, are"
        )
    if modules[0][1]:
        raise ModelConfigError(f"{path}: the Transformer is in {modules[0][1]!r}: its files must be in {folder} itself")
    pooling_type = _pooling_type(_object(folder, modules[1][1]))
    denses = tuple(_dense(*_object(folder, where)) for kind, where in modules if kind == "Dense")
    sizes = [hidden_size, *[dense.num_outputs for dense in denses]]
    for dense, size in zip(denses, sizes):
        if dense.num_inputs != size:
            raise ModelConfigError(f"{folder / dense.folder}: in_features={dense.num_inputs}, it is given {size}")
    max_tokens = _sentence_settings(folder)
    _warn_of_default_prompt(folder)
    cuts = config.get("matryoshka_dimensions") or []
    if not isinstance(cuts, list):
        raise ModelConfigError(f"{folder / 'config.json'}: matryoshka_dimensions={cuts!r} must be a list")
    return PoolingConfig(
        "embed",
        pooling_type,
        hidden_size,
        denses,
        is_normalized=bool(tail),
        matryoshka_dimensions=tuple(_whole(each, f"{folder / 'config.json'}: matryoshka_dimensions") for each in cuts),
        is_matryoshka=config.get("is_matryoshka") is True,
        max_tokens=max_tokens,
    )


def _pooling_type(given: tuple[Mapping[str, Any], Path]) -> str:
    settings, path = given
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode or [key for key in _OLD_MODES if settings.get(key) is True]
    known = {**_MODES, **_OLD_MODES}
    types = [known.get(each) if isinstance(each, str) else None for each in modes] if isinstance(modes, list) else []
    if len(types) != 1 or types[0] not in POOLING_TYPES:
        raise ModelConfigError(f"{path}: pooling mode {modes!r} is not run: one of {', '.join(_MODES)} is")
    if settings.get("include_prompt", True) is not True:
        raise ModelConfigError(f"{path}: include_prompt=false is not run: every token of a row counts")
    return str(types[0])


def _dense(settings: Mapping[str, Any], path: Path) -> DenseConfig:
    bias = settings.get("bias", True)
    if not isinstance(bias, bool):
        raise ModelConfigError(f"{path}: bias={bias!r} must be true or false")
    return DenseConfig(
        path.parent.name,
        _whole(settings.get("in_features"), f"{path}: in_features"),
        _whole(settings.get("out_features"), f"{path}: out_features"),
        bias,
        _activation(settings.get("activation_function", "torch.nn.modules.activation.Tanh"), f"{path}: activation"),
    )


def _sentence_settings(folder: Path) -> int:
    """The most tokens of a row, 0 for as many as the model takes."""
    path = folder / "sentence_bert_config.json"
    if not path.exists():
        return 0
    settings = _read(path)
    if settings.get("do_lower_case") is True:
        raise ModelConfigError(f"{path}: do_lower_case=true is not run: put a lowercase normalizer into tokenizer.json")
    most = settings.get("max_seq_length")
    return 0 if most is None else _whole(most, f"{path}: max_seq_length")


def _warn_of_default_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    name = _read(path).get("default_prompt_name") if path.exists() else None
    if name is not None:
        message = "%s: default_prompt_name=%s is ignored: put the prompt before your texts yourself"
        logger.warning(message, path, name, extra=SAME_ON_EVERY_RANK)


def _listed(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = files.read_regular_file(path)
        # The parser takes objects only: an object cannot hide in a list of objects.
        modules = files.parse_json_object(b'{"modules":%s}' % text)["modules"]
    except (OSError, files.JsonError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(each, Mapping) for each in modules):
        raise ModelConfigError(f"{path} must be a list of modules")
    return modules


def _is_folder_name(where: Any) -> bool:
    return isinstance(where, str) and files.is_plain_name(where)


def _object(folder: Path, where: Any) -> tuple[Mapping[str, Any], Path]:
    """The settings of a module, and where they are."""
    if not _is_folder_name(where):
        raise ModelConfigError(f"{folder / _MODULES_FILE}: path {where!r} must be the name of a folder beside it")
    path = folder / where / "config.json"
    return _read(path), path


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.parse_json_object(files.read_regular_file(path), allows_nan=True)
    except (OSError, files.JsonError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None


def _activation(given: Any, where: str) -> str:
    if _word(given) not in _ACTIVATIONS:
        raise ModelConfigError(f"{where}={given!r} is not run: only {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[_word(given)]


def _word(dotted: Any) -> str:
    """The last word of a class's name."""
    return str(dotted).rpartition(".")[2]


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_SIZE:
        raise ModelConfigError(f"{where}={value!r} must be a whole number from 1 to {_MOST_SIZE}")
    return value
