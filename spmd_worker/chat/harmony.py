"""Answers in gpt-oss' harmony format: messages in channels.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content

The prompt ends with <|start|>assistant. `analysis` is reasoning, `final` content, `commentary` content too unless it is
addressed to a function, which is a call: `commentary to=functions.name <|constrain|>json<|message|>{...}`; the role may
name the function as well. A message ends with <|end|>, <|call|>, <|return|>, the next one's beginning or the text.

Source: the harmony format's description by OpenAI.
"""

import re
from typing import Final

from spmd_worker.chat.answer_parts import CallText, Part, PassOn, PassOnJson, Stripped, ToolCall, UpTo, object_text

_HEAD: Final = re.compile(r"(?:\s*<\|start\|>)?([^<]*)<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_FUNCTIONS: Final = "functions."
_UNFINISHED_HEAD: Final = re.compile(r"\s*<\|(?:start|channel)\|>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*\Z")
BODY_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE: Final = "<|message|>"
_CONTENT: Final = _HEAD.fullmatch(f"<|channel|>final{_MESSAGE}")


class _Message:
    """One message with a parsed head: reasoning, content, or a call, which is buffered up to its end."""

    def __init__(self, head: re.Match[str], *, has_calls: bool, is_json: bool) -> None:
        self._head = head[0]
        recipient = _RECIPIENT.search(f"{head[1]} {head[2]}") if has_calls else None
        self._function = None if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        self.is_call = recipient is not None
        self.is_reasoning = recipient is None and head[2].split()[:1] == ["analysis"]
        self.has_text = False
        self._call = CallText(_END, BODY_ENDS, self._called) if recipient is not None else None
        pass_on = PassOnJson if is_json and not self.is_reasoning else PassOn
        self._text, self._stripped = pass_on(_END, *BODY_ENDS), Stripped()

    def read(self, text: str, *, is_end: bool) -> tuple[str, ToolCall | None, str | None]:
        """Text that has become certain, the call if it was one, and the text after the message (None: it goes on)."""
        if self._call is not None:
            found = self._call.read(text, is_end=is_end)
            if found is None:
                return "", None, None
            body, end, rest, call = found
            # The unchanged message if it is no call.
            return "" if call is not None else self._head + body + end, call, rest
        certain, behind = self._text.read(text, is_end=is_end)
        return self._stripped.read(certain) if self.is_reasoning else certain, None, behind

    def _called(self, body: str) -> ToolCall | None:
        arguments = object_text(body)
        return None if arguments is None or self._function is None else ToolCall(self._function, arguments)


class HarmonyReader:
    """Parser of one answer, whose text comes in pieces (`answer_parts.py`). `has_calls`: messages to functions are
    calls, else content. `is_json`: content is JSON. `is_inside`: the prompt has the head of the first message, which is
    content. Text that is not a message, and all after it, is content.
    """

    def __init__(self, *, has_calls: bool, is_json: bool = False, is_inside: bool = False) -> None:
        self._has_calls, self._is_json = has_calls, is_json
        self._head = UpTo(_MESSAGE)
        self._message: _Message | None = None
        if is_inside and _CONTENT is not None:
            self._message = _Message(_CONTENT, has_calls=has_calls, is_json=is_json)
        self._rest: list[str] | None = None
        # Consecutive messages are separate lines.
        self._has_reasoning = self._is_behind_content = False

    def read(self, text: str, *, is_end: bool) -> tuple[str, list[Part]]:
        """Reasoning and parts that have become certain with the next piece."""
        reasoning: list[str] = []
        parts: list[Part] = []
        while self._rest is None:
            if self._message is None:
                found = self._head.read(text)
                if found is None:
                    break
                head_text, text = found
                head = _HEAD.fullmatch(head_text)
                if head is None:
                    self._rest = [head_text]
                    break
                self._message = _Message(head, has_calls=self._has_calls, is_json=self._is_json)
            behind = self._read_message(self._message, text, reasoning, parts, is_end=is_end)
            if behind is None:
                return "".join(reasoning), parts
            self._message, self._head, text = None, UpTo(_MESSAGE), behind
        if self._rest is not None:
            self._rest.append(text)
        if is_end:
            # A truncated head is dropped.
            rest = self._head.text if self._rest is None else "".join(self._rest)
            parts += [rest] if rest and not _UNFINISHED_HEAD.match(rest) else []
        return "".join(reasoning), parts

    def _read_message(
        self, message: _Message, text: str, reasoning: list[str], parts: list[Part], *, is_end: bool
    ) -> str | None:
        """Read the current message; returns the text after it, None while it goes on."""
        certain, call, behind = message.read(text, is_end=is_end)
        if call is not None:
            parts.append(call)
            self._is_behind_content = False
        elif certain and message.is_reasoning:
            reasoning += ["\n", certain] if self._has_reasoning and not message.has_text else [certain]
            self._has_reasoning = message.has_text = True
        elif certain:
            is_line = self._is_behind_content and not message.has_text and not message.is_call
            parts.append(f"\n{certain}" if is_line else certain)
            self._is_behind_content = message.has_text = True
        return behind
