"""Tools, tool_choice and response_format of chat bodies, and their errors."""

from typing import Any

import pytest
from chat_models import TOOLS

from spmd_worker.chat.chat_request import ChatRequest, chat_request
from spmd_worker.tokenizer.messages import InvalidRequestError

SCHEMA = {"type": "object", "properties": {}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def json_schema(**given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def test_chat_request_reads_tools_and_schema():
    tools = tuple(TOOLS)
    assert chat_request({"tools": TOOLS}) == ChatRequest(tools)
    assert chat_request({"tools": TOOLS, "tool_choice": "none"}) == ChatRequest(tools, "none")
    assert chat_request({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}) == ChatRequest(
        tools, "required", None, False
    )
    assert chat_request({"tools": TOOLS, "tool_choice": named("stop")}) == ChatRequest(tools, "named", "stop", False)
    for strict in (True, False, None):
        asked = json_schema(name="a", schema=SCHEMA, strict=strict)
        assert chat_request(asked) == ChatRequest(schema=SCHEMA)
    assert chat_request({"response_format": {"type": "json_object"}}) == ChatRequest(schema={"type": "object"})


def test_function_without_parameters_accepts_no_arguments():
    request = chat_request({"tools": TOOLS})
    assert request is not None
    assert request.functions["stop"] == {"type": "object", "properties": {}, "additionalProperties": False}
    request = chat_request(tool(name="f", parameters={"properties": {"a": {}}}))
    assert request is not None
    assert request.functions == {"f": {"type": "object", "properties": {"a": {}}}}


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"response_format": {"type": "text"}}),
        {"tool_choice": "none", "parallel_tool_calls": True},
    ],
)
def test_empty_chat_request_is_none(body: dict):
    assert chat_request(body) is None


WRONG = [
    ({"tools": {}}, "tools={} must be a list of tools"),
    ({"tools": [3]}, "tools[0]=3 must be an object with type and function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type='web_search' is not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function=None must be an object with a name"),
    (tool(), "tools[0].function.name=None must be 1 to 64 letters, digits and any of _ . -"),
    (tool(name="a b"), "tools[0].function.name='a b' must be 1 to 64"),
    (tool(name="a" * 65), "must be 1 to 64"),
    (tool(name="a", parameters=[]), "tools[0].function.parameters=[] must be the JSON Schema of an object"),
    (tool(name="a", parameters={"type": "string"}), "must be the JSON Schema of an object"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name='add' is a duplicate"),
    ({"tools": TOOLS, "tool_choice": named("sub")}, "tool_choice names 'sub', which is not in tools: add, stop"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice names None, which is not in tools"),
    ({"tool_choice": named("add")}, "tool_choice names 'add', which is not in tools: (none)"),
    ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice='any' is not supported: use 'auto', 'none', 'required' or"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "is not supported: use 'auto'"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls=1 must be true or false"),
    ({"response_format": "json"}, "response_format='json' must be an object with type text, json_object, json_schema"),
    ({"response_format": {"type": "grammar"}}, "must be an object with type text, json_object, json_schema"),
    ({"response_format": {"type": "json_schema"}}, "json_schema=None must be an object with name and schema"),
    (json_schema(schema=SCHEMA), "response_format.json_schema.name=None"),
    (json_schema(name="a"), "response_format.json_schema.schema=None must be a JSON Schema; for any object use"),
    (json_schema(name="a", schema=True), "json_schema.schema=True must be a JSON Schema"),
    (json_schema(name="a", schema=SCHEMA, strict=1), "json_schema.strict=1 must be true or false"),
]


@pytest.mark.parametrize(("body", "words"), WRONG)
def test_chat_request_error_names_key_value_and_fix(body: dict, words: str):
    with pytest.raises(InvalidRequestError) as problem:
        chat_request(body)
    assert words in str(problem.value)
