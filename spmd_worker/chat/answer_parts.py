"""The parts of an answer's text, content and tool calls, and what the readers of all formats share.

A text comes in pieces, or whole in one. A reader is given each piece once and returns the parts that have become
certain, which stay as they are however the text goes on: what it keeps is where it is, and what it has not decided, so
that a long answer costs what its characters cost, however it is cut. No text makes a reader raise: what is no call is
content, as it is.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object, in the model's own words."""

    name: str
    arguments: str


Part = str | ToolCall


class CallReader(Protocol):
    """Of one answer."""

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        """The parts that have become certain with the next piece of the text; content may be cut anywhere. `is_end`: it
        is the last.
        """


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


class UpTo:
    """Keeps a text up to the first of a marker: a match of `marker`, which `most` characters at most decide."""

    def __init__(self, marker: re.Pattern[str], most: int) -> None:
        self._marker, self._num_kept = marker, most - 1
        self._pieces: list[str] = []
        self._tail = ""

    @property
    def text(self) -> str:
        """All that was read, while no marker was."""
        return "".join(self._pieces)

    def read(self, text: str) -> tuple[str, str, str] | None:
        """What is before the marker, the marker, and what is behind it; None while there is none. Each character is
        looked at once, but for the few that may begin a marker.
        """
        window = self._tail + text
        self._pieces.append(text)
        found = self._marker.search(window)
        if found is None:
            self._tail = window[max(len(window) - self._num_kept, 0) :]
            return None
        whole = self.text
        before = len(whole) - len(window)
        return whole[: before + found.start()], found[0], whole[before + found.end() :]


class _JsonMarkers:
    """Finds markers in JSON that comes in pieces, and tells those in strings from others. `marker` matches `markers`.
    Each character is looked at once, but for the few that may begin a marker, or an escape.
    """

    def __init__(self, marker: re.Pattern[str], markers: Iterable[str]) -> None:
        self._patterns = [re.compile(f"(?P<marker>{marker.pattern})|{others}") for others in _PLACES]
        self._may_begin = (*markers, '\\"')
        self._window = ""
        self._place = _BETWEEN
        self.num_read = 0
        """Characters of the text in which all markers were found."""

    def read(self, text: str, *, is_end: bool) -> Iterator[tuple[str, int, int]]:
        """`inside` or `outside` a string, and where in the text a marker is; or `no json`, once, and where that shows:
        from there on strings are none.
        """
        window, start = self._window + text, self.num_read
        limit = len(window) - (0 if is_end else max(num_held(window, each) for each in self._may_begin))
        at = 0
        while (found := self._patterns[self._place].search(window, at)) is not None and found.start() < limit:
            at, kind = max(found.end(), found.start() + 1), found.lastgroup
            if kind == "marker":
                is_inside = self._place == _IN_STRING
                yield "inside" if is_inside else "outside", start + found.start(), start + found.end()
            elif kind == "quote":
                self._place = _BETWEEN if self._place == _IN_STRING else _IN_STRING
            elif kind == "illegal":
                self._place, at = _NO_JSON, found.start()
                yield "no json", start + at, start + at
        # The last match may be an escape that goes beyond the limit.
        self._window = window[max(at, limit) :]
        self.num_read = start + max(at, limit)


_BETWEEN, _IN_STRING, _NO_JSON = range(3)
_PLACES: Final = (
    r'(?P<quote>")|(?P<illegal>[^ \t\r\n0-9A-Za-z{}\[\]:,.+-])',
    r'(?P<escape>\\["\\/bfnrtu])|(?P<quote>")|(?P<illegal>[\x00-\x1f\\])',
    r"(?!)",
)
"""Beside markers, what changes the place, by the place: between strings, in one, and where the text is no JSON."""


class CallText:
    """Keeps the JSON of a call up to the marker behind it: the first that is in none of its strings, or the first of
    all where the text shows before that it is no JSON. `marker` matches `markers`; `parse` gives the call that a whole
    text is.
    """

    def __init__(
        self, marker: re.Pattern[str], markers: Iterable[str], parse: Callable[[str], ToolCall | None]
    ) -> None:
        self._found, self._parse = _JsonMarkers(marker, markers), parse
        self._pieces: list[str] = []
        self._first: tuple[int, int] | None = None
        """Where the first marker is, if that was in a string."""

    def read(self, text: str, *, is_end: bool) -> tuple[str, str, str, ToolCall | None] | None:
        """What is before the marker, the marker, what is behind it, and the call; None while there is no marker. The
        end of the text may stand for it.
        """
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
        whole = "".join(self._pieces)
        return whole[:start], whole[start:end], whole[end:], self._parse(whole[:start])


class PassOnJson:
    """As `PassOn`, of JSON: a marker in one of its strings is text."""

    def __init__(self, marker: re.Pattern[str], *markers: str) -> None:
        self._found = _JsonMarkers(marker, markers)
        self._held = ""
        self._num_given = 0

    def read(self, text: str, *, is_end: bool = False) -> tuple[str, str | None]:
        """See `PassOn.read`."""
        window, given = self._held + text, self._num_given
        for kind, start, end in self._found.read(text, is_end=is_end):
            if kind == "outside":
                return window[: start - given], window[end - given :]
        self._num_given = self._found.num_read
        self._held = window[self._num_given - given :]
        return window[: self._num_given - given], None


class PassOn:
    """Passes a text on up to the first of some markers, and holds back what may become one. `marker` matches them."""

    def __init__(self, marker: re.Pattern[str], *markers: str) -> None:
        self._marker, self._markers = marker, markers
        self._held = ""

    def read(self, text: str, *, is_end: bool = False) -> tuple[str, str | None]:
        """What is certain before a marker, and what is behind it; None while there is none."""
        window = self._held + text
        found = self._marker.search(window)
        if found is not None:
            self._held = ""
            return window[: found.start()], window[found.end() :]
        held = 0 if is_end else max([num_held(window, marker) for marker in self._markers])
        self._held = window[len(window) - held :]
        return window[: len(window) - held], None


class Stripped:
    """Passes a text on without the spaces around it; with those before it where it `keeps_beginning`."""

    def __init__(self, *, keeps_beginning: bool = False) -> None:
        self._has_begun = keeps_beginning
        self._spaces: list[str] = []

    @property
    def spaces(self) -> str:
        """Behind what was passed on, so far."""
        return "".join(self._spaces)

    def read(self, text: str) -> str:
        """What is certain with the next piece."""
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
    """What is beside the calls of an answer, without the spaces around them. Without a call all of it, as it is."""

    def __init__(self) -> None:
        self._piece = Stripped(keeps_beginning=True)
        self._has_text = self._is_behind_call = False

    def read(self, parts: Iterable[Part], *, is_end: bool) -> tuple[str, list[ToolCall]]:
        """The content that has become certain with the next parts, and the calls among them. Spaces at the end are held
        back: a call may follow them.
        """
        found: list[str] = []
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, ToolCall):
                calls.append(part)
                self._piece, self._is_behind_call = Stripped(), True
            elif text := self._piece.read(part):
                # What is between two calls is a line of its own.
                found += ["\n", text] if self._is_behind_call and self._has_text else [text]
                self._has_text, self._is_behind_call = True, False
        if is_end:
            found.append(self._piece.spaces)
        return "".join(found), calls


def _string(value: str) -> str:
    """The text that a JSON string holds; "" for another value."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
