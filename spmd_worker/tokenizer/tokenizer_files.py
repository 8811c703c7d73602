"""Reads the tokenizer files of a model folder."""

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import tokenizers

from spmd_worker.base import files
from spmd_worker.base.errors import TokenizerError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.tokenizer.added_tokens import added_tokens, named_tokens
from spmd_worker.tokenizer.chat_templates import DEFAULT, ChatTemplates, named_templates
from spmd_worker.tokenizer.conversion import Converted, converted
from spmd_worker.tokenizer.encoder import Encoder, opened
from spmd_worker.tokenizer.encoder_process import IsolatedEncoder
from spmd_worker.tokenizer.file_check import WAY_OUT, CheckedFile, check_file
from spmd_worker.tokenizer.source_language import SourceLanguage, has_languages, source_language
from spmd_worker.tokenizer.token_bound import UNKNOWN, TokenBound, token_bound

logger = logging.getLogger(__name__)

TOKENIZER_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
_MODEL_FILE: Final = "config.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_OLD_TEMPLATE_FILE: Final = "chat_template.json"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE_SUFFIX: Final = ".jinja"
_FILES: Final = (TOKENIZER_FILE, _CONFIG_FILE, _SPECIAL_TOKENS_FILE, _TEMPLATE_FILE, _OLD_TEMPLATE_FILE)

_MAX_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of tokenizer.json: vocabularies of a million tokens take 64 MiB."""

_BERT_CLASSES: Final = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_BERT_MODELS: Final = ("bert", "distilbert", "electra", "mpnet", "nomic_bert")
"""Supported model types to which AutoTokenizer assigns such a class if none is named."""
_BERT_NORMALIZER: Final = "BertNormalizer"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Checked contents of a folder's files. `backend` has the vocabulary and the decoder; `fingerprint` is a digest.
    `source` is the rule of a translator's source languages. `is_of_ranks`: the vocabulary was a file of ranks.
    """

    backend: tokenizers.Tokenizer
    encoder: Encoder | IsolatedEncoder
    special_tokens: Mapping[str, str]
    chat_templates: ChatTemplates
    fingerprint: str
    truncation_side: str
    bound: TokenBound
    source: SourceLanguage | None = None
    is_of_ranks: bool = False


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read and check the files. Raises TokenizerError naming the file and the fault."""
    contents = {name: _read(folder / name) for name in (*_FILES, *_more_templates(folder))}
    config = _json_object(folder / _SPECIAL_TOKENS_FILE, contents[_SPECIAL_TOKENS_FILE])
    config |= _json_object(folder / _CONFIG_FILE, contents[_CONFIG_FILE])
    given = contents[TOKENIZER_FILE]
    made = _converted(folder, config) if given is None else Converted(folder / TOKENIZER_FILE, given)
    path, contents[TOKENIZER_FILE] = made.path, made.content
    checked = check_file(str(path), made.content)
    text = made.content.decode("utf-8")
    of_text = _added_ids(checked.values)
    special_tokens = {name: each for name, each in made.named.items() if each in of_text} | named_tokens(config)
    source = _source_language(folder, config, of_text)
    of_class = {
        "normalizer": _class_normalizer(folder, checked, config),
        "post_processor": None if source is None else source.processor(of_text.get),
    }
    changed = {key: value for key, value in of_class.items() if value not in (None, checked.values.get(key))}
    if changed:
        checked = replace(checked, values={**checked.values, **changed})
        text = json.dumps(checked.values)
    added = added_tokens(checked.values, config, special_tokens, folder / _CONFIG_FILE)
    backend, encoder = _open_library(path, text, checked, added)
    vocabulary = checked.values["model"].get("vocab")
    bound = token_bound(backend, vocabulary if isinstance(vocabulary, dict) else None) if checked.is_known else UNKNOWN
    templates = ChatTemplates(_chat_template_sources(folder, contents, config), special_tokens)
    side = config.get("truncation_side", "right")
    if side not in ("left", "right"):
        raise TokenizerError(f"{folder / _CONFIG_FILE}: truncation_side={side!r} must be left or right")
    digest = blake2b(digest_size=16)
    for name, each in contents.items():
        digest.update(f"{name}:{each is not None}:{len(each or b'')}\n".encode())
        digest.update(each or b"")
    fingerprint = digest.hexdigest()
    return TokenizerFiles(
        *(backend, encoder, special_tokens, templates, fingerprint, side, bound, source),
        is_of_ranks=made.is_of_ranks,
    )


def _converted(folder: Path, config: Mapping[str, Any]) -> Converted:
    made = converted(folder, config, partial(_model_settings, folder))
    if made is None:
        raise TokenizerError(
            f"{folder} has no {TOKENIZER_FILE}: text prompts need one (convert other formats with transformers' "
            f"save_pretrained); rows with prompt_token_ids work without"
        )
    return made


def _read(path: Path) -> bytes | None:
    """Contents of a file; None if it does not exist."""
    try:
        most = _MAX_BYTES if path.name == TOKENIZER_FILE else files.CONFIG_BYTES
        return files.read_regular_file(path, most) if path.is_file() else None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _model_settings(folder: Path) -> dict[str, Any]:
    """config.json; {} if it does not exist."""
    return _json_object(folder / _MODEL_FILE, _read(folder / _MODEL_FILE))


def _source_language(folder: Path, config: Mapping[str, Any], added: Mapping[str, int]) -> SourceLanguage | None:
    """The rule for texts' languages. The model's own file is read only if it may say more."""
    is_asked = not config.get("tokenizer_class") and has_languages(added)
    return source_language(config, _model_settings(folder) if is_asked else {})


def _added_ids(values: Mapping[str, Any]) -> dict[str, int]:
    """Text of each added token of tokenizer.json -> its id."""
    return {token["content"]: token["id"] for token in values.get("added_tokens") or []}


def _class_normalizer(folder: Path, checked: CheckedFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The normalizer with which transformers replaces that of tokenizer.json, if it differs; else None."""
    own = checked.values.get("normalizer")
    if not isinstance(own, dict) or own.get("type") != _BERT_NORMALIZER:
        return None
    try:
        normalizer = _bert_normalizer(config, _model_settings(folder))
    except ValueError as error:
        raise TokenizerError(f"{folder / _CONFIG_FILE}: {error}") from None
    changed = [] if normalizer is None else [key for key in normalizer if own.get(key) != normalizer[key]]
    if normalizer is None or not changed:
        return None
    logger.warning(
        "%s: the tokenizer's class and %s override the normalizer's %s, as in transformers",
        folder / TOKENIZER_FILE,
        _CONFIG_FILE,
        ", ".join(f"{key}={json.dumps(normalizer[key])}" for key in changed),
        extra=SAME_ON_EVERY_RANK,
    )
    return normalizer


def _bert_normalizer(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any] | None:
    """The normalizer of BERT's tokenizer classes, by their settings; None for other classes. Raises ValueError."""
    named = settings.get("tokenizer_class") or model.get("tokenizer_class")
    is_bert = (
        named.removesuffix("Fast") in _BERT_CLASSES
        if isinstance(named, str)
        else model.get("model_type") in _BERT_MODELS
    )
    if not is_bert:
        return None
    for key, value in settings.items():
        allowed = {"do_lower_case": bool, "tokenize_chinese_chars": bool, "strip_accents": bool | None}.get(key)
        if allowed is not None and not isinstance(value, allowed):
            raise ValueError(f"{key}={str(value)[:80]!r} must be true or false")
    return {
        "type": _BERT_NORMALIZER,
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }


def _open_library(
    path: Path, text: str, checked: CheckedFile, added: Sequence[Mapping[str, Any]]
) -> tuple[tokenizers.Tokenizer, Encoder | IsolatedEncoder]:
    """The vocabulary and decoder, in this process, and the encoder. Raises TokenizerError."""
    try:
        if checked.is_known:
            backend = opened(text, added)
            encoder: Encoder | IsolatedEncoder = Encoder(backend)
        else:
            backend = opened(json.dumps({**checked.values, "normalizer": None, "pre_tokenizer": None}), added)
            encoder = IsolatedEncoder(text, added)
            encoder.check()
            message = "%s has a step that may take more than linear time: texts are encoded in a process with limits"
            logger.warning(message, path, extra=SAME_ON_EVERY_RANK)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}: {WAY_OUT}") from None
    if dropout := checked.values["model"].get("dropout"):
        logger.warning("%s: model.dropout=%s is for training: off here", path, dropout, extra=SAME_ON_EVERY_RANK)
    return backend, encoder


def _json_object(path: Path, content: bytes | None) -> dict[str, Any]:
    """The object in a file; {} if it does not exist."""
    if content is None:
        return {}
    try:
        return files.parse_json_object(content, allows_nan=True)
    except files.JsonError as error:
        raise TokenizerError(f"{path} {error}") from None


def _more_templates(folder: Path) -> list[str]:
    try:
        paths = sorted((folder / _MORE_TEMPLATES).glob(f"*{_TEMPLATE_SUFFIX}"))
    except OSError as error:
        raise TokenizerError(f"{folder / _MORE_TEMPLATES} cannot be read: {error}") from None
    for path in paths:
        try:
            path.name.encode("utf-8")
        except UnicodeEncodeError:
            raise TokenizerError(f"{str(path)!a}: the name of a template must be UTF-8: rename the file") from None
    return [f"{_MORE_TEMPLATES}/{path.name}" for path in paths]


def _chat_template_sources(
    folder: Path, contents: Mapping[str, bytes | None], config: Mapping[str, Any]
) -> dict[str, str]:
    """Name -> text. Separate files take precedence over the configuration, as in transformers."""
    sources = {}
    for name, content in contents.items():
        if name.endswith(_TEMPLATE_SUFFIX) and content is not None:
            key = DEFAULT if name == _TEMPLATE_FILE else Path(name).name.removesuffix(_TEMPLATE_SUFFIX)
            try:
                # With the line ends of reading as text.
                sources[key] = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{folder / name} cannot be read: {error}") from None
    if sources:
        return sources
    old = _json_object(folder / _OLD_TEMPLATE_FILE, contents[_OLD_TEMPLATE_FILE])
    return named_templates(folder / _OLD_TEMPLATE_FILE, old.get("chat_template")) or named_templates(
        folder / _CONFIG_FILE, config.get("chat_template")
    )
