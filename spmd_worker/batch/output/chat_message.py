"""The message of a chat answer in OpenAI's shape, with `reasoning_content` as vLLM has it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.batch.row import EncodedRow
from spmd_worker.chat.answer_parts import ToolCall
from spmd_worker.chat.answer_reader import ChatAnswer
from spmd_worker.sequence.outputs import CompletionOutput

_MISTRAL_DIGITS: Final = 9
"""Mistral's chat templates refuse a call id of any other length, when it comes back."""
_DIGITS: Final = 24


def chat_answer(row: EncodedRow, completion: CompletionOutput) -> ChatAnswer:
    """Of a completion with all of its tokens."""
    if row.reader is None:
        return ChatAnswer(completion.text)
    text = row.reader.marked_text(row.prompt_token_ids, row.sampling).text_of(completion)
    return row.reader.read(text)


def chat_message(row: EncodedRow, sample: int, answer: ChatAnswer) -> dict[str, Any]:
    """The message of a whole answer. Without content, which is null then, it has reasoning or calls."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = call_records(row, sample, answer.tool_calls)
    return message if answer.content or len(message) == 2 else {**message, "content": None}


def call_records(row: EncodedRow, sample: int, calls: Sequence[ToolCall], first: int = 0) -> list[dict[str, Any]]:
    """Calls of a sample, of which `first` came before. Ids follow from the row's name and from where calls stand."""
    return [
        {
            "id": _call_id(row, sample, number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls, first)
    ]


def ended(row: EncodedRow, completion: CompletionOutput, answer: ChatAnswer) -> CompletionOutput:
    """The completion with OpenAI's reason for its end: `tool_calls`, but for a function that the row has named."""
    is_called = completion.finish_reason == "stop" and answer.tool_calls and row.reader and not row.reader.is_named
    return replace(completion, finish_reason="tool_calls") if is_called else completion


def _call_id(row: EncodedRow, sample: int, number: int) -> str:
    text = json.dumps([row.name, sample, number])
    digest = blake2b(text.encode("ascii"), digest_size=_DIGITS // 2).hexdigest()
    is_mistral = row.reader is not None and row.reader.format.tool_calls == "mistral"
    return digest[:_MISTRAL_DIGITS] if is_mistral else f"call_{digest}"
