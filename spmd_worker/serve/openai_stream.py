"""What clients get, in OpenAI's shapes: whole bodies, the chunks of a stream, errors.

A body is that of a batch row but for `id` and `created`, which say nothing of the answer. A stream's chunks, put
together, are that body. Where a chat's answers may have tool calls, what may become one is held back until it is known,
and a call is one chunk.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.batch.output.chat_message import call_ids, ended
from spmd_worker.batch.output.openai_body import (
    JsonObject,
    chat_body,
    chat_choice,
    completion_body,
    completion_choice,
    usage,
)
from spmd_worker.batch.output.row_writer import json_line
from spmd_worker.batch.pooled_row import EncodedPooledRow, PooledOutput, pooled_response
from spmd_worker.batch.row import EncodedRow
from spmd_worker.chat.answer_reader import AnswerReader, AnswerStream, MarkedText
from spmd_worker.chat.message import call_records
from spmd_worker.sequence.outputs import CompletionOutput, RequestOutput

DONE: Final = b"data: [DONE]\n\n"

_STATUSES: Final = {
    "unsupported_url": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "invalid_api_key": 401,
    "body_too_slow": 408,
    "line_too_long": 413,
    "rate_limit_exceeded": 429,
    "non_finite_logits": 500,
    "non_finite_vector": 500,
    "grammar_failed": 500,
    "extra_missing": 500,
    "server_error": 500,
    "server_failed": 503,
}
"""By the code of an error; all others are the request's own, 400."""
_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def status_of(code: str) -> int:
    """The HTTP status of an error."""
    return _STATUSES.get(code, 400)


def error_body(code: str, message: str) -> JsonObject:
    """An error as OpenAI's API has it."""
    kind = _KINDS.get(status_of(code), "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(record: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_line(record) + b"\n"


@dataclass(frozen=True, slots=True)
class AnswerName:
    """What an answer is called. `request` is unique; `created` is in seconds since the epoch; `model` is for requests
    that named none.
    """

    request: str
    created: int
    model: str


def response_body(
    row: EncodedRow | EncodedPooledRow, output: RequestOutput | PooledOutput, name: AnswerName
) -> JsonObject:
    """The body of an answer that is not streamed."""
    if isinstance(row, EncodedPooledRow):
        assert isinstance(output, PooledOutput), output
        body = pooled_response(row, output, name.model)
        own = {"id": f"{row.row.kind}-{name.request}", "created": name.created}
        return {key: own.get(key, value) for key, value in body.items()}
    assert isinstance(output, RequestOutput), output
    return answer_body(row, output, name)


def answer_body(row: EncodedRow, output: RequestOutput, name: AnswerName) -> JsonObject:
    """The same of a completion or a chat completion."""
    body = (chat_body if row.kind == "chat" else completion_body)(row, output, name.model)
    return {**body, "id": _body_id(row, name), "created": name.created}


@dataclass(slots=True)
class _Sent:
    """Of one choice: how much of it its chunks had, and where its text and the reading of it are."""

    num_characters: int = 0
    num_tokens: int = 0
    offset: int = 0
    has_ended: bool = False
    text: MarkedText | None = None
    answer: AnswerStream | None = None


@dataclass(slots=True)
class ChunkWriter:
    """The chunks of one request's stream, from outputs that each have all of it so far."""

    row: EncodedRow
    name: AnswerName
    includes_usage: bool
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def chunks(self, output: RequestOutput) -> list[JsonObject]:
        """What is new in `output`, and, after the last, the usage if it was asked for."""
        choices = [choice for each in output.outputs if (choice := self._choice(each)) is not None]
        found = [self._chunk([choice]) for choice in choices]
        if output.finished and self.includes_usage:
            counts = usage(output)
            found.append(self._chunk([]) | {"usage": {**counts, "total_tokens": sum(counts.values())}})
        return found

    def _choice(self, completion: CompletionOutput) -> JsonObject | None:
        """None where nothing is new."""
        if self.row.reader is not None:
            return self._read_choice(completion, self.row.reader)
        is_first = completion.index not in self._sent
        sent = self._sent.get(completion.index) or _Sent()
        logprobs = None if completion.logprobs is None else completion.logprobs[sent.num_tokens :] or None
        part = replace(completion, text=completion.text[sent.num_characters :], logprobs=logprobs)
        is_end = completion.finish_reason is not None and not sent.has_ended
        if not (part.text or part.logprobs or is_end):
            return None
        # Not before: the first chunk of a choice says whose words they are.
        self._sent[completion.index] = sent
        sent.num_characters, sent.num_tokens = len(completion.text), len(completion.token_ids)
        sent.has_ended = sent.has_ended or is_end
        if self.row.kind == "chat":
            role = {"role": "assistant"} if is_first else {}
            return chat_choice(part, {"delta": {**role, "content": part.text}}, self.row)
        choice = completion_choice(part, sent.offset)
        sent.offset += sum(map(len, (choice["logprobs"] or {"tokens": ()})["tokens"]))
        return choice

    def _read_choice(self, completion: CompletionOutput, reader: AnswerReader) -> JsonObject | None:
        """Of a chat whose answers have reasoning and calls: these as they are certain, a call in one piece."""
        is_first = completion.index not in self._sent
        sent = self._sent.setdefault(completion.index, _Sent())
        if sent.has_ended:
            return None
        if sent.text is None or sent.answer is None:
            sent.text = reader.marked_text(self.row.prompt_token_ids, self.row.sampling)
            sent.answer = reader.stream()
        num_calls, is_end = sent.answer.num_calls, completion.finished()
        new = sent.answer.read(sent.text.read(completion), is_end=is_end)
        delta: JsonObject = {"role": "assistant"} if is_first else {}
        delta |= {"reasoning_content": new.reasoning} if new.reasoning else {}
        delta |= {"content": new.content} if new.content else {}
        calls = call_records(new.tool_calls, call_ids(self.row, completion.index), num_calls)
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, num_calls)]
        part = completion
        if completion.logprobs is not None:
            part = replace(completion, logprobs=completion.logprobs[sent.num_tokens :] or None)
        if not (delta or part.logprobs or is_end):
            return None
        sent.num_tokens, sent.has_ended = len(completion.token_ids), is_end
        return chat_choice(ended(self.row, part, sent.answer.num_calls), {"delta": delta}, self.row)

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": _body_id(self.row, self.name),
            "object": "chat.completion.chunk" if self.row.kind == "chat" else "text_completion",
            "created": self.name.created,
            "model": self.name.model if self.row.model is None else self.row.model,
            "choices": choices,
            **({"usage": None} if self.includes_usage else {}),
        }


def _body_id(row: EncodedRow, name: AnswerName) -> str:
    return f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{name.request}"
