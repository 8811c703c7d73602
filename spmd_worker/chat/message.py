"""Assistant message of a chat answer in OpenAI's format, with vLLM's `reasoning_content`."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from spmd_worker.chat.answer_parts import ToolCall
from spmd_worker.chat.answer_reader import ChatAnswer

_DIGITS: Final = 24
_MISTRAL_DIGITS: Final = 9
"""Mistral's chat templates reject a call id of any other length, when it comes back."""


class CallIds(NamedTuple):
    """Ids of one sample's calls, derived from the request's id and a call's index."""

    request: str | int
    sample: int
    tool_call_format: str

    def call_id(self, number: int) -> str:
        text = json.dumps([self.request, self.sample, number])
        digest = blake2b(text.encode("ascii"), digest_size=_DIGITS // 2).hexdigest()
        return digest[:_MISTRAL_DIGITS] if self.tool_call_format == "mistral" else f"call_{digest}"


def call_records(calls: Sequence[ToolCall], ids: CallIds, first: int = 0) -> list[dict[str, Any]]:
    """Records of a sample's calls, numbered from `first`."""
    return [
        {"id": ids.call_id(number), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls, first)
    ]


def chat_message(answer: ChatAnswer, ids: CallIds) -> dict[str, Any]:
    """Assistant message of a complete answer. With reasoning or a call, and no content, the content is null."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = call_records(answer.tool_calls, ids)
    return message if answer.content or len(message) == 2 else {**message, "content": None}
