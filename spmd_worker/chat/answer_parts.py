"""Parts of an answer's text, content and tool calls, and the code that the parsers of all formats share.

A text comes in pieces, or complete in one. A parser gets each piece once and returns the parts that have become
certain, which stay the same however the text goes on. It keeps its state and its undecided text, so that an answer's
cost is linear in its length, however it is cut. No text makes a parser raise: an invalid call is content, unchanged.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object, as the model wrote it."""

    name: str
    arguments: str


Part = str | ToolCall


class CallReader(Protocol):
    """Parser of one answer's tool calls."""

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        """The parts that have become certain with the next piece of the text; content may be cut anywhere."""


_MARGIN: Final = " \t\r\n"


def _reject(constant: str) -> None:
    raise ValueError(constant)


# Numbers stay text: they are not computed with, and may have many digits.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_reject)


def object_members(text: str, at: int = 0) -> tuple[dict[str, str], int] | None:
    """Members of the JSON object at `at` with the text of each value, and the object's end; None if it is invalid."""
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
    """The JSON object that is all of `text`, without surrounding spaces; one in a string too. None if it is invalid."""
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
    """The call written as an object with `name` and `arguments` (or `parameters`) at `at`, and its end."""
    found = object_members(text, at)
    if found is None:
        return None
    members, end = found
    name = _string(members.get("name", ""))
    default = "" if needs_arguments else "{}"
    arguments = object_text(members.get("arguments", members.get("parameters", default)))
    return None if not name or arguments is None else (ToolCall(name, arguments), end)


def after_margin(text: str, at: int) -> int:
    """Index of the first non-space from `at`."""
    while at < len(text) and text[at] in _MARGIN:
        at += 1
    return at


def num_held(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may be the beginning of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


class UpTo:
    """Buffers a text up to the first `marker`."""

    def __init__(self, marker: str) -> None:
        self._marker, self._num_kept = re.compile(re.escape(marker)), len(marker) - 1
        self._pieces: list[str] = []
        self._tail = ""

    @property
    def text(self) -> str:
        """All text read before the marker was found."""
        return "".join(self._pieces)

    def read(self, text: str) -> tuple[str, str] | None:
        """The text up to the end of the marker, and the text after it; None while there is none. Linear in the text."""
        window = self._tail + text
        self._pieces.append(text)
        found = self._marker.search(window)
        if found is None:
            self._tail = window[max(len(window) - self._num_kept, 0) :]
            return None
        read = self.text
        return read[: len(read) - len(window) + found.end()], window[found.end() :]


class _JsonMarkers:
    """Finds markers in JSON that comes in pieces, and distinguishes those in strings. `marker` matches `markers`. Each
    character is scanned once, except the few that may begin a marker, or an escape.
    """

    def __init__(self, marker: re.Pattern[str], markers: Iterable[str]) -> None:
        self._patterns = [re.compile(f"(?P<marker>{marker.pattern})|{others}") for others in _STATES]
        self._may_begin = (*markers, '\\"')
        self._window = ""
        self._state = _BETWEEN
        self.num_read = 0
        """Characters of the text in which all markers were found."""

    def read(self, text: str, *, is_end: bool) -> Iterator[tuple[str, int, int]]:
        """`inside` or `outside` a string, and a marker's range in the text; or `no json`, once, and the index that
        shows it: from there on nothing is a string.
        """
        window, start = self._window + text, self.num_read
        limit = len(window) - (0 if is_end else max(num_held(window, each) for each in self._may_begin))
        at = 0
        while (found := self._patterns[self._state].search(window, at)) is not None and found.start() < limit:
            at, kind = max(found.end(), found.start() + 1), found.lastgroup
            if kind == "marker":
                is_inside = self._state == _IN_STRING
                yield "inside" if is_inside else "outside", start + found.start(), start + found.end()
            elif kind == "quote":
                self._state = _BETWEEN if self._state == _IN_STRING else _IN_STRING
            elif kind == "illegal":
                self._state, at = _NO_JSON, found.start()
                yield "no json", start + at, start + at
        # The last match may be an escape that extends past the limit.
        self._window = window[max(at, limit) :]
        self.num_read = start + max(at, limit)


_BETWEEN, _IN_STRING, _NO_JSON = range(3)
_STATES: Final = (
    r'(?P<quote>")|(?P<illegal>[^ \t\r\n0-9A-Za-z{}\[\]:,.+-])',
    r'(?P<escape>\\["\\/bfnrtu])|(?P<quote>")|(?P<illegal>[\x00-\x1f\\])',
    r"(?!)",
)
"""Patterns per state, which find markers and state changes: between strings, in a string, and in invalid JSON."""


class CallText:
    """Buffers the JSON of a call up to the marker after it: the first outside its strings, or in invalid JSON the
    first. `marker` matches `markers`; `parse` returns the call of a complete text.
    """

    def __init__(
        self, marker: re.Pattern[str], markers: Iterable[str], parse: Callable[[str], ToolCall | None]
    ) -> None:
        self._found, self._parse = _JsonMarkers(marker, markers), parse
        self._pieces: list[str] = []
        self._first: tuple[int, int] | None = None
        """Range of the first marker, if that was in a string."""

    def read(self, text: str, *, is_end: bool) -> tuple[str, str, str, ToolCall | None] | None:
        """The text before the marker or the end, the marker, the text after it, and the call; None before that."""
        self._pieces.append(text)
        for kind, start, end in self._found.read(text, is_end=is_end):
            if kind == "outside":
                return self._split(start, end)
            if kind == "inside" and self._first is None:
                self._first = start, end
            if kind == "no json" and self._first is not None:
                return self._split(*self._first)
        if not is_end:
            return None
        end = self._found.num_read
        found = self._split(end, end)
        return found if found[3] is not None or self._first is None else self._split(*self._first)

    def _split(self, start: int, end: int) -> tuple[str, str, str, ToolCall | None]:
        text = "".join(self._pieces)
        return text[:start], text[start:end], text[end:], self._parse(text[:start])


class PassOnJson:
    """`PassOn` for JSON: a marker in one of its strings is text."""

    def __init__(self, marker: re.Pattern[str], *markers: str) -> None:
        self._found = _JsonMarkers(marker, markers)
        self._held = ""
        self._num_given = 0

    def read(self, text: str, *, is_end: bool = False) -> tuple[str, str | None]:
        window, given = self._held + text, self._num_given
        for kind, start, end in self._found.read(text, is_end=is_end):
            if kind == "outside":
                return window[: start - given], window[end - given :]
        self._num_given = self._found.num_read
        self._held = window[self._num_given - given :]
        return window[: self._num_given - given], None


class PassOn:
    """Passes a text on up to the first match of `marker`, and holds back a possible beginning of one of `markers`."""

    def __init__(self, marker: re.Pattern[str], *markers: str) -> None:
        self._marker, self._markers = marker, markers
        self._held = ""

    def read(self, text: str, *, is_end: bool = False) -> tuple[str, str | None]:
        """The certain text before a marker, and the text after it; None while there is none."""
        window = self._held + text
        found = self._marker.search(window)
        if found is not None:
            self._held = ""
            return window[: found.start()], window[found.end() :]
        held = 0 if is_end else max([num_held(window, marker) for marker in self._markers])
        self._held = window[len(window) - held :]
        return window[: len(window) - held], None


class Stripped:
    """Passes a text on without the spaces around it; `keeps_beginning`: with the leading ones."""

    def __init__(self, *, keeps_beginning: bool = False) -> None:
        self._has_begun = keeps_beginning
        self._spaces: list[str] = []

    @property
    def spaces(self) -> str:
        return "".join(self._spaces)

    def read(self, text: str) -> str:
        text = text if self._has_begun else text.lstrip()
        kept = text.rstrip()
        self._has_begun = self._has_begun or bool(kept)
        if not kept:
            self._spaces.append(text)
            return ""
        found = self.spaces + kept
        self._spaces = [text[len(kept) :]]
        return found


class Content:
    """Content between the calls of an answer, without the spaces around them. Without a call all of it, unchanged."""

    def __init__(self) -> None:
        self._piece = Stripped(keeps_beginning=True)
        self._has_text = self._is_behind_call = False

    def read(self, parts: Iterable[Part], *, is_end: bool) -> tuple[str, list[ToolCall]]:
        """Content and calls that have become certain. Spaces at the end are held back: a call may follow them."""
        found: list[str] = []
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, ToolCall):
                calls.append(part)
                self._piece, self._is_behind_call = Stripped(), True
            elif text := self._piece.read(part):
                # Content between two calls is a line of its own.
                found += ["\n", text] if self._is_behind_call and self._has_text else [text]
                self._has_text, self._is_behind_call = True, False
        if is_end:
            found.append(self._piece.spaces)
        return "".join(found), calls


def _string(value: str) -> str:
    """The value of a JSON string; "" for another value."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
