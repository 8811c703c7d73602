"""Tool calls in the text of an answer: the formats of Hermes and Qwen, Llama 3 and Mistral.

Read from published chat templates and model cards; each parser is a `Parser` of `answer_parts.py`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from spmd_worker.chat.answer_parts import Parser, Part, ToolCall, after_margin, call_at, num_held, object_members
from spmd_worker.chat.chat_format import PYTHON_TAG
from spmd_worker.chat.chat_request import ChatRequest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL_CALLS: Final = "[TOOL_CALLS]"
_MISTRAL_HEAD: Final = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
"""name, a call id perhaps, and what stands before the arguments."""


def no_calls(text: str, is_whole: bool) -> list[Part]:
    """All is content."""
    return [text]


def hermes_calls(text: str, is_whole: bool) -> list[Part]:
    """An object with `name` and `arguments` between <tool_call> and </tool_call>, which the end of the text may stand
    for; any number of them, anywhere.
    """
    parts: list[Part] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        parts.append(text[at:start])
        end = text.find(_CLOSE, start)
        if end < 0 and not is_whole:
            return parts
        inner = text[start + len(_OPEN) : end if end >= 0 else len(text)]
        at = end + len(_CLOSE) if end >= 0 else len(text)
        parts.append(_whole_call(inner) or text[start:at])
    parts.append(_certain(text[at:], _OPEN, is_whole))
    return parts


def llama3_calls(request: ChatRequest, text: str, is_whole: bool) -> list[Part]:
    """The whole text is one object with `name` and `parameters`, or several with `;` between them, behind
    <|python_tag|>, which may be left out where answers are not in JSON anyway. An object that names none of the
    request's functions is no call.
    """
    needs_tag = request.schema is not None and not request.must_call
    head = text.lstrip()
    begins = (PYTHON_TAG,) if needs_tag else (PYTHON_TAG, "{")
    may_be_call = head.startswith(begins) or PYTHON_TAG.startswith(head)
    if not may_be_call:
        return [text]
    if not is_whole:
        return []
    body = head.removeprefix(PYTHON_TAG)
    calls: list[Part] = []
    at = after_margin(body, 0)
    while (found := call_at(body, at, needs_arguments=True)) is not None:
        call, at = found
        if call.name not in request.functions:
            return [text]
        calls.append(call)
        at = after_margin(body, at)
        if at == len(body):
            return calls
        if body[at] != ";":
            return [text]
        at = after_margin(body, at + 1)
    return [text]


def mistral_calls(text: str, is_whole: bool) -> list[Part]:
    """[TOOL_CALLS] and a list of objects with `name` and `arguments`, or for each call [TOOL_CALLS], the name, [ARGS]
    and the arguments. Calls end an answer: they are certain with its end.
    """
    start = text.find(_MISTRAL_CALLS)
    if start < 0:
        return [_certain(text, _MISTRAL_CALLS, is_whole)]
    if not is_whole:
        return [text[:start]]
    parts: list[Part] = [text[:start]]
    for piece in text[start:].split(_MISTRAL_CALLS)[1:]:
        calls = _mistral_list(piece) or _mistral_named(piece)
        parts += calls or [_MISTRAL_CALLS + piece]
    return parts


def call_parser(tool_calls: str, request: ChatRequest) -> Parser:
    """Of the format with this name, but harmony's."""
    if tool_calls == "llama3_json":
        return partial(llama3_calls, request)
    return _PARSERS[tool_calls]


def _whole_call(text: str) -> ToolCall | None:
    """The call that is all of `text` but for spaces."""
    found = call_at(text, after_margin(text, 0))
    return found[0] if found is not None and after_margin(text, found[1]) == len(text) else None


def _mistral_list(text: str) -> list[Part]:
    """[] where it is none."""
    calls: list[Part] = []
    at = after_margin(text, 0)
    if text[at : at + 1] != "[":
        return []
    at = after_margin(text, at + 1)
    while (found := call_at(text, at)) is not None:
        calls.append(found[0])
        at = after_margin(text, found[1])
        if text[at : at + 1] == "]":
            return calls if after_margin(text, at + 1) == len(text) else []
        if text[at : at + 1] != ",":
            return []
        at = after_margin(text, at + 1)
    return []


def _mistral_named(text: str) -> list[Part]:
    head = _MISTRAL_HEAD.match(text)
    found = object_members(text, head.end()) if head is not None else None
    if head is None or found is None or after_margin(text, found[1]) != len(text):
        return []
    return [ToolCall(head[1], text[head.end() : found[1]])]


def _certain(text: str, marker: str, is_whole: bool) -> str:
    """Without what may become the marker."""
    return text if is_whole else text[: len(text) - num_held(text, marker)]


_PARSERS: Final[Mapping[str, Parser]] = {"none": no_calls, "hermes": hermes_calls, "mistral": mistral_calls}
