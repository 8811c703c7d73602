"""Parses a chat body's `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.tokenizer.messages import MessageProblem

AUTO: Final = "auto"
NONE: Final = "none"
REQUIRED: Final = "required"

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAME_RULE: Final = "must be 1 to 64 letters, digits and any of _ . -"
_FORMATS: Final = ("text", "json_object", "json_schema")
_MAX_SHOWN: Final = 80

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`tools` are the body's, for the chat template. `choice` is auto, none, required or `named`; then `name` is the
    function. `is_parallel`: an answer may have several calls. `schema`: that of a JSON answer.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = AUTO
    name: str | None = None
    is_parallel: bool = True
    schema: Mapping[str, Any] | None = None

    @property
    def wants_calls(self) -> bool:
        """Whether the answer is searched for tool calls."""
        return bool(self.tools) and self.choice != NONE

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.choice == REQUIRED or self.name is not None

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """Functions that may be called: name -> schema of the arguments."""
        found = {}
        for tool in self.tools:
            function = tool["function"]
            if self.name in (None, function["name"]):
                parameters = function.get("parameters")
                found[function["name"]] = {**ANY_OBJECT, **parameters} if parameters else _NO_ARGUMENTS
        return found


def chat_request(body: Mapping[str, Any]) -> ChatRequest | None:
    """The request of a body; None if it has neither tools nor a schema. Raises MessageProblem."""
    tools = _tools(body.get("tools"))
    choice, name = _choice(body.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    is_parallel = body.get("parallel_tool_calls")
    if not isinstance(is_parallel, bool | None):
        raise MessageProblem("invalid_value", f"parallel_tool_calls={_short(is_parallel)} must be true or false")
    schema = response_schema(body.get("response_format"))
    if not tools and schema is None:
        return None
    # A named function is called once.
    return ChatRequest(tools, choice, name, is_parallel is not False and name is None, schema)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise MessageProblem("invalid_value", f"tools={_short(value)} must be a list of tools")
    names: list[str] = []
    for position, tool in enumerate(value):
        name = _function_name(f"tools[{position}]", tool)
        if name in names:
            raise MessageProblem(
                "invalid_value", f"tools[{position}].function.name={name!r} is an earlier tool's: names must differ"
            )
        names.append(name)
    return tuple(value)


def _function_name(where: str, tool: Any) -> str:
    """Name of a tool's function, after a check of the tool."""
    if not isinstance(tool, dict):
        raise MessageProblem("invalid_value", f"{where}={_short(tool)} must be an object with type and function")
    if tool.get("type") != "function":
        raise MessageProblem(
            "unsupported_value", f"{where}.type={_short(tool.get('type'))} is not supported: tools are functions here"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise MessageProblem("invalid_value", f"{where}.function={_short(function)} must be an object with a name")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MessageProblem("invalid_value", f"{where}.function.name={_short(name)} {_NAME_RULE}")
    if parameters is None:
        return name
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise MessageProblem(
            "invalid_value",
            f"{where}.function.parameters={_short(parameters)} must be the JSON Schema of an object "
            f'("type": "object"), or left out where there are none',
        )
    return name


def _choice(value: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """Kind of the choice and, for a named function, its name."""
    if value is None:
        return AUTO, None
    if isinstance(value, str) and value in (AUTO, NONE):
        return value, None
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            known = ", ".join(names) or "(none)"
            raise MessageProblem("invalid_value", f"tool_choice names {_short(name)}, which is none of tools: {known}")
        return "named", str(name)
    if value != REQUIRED:
        raise MessageProblem(
            "unsupported_value",
            f"tool_choice={_short(value)} is not supported: use 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}}',
        )
    if not names:
        raise MessageProblem("conflicting_keys", "tool_choice='required' needs tools: give some, or leave it out")
    return REQUIRED, None


def response_schema(value: Any) -> Mapping[str, Any] | None:
    """The answer's schema in `response_format`; None for text. Raises MessageProblem."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _FORMATS:
        raise MessageProblem(
            "unsupported_value", f"response_format={_short(value)} must be an object with type {', '.join(_FORMATS)}"
        )
    if kind != "json_schema":
        return None if kind == "text" else ANY_OBJECT
    named = value.get("json_schema")
    if not isinstance(named, dict):
        raise MessageProblem(
            "invalid_value", f"response_format.json_schema={_short(named)} must be an object with name and schema"
        )
    if not isinstance(named.get("name"), str) or not named["name"]:
        name = _short(named.get("name"))
        raise MessageProblem("invalid_value", f"response_format.json_schema.name={name} must be text that is not empty")
    if not isinstance(named.get("strict"), bool | None):
        strict = _short(named["strict"])
        raise MessageProblem("invalid_value", f"response_format.json_schema.strict={strict} must be true or false")
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise MessageProblem(
            "invalid_value",
            f"response_format.json_schema.schema={_short(schema)} must be a JSON Schema; for any object use "
            f'{{"type": "json_object"}}',
        )
    return schema


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
