"""Messages in the format of chat templates: contents as text or text parts, arguments of tool calls as objects."""

import json
from collections.abc import Mapping
from typing import Any, Final

_TEXT_TYPES: Final = ("text", "input_text", "output_text")
_MAX_SHOWN: Final = 80


class MessageProblem(ValueError):
    """Fault of a message: for people, and as the code of an error row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def checked_content(name: str, value: Any) -> str | list[dict[str, Any]]:
    """Text unchanged, and a list of text parts in the format of templates: objects of type `text`; an empty list
    becomes the empty text. Raises MessageProblem, naming the part, for anything but text: images, audio.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise MessageProblem("invalid_value", f"{name}={_short(value)} must be a string or a list of text parts")
    return [_part(f"{name}[{position}]", part) for position, part in enumerate(value)] or ""


def with_parsed_arguments(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its tool calls as objects: in OpenAI's format they are JSON, which a template
    would encode once more. Raises MessageProblem for invalid JSON.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_parsed_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]}


def _parsed_call(name: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise MessageProblem(
            "invalid_value", f"{name}.function.arguments={_short(arguments)} must be an object, or one as JSON"
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _part(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _TEXT_TYPES:
        raise MessageProblem("unsupported_value", f"{name} has type {_short(kind)}: only text parts are supported")
    if not isinstance(value.get("text"), str):
        raise MessageProblem("invalid_value", f"{name}.text={_short(value.get('text'))} must be a string")
    return {**value, "type": "text"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
