"""Constraint on a row's answer: a JSON Schema, a regular expression, a list of choices or a grammar.

`spmd_worker/replica/grammar` enforces it, and checks whether a schema or an expression is supported. Fields are text,
so that the same record is sent over the wire and hashed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final

from spmd_worker.base.config.plain_values import asks, plain_bool, plain_text, shown
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.replica.sequence.record_checks import NOT_SENT

MAX_GRAMMAR_BYTES: Final = 64 * 1024
"""Most bytes that a constraint may have as text: it is sent to every rank with its row."""

MIN_COMPILE_BYTES: Final = 1024
"""Minimum compile cost of a constraint."""

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of which exactly one must be given."""

_MAX_NESTING: Final = 200
_OTHER_PROPERTIES: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties")
VALUE_KEYS: Final = ("const", "enum", "default", "examples")
SCHEMAS_BY_NAME: Final = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of these fields, by vLLM's names:

    `json`: a JSON Schema, as a mapping, as text, or a class that has `model_json_schema`; kept as compact text, with
    its keys in their order, which is that of the answer's. `regex`: the complete answer matches it. `choice`: the
    answer is one of these texts. `grammar`: in Lark's syntax or as EBNF / GBNF (`root ::= ...`). `json_object`: any
    JSON object.

    In a JSON answer, `disable_any_whitespace` allows no space between its parts, else `whitespace_pattern`, a regular
    expression, is what is allowed there, by default a few of any kind; `disable_additional_properties` allows an object
    with `properties` no others, unless its schema mentions them. `disable_fallback` and `backend` are without effect:
    there is one engine. `structural_tag` is rejected. `around` is a grammar in Lark's syntax in which `@form` is the
    constraint: the rest of an answer, such as reasoning before it.

    Raises ValueError naming the field and the rule, also for a text of more than 64 KiB.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Any = field(default=None, metadata=NOT_SENT)
    around: str | None = None
    disable_fallback: Any = field(default=None, metadata=NOT_SENT, compare=False)
    backend: Any = field(default=None, metadata=NOT_SENT, compare=False)

    def __post_init__(self) -> None:
        if asks(self.structural_tag):
            raise ValueError(
                f"structural_tag={shown(self.structural_tag)} is not supported: use grammar, or the tools of a chat "
                f"row, whose calls are parsed from the text"
            )
        keep = partial(object.__setattr__, self)
        # Like None, empty asks for nothing; kept, an empty mapping could not be hashed.
        keep("structural_tag", None)
        for name in ("disable_any_whitespace", "disable_additional_properties", "json_object"):
            keep(name, _flag(name, getattr(self, name)))
        keep("choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern", "around"):
            keep(name, _text(name, getattr(self, name)))
        if self.json is not None:
            keep("json", schema_text(self.json, is_closed=self.disable_additional_properties))
        if self.around is not None and "@form" not in self.around:
            raise ValueError(f"around={self.around[:80]!r} must contain @form, the constraint")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"exactly one of {', '.join(KINDS)} must be given: {found}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace are both given: leave one out")
        if self.num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{given[0]} is {self.num_bytes} bytes, more than the limit of {MAX_GRAMMAR_BYTES}")

    @staticmethod
    def from_optional(**given: Any) -> "StructuredOutputsParams | None":
        """A record in which None means not given; None if no constraint is given."""
        wanted = {name: value for name, value in given.items() if value not in (None, False)}
        return StructuredOutputsParams(**wanted) if any(name in wanted for name in (*KINDS, "structural_tag")) else None

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def num_bytes(self) -> int:
        """Bytes of all its texts, in UTF-8."""
        texts = [self.json, self.regex, self.grammar, self.whitespace_pattern, self.around, *(self.choice or ())]
        return sum([len(each.encode("utf-8")) for each in texts if each is not None])

    @property
    def compile_bytes(self) -> int:
        """Compile cost: `num_bytes`, at least `MIN_COMPILE_BYTES`."""
        return max(self.num_bytes, MIN_COMPILE_BYTES)


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def as_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The record from itself, a mapping, another library's object with these fields, or None.

    Raises ValueError as the record does, with the name of the sampling parameter before it.
    """
    # Like None, empty asks for nothing.
    if value is None or value is False or value == {}:
        return None
    if isinstance(value, StructuredOutputsParams):
        return value
    known = [spec.name for spec in fields(StructuredOutputsParams)]
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(f"structured_outputs: unknown key {unknown[0]!r}. Known keys: {', '.join(known)}")
        given = dict(value)
    elif any(hasattr(value, name) for name in KINDS) and not isinstance(value, type):
        given = {name: getattr(value, name) for name in known if hasattr(value, name)}
    else:
        raise ValueError(f"structured_outputs={shown(value)} must have one of {', '.join(KINDS)}")
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        raise ValueError(f"structured_outputs: {error}") from None


def schema_text(schema: Any, *, is_closed: bool = False) -> str:
    """A JSON Schema as compact text. `is_closed`: objects with `properties` have no others, unless the schema mentions
    them. Raises ValueError for anything but a JSON object.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, Mapping):
        try:
            schema = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json is not a JSON Schema: {error}") from None
    if not isinstance(schema, str):
        raise ValueError(f"json={shown(schema)} must be a JSON Schema: an object, or its JSON text")
    try:
        parsed = parse_json_object(_text("json", schema).encode("utf-8"), max_nesting=_MAX_NESTING)
    except JsonError as error:
        raise ValueError(f"json {error}") from None
    if is_closed:
        _close(parsed)
    # Unescaped, a lone surrogate of the schema is text that UTF-8 cannot encode.
    return str(_text("json", json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))))


def _close(schema: Any) -> None:
    """Close objects with `properties`, at any depth; values that are not schemas are left alone."""
    for each in schema if isinstance(schema, list) else ():
        _close(each)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict) and not any(name in schema for name in _OTHER_PROPERTIES):
        schema["additionalProperties"] = False
    for name, each in schema.items():
        if name in SCHEMAS_BY_NAME and isinstance(each, dict):
            # These names are the user's own, even if they equal a keyword of JSON Schema.
            _close(list(each.values()))
        elif name not in VALUE_KEYS:
            _close(each)


def _flag(name: str, value: Any) -> bool:
    flag = False if value is None else plain_bool(value)
    if flag is None:
        raise ValueError(f"{name}={shown(value)} must be true or false")
    return flag


def _text(name: str, value: Any) -> Any:
    """None, or text that UTF-8 can encode."""
    if value is None:
        return None
    text = plain_text(value)
    if not text:
        raise ValueError(f"{name}={shown(value)} must be text that is not empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains a lone surrogate, which UTF-8 cannot encode") from None
    return text


def _choices(value: Any) -> tuple[str, ...] | None:
    """Unique choices, in order."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"choice={shown(value)} must be a list of texts")
    return tuple(dict.fromkeys([_text("choice", each) for each in value]))
