"""Decodes one line of JSON strictly: what two readers could understand differently is refused.

Knows JSON. Knows nothing about rows.
"""

import json
from typing import Any


class StrictJsonError(ValueError):
    """The line is not JSON as a row may have it. `code` is the error code of the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def decode_object(line: bytes, max_nesting: int) -> dict[str, Any]:
    """The JSON object on a line, of at most `max_nesting` levels.

    Raises StrictJsonError for invalid UTF-8, anything but one JSON object, duplicate keys, NaN and Infinity, numbers of
    thousands of digits, and what is nested deeper.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJsonError("invalid_utf8", f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    too_deep = StrictJsonError("nested_too_deeply", f"the row is nested more than {max_nesting} levels deep")
    try:
        value = _decode(text)
    except RecursionError:
        raise too_deep from None
    if (line.count(b"[") + line.count(b"{")) > max_nesting and _is_deeper_than(value, max_nesting):
        raise too_deep
    if not isinstance(value, dict):
        raise StrictJsonError("not_an_object", f"a row must be a JSON object, not {_kind(value)}")
    return value


def _decode(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise StrictJsonError("invalid_json", f"the line is not JSON: {error.msg} at character {error.pos}") from None
    except StrictJsonError:
        raise
    except ValueError:
        # Python refuses to convert whole numbers of more than 4,300 digits.
        raise StrictJsonError("invalid_json", "the line holds a whole number of thousands of digits") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise StrictJsonError("invalid_json", f"the key {_first_duplicate(pairs)[:100]!r} appears twice in one object")
    return value


def _first_duplicate(pairs: list[tuple[str, Any]]) -> str:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("no key appears twice")


def _refuse_constant(name: str) -> Any:
    raise StrictJsonError("invalid_json", f"{name} is not a JSON number")


def _is_deeper_than(value: Any, limit: int) -> bool:
    """Level by level, without recursion: the value may be as deep as the decoder allowed."""
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return True


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
