"""A form as llguidance reads it: a JSON Schema with options, or a grammar in Lark's syntax.

Made from the record alone, so every rank makes the same text of it. llguidance itself is needed for grammars in EBNF.
"""

import json
from typing import Any, Final

from spmd_worker.config.extras import refuse_without
from spmd_worker.sequence.structured_outputs import StructuredOutputsParams

DEFAULT_WHITESPACE: Final = r"[ \t\n\r]{1,32}"
"""Between the parts of a JSON answer. Without a bound a model that likes spaces would never end."""


class GrammarError(ValueError):
    """A form in which no answer can be given: `code` is an error row's, the message is in the engine's words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def load_llguidance() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    try:
        import llguidance
        import llguidance.gbnf_to_lark
    except ImportError as error:
        refuse_without("llguidance", "structured", "structured_outputs", error)
    return llguidance


def engine_grammar(form: StructuredOutputsParams) -> str:
    """What `llguidance.LLMatcher` takes. Raises GrammarError for an EBNF grammar that cannot be read."""
    if form.json is not None or form.json_object:
        return _of_schema(form)
    if form.regex is not None:
        return str(load_llguidance().LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        # One terminal, in upper case: a rule of so many alternatives would be more than a row of the parser holds.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, form.choice))
    assert form.grammar is not None, form
    return _as_lark(form.grammar)


def _of_schema(form: StructuredOutputsParams) -> str:
    schema = json.loads(form.json) if form.json is not None else {"type": "object"}
    if form.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": form.whitespace_pattern or DEFAULT_WHITESPACE}
    # What the schema itself says to the engine comes before defaults, and after what the row says.
    own = schema.get("x-guidance")
    is_said = form.disable_any_whitespace or form.whitespace_pattern is not None
    theirs = own if isinstance(own, dict) else {}
    schema["x-guidance"] = theirs | options if is_said or not theirs else theirs
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _as_lark(grammar: str) -> str:
    """EBNF and GBNF define with `::=`, which Lark's syntax does not have outside a literal."""
    if "::=" not in grammar:
        return grammar
    convert = load_llguidance().gbnf_to_lark.any_to_lark
    try:
        return str(convert(grammar))
    except Exception as error:  # of a parser that raises what comes: RecursionError, IndexError, its own
        raise GrammarError("grammar_refused", f"grammar is no EBNF that can be read: {error}") from None
