"""Messages in the format of chat templates: contents as text or parts, arguments of tool calls as objects."""

import json
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown

_TEXT_TYPES: Final = ("text", "input_text", "output_text")
_IMAGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("image", "url", "path"),
    **dict.fromkeys(("image_url", "input_image"), ("image_url",)),
    "image_pil": ("image_pil",),
}
"""Type of an image part -> the keys that may hold the image: OpenAI's, Qwen's, transformers' and vLLM's notations."""
IMAGE_PART: Final[Mapping[str, Any]] = {"type": "image"}
"""An image part in the format of templates."""


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


def checked_content(name: str, value: Any, images: list[Any]) -> str | list[dict[str, Any]]:
    """Text unchanged, and a list of parts in the format of templates: objects of type `text` or `image`; an empty list
    becomes the empty text. `images` gets the image of each image part, None for a part without one. Raises
    InvalidRequestError, naming the part, for anything else: audio, videos.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name}={shown(value)} must be a string or a list of parts, text and images")
    return [_part(f"{name}[{index}]", part, images) for index, part in enumerate(value)] or ""


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


def _part(name: str, value: Any, images: list[Any]) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind in _IMAGE_KEYS:
        images.append(_image(name, value, kind))
        return dict(IMAGE_PART)
    if kind == "refusal" and isinstance(value.get("refusal"), str):
        # An answer of OpenAI's models that is sent back.
        return {"type": "text", "text": value["refusal"]}
    if kind not in _TEXT_TYPES:
        raise InvalidRequestError(
            f"{name} has type {shown(kind)}: only text and images are supported", "unsupported_value"
        )
    if not isinstance(value.get("text"), str):
        raise InvalidRequestError(f"{name}.text={shown(value.get('text'))} must be a string")
    return {**value, "type": "text"}


def _image(name: str, part: Mapping[str, Any], kind: str) -> Any:
    """The image of a part: a URL, a path, or what a caller in the same process has; None for `{"type": "image"}`."""
    keys = [key for key in _IMAGE_KEYS[kind] if part.get(key) is not None]
    if not keys and kind == "image":
        return None
    if len(keys) != 1:
        raise InvalidRequestError(f"{name} needs {' or '.join(_IMAGE_KEYS[kind])}, and nothing else, for its image")
    found = part[keys[0]]
    if keys[0] == "image_url" and isinstance(found, Mapping):
        # Its `detail` is for OpenAI's models: the size of an image is that of the model's own rule.
        found = found.get("url")
    if found is None or isinstance(found, bool | int | float | list | tuple | Mapping):
        raise InvalidRequestError(f"{name}.{keys[0]}={shown(found)} must be a data URL or a path")
    return found
