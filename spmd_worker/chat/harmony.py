"""Answers in gpt-oss' harmony format: messages in channels.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content

The prompt ends with <|start|>assistant. `analysis` is reasoning, `final` content, `commentary` content too unless it is
to a function, which is a call: `commentary to=functions.name <|constrain|>json<|message|>{...}`; the role may name the
function as well. A message ends with <|end|>, <|call|>, <|return|>, the next one's beginning or the text.

Source: the harmony format's description by OpenAI.
"""

import re
from typing import Final

from spmd_worker.chat.answer_parts import Part, ToolCall, num_held, object_text
from spmd_worker.chat.reasoning import Reasoned

_HEAD: Final = re.compile(r"(?:\s*<\|start\|>)?([^<]*)<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)")
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_FUNCTIONS: Final = "functions."
_UNFINISHED_HEAD: Final = re.compile(r"\s*<\|(?:start|channel)\|>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*\Z")
_BODY_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


def harmony_parts(text: str, is_whole: bool, *, has_calls: bool) -> tuple[str, list[Part]]:
    """The reasoning and the parts. `has_calls`: messages to functions are calls, and content where not. From what is no
    message on, the text is content.
    """
    reasoning: list[str] = []
    parts: list[Part] = []
    at = 0
    while at < len(text):
        head = _HEAD.match(text, at)
        if head is None:
            # A head that goes on may become one; one that was cut off says nothing.
            if is_whole and not _UNFINISHED_HEAD.match(text, at):
                parts.append(text[at:])
            break
        end = _END.search(text, head.end())
        is_ended = end is not None or is_whole
        body = text[head.end() : end.start() if end is not None else len(text)]
        at = end.end() if end is not None else len(text)
        recipient = _RECIPIENT.search(f"{head[1]} {head[2]}")
        if recipient is not None and has_calls:
            if is_ended:
                arguments = object_text(body)
                name = recipient[1].removeprefix(_FUNCTIONS)
                parts.append(text[head.start() : at] if arguments is None else ToolCall(name, arguments))
            continue
        body = body if is_ended else _certain(body)
        if head[2].split()[:1] == ["analysis"]:
            reasoning.append(body.strip())
        elif body:
            # Of two messages in a row.
            parts.append(f"\n{body}" if parts and isinstance(parts[-1], str) else body)
    return "\n".join([each for each in reasoning if each]), parts


def split_harmony(text: str, is_whole: bool) -> Reasoned:
    """Reasoning and content, where no calls are looked for."""
    reasoning, parts = harmony_parts(text, is_whole, has_calls=False)
    return Reasoned(reasoning, "".join([part for part in parts if isinstance(part, str)]))


def _certain(body: str) -> str:
    """Without what may become the marker that ends it."""
    return body[: len(body) - max(num_held(body, marker) for marker in _BODY_ENDS)]
