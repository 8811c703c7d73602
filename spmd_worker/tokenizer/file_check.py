"""Checks a tokenizer.json before the tokenizers library reads it: it comes with a model folder and is not trusted.

Components that published models use are known: their regular expressions take time linear in the text, and the library
does not panic over them. They encode in this process. An unknown normalizer or pre-tokenizer runs in a process with
limits (`encoder_process.py`). Components that let a text grow or drop it are rejected. Decoding must be the same on
every rank and has no process: unknown decoders are rejected, and so are vocabularies in which two tokens have one id,
of which the library uses a random one.
"""

import base64
import binascii
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base import files
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import TokenizerError
from spmd_worker.tokenizer.patterns import is_linear

_MAX_NESTING: Final = 64
_MAX_ARRAYS: Final = 4_000_000
_MAX_ITEMS: Final = 16_000_000
"""Maximum of the file: parsing takes some hundred bytes each. Merges of 500,000 tokens are 500,000 arrays."""
_MAX_ID: Final = 1 << 22
_MAX_TOKEN_CHARACTERS: Final = 8192
"""Maximum text that one token adds to an answer. Models have tokens of a few hundred spaces."""
_MAX_UNIGRAM_CHARACTERS: Final = 256
"""Encoding examines up to this many characters from each."""
_MAX_WORD_CHARACTERS: Final = 1000
"""`max_input_chars_per_word`: encoding takes time quadratic in it. BERT has 100."""
_MAX_STEPS: Final = 32
_MAX_GROWTH: Final = 64
_MAX_TEMPLATE: Final = 64
"""Maximum special tokens of a post-processor, and ids of one of them."""
_MAX_SHOWN: Final = 60
WAY_OUT: Final = "use the file that the model was published with, or remove it and give prompt_token_ids"


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A checked file, and whether all of it may run in this process."""

    values: Mapping[str, Any]
    is_known: bool


def check_file(name: str, content: bytes) -> CheckedFile:
    """Check the file `name`. Raises TokenizerError: key, value, rule, way out."""
    check_size(name, content)
    try:
        values = files.parse_json_object(content, max_nesting=_MAX_NESTING)
    except files.JsonError as error:
        raise TokenizerError(f"{name} {error}: {WAY_OUT}") from None
    try:
        return CheckedFile(values, _check(values))
    except _InvalidError as error:
        raise TokenizerError(f"{name}: {error}: {WAY_OUT}") from None


def check_size(name: str, content: bytes) -> None:
    """Check what parsing the JSON of a file takes. Raises TokenizerError."""
    if content.count(b"[") + content.count(b"{") > _MAX_ARRAYS or content.count(b",") > _MAX_ITEMS:
        raise TokenizerError(f"{name} has more than {_MAX_ARRAYS} arrays or {_MAX_ITEMS} items: {WAY_OUT}")


def check_token(name: str, key: str, content: str) -> None:
    """Check a token of another file of the folder. Raises TokenizerError."""
    if len(content) > _MAX_TOKEN_CHARACTERS:
        raise TokenizerError(
            f"{name}: {key}={_short(content)} has {len(content)} characters, more than {_MAX_TOKEN_CHARACTERS}: "
            f"{WAY_OUT}"
        )


class _InvalidError(ValueError):
    """Key, value and rule."""


def _check(values: Mapping[str, Any]) -> bool:
    model = _object("model", values.get("model"))
    _check_model(model)
    for index, token in enumerate(_list("added_tokens", values.get("added_tokens"))):
        key = f"added_tokens[{index}]"
        token = _object(key, token)
        _check_id(f"{key}.id", token.get("id"))
        _check_token(f"{key}.content", token.get("content"))
    for step in _steps("post_processor", values.get("post_processor")):
        _check_processor(step)
    for step in _steps("decoder", values.get("decoder")):
        _check_decoder(step)
    are_known = [_is_known(key, _steps(key, values.get(key))) for key in ("normalizer", "pre_tokenizer")]
    return _has_known_model(model) and all(are_known)


def _object(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidError(f"{key}={_short(value)} must be an object")
    return value


def _list(key: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _InvalidError(f"{key}={_short(value)} must be an array")
    return value or []


def _steps(key: str, value: Any) -> list[Mapping[str, Any]]:
    """Steps of a component, those of its sequences one after the other."""
    if value is None:
        return []
    value = _object(key, value)
    nested = next((name for name in ("normalizers", "pretokenizers", "processors", "decoders") if name in value), None)
    if nested is None:
        return [value]
    steps = [step for part in _list(f"{key}.{nested}", value[nested]) for step in _steps(key, part)]
    if len(steps) > _MAX_STEPS:
        raise _InvalidError(f"{key} has {len(steps)} steps, more than {_MAX_STEPS}")
    return steps


# The vocabulary.


def _check_model(model: Mapping[str, Any]) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        tokens, ids = list(vocabulary), list(vocabulary.values())
        # Checked without a loop in Python unless an id is invalid: a vocabulary may have 250,000 tokens.
        if not set(map(type, ids)) <= {int} or not all(map(_is_id, (min(ids, default=0), max(ids, default=0)))):
            for each in ids:
                _check_id("model.vocab: id", each)
        if len(set(ids)) < len(ids):
            ((duplicate, number),) = Counter(ids).most_common(1)
            raise _InvalidError(f"model.vocab: the id {duplicate} belongs to {number} tokens and must belong to one")
    else:
        entries = _list("model.vocab", vocabulary)
        for index, entry in enumerate(entries):
            if (
                not isinstance(entry, list)
                or len(entry) != 2
                or type(entry[1]) not in (int, float)
                or not math.isfinite(entry[1])
            ):
                raise _InvalidError(f"model.vocab[{index}]={_short(entry)} must be a token and its score")
        tokens = [entry[0] for entry in entries]
        unknown = model.get("unk_id")
        if unknown is not None and not (_is_id(unknown) and unknown < len(entries)):
            raise _InvalidError(f"model.unk_id={_short(unknown)} must be the index of one of {len(entries)} tokens")
    if not set(map(type, tokens)) <= {str} or max(map(len, tokens), default=0) > _MAX_TOKEN_CHARACTERS:
        for token in tokens:
            _check_token("model.vocab: token", token)
    _check_prefix(model)


def _check_prefix(model: Mapping[str, Any]) -> None:
    """Check merges: the library cuts the prefix off the second part of each without a check."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise _InvalidError(
                f"model.merges[{index}]={_short(merge)} must have a second part that begins with {_short(prefix)}"
            )


def _check_token(key: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _MAX_TOKEN_CHARACTERS:
        raise _InvalidError(f"{key}={_short(value)} must be a string of at most {_MAX_TOKEN_CHARACTERS} characters")


def _check_id(key: str, value: Any) -> None:
    if not _is_id(value):
        raise _InvalidError(f"{key}={_short(value)} must be an integer from 0 to {_MAX_ID - 1}")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID


def _has_known_model(model: Mapping[str, Any]) -> bool:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        return all(len(entry[0]) <= _MAX_UNIGRAM_CHARACTERS for entry in vocabulary)
    most = model.get("max_input_chars_per_word")
    return most is None or (_is_id(most) and most <= _MAX_WORD_CHARACTERS)


# Post-processors and decoders: rejected if unknown.


def _check_processor(step: Mapping[str, Any]) -> None:
    if step.get("type") in ("BertProcessing", "ByteLevel", "RobertaProcessing"):
        return
    if step.get("type") != "TemplateProcessing":
        raise _InvalidError(f"post_processor.type={_short(step.get('type'))} is not supported")
    single, pair = _list("post_processor.single", step.get("single")), _list("post_processor.pair", step.get("pair"))
    texts = [[name for kind, name in _names(parts) if kind != "SpecialToken"] for parts in (single, pair)]
    if texts[0] != ["A"]:
        raise _InvalidError(f"post_processor.single={_short(single)} must contain sequence A once")
    if texts[1] not in (["A", "B"], ["B", "A"], ["A"], []):
        raise _InvalidError(f"post_processor.pair={_short(pair)} must contain sequences A and B once each")
    special = _object("post_processor.special_tokens", step.get("special_tokens") or {})
    num_ids = [len(_list("post_processor", _object("post_processor", each).get("ids"))) for each in special.values()]
    if max(len(single), len(pair), *num_ids, 0) > _MAX_TEMPLATE:
        raise _InvalidError(f"post_processor has more than {_MAX_TEMPLATE} special tokens")
    for kind, name in _names([*single, *pair]):
        if kind == "SpecialToken" and (not isinstance(name, str) or name not in special):
            raise _InvalidError(f"post_processor: the special token {_short(name)} must be one of special_tokens")


def _names(parts: list[Any]) -> list[tuple[str, Any]]:
    """Kind and id of each part."""
    key = "post_processor"
    return [(kind, _object(key, value).get("id")) for part in parts for kind, value in _object(key, part).items()]


def _check_decoder(step: Mapping[str, Any]) -> None:
    kind = step.get("type")
    if kind in ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "WordPiece", "CTC"):
        return
    if kind == "Strip":
        # The library panics on a token with fewer characters to strip at the end.
        if step.get("stop") != 0 or not _is_id(step.get("start")):
            raise _InvalidError(f"decoder.stop={_short(step.get('stop'))} of Strip must be 0, and start an integer")
        return
    if kind != "Replace":
        raise _InvalidError(f"decoder.type={_short(kind)} is not supported")
    pattern, content = _short(step.get("pattern")), _short(step.get("content"))
    if _growth(step) > 1:
        raise _InvalidError(f"decoder: Replace of {pattern} by {content} must not make text longer")
    if not _is_known_pattern(step.get("pattern")):
        raise _InvalidError(
            f"decoder: Replace of {pattern} must have a string or a linear-time regular expression as pattern"
        )


# Normalizers and pre-tokenizers: run in a process with limits if unknown.


def _is_known(key: str, steps: list[Mapping[str, Any]]) -> bool:
    for step in steps:
        if step.get("type") == "Precompiled":
            _check_charsmap(f"{key}.precompiled_charsmap", step.get("precompiled_charsmap"))
        if isinstance(pattern := step.get("pattern"), dict) and "" in pattern.values():
            raise _InvalidError(f"{key}: {step.get('type')} must have a non-empty pattern")
    growth = math.prod(map(_growth, steps))
    if growth > _MAX_GROWTH:
        raise _InvalidError(f"{key} makes up to {_short(growth)} characters from one, more than {_MAX_GROWTH}")
    return all(
        _is_known_pattern(step.get("pattern"))
        if step.get("type") == _WITH_PATTERN[key]
        else step.get("type") in _KNOWN[key]
        for step in steps
    )


_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "normalizer": (
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Strip", "StripAccents"),
    ),
    "pre_tokenizer": (
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
        *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    ),
}
_WITH_PATTERN: Final = {"normalizer": "Replace", "pre_tokenizer": "Split"}


def _is_known_pattern(pattern: Any) -> bool:
    if not isinstance(pattern, dict):
        return False
    text, regex = pattern.get("String"), pattern.get("Regex")
    return bool(text) if isinstance(text, str) else isinstance(regex, str) and is_linear(regex)


def _growth(step: Mapping[str, Any]) -> int:
    """Maximum number of characters made from one, beyond Unicode's own decompositions."""
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        covered = len(text) if isinstance(text, str) and text else 1
        return max(1, math.ceil(len(str(step.get("content"))) / covered))
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend")))
    return 2 if kind in ("ByteLevel", "Metaspace") else 1


def _check_charsmap(key: str, value: Any) -> None:
    """Check SentencePiece's map: the size of a double array, the array, and the texts that its leaves point to."""
    try:
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
        (size,) = struct.unpack_from("<I", content)
        units = struct.unpack_from(f"<{size // 4}I", content, 4)
        texts = content[4 + size :]
        texts.decode("utf-8")
        is_valid = size % 4 == 0 and bool(units) and _is_double_array(units, texts)
    except (binascii.Error, struct.error, ValueError):
        is_valid = False
    if not is_valid:
        raise _InvalidError(f"{key}={_short(value)} is not a valid character map")


def _is_double_array(units: tuple[int, ...], texts: bytes) -> bool:
    """Whether each walk from the root stays in the array, and each leaf points to the beginning of a character."""
    children: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        if unit & 0xFF and not unit >> 31:
            children.setdefault(index ^ (unit & 0xFF), []).append(index)
    reached, waiting = bytearray(len(units)), [_offset(units[0])]
    while waiting:
        base = waiting.pop()
        if base | 0xFF >= len(units):
            return False
        for index in children.get(base, ()):
            unit = units[index]
            if reached[index]:
                continue
            reached[index] = 1
            below = index ^ _offset(unit)
            if below >= len(units):
                return False
            if unit >> 8 & 1:
                leaf = units[below] & 0x7FFFFFFF
                if leaf > len(texts) or (leaf < len(texts) and texts[leaf] & 0xC0 == 0x80):
                    return False
            waiting.append(below)
    return True


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)


def _short(value: Any) -> str:
    return shown(value[:_MAX_SHOWN] if isinstance(value, str | list) else value, _MAX_SHOWN)
