"""Tool-call parsers for the formats of Hermes and Qwen, Llama 3 and Mistral, from their published chat templates."""

import re
from typing import Final

from spmd_worker.chat.answer_parts import (
    CallReader,
    CallText,
    Part,
    PassOn,
    ToolCall,
    after_margin,
    call_at,
    object_members,
)
from spmd_worker.chat.chat_format import PYTHON_TAG
from spmd_worker.chat.chat_request import ChatRequest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPEN_MARKER, _CLOSE_MARKER = re.compile(_OPEN), re.compile(_CLOSE)
_MISTRAL_CALLS: Final = "[TOOL_CALLS]"
_MISTRAL_MARKER: Final = re.compile(re.escape(_MISTRAL_CALLS))
_MISTRAL_HEAD: Final = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\[{]*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
"""Name, optional call id, and the text before the arguments. Possessive: trailing spaces would cost quadratic time."""


class NoCalls:
    """Parser without tool calls: all is content."""

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        return [text]


class HermesCalls:
    """Objects with `name` and `arguments` between <tool_call> and </tool_call>, or the end of the text."""

    def __init__(self) -> None:
        self._content = PassOn(_OPEN_MARKER, _OPEN)
        self._call: CallText | None = None

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._call is None:
                before, behind = self._content.read(text, is_end=is_end)
                parts.append(before)
                if behind is None:
                    return parts
                self._call, text = CallText(_CLOSE_MARKER, [_CLOSE], _only_call), behind
            found = self._call.read(text, is_end=is_end)
            if found is None:
                return parts
            inner, close, text, call = found
            self._call = None
            parts.append(call or _OPEN + inner + close)


class Llama3Calls:
    """The entire text is one object with `name` and `parameters`, or several separated by `;`, after <|python_tag|>,
    which is optional unless content is JSON too. The name must be one of the request's functions.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        needs_tag = request.schema is not None and not request.must_call
        self._beginnings = (PYTHON_TAG,) if needs_tag else (PYTHON_TAG, "{")
        # Beginning of the text, without leading spaces, until it is known whether it may be a call.
        self._head = ""
        self._may_be_call: bool | None = None
        self._pieces: list[str] = []

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        if self._may_be_call is None:
            self._head = self._head + text if self._head else text.lstrip()
            if self._head.startswith(self._beginnings):
                self._may_be_call = True
            elif not PYTHON_TAG.startswith(self._head):
                self._may_be_call = False
                return ["".join([*self._pieces, text])]
        if self._may_be_call is False:
            return [text]
        self._pieces.append(text)
        return self._calls("".join(self._pieces)) if is_end else []

    def _calls(self, text: str) -> list[Part]:
        body = text.lstrip().removeprefix(PYTHON_TAG)
        calls: list[Part] = []
        at = after_margin(body, 0)
        while (found := call_at(body, at, needs_arguments=True)) is not None:
            call, at = found
            if call.name not in self._request.functions:
                return [text]
            calls.append(call)
            at = after_margin(body, at)
            if at == len(body):
                return calls
            if body[at] != ";":
                return [text]
            at = after_margin(body, at + 1)
        return [text]


class MistralCalls:
    """[TOOL_CALLS] and a list of objects with `name` and `arguments`, or for each call [TOOL_CALLS], the name, [ARGS]
    and the arguments. Calls end an answer: they are certain at its end.
    """

    def __init__(self) -> None:
        self._content = PassOn(_MISTRAL_MARKER, _MISTRAL_CALLS)
        self._calls: list[str] | None = None

    def read(self, text: str, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        if self._calls is None:
            before, behind = self._content.read(text, is_end=is_end)
            parts.append(before)
            if behind is None:
                return parts
            self._calls, text = [], behind
        self._calls.append(text)
        return [*parts, *_mistral_calls("".join(self._calls))] if is_end else parts


def _only_call(text: str) -> ToolCall | None:
    """The call that is all of `text` but spaces."""
    found = call_at(text, after_margin(text, 0))
    return found[0] if found is not None and after_margin(text, found[1]) == len(text) else None


def _mistral_calls(text: str) -> list[Part]:
    """Calls after the first marker: another one begins more, unless it is in a call's JSON."""
    parts: list[Part] = []
    at = 0
    while True:
        calls, end = _mistral_list(text, at) or _mistral_named(text, at) or ([], at)
        end = after_margin(text, end)
        if not calls or not (end == len(text) or text.startswith(_MISTRAL_CALLS, end)):
            end = text.find(_MISTRAL_CALLS, at)
            end = len(text) if end < 0 else end
            calls = [_MISTRAL_CALLS + text[at:end]]
        parts += calls
        if end == len(text):
            return parts
        at = end + len(_MISTRAL_CALLS)


def _mistral_list(text: str, at: int) -> tuple[list[Part], int] | None:
    """The calls of the list that begins at `at`, and its end."""
    calls: list[Part] = []
    at = after_margin(text, at)
    if text[at : at + 1] != "[":
        return None
    at = after_margin(text, at + 1)
    while (found := call_at(text, at)) is not None:
        calls.append(found[0])
        at = after_margin(text, found[1])
        if text[at : at + 1] == "]":
            return calls, at + 1
        if text[at : at + 1] != ",":
            return None
        at = after_margin(text, at + 1)
    return None


def _mistral_named(text: str, at: int) -> tuple[list[Part], int] | None:
    head = _MISTRAL_HEAD.match(text, at)
    found = object_members(text, head.end()) if head is not None else None
    if head is None or found is None:
        return None
    return [ToolCall(head[1], text[head.end() : found[1]])], found[1]


def call_reader(tool_calls: str, request: ChatRequest) -> CallReader:
    """Parser of one answer in the named format, except harmony's."""
    match tool_calls:
        case "llama3_json":
            return Llama3Calls(request)
        case "hermes":
            return HermesCalls()
        case "mistral":
            return MistralCalls()
    return NoCalls()
