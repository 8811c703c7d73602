"""Fields of a form that uploads audio, as the body of the same request in JSON; its file stays bytes."""

import json
from collections.abc import Sequence
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.frontends.openai.audio_request import FILE_KEYS, NUMBER_KEYS
from spmd_worker.frontends.serve.multipart import FormField
from spmd_worker.tokenizer.messages import InvalidRequestError

_LIST: Final = "[]"
"""Ends the name of a field that may come several times."""
_LIST_KEYS: Final = ("timestamp_granularities", "include")
_FLAGS: Final = {"true": True, "false": False}
_FLAG_KEYS: Final = ("stream", "stream_include_usage", "stream_continuous_usage_stats")


def body_of_form(fields: Sequence[FormField]) -> dict[str, Any]:
    """The body. Raises InvalidRequestError."""
    body: dict[str, Any] = {}
    for field in fields:
        name = field.name.removesuffix(_LIST)
        value = _value(name, field.value)
        if name in _LIST_KEYS:
            body.setdefault(name, []).append(value)
        elif name in body:
            raise InvalidRequestError(f"the form has {name[:100]!r} twice: send it once", "conflicting_keys")
        else:
            body[name] = value
    return body


def _value(name: str, value: str | bytes) -> Any:
    if isinstance(value, bytes):
        if name not in FILE_KEYS:
            message = f"the field {name[:100]!r} is a file, or not UTF-8: send audio as file, and text as UTF-8"
            raise InvalidRequestError(message)
        return value
    if name in _FLAG_KEYS:
        return _FLAGS.get(value.lower(), value)
    if name in NUMBER_KEYS and value:
        return _number(name, value)
    # An empty field is one that is left out.
    return value or None


def _number(name: str, value: str) -> int | float:
    try:
        number = json.loads(value)
    except (ValueError, RecursionError):
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidRequestError(f"{name}={shown(value)} must be a number")
    return number
