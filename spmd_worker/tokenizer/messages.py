"""Messages in the format of chat templates: contents as text or text parts, arguments of tool calls as objects."""

import json
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown

_TEXT_TYPES: Final = ("text", "input_text", "output_text")


class InvalidRequestError(ValueError):
    """A request that cannot run. `code` is that of its error row or response."""

    def __init__(self, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.code = code


def optional_flag(given: Mapping[str, Any], key: str, *, default: bool = False, prefix: str = "") -> bool:
    """The boolean of `key`, `default` where it is missing or null. Raises InvalidRequestError."""
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise InvalidRequestError(f"{prefix}{key}={shown(value)} must be true or false")
    return default if value is None else value


def checked_content(name: str, value: Any) -> str | list[dict[str, Any]]:
    """Text unchanged, and a list of text parts in the format of templates: objects of type `text`; an empty list
    becomes the empty text. Raises InvalidRequestError, naming the part, for anything but text: images, audio.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name}={shown(value)} must be a string or a list of text parts")
    return [_part(f"{name}[{index}]", part) for index, part in enumerate(value)] or ""


def with_parsed_arguments(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its tool calls' JSON arguments as objects, for templates. Raises InvalidRequestError."""
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
        raise InvalidRequestError(
            f"{name}.function.arguments={shown(arguments)} must be an object, or one as JSON"
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _part(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _TEXT_TYPES:
        raise InvalidRequestError(f"{name} has type {shown(kind)}: only text parts are supported", "unsupported_value")
    if not isinstance(value.get("text"), str):
        raise InvalidRequestError(f"{name}.text={shown(value.get('text'))} must be a string")
    return {**value, "type": "text"}
