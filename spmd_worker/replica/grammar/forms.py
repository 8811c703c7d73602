"""Converts a constraint to llguidance's input: a JSON Schema with options, or a grammar in Lark's syntax.

Depends only on the record, so every rank makes the same text. llguidance itself is needed for grammars in EBNF.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from spmd_worker.base.config.extras import raise_missing_package
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

_MOST_RULES: Final = 500
"""Most rules of a grammar in EBNF: conversion time grows with their square."""


_SCHEMA: Final = re.compile(r"%json\s*(?=\{)")
"""Start of a schema in a grammar."""

_MOST_COPIED: Final = 4 << 20
_ALTERNATIVES: Final = ("enum", "anyOf", "oneOf", "allOf")
"""Each alternative is merged with its sibling keywords: at most `_MOST_COPIED` characters of these are copied."""


class GrammarError(ValueError):
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


def engine_grammar(form: StructuredOutputsParams) -> str:
    """Input of `llguidance.LLMatcher`. Raises GrammarError for a grammar that cannot be read."""
    grammar = _form_grammar(form) if form.around is None else _surrounded(_form_grammar(form), form.around)
    for schema in _schemas_of(grammar):
        _check_copies(schema)
    try:
        return _unforced(_exact(grammar))
    except SchemaProblem as problem:
        raise GrammarError("grammar_refused", f"json: {problem}") from None


def _surrounded(grammar: str, around: str) -> str:
    """The engine's own JSON, in which grammars refer to each other by name."""
    try:
        is_lark = not grammar.lstrip().startswith("{")
        grammars = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
        name = grammars[0].setdefault("name", "form")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise GrammarError("grammar_refused", f"grammar is no JSON of llguidance's: {error}") from None
    outer = {"lark_grammar": around.replace("@form", f"@{name}")}
    return json.dumps({"grammars": [outer, *grammars]})


def _form_grammar(form: StructuredOutputsParams) -> str:
    if form.json is not None or form.json_object:
        return _of_schema(form)
    if form.regex is not None:
        return str(load_llguidance().LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        # One terminal, in upper case: a rule with this many alternatives would exceed a row of the parser.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, form.choice))
    assert form.grammar is not None, form
    return _as_lark(form.grammar)


def _of_schema(form: StructuredOutputsParams) -> str:
    schema = json.loads(form.json) if form.json is not None else {"type": "object"}
    if form.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": form.whitespace_pattern or DEFAULT_WHITESPACE}
    # The schema's own options override defaults, and the row's options override them.
    own = schema.get("x-guidance")
    is_said = form.disable_any_whitespace or form.whitespace_pattern is not None
    theirs = own if isinstance(own, dict) else {}
    schema["x-guidance"] = theirs | options if is_said else _with_default(theirs, options)
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _schemas_of(grammar: str) -> Iterator[Any]:
    """All schemas in the engine's input, also in the user's grammars."""
    if not grammar.lstrip().startswith("{"):
        yield from _schemas_in(grammar)
        return
    # The engine rejects invalid JSON, and other keys.
    with contextlib.suppress(ValueError, RecursionError, LookupError, AttributeError, TypeError):
        for each in json.loads(grammar)["grammars"]:
            yield each.get("json_schema")
            yield from _schemas_in(str(each.get("lark_grammar", "")))


def _schemas_in(grammar: str) -> Iterator[Any]:
    for found in _SCHEMA.finditer(grammar):
        # The engine rejects invalid JSON.
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]


def _exact(grammar: str) -> str:
    """The grammar with all schemas rewritten to be exact, also the user's. Raises SchemaProblem."""
    if not grammar.lstrip().startswith("{"):
        return _with_exact_schemas(grammar)
    try:
        whole = json.loads(grammar)
        for each in whole["grammars"]:
            if "json_schema" in each:
                each["json_schema"] = exact_schema(each["json_schema"])
            if "lark_grammar" in each:
                each["lark_grammar"] = _with_exact_schemas(str(each["lark_grammar"]))
    except SchemaProblem:
        raise
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # The engine rejects it.
        return grammar
    return json.dumps(whole)


def _with_exact_schemas(grammar: str) -> str:
    made, place = [], 0
    for found in _SCHEMA.finditer(grammar):
        # The engine rejects invalid JSON; a match may lie inside another schema.
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
            if found.start() >= place:
                made += [grammar[place : found.end()], json.dumps(exact_schema(schema))]
                place = end
    return "".join([*made, grammar[place:]])


def _check_copies(schema: Any) -> None:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not isinstance(each, dict):
            continue
        num = sum(len(each[key]) for key in _ALTERNATIVES if isinstance(each.get(key), list))
        beside = {key: value for key, value in each.items() if key not in _ALTERNATIVES} if num > 1 else {}
        if num * len(json.dumps(beside)) > _MOST_COPIED:
            message = f"json: {num} alternatives stand beside a schema of {len(json.dumps(beside))} characters"
            raise GrammarError("grammar_refused", f"{message}: that would be copied for each; make one of them smaller")


def _with_default(theirs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    says_spaces = not theirs.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern"))
    return theirs if says_spaces else options | theirs


def _unforced(grammar: str) -> str:
    """The engine's own JSON, with `_NO_FORCING`, whatever the grammar's own option."""
    try:
        is_lark = not grammar.lstrip().startswith("{")
        whole = {"grammars": [{"lark_grammar": grammar}]} if is_lark else json.loads(grammar)
        if whole["grammars"] == []:
            # The engine rejects it; with an added grammar it would allow only the empty text.
            return grammar
        whole["grammars"].append(_NO_FORCING)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # The engine rejects it.
        return grammar
    return json.dumps(whole)


def _as_lark(grammar: str) -> str:
    """EBNF and GBNF define with `::=`, which Lark's syntax does not have outside a literal."""
    if "::=" not in grammar:
        return grammar
    if grammar.count("::=") > _MOST_RULES:
        message = f"grammar has more than {_MOST_RULES} rules in EBNF: write it in Lark's syntax"
        raise GrammarError("grammar_refused", message)
    convert = load_llguidance().gbnf_to_lark.any_to_lark
    try:
        return str(convert(grammar))
    except Exception as error:  # its parser raises anything: RecursionError, IndexError, its own
        raise GrammarError("grammar_refused", f"grammar is no EBNF that can be read: {error}") from None
