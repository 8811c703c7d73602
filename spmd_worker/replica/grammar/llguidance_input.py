"""Converts a constraint to llguidance's input: a JSON Schema with options, or a grammar in Lark's syntax.

Depends only on the record, so every rank makes the same text. llguidance itself is needed for grammars in EBNF.
"""

import contextlib
import json
import re
from typing import Any, Final

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.picklable_error import PicklableError
from spmd_worker.replica.grammar.exact_schema import SchemaProblem, exact_schema
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

DEFAULT_WHITESPACE: Final = r"[ \t\n\r]{1,32}"
"""Whitespace between the parts of a JSON answer. Unbounded, a model that repeats spaces would never end."""

_NO_FORCING: Final = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}
"""An additional, unreferenced grammar: the forcing option of one applies to all. Where only one text can follow, the
engine would allow only the tokenizer's tokens for it, and then reject one that was added to the vocabulary
(`<tool_call>` in a choice) as not being text; and it would process the complete text. With this it allows all tokens
that encode it.
"""

_MAX_RULES: Final = 500
"""Maximum number of rules of a grammar in EBNF: conversion time grows with their square."""

_SCHEMA: Final = re.compile(r"%json\s*(?=\{)")
"""Start of a schema in a grammar."""

_MAX_COPIED: Final = 4 << 20
_ALTERNATIVES: Final = ("enum", "anyOf", "oneOf", "allOf")
"""Each alternative is merged with its sibling keywords: at most `_MAX_COPIED` characters of these are copied."""

_UNREADABLE: Final = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of a user's grammar that is not the engine's JSON."""


class GrammarError(PicklableError, ValueError):
    """An invalid constraint: `code` is an error row's, the message is the engine's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def load_llguidance() -> Any:
    """Import the package. Raises ConfigError if it is not installed."""
    try:
        import llguidance
        import llguidance.gbnf_to_lark
    except ImportError as error:
        raise_missing_package("llguidance", "structured", "structured_outputs", error)
    return llguidance


def engine_grammar(constraint: StructuredOutputsParams) -> str:
    """Input of `llguidance.LLMatcher`. Raises GrammarError for a grammar that cannot be read."""
    grammar = _grammar_of(constraint)
    if constraint.around is not None:
        grammar = _surrounded(grammar, constraint.around)
    try:
        parsed = _parsed(grammar)
        for each in parsed["grammars"]:
            if "json_schema" in each:
                each["json_schema"] = _exact(each["json_schema"])
            if "lark_grammar" in each:
                each["lark_grammar"] = _with_exact_schemas(str(each["lark_grammar"]))
        # With an added grammar, an empty list would allow only the empty text.
        if parsed["grammars"] != []:
            parsed["grammars"].append(_NO_FORCING)
    except GrammarError:
        raise
    except _UNREADABLE:
        # The engine rejects it.
        return grammar
    return json.dumps(parsed)


def _parsed(grammar: str) -> dict[str, Any]:
    """The engine's own JSON, in which grammars refer to each other by name. Raises one of `_UNREADABLE`."""
    if not grammar.lstrip().startswith("{"):
        return {"grammars": [{"lark_grammar": grammar}]}
    parsed: dict[str, Any] = json.loads(grammar)
    return parsed


def _surrounded(grammar: str, around: str) -> str:
    try:
        grammars = _parsed(grammar)["grammars"]
        name = grammars[0].setdefault("name", "form")
    except _UNREADABLE as error:
        message = f"structured_outputs.grammar is not valid llguidance JSON: {error}"
        raise GrammarError("grammar_refused", message) from None
    outer = {"lark_grammar": around.replace("@form", f"@{name}")}
    return json.dumps({"grammars": [outer, *grammars]})


def _grammar_of(constraint: StructuredOutputsParams) -> str:
    if constraint.json is not None or constraint.json_object:
        return _of_schema(constraint)
    if constraint.regex is not None:
        return str(load_llguidance().LLMatcher.grammar_from_regex(constraint.regex))
    if constraint.choice is not None:
        # One terminal, in upper case: a rule with this many alternatives would exceed a row of the parser.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, constraint.choice))
    assert constraint.grammar is not None, constraint
    return _as_lark(constraint.grammar)


def _of_schema(constraint: StructuredOutputsParams) -> str:
    schema = json.loads(constraint.json) if constraint.json is not None else {"type": "object"}
    if constraint.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": constraint.whitespace_pattern or DEFAULT_WHITESPACE}
    # The schema's own options override defaults, and the row's options override them.
    own = schema.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    if constraint.disable_any_whitespace or constraint.whitespace_pattern is not None:
        schema["x-guidance"] = own | options
    else:
        has_whitespace = "whitespace_flexible" in own or "whitespace_pattern" in own
        schema["x-guidance"] = own if has_whitespace else options | own
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _exact(schema: Any) -> Any:
    """The schema rewritten to be exact (`exact_schema`). Raises GrammarError."""
    _check_copies(schema)
    try:
        return exact_schema(schema)
    except SchemaProblem as problem:
        raise GrammarError("grammar_refused", f"json: {problem}") from None


def _with_exact_schemas(grammar: str) -> str:
    """A grammar in Lark's syntax, with the schemas inside it rewritten to be exact."""
    parts, end = [], 0
    for found in _SCHEMA.finditer(grammar):
        if found.start() < end:
            # It lies inside another schema.
            continue
        # The engine rejects invalid JSON.
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            schema, schema_end = json.JSONDecoder().raw_decode(grammar, found.end())
            parts += [grammar[end : found.end()], json.dumps(_exact(schema))]
            end = schema_end
    return "".join([*parts, grammar[end:]])


def _check_copies(schema: Any) -> None:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not isinstance(each, dict):
            continue
        num = sum(len(each[key]) for key in _ALTERNATIVES if isinstance(each.get(key), list))
        siblings = {key: value for key, value in each.items() if key not in _ALTERNATIVES} if num > 1 else {}
        if num * len(json.dumps(siblings)) > _MAX_COPIED:
            message = f"json: {num} alternatives have sibling keywords of {len(json.dumps(siblings))} characters"
            raise GrammarError("grammar_refused", f"{message}, which each would copy: make one of them smaller")


def _as_lark(grammar: str) -> str:
    """EBNF and GBNF define with `::=`, which Lark's syntax does not have outside a literal."""
    if "::=" not in grammar:
        return grammar
    if grammar.count("::=") > _MAX_RULES:
        message = f"grammar has more than {_MAX_RULES} rules in EBNF: write it in Lark's syntax"
        raise GrammarError("grammar_refused", message)
    convert = load_llguidance().gbnf_to_lark.any_to_lark
    try:
        return str(convert(grammar))
    except Exception as error:  # its parser raises anything: RecursionError, IndexError, its own
        raise GrammarError("grammar_refused", f"grammar is not valid EBNF: {error}") from None
