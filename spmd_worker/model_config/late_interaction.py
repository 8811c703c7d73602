"""Late interaction (ColBERT): vectors of a query's tokens are compared with those of a document's tokens.

How queries and documents are written: a marker, a prompt and a length each, mask tokens behind a query, and words of a
document that are left out. Read from folders of PyLate, of sentence-transformers (`MultiVectorEncoder`) and of
ColBERT's authors (`artifact.metadata`), as sentence-transformers 6 reads them. Knows files and rules;
`compat/late_texts.py` encodes.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer

ARTIFACT_FILE: Final = "artifact.metadata"
"""Settings of ColBERT's authors, next to config.json."""
INPUT_TYPES: Final = ("query", "document")
MAX_LENGTH: Final = 2**20
_PUNCTUATION: Final = tuple(string.punctuation)
_LENGTH: Final = 32
"""Tokens of a query, if a file of PyLate or of ColBERT's authors names none."""
_SIZE: Final = 128
"""Numbers of a token, if a file of ColBERT's authors names none."""
_PYLATE_KEYS: Final = (
    *("query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens"),
    *("attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words"),
)


@dataclass(frozen=True, slots=True)
class TextRole:
    """Queries or documents: the `marker`, a text before the `prompt`, which precedes each text; and the most tokens
    of a row, 0 for the model's. If the vocabulary has the marker, or its first word, that is one token, behind the
    first special one.
    """

    prompt: str = ""
    marker: str = ""
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Tokens behind a query's, up to `length` tokens in all: `token`, "" for the tokenizer's mask token. Unless
    `is_attended` no token attends to them, and they to those of the query alone. If it `truncates`, a query has at most
    `length` tokens.
    """

    length: int
    is_attended: bool = False
    token: str = ""
    truncates: bool = True


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Texts of a model whose tokens' vectors are compared. Vectors of `skipped_words`, tokens of the vocabulary, are
    left out of texts of the types `skips_in`. If it `averages`, a score is divided by the number of a query's vectors.
    """

    query: TextRole = TextRole()
    document: TextRole = TextRole()
    expansion: QueryExpansion | None = None
    skipped_words: tuple[str, ...] = ()
    skips_in: tuple[str, ...] = ("document",)
    averages: bool = False

    @property
    def max_tokens(self) -> int:
        """The most tokens of a row by these settings; 0 if they do not bound documents."""
        length = 0 if self.expansion is None else self.expansion.length
        bounds = (self.query.max_tokens, self.document.max_tokens, length)
        return max(bounds) if self.document.max_tokens else 0


def read_artifact(reader: ConfigReader) -> tuple[LateInteraction, int]:
    """Settings of a folder of ColBERT's authors, and the numbers of a token; `reader` is of its file, which may be
    missing.
    """
    _choice(reader, "similarity", "cosine", ("cosine",))
    expansion = QueryExpansion(_length(reader, "query_maxlen") or _LENGTH, _flag(reader, "attend_to_mask_tokens"))
    late = LateInteraction(
        # A text follows a space, as in their code.
        TextRole(marker=_text(reader, "query_token_id", "[unused0]") + " "),
        TextRole(marker=_text(reader, "doc_token_id", "[unused1]") + " ", max_tokens=_length(reader, "doc_maxlen")),
        expansion,
        _PUNCTUATION if _flag(reader, "mask_punctuation", True) else (),
    )
    size = reader.get("dim")
    return late, _SIZE if size is None else checked_integer(size, reader.where("dim"), 1, MAX_LENGTH)


def read_settings(
    settings: ConfigReader, transformer: ConfigReader, mask: ConfigReader | None, prompts: Mapping[str, str]
) -> LateInteraction:
    """Settings of a folder with `modules.json`. `settings` is config_sentence_transformers.json, whose `prompts` are by
    name; `transformer` the Transformer's file, which comes first; `mask` the MultiVectorMask's, None if the folder has
    none, as PyLate's.
    """
    is_pylate = any(key in settings.config for key in _PYLATE_KEYS)
    sources = [transformer, settings]
    lengths = {role: _first_length(sources, f"{role}_length") for role in INPUT_TYPES}
    of_expansion = next((each for each in sources if "query_expansion" in each.config), None)
    expansion = None
    if of_expansion is not None:
        expansion = _expansion(of_expansion)
    elif is_pylate and _flag(settings, "do_query_expansion", True):
        attends = "attend_to_expansion_tokens" if "attend_to_expansion_tokens" in settings.config else _ATTENDS
        expansion = QueryExpansion(lengths["query"] or _LENGTH, _flag(settings, attends))
    roles = [_role(settings, role, prompts.get(role, ""), lengths[role]) for role in INPUT_TYPES]
    words = _skipped_words(settings if mask is None else mask, _PUNCTUATION if mask is None else ())
    return LateInteraction(
        roles[0],
        roles[1],
        expansion,
        words,
        ("document",) if mask is None else _tasks(mask),
        _choice(settings, "similarity_fn_name", "maxsim", ("maxsim", "meanmaxsim", *_OTHERS)) == "meanmaxsim",
    )


_ATTENDS: Final = "attend_to_mask_tokens"
_OTHERS: Final = ("MaxSim", "cosine", "dot", "euclidean", "manhattan")
"""Names that PyLate wrote, and those of models of one vector: the scores are sums."""


def _role(settings: ConfigReader, role: str, prompt: str, length: int) -> TextRole:
    marker = _text(settings, f"{role}_prefix", "")
    return TextRole(prompt.removeprefix(marker) if marker else prompt, marker, length)


def _expansion(reader: ConfigReader) -> QueryExpansion | None:
    """sentence-transformers' own setting."""
    if reader.get("query_expansion") is None:
        return None
    own = reader.object("query_expansion")
    for key in own.config:
        if key not in ("strategy", "attend", "token", "length"):
            raise own.error(key, "is unknown: remove it")
    truncates = own.choice("strategy", ("fixed", "min")) == "fixed"
    length = checked_integer(own.get("length"), own.where("length"), 1, MAX_LENGTH)
    return QueryExpansion(length, _flag(own, "attend"), _text(own, "token", ""), truncates)


def _skipped_words(reader: ConfigReader, default: tuple[str, ...]) -> tuple[str, ...]:
    words = reader.get("skiplist_words")
    if words is None:
        return default
    return _texts(reader, "skiplist_words", words)


def _tasks(mask: ConfigReader) -> tuple[str, ...]:
    if mask.get("keep_only_token_ids") not in (None, []):
        raise mask.error("keep_only_token_ids", "is not supported: documents are texts, not images")
    given = mask.get("skiplist_tasks")
    if given is None:
        return ("document",)
    return _texts(mask, "skiplist_tasks", [given] if isinstance(given, str) else given)


def _texts(reader: ConfigReader, key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise reader.error(key, "must be a list of texts")
    return tuple(dict.fromkeys(values))


def _first_length(readers: list[ConfigReader], key: str) -> int:
    return next((length for each in readers if (length := _length(each, key))), 0)


def _length(reader: ConfigReader, key: str) -> int:
    """Tokens; 0 for null and missing keys."""
    value = reader.get(key)
    return 0 if value is None else checked_integer(value, reader.where(key), 1, MAX_LENGTH)


def _flag(reader: ConfigReader, key: str, default: bool = False) -> bool:
    return default if reader.get(key) is None else reader.flag(key, default)


def _text(reader: ConfigReader, key: str, default: str) -> str:
    value = reader.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise reader.error(key, "must be a text")
    return value


def _choice(reader: ConfigReader, key: str, default: str, known: tuple[str, ...]) -> str:
    return str(default if reader.get(key) is None else reader.choice(key, known))
