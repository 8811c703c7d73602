"""Parses reasoning at the beginning of an answer's text, between two markers."""

import re
from enum import Enum, auto

from spmd_worker.chat.answer_parts import PassOn, Stripped


class _State(Enum):
    """Part that the next text belongs to."""

    HEAD = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningReader:
    """Parser of one answer, whose text comes in pieces. `is_open`: the prompt has opened the reasoning. Without an end
    marker all is reasoning. A begin marker after the first words is content; `is_inside`: the prompt has first words,
    of the reasoning or the content.
    """

    def __init__(self, markers: tuple[str, str], *, is_open: bool, is_inside: bool = False) -> None:
        self._begin, end = markers
        self._is_open = is_open
        self._state = _State.HEAD
        if is_inside:
            self._state = _State.REASONING if is_open else _State.ANSWER
        # Beginning of the text, unchanged and without leading spaces, until it is decided.
        self._pieces: list[str] = []
        self._head = ""
        self._inside = PassOn(re.compile(re.escape(end)), end)
        self._reasoning = Stripped(keeps_beginning=is_inside)

    def read(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Reasoning, and text of the answer after it, that have become certain with the next piece."""
        reasoning = ""
        if self._state is _State.HEAD:
            text = self._opened(text, is_end=is_end)
        if self._state is _State.REASONING:
            before, behind = self._inside.read(text, is_end=is_end)
            reasoning, text = self._reasoning.read(before), behind or ""
            self._state = self._state if behind is None else _State.GAP
        if self._state is _State.GAP:
            text = text.lstrip()
            self._state = _State.ANSWER if text else self._state
        return reasoning, text

    def _opened(self, text: str, *, is_end: bool) -> str:
        """The text after the begin marker, once it is decided whether there is one; "" before."""
        self._pieces.append(text)
        self._head = self._head + text if self._head else text.lstrip()
        # Some models repeat the begin marker of the prompt.
        is_marked = self._head.startswith(self._begin)
        if not is_end and not is_marked and self._begin.startswith(self._head):
            return ""
        self._state = _State.REASONING if is_marked or self._is_open else _State.ANSWER
        return self._head[len(self._begin) :] if is_marked else "".join(self._pieces)
