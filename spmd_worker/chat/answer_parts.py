"""The parts of an answer's text, content and tool calls, and what the parsers of all formats share.

A parser is a function of the text alone. Of a text that may go on (`is_whole` false) it returns the parts that stay as
they are however it goes on: an answer that is streamed is its parts so far. No text makes a parser raise: what is no
call is content, as it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object, in the model's own words."""

    name: str
    arguments: str


Part = str | ToolCall
Parser = Callable[[str, bool], list[Part]]

_MARGIN: Final = " \t\r\n"


def _refuse(constant: str) -> None:
    raise ValueError(constant)


# Numbers stay text: nothing is computed of them, and their digits may be many.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def object_members(text: str, at: int = 0) -> tuple[dict[str, str], int] | None:
    """The members of the JSON object that begins at `at`, each with its value's own text, and where it ends. None where
    there is none.
    """
    try:
        if text[at : at + 1] != "{":
            return None
        members: dict[str, str] = {}
        at = after_margin(text, at + 1)
        while text[at : at + 1] != "}":
            name, at = _DECODER.raw_decode(text, at)
            at = after_margin(text, at)
            if not isinstance(name, str) or text[at : at + 1] != ":":
                return None
            start = after_margin(text, at + 1)
            _, at = _DECODER.raw_decode(text, start)
            members[name] = text[start:at]
            at = after_margin(text, at)
            if text[at : at + 1] == ",":
                at = after_margin(text, at + 1)
                if text[at : at + 1] == "}":
                    return None
            elif text[at : at + 1] != "}":
                return None
        return members, at + 1
    except (ValueError, RecursionError):
        return None


def object_text(text: str) -> str | None:
    """The JSON object that `text` is, without what is around it; one in a string too. None where it is none."""
    stripped = text.strip(_MARGIN)
    if stripped.startswith('"'):
        try:
            inner = json.loads(stripped)
        except (ValueError, RecursionError):
            return None
        stripped = inner.strip(_MARGIN) if isinstance(inner, str) else ""
    found = object_members(stripped)
    return stripped if found is not None and found[1] == len(stripped) else None


def call_at(text: str, at: int = 0, *, needs_arguments: bool = False) -> tuple[ToolCall, int] | None:
    """The call that is written as an object with `name` and `arguments` (or `parameters`) at `at`, and where it ends.

    Without either of the two the call has no arguments, or is none (`needs_arguments`).
    """
    found = object_members(text, at)
    if found is None:
        return None
    members, end = found
    name = _string(members.get("name", ""))
    default = "" if needs_arguments else "{}"
    arguments = object_text(members.get("arguments", members.get("parameters", default)))
    return None if not name or arguments is None else (ToolCall(name, arguments), end)


def after_margin(text: str, at: int) -> int:
    """The first place from `at` where there is no space."""
    while at < len(text) and text[at] in _MARGIN:
        at += 1
    return at


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def content_of(parts: Sequence[Part], is_whole: bool) -> str:
    """What is beside the calls, without the spaces around them. Without a call all of it, as it is.

    Of a text that goes on spaces at the end are left out: a call may follow them.
    """
    pieces: list[str] = [""]
    for part in parts:
        if isinstance(part, ToolCall):
            pieces[-1] = pieces[-1].rstrip()
            pieces.append("")
        elif len(pieces) > 1 and not pieces[-1]:
            pieces[-1] = part.lstrip()
        else:
            pieces[-1] += part
    text = "\n".join([piece for piece in pieces if piece])
    return text if is_whole else text.rstrip()


def _string(value: str) -> str:
    """The text that a JSON string holds; "" for another value."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
