"""Answers to schemas that llguidance reads otherwise than jsonschema: valid, or the form is refused in words.

Walks choose among what the masks allow, as a model with random logits does; instances that are asked for by name must
not be allowed where jsonschema calls them invalid.
"""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from constrained_rows import EOS, VOCAB_SIZE, open_model, write_model
from run_folder import made_once

from spmd_worker import PromptsRefusedError, SamplingParams, StructuredOutputsParams
from spmd_worker.chat.chat_format import ChatFormat
from spmd_worker.frontends.openai.row import EncodedRow, Row, RowError
from spmd_worker.frontends.openai.row_encoding import RowContext, resolve
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.replica.grammar import llguidance_input as forms
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.grammar.row_grammar import BITS
from spmd_worker.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.finding(number="A7")
N = 1234567890123456789
TEXT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
CHARACTERS = [json.dumps(each, ensure_ascii=False) for each in "aAzé٣²ªⅧ一_ -[]&~:1\u00a0\u2028\u0085\u3000\ufeff😀ſK"]
CHARACTERS += ['"\\u001c"', '"\\u001f"', '"\\n"', '"ab"', '"aa"', '"aaa"', '"a]"', '""']


@cache
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.open(made_once("constrained", write_model))
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, (EOS,))


@cache
def texts() -> Tokenizer:
    return Tokenizer.open(made_once("constrained", write_model))


def form_of(schema: Any) -> StructuredOutputsParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return StructuredOutputsParams(json=text, disable_any_whitespace=True)


def is_valid(schema: Any, text: str) -> bool:
    schema = json.loads(schema) if isinstance(schema, str) else schema
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


def walked(form: StructuredOutputsParams, chance: random.Random, most: int = 120) -> str | None:
    """One answer; None where it has no end by then. Quotes, brackets and the end are likelier than others."""
    state, bits, ids = compiler().start(form), compiler().new_bits(1)[0], []
    for _ in range(most):
        state.fill(bits)
        assert not state.problem, state.problem
        words = bits.view(np.uint32)
        allowed = [each for each in range(VOCAB_SIZE) if words[each // BITS] >> np.uint32(each % BITS) & 1]
        weights = [8.0 if each == EOS else 3.0 if texts().token_text(each)[-1:] in '"]}' else 1.0 for each in allowed]
        (token,) = chance.choices(allowed, weights)
        if token == EOS:
            return texts().decode(ids, skip_special_tokens=False)
        ids.append(token)
        state.advance(ids)
    return None


def allows(form: StructuredOutputsParams, text: str) -> bool:
    state, bits = compiler().start(form), compiler().new_bits(1)[0]
    state.advance(texts().encode(text, add_special_tokens=False))
    state.fill(bits)
    return not state.problem and bool(bits[0] & (1 << EOS))


def wrong(schema: Any, instances: list[str], num_walks: int) -> list[str]:
    form = form_of(schema)
    chance = random.Random(str(schema))
    found = [walked(form, chance) for _ in range(num_walks)]
    answers = [each for each in found if each is not None]
    assert answers, "some walks end"
    answers += [each for each in instances if allows(form, each)]
    return [each for each in answers if not is_valid(schema, each)]


def around(*numbers: int) -> list[str]:
    return [str(number + step) for number in numbers for step in (-1, 0, 1)]


def pattern(source: str) -> dict[str, Any]:
    return {**TEXT, "pattern": source}


def keyed(source: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {source: DIGIT}, **others}


ENFORCED: dict[str, tuple[Any, list[str]]] = {
    "2**53": ({"enum": [2**53, -(2**53)]}, around(2**53)),
    "bounds beyond": ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9}, around(2**53, 2**53 + 9)),
    "64 bits": ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, around(2**63 - 1, 0)),
    "exclusive": (
        {"type": ["integer", "null"], "exclusiveMinimum": N, "maximum": N + 999},
        ["null", *around(N, N + 999)],
    ),
    "decimals": ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.09", "0.1", "0.3", "0.30000000000000004"]),
    "above 0": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "-0", "0.5", "0.25"]),
    "below 0": ({"exclusiveMaximum": 0, "minimum": -0.5, "type": "number"}, ["0", "-0", "-0.0", "-0.5", "-0.25"]),
    "above 7": (
        {"allOf": [{"exclusiveMinimum": 7}, {"exclusiveMaximum": 7.5}], "type": "number"},
        ["7", "7.0", "7.25", "7.5"],
    ),
    "below -7": ({"type": "number", "minimum": -7.5, "exclusiveMaximum": -7}, ["-7", "-7.0", "-7.25", "-7.5"]),
    "above 0 in either": (
        {"exclusiveMinimum": 0, "type": ["integer", "number"], "maximum": 2, "multipleOf": 0.5},
        ["0", "0.5", "1", "2", "2.5"],
    ),
    "halves": ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3}, ["0.3", "1.5", "2"]),
    "whole decimals": ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, around(1, 4)),
    "flags of draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", **DIGIT, "exclusiveMinimum": True},
        around(0, 9),
    ),
    "equal numbers": ('{"enum": [1, 1.0, 2.5, true, 0, false, "1"]}', ["1", "1.0", "true", "0", "-0", "2.50"]),
    "emoji": ({"type": "string", "minLength": 2, "maxLength": 2}, ['"😀😀"', '"😀"', '"\\ud83d\\ude00"']),
    "length and pattern": ({**TEXT, "pattern": "a", "minLength": 3}, ['"a"', '"bab"', '"aaaaaaa"']),
    "no space": (pattern(r"^\S$"), CHARACTERS),
    "no digit": (pattern(r"^\D$"), CHARACTERS),
    "no letter": (pattern(r"^\W$"), CHARACTERS),
    "class of none": (pattern(r"^[^\d]$"), CHARACTERS),
    "class of no letter": (pattern(r"^[^\w-]$"), CHARACTERS),
    "class of no space": (pattern(r"^[^\s]$"), CHARACTERS),
    "class with negations": (pattern(r"^[\W_]$"), CHARACTERS),
    "lazy": (pattern(r"^(?:a|b)+?c{1,2}$"), ['"ac"', '"c"']),
    "unanchored": (pattern(r"\d"), ['"x1x"', '"x"', '"٣"']),
    "end": (pattern("^a$"), ['"a"', '"a\\n"']),
    "leap years": (
        {"type": "string", "format": "date"},
        [f'"{year}-{day}"' for year in ("0000", "0004", "1900", "2000", "2023", "2024") for day in ("02-29", "01-31")],
    ),
    "date or null": ({"type": ["string", "null"], "format": "date"}, ["null", '"2023-02-29"', '"2023-02-28"']),
    "names of patterns": (keyed("^a$", additionalProperties=TEXT), ['{"a\\n":"x"}', '{"a\\n":1}', '{"a":"x"}']),
    "digits of names": (keyed(r"^\d$", additionalProperties=TEXT), ['{"٣":"x"}', '{"٣":1}', '{"1":"x"}']),
    "any names": (keyed("^.$", additionalProperties=TEXT), ['{"\u2028":"x"}', '{"x":"x"}', '{"xx":"x"}']),
    "closed names": (keyed(r"^\w$", additionalProperties=False, maxProperties=2), ['{"é":1}', '{"a":1}']),
    "escaped names": (
        {"type": "object", "properties": {"a": DIGIT, "é": DIGIT}, "additionalProperties": TEXT},
        ['{"\\u0061":"x"}', '{"\\u00e9":"x"}', '{"b":"x"}'],
    ),
    "control characters": ({"enum": ["a\u0000b", "\u2028", "e\u0301", '"\\/']}, ['"é"', '"e\u0301"']),
    "words as names": (
        {"type": "object", "properties": {"const": DIGIT, "format": {"enum": ["date"]}}, "required": ["const"]}
        | {"additionalProperties": False},
        ['{"const":1}', '{"const":"x"}'],
    ),
    "defaults": ({**DIGIT, "default": N, "examples": [N]}, around(9)),
    "overlap": ({"anyOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, around(1, 3)),
    "tuple": ({"type": "array", "prefixItems": [DIGIT], "items": False}, ["[]", "[1]", "[1,2]"]),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_answers_are_valid_where_readers_differ(name: str) -> None:
    schema, instances = ENFORCED[name]
    assert wrong(schema, instances, 3) == []
    assert any(allows(form_of(schema), each) for each in instances), "some instance is allowed"


@pytest.mark.stress
@pytest.mark.parametrize("name", ENFORCED)
def test_many_answers_are_valid_where_readers_differ(name: str) -> None:
    schema, instances = ENFORCED[name]
    assert wrong(schema, instances, 400) == []


def test_schema_check_detects_unchanged_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, of each kind of change."""
    compiler.cache_clear()
    monkeypatch.setattr(forms, "exact_schema", lambda schema: schema)
    names = ("bounds beyond", "no letter", "class of no space", "leap years", "names of patterns", "escaped names")
    try:
        assert [name for name in names if not wrong(*ENFORCED[name], 6)] == []
        assert wrong({"const": N}, [], 1) == ["1234567890123456768"]
    finally:
        compiler.cache_clear()


REFUSED: dict[str, tuple[Any, str]] = {
    "const": ({"const": N}, rf"const={N} is not exact where numbers are 64-bit floats .*: write it as text"),
    "negative": ({"const": -N}, "is not exact"),
    "enum": ({"enum": ["a", {"b": [N]}]}, f"enum={N} is not exact"),
    "below": ({"properties": {"a": {"anyOf": [{"const": 2**64}, {"type": "null"}]}}}, "is not exact"),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"const": N}}}, "is not exact"),
    "float": ('{"const": 1e30}', "is not exact"),
    "digits": ({"const": 1e15 + 0.5}, "is not exact"),
    "small": ({"enum": [5e-324]}, "is not exact"),
    "number": ({"type": "number", "minimum": N, "maximum": N + 3}, f"minimum={N} is not exact"),
    "narrow": ({"type": "integer", "minimum": N, "maximum": N + 3}, "minimum .* is greater than maximum"),
    "long decimals": ({"type": "number", "maximum": 0.19999999999999998}, "is not exact"),
    "unsigned": ({"type": "integer", "maximum": 2**64 - 1}, "is not exact"),
    "lowest": ({"type": "integer", "minimum": -(2**64), "maximum": -(2**63)}, "is not exact"),
    "parts": ({"type": "number", "multipleOf": 0.1}, "multipleOf=0.1 is not a multiple of"),
    "large parts": ({"type": "integer", "multipleOf": N}, "multipleOf="),
    "names twice": ({"type": "object", "additionalProperties": DIGIT, "minProperties": 2}, "one name twice"),
    "possessive": (pattern("^a++a$"), r"\+ after another quantifier"),
    "twice": (pattern("^a{2}{2}$"), "after another quantifier"),
    "class in class": (pattern("^[a[b]c]$"), r"has \[b in a character class"),
    "posix": (pattern("^[[:alpha:]]$"), "in a character class"),
    "intersection": (pattern("^[^a&&b]$"), "&& in a character class"),
    "open names": (keyed(r"^\w$"), r"\\w means more characters"),
    "itself": ({"$ref": "#"}, r"\$ref refers .*itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_schema_is_rejected_with_reason(name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(GrammarError, match=words) as refused:
        compiler().check(form_of(schema))
    assert refused.value.code == "grammar_refused"


@pytest.mark.finding(number="D17")
@pytest.mark.parametrize("grammar", ['start: start "a"', "start: a\na: b\nb: a"])
def test_endless_grammar_is_rejected_with_reason(grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"^grammar: .*refers .*itself") as refused:
        compiler().check(StructuredOutputsParams(grammar=grammar))
    assert "NoExtension" not in str(refused.value)
    with pytest.raises(GrammarError, match=r"^json: .*refers .*itself"):
        compiler().check(StructuredOutputsParams(json={"$ref": "#"}))


@pytest.mark.parametrize(
    "grammar",
    ['start: %json {"const": 1234567890123456789}', '{"grammars": [{"json_schema": {"const": 1234567890123456789}}]}'],
)
def test_inexact_schema_inside_grammar_is_rejected(grammar: str) -> None:
    with pytest.raises(GrammarError, match="is not exact"):
        compiler().check(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_inexact_tool_parameters_are_rejected_when_call_required(choice: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"const": N}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice, "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    row = parse_row(0, json.dumps(line).encode(), SamplingParams())
    assert isinstance(row, Row), row
    with open_model(made_once("constrained", write_model)) as llm:
        engine = llm.llm_engine
        hermes = ChatFormat("hermes", "none", True)
        resolved = resolve(row, RowContext(engine.tokenizer, engine.limits, chat_format=hermes))
    if choice == "required":
        assert isinstance(resolved, RowError)
        assert (resolved.code, f"const={N} is not exact" in resolved.message) == ("grammar_refused", True)
    else:
        # Nothing holds the answer to a call.
        assert isinstance(resolved, EncodedRow)


def test_too_deeply_nested_schema_is_rejected() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(900):
        deep = {"items": deep}
    with pytest.raises(GrammarError):
        compiler().check(StructuredOutputsParams(grammar=f"start: %json {json.dumps(deep)}"))


def test_lone_surrogate_in_schema_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^json contains .*surrogate"):
        StructuredOutputsParams(json='{"const": "\\ud83d"}')


def test_rows_with_inexact_numbers_are_error_rows() -> None:
    """Plain ones and response formats."""
    with open_model(made_once("constrained", write_model)) as llm:
        engine = llm.llm_engine
        parameters = {"type": "object", "properties": {"a": {"const": N}}, "required": ["a"]}
        message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        named = {"name": "n", "schema": parameters}
        rows = [
            {"prompt": "x", "structured_outputs": {"json": parameters}},
            {**message, "response_format": {"type": "json_schema", "json_schema": named}},
        ]
        for given in rows:
            line = given if "prompt" in given else {"custom_id": "a", "method": "POST", "body": given}
            line |= {} if "prompt" in given else {"url": "/v1/chat/completions"}
            row = parse_row(0, json.dumps(line).encode(), SamplingParams())
            assert isinstance(row, Row), row
            error = resolve(row, RowContext(engine.tokenizer, engine.limits))
            assert isinstance(error, RowError), error
            assert (error.code, f"const={N} is not exact" in error.message) == ("grammar_refused", True)
        params = SamplingParams(max_tokens=4, structured_outputs=form_of({"const": N}))
        with pytest.raises(PromptsRefusedError, match="is not exact"):
            llm.generate("x", params, use_tqdm=False)
