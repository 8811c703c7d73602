"""Reads folders of sentence-transformers: `modules.json` and the files that it names, which configure texts and
pooling. Each setting is read as releases 2 to 6 of sentence-transformers read it, or rejected.

Knows files and rules; `pooling.py` makes one record of this and of config.json.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base import files
from spmd_worker.base.errors import ModelConfigError

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
MOST_SIZE: Final = 2**20

_OWN_TYPES: Final = "sentence_transformers."
_MODEL_TYPES: Final = ("SentenceTransformer", "CrossEncoder")
SIMILARITIES: Final = ("cosine", "dot", "euclidean", "manhattan")
MESSAGE_FORMATS: Final = ("structured", "flat", "auto")

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
_TYPED_MODELS: Final = ("bert",)
"""Supported model types to which AutoTokenizer assigns such a class if none is named."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One linear layer after the pooled vector, whose weights are in `folder` of the model folder. `activation` is
    "none" or a function of `model/pooler.py`.
    """

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class TextForm:
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
        """Text prepended to each text."""
        return dict(self.prompts).get(self.default_prompt, "")

    @property
    def changes_texts(self) -> bool:
        """Whether a text is encoded as anything but itself."""
        return bool(self.message_format or self.prompt)


PLAIN_TEXT: Final = TextForm()


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """Settings of a folder with `modules.json`.

    `kind` is the last module that decides a row's result: "Pooling", a vector; "Dense", scores of a cross-encoder from
    a pooled vector; "Transformer", scores of a classifier; "LogitScore", the difference of two tokens' logits.
    `activation` of scores is None if not given. `similarity` of two vectors is one of `SIMILARITIES`. `max_tokens` of a
    row, `max_dimensions` of a vector: 0 for no limit.
    """

    kind: str
    pooling_type: str = ""
    denses: tuple[DenseConfig, ...] = ()
    is_normalized: bool = False
    label_token_ids: tuple[int, ...] = ()
    activation: str | None = None
    text: TextForm = PLAIN_TEXT
    similarity: str = "cosine"
    max_tokens: int = 0
    max_dimensions: int = 0


@dataclass(frozen=True, slots=True)
class _Transformer:
    task: str
    max_tokens: int
    text: TextForm


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
        if not str(each.get("type")).startswith(_OWN_TYPES):
            raise ModelConfigError(
                f"{path}: module {each.get('type')!r} is code of the folder or of another package, which is never run: "
                f"use a folder whose modules are sentence-transformers' own"
            )
    return read


def _read_modules(folder: Path, listed: Sequence[Mapping[str, Any]], hidden_size: int) -> SentenceFolder:
    path = folder / MODULES_FILE
    kinds, where = [_word(each.get("type")) for each in listed], [each.get("path") for each in listed]
    if kinds[:1] == ["Transformer"] and where[0]:
        raise ModelConfigError(
            f'{path}: the Transformer is in {where[0]!r}: its files must be in {folder} itself, with path ""'
        )
    settings_path = folder / SETTINGS_FILE
    settings = _read(settings_path) if settings_path.exists() else {}
    model_type = settings.get("model_type", _MODEL_TYPES[0])
    if model_type not in _MODEL_TYPES:
        raise ModelConfigError(
            f"{settings_path}: model_type={model_type!r} is not run: {' and '.join(_MODEL_TYPES)} are; load the folder "
            f"as one of these and save it again"
        )
    transformer = _transformer(folder)
    text = _text_form(settings, settings_path, transformer.text)
    common: dict[str, Any] = {"text": text, "max_tokens": transformer.max_tokens}
    if model_type == "CrossEncoder":
        given = settings.get("activation_fn")
        where_from = f"{settings_path}: activation_fn"
        common["activation"] = None if given is None else read_activation(given, where_from, of_scores=True)
    if model_type == "CrossEncoder" and kinds == ["Transformer"] and transformer.task == "sequence-classification":
        return SentenceFolder("Transformer", **common)
    if (
        model_type == "CrossEncoder"
        and kinds == ["Transformer", "LogitScore"]
        and transformer.task == "text-generation"
    ):
        return SentenceFolder("LogitScore", label_token_ids=_label_tokens(*_object(folder, where[1])), **common)
    num_denses = kinds.count("Dense")
    tail = ["Normalize"] if "Normalize" in kinds else []
    is_pooled = kinds == ["Transformer", "Pooling", *["Dense"] * num_denses, *tail]
    if not is_pooled or transformer.task != "feature-extraction" or (model_type == "CrossEncoder" and not num_denses):
        raise ModelConfigError(
            f"{path}: modules {', '.join(kinds) or 'none'} are not run for transformer_task={transformer.task} of a "
            f"{model_type}: only Transformer, Pooling, then Dense any number of times, then Normalize or not, are; and "
            f"of a CrossEncoder its Transformer alone, with LogitScore, or with Pooling and Dense: save the folder in "
            f"one of these forms"
        )
    scores = model_type == "CrossEncoder"
    denses = _denses(
        folder, [place for kind, place in zip(kinds, where) if kind == "Dense"], hidden_size, scores=scores
    )
    if tail:
        _check_normalize(folder, where[-1])
        if scores:
            raise ModelConfigError(f"{path}: Normalize behind the scores of a CrossEncoder is not run: take it out")
    return SentenceFolder(
        "Dense" if scores else "Pooling",
        _pooling_type(*_object(folder, where[1])),
        denses,
        is_normalized=bool(tail),
        similarity=_similarity(settings, settings_path),
        max_dimensions=_optional_whole(settings.get("truncate_dim"), f"{settings_path}: truncate_dim"),
        **common,
    )


def pooling_files(folder: Path) -> list[Path]:
    """Files that configure pooling, next to config.json, in an order that is the same everywhere."""
    if not is_sentence_folder(folder):
        return []
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
    return [str(name) for name in names if _is_folder_name(name)]


def tokenizer_length(folder: Path) -> int:
    """Maximum tokens of a row by the tokenizer; 0 if its files name no length that a model may have."""
    settings = _tokenizer_config(folder)
    # Old releases of transformers write `max_len`.
    length = settings.get("model_max_length", settings.get("max_len"))
    # transformers writes 1e30 for no limit.
    return length if type(length) is int and 1 <= length <= MOST_SIZE else 0


def gives_token_types(folder: Path, config: Mapping[str, Any]) -> bool:
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
        raise ModelConfigError(f"{where}={given!r} is not run: only torch's {', '.join(known)} are")
    return known[name]


def whole_size(value: Any, where: str) -> int:
    """The value, a size of 1 or more. Raises ModelConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SIZE:
        raise ModelConfigError(f"{where}={value!r} must be a whole number from 1 to {MOST_SIZE}")
    return value


def _optional_whole(value: Any, where: str) -> int:
    return 0 if value is None else whole_size(value, where)


def _transformer(folder: Path) -> _Transformer:
    """Settings of the Transformer, from the first file that exists and is not empty."""
    paths = [folder / name for name in _TRANSFORMER_FILES]
    path, settings = paths[0], {}
    for each in paths:
        settings = _read(each) if each.exists() else {}
        if settings:
            path = each
            break
    unknown = [key for key in settings if key not in _TRANSFORMER_KEYS]
    if unknown:
        raise ModelConfigError(f"{path}: {unknown[0]}={settings[unknown[0]]!r} is not known: take it out")
    if settings.get("do_lower_case") is True and not _makes_lowercase(folder):
        raise ModelConfigError(f"{path}: do_lower_case=true is not run: put a lowercase normalizer into tokenizer.json")
    if settings.get("tokenizer_name_or_path") is not None:
        raise ModelConfigError(
            f"{path}: tokenizer_name_or_path={settings['tokenizer_name_or_path']!r} is not run: put the tokenizer's "
            f"files into {folder} and take it out"
        )
    arguments = _loader_arguments(settings, path)
    task = settings.get("transformer_task", "feature-extraction")
    if task not in _TASKS:
        raise ModelConfigError(f"{path}: transformer_task={task!r} is not run: one of {', '.join(_TASKS)} is")
    message_format = _message_format(folder, settings, path, task)
    form, own_length = _processing(settings.get("processing_kwargs"), path, message_format)
    length = arguments.get("model_max_length")
    key = f"{path}: model_max_length" if length is not None else f"{path}: max_seq_length"
    length = settings.get("max_seq_length") if length is None else length
    return _Transformer(task, own_length or _optional_whole(length, key) or tokenizer_length(folder), form)


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


def _loader_arguments(settings: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The tokenizer's arguments. Raises ModelConfigError for those that would change an answer."""
    tokenizer: Mapping[str, Any] = {}
    for key in (*_OLD_ARGUMENTS, *_HARMLESS):
        given = settings.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ModelConfigError(f"{path}: {key}={given!r} must be an object")
        kind = _OLD_ARGUMENTS.get(key, key)
        for name in given:
            if name not in _HARMLESS[kind]:
                raise ModelConfigError(
                    f"{path}: {key}.{name}={given[name]!r} is not run: put it into the folder's own files, and take it "
                    f"out here"
                )
        tokenizer = given if kind == "processor_kwargs" else tokenizer
    return tokenizer


def _message_format(folder: Path, settings: Mapping[str, Any], path: Path, task: str) -> str:
    """Format of texts as messages of the chat template; "" if they are plain texts."""
    given = settings.get("modality_config")
    if given is None:
        return ""
    output, name = _TASKS[task]
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise ModelConfigError(f"{path}: modality_config={given!r} must be an object of objects")
    if settings.get("module_output_name") != name:
        raise ModelConfigError(
            f"{path}: module_output_name={settings.get('module_output_name')!r} is not run: {name} is, for "
            f"transformer_task={task}"
        )
    # As in sentence-transformers: if messages are configured, texts become messages.
    kind = "message" if "message" in given else "text"
    if kind not in given:
        raise ModelConfigError(
            f"{path}: modality_config has no text: only texts are run, and {', '.join(given)} are not"
        )
    wanted = {"method": "forward", "method_output_name": output}
    for key, value in wanted.items():
        if given[kind].get(key) != value:
            raise ModelConfigError(
                f"{path}: modality_config.{kind}.{key}={given[kind].get(key)!r} is not run: {value} is"
            )
    if kind == "text":
        return ""
    form = given[kind].get("format", "auto")
    if form not in MESSAGE_FORMATS:
        raise ModelConfigError(
            f"{path}: modality_config.message.format={form!r} is not run: one of {', '.join(MESSAGE_FORMATS)} is"
        )
    return str(form)


def _processing(given: Any, path: Path, message_format: str) -> tuple[TextForm, int]:
    """Text settings and maximum length in `processing_kwargs`."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping | None) for each in given.values()):
        raise ModelConfigError(f"{path}: processing_kwargs={given!r} must be an object of objects")
    most = 0
    for kind in ("common", "text"):
        for key, value in (given.get(kind) or {}).items():
            where = f"{path}: processing_kwargs.{kind}.{key}"
            if key == "max_length":
                most = _optional_whole(value, where)
            elif key not in _HARMLESS_CALL and not (key == "truncation" and value in _CUTTING):
                raise ModelConfigError(f"{where}={value!r} is not run: take it out")
    template = dict(given.get("chat_template") or {})
    restores = template.pop("restore_suffix", True)
    for key in ("max_length", "truncation", "padding", "return_tensors"):
        if key in template:
            raise ModelConfigError(
                f"{path}: processing_kwargs.chat_template.{key}={template[key]!r} is not run: take it out, and name a "
                f"length under processing_kwargs.text.max_length"
            )
    if not isinstance(restores, bool) or not isinstance(template.get("add_generation_prompt", False), bool):
        raise ModelConfigError(
            f"{path}: processing_kwargs.chat_template: restore_suffix and add_generation_prompt must be true or false"
        )
    variables = json.dumps(template, sort_keys=True, allow_nan=False)
    return TextForm((), "", message_format, variables, restores), most


def _text_form(settings: Mapping[str, Any], path: Path, form: TextForm) -> TextForm:
    """`form` with the folder's prompts."""
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(each, str | None) for each in prompts.values()):
        raise ModelConfigError(f"{path}: prompts={prompts!r} must be an object of texts")
    known = {"query": "", "document": "", **{name: text or "" for name, text in prompts.items()}}
    if default is not None and default not in known:
        raise ModelConfigError(
            f"{path}: default_prompt_name={default!r} is none of its prompts, {', '.join(known)}: name one of them"
        )
    return TextForm(
        tuple(known.items()), default or "", form.message_format, form.template_variables, form.restores_suffix
    )


def _similarity(settings: Mapping[str, Any], path: Path) -> str:
    name = settings.get("similarity_fn_name")
    if name is None:
        return "cosine"
    if name not in SIMILARITIES:
        raise ModelConfigError(f"{path}: similarity_fn_name={name!r} is not run: one of {', '.join(SIMILARITIES)} is")
    return str(name)


def _label_tokens(settings: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """(false, true), or the true one alone."""
    if settings.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelConfigError(
            f"{path}: module_input_name={settings['module_input_name']!r} is not run: causal_logits is"
        )
    names = ("false_token_id", "true_token_id")
    ids = [settings.get(name) for name in names if name == names[1] or settings.get(name) is not None]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelConfigError(f"{path}: {' and '.join(names)} must be token ids, not {token_id!r}")
    return tuple(ids)  # type: ignore[arg-type]  # checked above


def _pooling_type(settings: Mapping[str, Any], path: Path) -> str:
    mode = settings.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        old = [key for key in _OLD_MODES if key in settings]
        modes = [_OLD_MODES[key] for key in old if settings[key] is True] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in [*_MODES]:
        raise ModelConfigError(f"{path}: pooling mode {modes!r} is not run: one of {', '.join(_MODES)} is")
    if settings.get("include_prompt", True) is not True:
        raise ModelConfigError(
            f"{path}: include_prompt=false is not run: every token of a row counts; set it to true where texts have no "
            f"prompt"
        )
    return _MODES[modes[0]]


def _denses(folder: Path, places: Iterable[Any], hidden_size: int, *, scores: bool) -> tuple[DenseConfig, ...]:
    denses, size, last = [], hidden_size, [*places]
    for number, place in enumerate(last, 1):
        settings, path = _object(folder, place)
        own = "scores" if scores and number == len(last) else "sentence_embedding"
        source = settings.get("module_input_name", "sentence_embedding")
        target = settings.get("module_output_name") or source
        if source != "sentence_embedding" or target != own:
            raise ModelConfigError(
                f"{path}: module_input_name={source!r} and module_output_name={target!r} are not run: "
                f"sentence_embedding and {own} are"
            )
        if settings.get("use_residual", False) is not False:
            raise ModelConfigError(f"{path}: use_residual={settings['use_residual']!r} is not run: false is")
        bias = settings.get("bias", True)
        if not isinstance(bias, bool):
            raise ModelConfigError(f"{path}: bias={bias!r} must be true or false")
        num_inputs = whole_size(settings.get("in_features"), f"{path}: in_features")
        if num_inputs != size:
            raise ModelConfigError(f"{path.parent}: in_features={num_inputs}, it is given {size}")
        size = whole_size(settings.get("out_features"), f"{path}: out_features")
        activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        name = read_activation(activation, f"{path}: activation_function")
        denses.append(DenseConfig(path.parent.name, num_inputs, size, bias, name))
    return tuple(denses)


def _check_normalize(folder: Path, place: Any) -> None:
    # Old releases make an empty folder.
    path = folder / place / "config.json" if _is_folder_name(place) else None
    settings = _read(path) if path is not None and path.exists() else {}
    source = settings.get("module_input_name", "sentence_embedding")
    target = settings.get("module_output_name") or source
    if (source, target) != ("sentence_embedding", "sentence_embedding"):
        raise ModelConfigError(
            f"{path}: module_input_name={source!r} and module_output_name={target!r} are not run: sentence_embedding is"
        )


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
    """Settings of a module, and their path."""
    if not _is_folder_name(where):
        raise ModelConfigError(f"{folder / MODULES_FILE}: path {where!r} must be the name of a folder beside it")
    path = folder / where / "config.json"
    return _read(path), path


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.parse_json_object(files.read_regular_file(path), allows_nan=True)
    except (OSError, files.JsonError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None


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
