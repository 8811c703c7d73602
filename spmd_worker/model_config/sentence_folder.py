"""Reads folders of sentence-transformers: `modules.json` and the files that it names, which configure texts and
pooling. Each setting is read as releases 2 to 6 of sentence-transformers read it, or rejected.

Knows files and rules; `pooling.py` makes one record of this and of config.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

from spmd_worker.base import files
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.late_interaction import ARTIFACT_FILE, LateInteraction, read_settings

MODULES_FILE: Final = "modules.json"
SETTINGS_FILE: Final = "config_sentence_transformers.json"
POOLING_FILES: Final = (MODULES_FILE, "sentence_bert_config.json", SETTINGS_FILE)
"""Files next to config.json. Without the first the others are ignored."""
_TRANSFORMER_FILES: Final = (
    POOLING_FILES[1],
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")),
    "sentence_xlnet_config.json",
)
"""Settings of the Transformer: the first that exists. The later ones are names of old releases."""
_TOKENIZER_FILE: Final = "tokenizer_config.json"
_TOKENIZER_BYTES: Final = 256 * 1024 * 1024
MAX_SIZE: Final = 2**20

_OWN_TYPES: Final = "sentence_transformers."
_PYLATE_DENSE: Final = "pylate.models.Dense.Dense"
"""A module of another package that is sentence-transformers' own, for vectors of tokens."""
_LATE_TYPES: Final = ("MultiVectorEncoder", "ColBERT")
"""`model_type` of models whose tokens' vectors are compared, of sentence-transformers and PyLate."""
_MODEL_TYPES: Final = ("SentenceTransformer", "CrossEncoder")
SIMILARITIES: Final = ("cosine", "dot", "euclidean", "manhattan")
MESSAGE_FORMATS: Final = ("structured", "flat", "auto")

_VECTOR: Final = "sentence_embedding"
_TOKENS: Final = "token_embeddings"
_MODES: Final = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of sentence-transformers before 5.3: one flag for each pooling mode."""

_ACTIVATIONS: Final = {
    "Identity": "none",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
"""Last word of torch's class name -> our name."""

_TASKS: Final = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
"""Output of the Transformer for each task: the model's output, and its name in later modules."""

_TRANSFORMER_KEYS: Final = (
    *("transformer_task", "modality_config", "module_output_name", "processing_kwargs"),
    *("max_seq_length", "do_lower_case", "tokenizer_name_or_path"),
    *("model_kwargs", "processor_kwargs", "config_kwargs", "model_args", "tokenizer_args", "config_args"),
    # Batching, and settings of `encode_query` and `encode_document`: no part of `encode`.
    *("unpad_inputs", "query_length", "document_length", "query_expansion"),
)
_OLD_ARGUMENTS: Final = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
_HARMLESS: Final = {
    "model_kwargs": (
        *("attn_implementation", "device_map", "dtype", "torch_dtype", "low_cpu_mem_usage", "use_safetensors"),
        *("add_pooling_layer", "trust_remote_code", "revision", "local_files_only", "cache_dir"),
    ),
    "processor_kwargs": (
        *("model_max_length", "padding", "padding_side", "use_fast", "clean_up_tokenization_spaces"),
        *("trust_remote_code", "revision", "local_files_only", "cache_dir"),
    ),
    "config_kwargs": ("use_cache", "trust_remote_code", "revision", "local_files_only", "cache_dir"),
}
"""Arguments of the libraries' loaders that do not change a row's result, or are read here."""
_HARMLESS_CALL: Final = ("padding", "padding_side", "pad_to_multiple_of", "return_tensors", "logits_to_keep")
_CUTTING: Final = (True, "longest_first")

_TYPED_TOKENIZERS: Final = (
    *("BertTokenizer", "CanineTokenizer", "ConvBertTokenizer", "DPRContextEncoderTokenizer"),
    *("DPRQuestionEncoderTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FNetTokenizer"),
    *("LayoutLMTokenizer", "LayoutLMv2Tokenizer", "LxmertTokenizer", "MarkupLMTokenizer", "MobileBertTokenizer"),
    *("SqueezeBertTokenizer", "TapasTokenizer"),
)
"""Classes of transformers 5 that output token types if tokenizer_config.json has no `model_input_names`."""
_TYPED_MODELS: Final = ("bert", "deberta", "deberta-v2", "electra", "nomic_bert")
"""Supported model types to which AutoTokenizer assigns such a class if none is named."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One linear layer after the pooled vector, whose weights are in `folder` of the model folder. `activation` is
    "none" or a function of `model/pooler.py`. With `has_residual` the input is added to the output, behind a matrix of
    its own if their lengths differ.
    """

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str
    has_residual: bool = False

    @property
    def has_residual_matrix(self) -> bool:
        return self.has_residual and self.num_inputs != self.num_outputs


@dataclass(frozen=True, slots=True)
class TextTransform:
    """Transformation of a text before it is encoded.

    `prompts` are texts by name, `default_prompt` the name of the one that is prepended to each text, "" for none. With
    a `message_format`, "flat" or "structured" (contents as text, or as a list of parts), texts become messages of a
    conversation that the chat template writes, with `template_variables` (JSON); if that is cut, `restores_suffix`
    keeps its end.
    """

    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    message_format: str = ""
    template_variables: str = "{}"
    restores_suffix: bool = True

    @property
    def prompt(self) -> str:
        return dict(self.prompts).get(self.default_prompt, "")

    @property
    def changes_texts(self) -> bool:
        """Whether a text is encoded as anything but itself."""
        return bool(self.message_format or self.prompt)


PLAIN_TEXT: Final = TextTransform()


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """Settings of a folder with `modules.json`.

    `kind` is the last module that decides a row's result: "Pooling", a vector; "Dense", scores of a cross-encoder from
    a pooled vector; "Transformer", scores of a classifier; "LogitScore", the difference of two tokens' logits;
    "Tokens", a vector of each token, with the settings `late`. `activation` of scores is None if not given.
    `similarity` of two vectors is one of `SIMILARITIES`. `max_tokens` of a row, `max_dimensions` of a vector: 0 for no
    limit.
    """

    kind: str
    pooling_type: str = ""
    denses: tuple[DenseConfig, ...] = ()
    is_normalized: bool = False
    label_token_ids: tuple[int, ...] = ()
    activation: str | None = None
    text: TextTransform = PLAIN_TEXT
    similarity: str = "cosine"
    max_tokens: int = 0
    max_dimensions: int = 0
    late: LateInteraction | None = None


@dataclass(frozen=True, slots=True)
class _Transformer:
    task: str
    max_tokens: int
    text: TextTransform
    settings: ConfigReader


def is_sentence_folder(folder: Path) -> bool:
    """Whether sentence-transformers saved it."""
    return (folder / MODULES_FILE).exists()


def read_sentence_folder(folder: Path, hidden_size: int) -> SentenceFolder:
    """Read the folder of a model whose pooled vectors are `hidden_size` long before the dense layers. Raises
    ModelConfigError naming the file for an unsupported setting.
    """
    path = folder / MODULES_FILE
    listed = _listed(path)
    read = _read_modules(folder, [each for each in listed if _word(each.get("type")) != "Dropout"], hidden_size)
    for each in listed:
        if not str(each.get("type")).startswith(_OWN_TYPES) and each.get("type") != _PYLATE_DENSE:
            raise ModelConfigError(
                f"{path}: module {shown(each.get('type'))} is code of the folder or of another package, which is never "
                f"run: use a folder whose modules are sentence-transformers' own"
            )
    return read


def _read_modules(folder: Path, listed: Sequence[Mapping[str, Any]], hidden_size: int) -> SentenceFolder:
    path = folder / MODULES_FILE
    kinds, names = [_word(each.get("type")) for each in listed], [each.get("path") for each in listed]
    if kinds[:1] == ["Transformer"] and names[0]:
        raise ModelConfigError(
            f'{path}: the Transformer is in {shown(names[0])}: its files must be in {folder} itself, with path ""'
        )
    settings = open_settings(folder / SETTINGS_FILE, is_optional=True)
    is_late = settings.get("model_type") in _LATE_TYPES or (
        settings.get("model_type") is None
        and ("query_prefix" in settings.config or any(each.get("type") == _PYLATE_DENSE for each in listed))
    )
    if is_late:
        return _late_folder(folder, kinds, names, settings, hidden_size)
    with_way_out = replace(settings, way_out=": load the folder as one of these and save it again")
    is_scorer = with_way_out.choice("model_type", _MODEL_TYPES, _MODEL_TYPES[0]) == "CrossEncoder"
    transformer = _read_transformer(folder)
    text = _with_prompts(transformer.text, settings)
    common: dict[str, Any] = {"text": text, "max_tokens": transformer.max_tokens}
    given = settings.get("activation_fn")
    if is_scorer and given is not None:
        common["activation"] = read_activation(given, settings.where("activation_fn"), of_scores=True)
    if is_scorer and (kinds, transformer.task) == (["Transformer"], "sequence-classification"):
        return SentenceFolder("Transformer", **common)
    if is_scorer and (kinds, transformer.task) == (["Transformer", "LogitScore"], "text-generation"):
        return SentenceFolder("LogitScore", label_token_ids=_label_tokens(_open_module(folder, names[1])), **common)
    dense_names = [name for kind, name in zip(kinds, names) if kind == "Dense"]
    tail = ["Normalize"] if "Normalize" in kinds else []
    is_pooled = kinds == ["Transformer", "Pooling", *["Dense"] * len(dense_names), *tail]
    if not is_pooled or transformer.task != "feature-extraction" or (is_scorer and not dense_names):
        raise ModelConfigError(
            f"{path}: modules {', '.join(kinds) or 'none'} are not supported for transformer_task={transformer.task} "
            f"of a {_MODEL_TYPES[is_scorer]}. Supported: Transformer, Pooling, any number of Dense, at most one "
            f"Normalize; for a CrossEncoder: Transformer, alone or with LogitScore, or with Pooling and Dense. Save "
            f"the folder with one of these lists of modules"
        )
    denses = _denses(folder, dense_names, hidden_size, "scores" if is_scorer else _VECTOR)
    if tail:
        _check_normalize(folder, names[-1], _VECTOR)
    if tail and is_scorer:
        raise ModelConfigError(f"{path}: Normalize after the scores of a CrossEncoder is not supported: remove it")
    return SentenceFolder(
        "Dense" if is_scorer else "Pooling",
        _pooling_type(_open_module(folder, names[1])),
        denses,
        is_normalized=bool(tail),
        similarity=settings.choice("similarity_fn_name", (*SIMILARITIES, None)) or "cosine",
        max_dimensions=_size(settings, "truncate_dim"),
        **common,
    )


def _late_folder(
    folder: Path, kinds: Sequence[str], names: Sequence[Any], settings: ConfigReader, hidden_size: int
) -> SentenceFolder:
    """A folder of PyLate, whose modules are a Transformer and Dense layers, or of a MultiVectorEncoder."""
    transformer = _read_transformer(folder)
    dense_names = [name for kind, name in zip(kinds, names) if kind == "Dense"]
    head = ["Transformer", *["Dense"] * len(dense_names)]
    masked = "MultiVectorMask" in kinds
    tail = [each for each in ("MultiVectorMask", "Normalize") if each in kinds]
    if [*kinds] != [*head, *tail] or transformer.task != "feature-extraction" or transformer.text.message_format:
        raise ModelConfigError(
            f"{folder / MODULES_FILE}: modules {', '.join(kinds) or 'none'} are not supported for "
            f"transformer_task={transformer.task} of a model whose tokens' vectors are compared. Supported: "
            f"Transformer of plain texts, any number of Dense, MultiVectorMask, Normalize. Save the folder with such a "
            f"list of modules"
        )
    if "Normalize" in kinds:
        _check_normalize(folder, names[-1], _TOKENS)
    mask = _open_module(folder, names[kinds.index("MultiVectorMask")]) if masked else None
    late = read_settings(settings, transformer.settings, mask, dict(_with_prompts(PLAIN_TEXT, settings).prompts))
    return SentenceFolder(
        "Tokens",
        denses=_denses(folder, dense_names, hidden_size, _TOKENS),
        # PyLate's always are.
        is_normalized="Normalize" in kinds or not masked,
        text=_with_prompts(transformer.text, settings),
        max_tokens=late.max_tokens or transformer.max_tokens,
        late=late,
    )


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Settings by which evaluations choose prompts and compare vectors. `prompts` are the file's own, by name."""

    prompts: Mapping[str, str]
    default_prompt_name: str | None
    similarity: str


def read_evaluation_settings(folder: Path) -> EvaluationSettings:
    """Read config_sentence_transformers.json, which may be missing, also of a folder without `modules.json`. Raises
    ModelConfigError naming file and key.
    """
    settings = open_settings(folder / SETTINGS_FILE, is_optional=True)
    known = dict(_with_prompts(PLAIN_TEXT, settings).prompts)
    prompts = {name: known[name] for name in settings.get("prompts") or {}}
    similarity = settings.choice("similarity_fn_name", (*SIMILARITIES, None)) or SIMILARITIES[0]
    return EvaluationSettings(prompts, settings.get("default_prompt_name"), similarity)


def pooling_files(folder: Path) -> list[Path]:
    """Files that configure pooling, next to config.json, in an order that is the same everywhere."""
    if not is_sentence_folder(folder):
        return [path for path in (folder / ARTIFACT_FILE,) if path.exists()]
    inside = [f"{name}/config.json" for name in module_folders(folder)]
    names = dict.fromkeys((*POOLING_FILES, *_TRANSFORMER_FILES, *inside))
    return [path for name in names if (path := folder / name).exists()]


def module_folders(folder: Path, *kinds: str) -> list[str]:
    """Names of the folders inside, of the modules of `kinds`, or of all, that `modules.json` lists; [] without the
    file. Invalid names are skipped. Raises ModelConfigError for an unreadable file.
    """
    path = folder / MODULES_FILE
    listed = _listed(path) if path.exists() else []
    names = [each.get("path") for each in listed if not kinds or _word(each.get("type")) in kinds]
    return [name for name in names if _is_folder_name(name)]


def tokenizer_length(folder: Path) -> int:
    """Maximum tokens of a row by the tokenizer; 0 if its files name no length that a model may have."""
    settings = _tokenizer_config(folder)
    # Old releases of transformers write `max_len`.
    length = settings.get("model_max_length", settings.get("max_len"))
    # transformers writes 1e30 for no limit.
    return length if type(length) is int and 1 <= length <= MAX_SIZE else 0


def outputs_token_types(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether AutoTokenizer's output has token types; else a model uses 0 for every token. `config` is the folder's
    config.json.
    """
    own = _tokenizer_config(folder)
    names = own.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    named = own.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str):
        return config.get("model_type") in _TYPED_MODELS
    return named.removesuffix("Fast") in _TYPED_TOKENIZERS


def read_activation(given: Any, where: str, *, of_scores: bool = False) -> str:
    """Our name of torch's class, given by its dotted name; scores may have Softmax too. Raises ModelConfigError."""
    known = {**_ACTIVATIONS, "Softmax": "softmax"} if of_scores else _ACTIVATIONS
    name = _word(given)
    if not str(given).startswith("torch.") or name not in known:
        raise ModelConfigError(f"{where}={shown(given)} is not supported, only torch's {', '.join(known)}")
    return known[name]


def _size(reader: ConfigReader, key: str) -> int:
    """The key's value, 1 or more; 0 for null and missing keys."""
    value = reader.get(key)
    return 0 if value is None else checked_integer(value, reader.where(key), 1, MAX_SIZE)


def _read_transformer(folder: Path) -> _Transformer:
    """Settings of the Transformer, from the first file that exists and is not empty."""
    readers = (open_settings(folder / name, is_optional=True) for name in _TRANSFORMER_FILES)
    settings = next((each for each in readers if each.config), ConfigReader({}, folder / _TRANSFORMER_FILES[0]))
    for key in settings.config:
        if key not in _TRANSFORMER_KEYS:
            raise settings.error(key, "is unknown: remove it")
    if settings.get("do_lower_case") is True and not _makes_lowercase(folder):
        raise settings.error("do_lower_case", "is not supported: put a lowercase normalizer into tokenizer.json")
    if settings.get("tokenizer_name_or_path") is not None:
        rule = f"is not supported: put the tokenizer's files into {folder} and remove it"
        raise settings.error("tokenizer_name_or_path", rule)
    tokenizer = _tokenizer_arguments(settings)
    task = settings.choice("transformer_task", (*_TASKS,), "feature-extraction")
    text, max_length = _read_processing(settings, _message_format(settings, task))
    max_tokens = max_length or _size(tokenizer, "model_max_length") or _size(settings, "max_seq_length")
    return _Transformer(task, max_tokens or tokenizer_length(folder), text, settings)


def _makes_lowercase(folder: Path) -> bool:
    """Whether the tokenizer already does what `do_lower_case` would add; False for an unreadable file."""
    try:
        content = files.read_regular_file(folder / "tokenizer.json", _TOKENIZER_BYTES)
        normalizer = files.parse_json_object(content).get("normalizer")
    except (OSError, files.JsonError):
        return False
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    # For BERT's classes the normalizer's lowercase is that of tokenizer_config.json.
    is_bert = _tokenizer_config(folder).get("do_lower_case") is not False
    return isinstance(steps, list) and any(
        step.get("type") == "Lowercase" or (step.get("type") == "BertNormalizer" and step.get("lowercase") and is_bert)
        for step in steps
        if isinstance(step, dict)
    )


def _tokenizer_arguments(settings: ConfigReader) -> ConfigReader:
    """The tokenizer's arguments. Raises ModelConfigError for arguments of a loader that would change an answer."""
    for key in (*_OLD_ARGUMENTS, *_HARMLESS):
        arguments, kind = settings.object(key), _OLD_ARGUMENTS.get(key, key)
        for name in arguments.config:
            if name not in _HARMLESS[kind]:
                raise arguments.error(name, "is not supported: put it into the folder's own files, and remove it here")
    return settings.object("tokenizer_args" if settings.get("processor_kwargs") is None else "processor_kwargs")


def _message_format(settings: ConfigReader, task: str) -> str:
    """Format of texts as messages of the chat template; "" if they are plain texts."""
    if settings.get("modality_config") is None:
        return ""
    modalities = settings.object("modality_config")
    for kind, value in modalities.config.items():
        if value is None:
            raise modalities.error(kind, "must be an object")
    readers = {kind: modalities.object(kind) for kind in modalities.config}
    output, name = _TASKS[task]
    settings.choice("module_output_name", (name,))
    # As in sentence-transformers: if messages are configured, texts become messages.
    kind = "message" if "message" in readers else "text"
    if kind not in readers:
        raise settings.error("modality_config", "has no text: only texts are supported")
    readers[kind].choice("method", ("forward",))
    readers[kind].choice("method_output_name", (output,))
    return "" if kind == "text" else str(readers[kind].choice("format", MESSAGE_FORMATS, "auto"))


def _read_processing(settings: ConfigReader, message_format: str) -> tuple[TextTransform, int]:
    """Text settings and maximum length in `processing_kwargs`; 0 for no maximum."""
    arguments = settings.object("processing_kwargs")
    readers = {kind: arguments.object(kind) for kind in (*arguments.config, "common", "text", "chat_template")}
    max_length = 0
    for reader in (readers["common"], readers["text"]):
        for key, value in reader.config.items():
            if key == "max_length":
                max_length = _size(reader, key)
            elif key not in _HARMLESS_CALL and not (key == "truncation" and value in _CUTTING):
                raise reader.error(key, "is not supported: remove it")
    chat = readers["chat_template"]
    for key in ("max_length", "truncation", "padding", "return_tensors"):
        if key in chat.config:
            raise chat.error(key, "is not supported: remove it, and set processing_kwargs.text.max_length instead")
    restores_suffix = chat.flag("restore_suffix", True)
    chat.flag("add_generation_prompt", False)
    variables = {key: value for key, value in chat.config.items() if key != "restore_suffix"}
    try:
        template_variables = json.dumps(variables, sort_keys=True, allow_nan=False)
    except ValueError:
        raise arguments.error("chat_template", "must not contain NaN or Infinity, which are not JSON") from None
    return TextTransform((), "", message_format, template_variables, restores_suffix), max_length


def _with_prompts(text: TextTransform, settings: ConfigReader) -> TextTransform:
    """`text` with the folder's prompts."""
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(each, str | None) for each in prompts.values()):
        raise settings.error("prompts", "must be an object of texts")
    known = {"query": "", "document": "", **{name: prompt or "" for name, prompt in prompts.items()}}
    if default not in (None, *known):
        raise settings.error("default_prompt_name", f"is not one of the folder's prompts: name {' or '.join(known)}")
    return replace(text, prompts=tuple(known.items()), default_prompt=default or "")


def _label_tokens(settings: ConfigReader) -> tuple[int, ...]:
    """(false, true), or the true one alone."""
    settings.choice("module_input_name", ("causal_logits",), "causal_logits")
    keys = ("true_token_id",) if settings.get("false_token_id") is None else ("false_token_id", "true_token_id")
    return tuple(checked_integer(settings.get(key), settings.where(key), 0, MAX_INT) for key in keys)


def _pooling_type(settings: ConfigReader) -> str:
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if settings.get(key) is True] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in [*_MODES]:
        words = f"only {' or '.join(_MODES)}"
        raise ModelConfigError(f"{settings.path}: pooling mode {shown(modes)} is not supported, {words}")
    if settings.get("include_prompt", True) is not True:
        rule = "is not supported: every token of a row counts; set it to true if texts have no prompt"
        raise settings.error("include_prompt", rule)
    return _MODES[modes[0]]


def _denses(folder: Path, names: Sequence[Any], hidden_size: int, last_output: str) -> tuple[DenseConfig, ...]:
    """Layers of vectors of rows, or of tokens; the last one's output has the name `last_output`."""
    denses, size = [], hidden_size
    for number, name in enumerate(names, 1):
        settings = _open_module(folder, name)
        source = _TOKENS if last_output == _TOKENS else _VECTOR
        _check_vector_names(settings, source, last_output if number == len(names) else source)
        has_residual = settings.flag("use_residual", False)
        has_bias = settings.flag("bias", True)
        num_inputs, num_outputs = (
            checked_integer(settings.get(key), settings.where(key), 1, MAX_SIZE)
            for key in ("in_features", "out_features")
        )
        if num_inputs != size:
            raise settings.error("in_features", f"must be {size}, the size of the vector before it")
        activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        activation = read_activation(activation, settings.where("activation_function"))
        denses.append(DenseConfig(name, num_inputs, num_outputs, has_bias, activation, has_residual))
        size = num_outputs
    return tuple(denses)


def _check_normalize(folder: Path, name: Any, vector: str) -> None:
    if _is_folder_name(name):
        # Old releases make an empty folder.
        _check_vector_names(open_settings(folder / name / "config.json", is_optional=True), vector, vector)


def _check_vector_names(settings: ConfigReader, source: str, output: str) -> None:
    """Check that a module reads `source`, the vector of the row or those of its tokens, and replaces it, or outputs
    what a later one reads as `output`.
    """
    source = settings.choice("module_input_name", (source,), source)
    if (settings.get("module_output_name") or source) != output:
        raise settings.error("module_output_name", f"is not supported, only {output}")


def _listed(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = files.read_regular_file(path)
        # The parser accepts objects only: an object cannot hide in a list of objects.
        modules = files.parse_json_object(b'{"modules":%s}' % text)["modules"]
    except (OSError, files.JsonError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(each, Mapping) for each in modules):
        raise ModelConfigError(f"{path} must be a list of modules")
    return modules


def _is_folder_name(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and files.is_plain_name(name)


def _open_module(folder: Path, name: Any) -> ConfigReader:
    if not _is_folder_name(name):
        raise ModelConfigError(f"{folder / MODULES_FILE}: path {shown(name)} must be the name of a folder next to it")
    return open_settings(folder / name / "config.json")


def open_settings(path: Path, *, is_optional: bool = False) -> ConfigReader:
    """A reader of the file; of no settings if it is missing and `is_optional`. Null values are not missing ones."""
    try:
        is_missing = is_optional and not path.exists()
        config = {} if is_missing else files.parse_json_object(files.read_regular_file(path), allows_nan=True)
    except (OSError, files.JsonError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    return ConfigReader(config, path, has_null_values=True)


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """Contents of the file, {} if it is missing or unreadable: opening the tokenizer reports the fault."""
    path = folder / _TOKENIZER_FILE
    try:
        return files.parse_json_object(files.read_regular_file(path, _TOKENIZER_BYTES), allows_nan=True)
    except (OSError, files.JsonError):
        return {}


def _word(dotted: Any) -> str:
    """Last word of a class's name."""
    return str(dotted).rpartition(".")[2]
