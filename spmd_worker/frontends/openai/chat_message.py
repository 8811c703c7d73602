"""Builds the assistant message from a chat row's completion."""

from dataclasses import replace

from spmd_worker.chat.answer_reader import ChatAnswer
from spmd_worker.chat.chat_format import NONE
from spmd_worker.chat.message import CallIds
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.replica.sequence.outputs import CompletionOutput


def chat_answer(row: EncodedRow, completion: CompletionOutput) -> ChatAnswer:
    """Answer parsed from a completion with all of its tokens."""
    if row.reader is None:
        return ChatAnswer(completion.text)
    return row.reader.read(row.reader.marked_text(row.prompt_token_ids, row.sampling).read(completion))


def call_ids(row: EncodedRow, sample: int) -> CallIds:
    """Ids of a sample's tool calls."""
    name = row.index if row.custom_id is None else row.custom_id
    return CallIds(name, sample, NONE if row.reader is None else row.reader.format.tool_calls)


def ended(row: EncodedRow, completion: CompletionOutput, num_calls: int) -> CompletionOutput:
    """The completion with OpenAI's reason for its end: `tool_calls`, except for a function that the row has named."""
    is_called = completion.finish_reason == "stop" and num_calls and row.reader and not row.reader.is_named
    return replace(completion, finish_reason="tool_calls") if is_called else completion
