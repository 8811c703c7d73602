"""Responses to clients in OpenAI's format: complete bodies, the chunks of a stream, errors.

A body is that of a batch row except `id` and `created`, which do not depend on the answer. A stream's joined chunks are
that body, but for the content of a chat's answer that has only reasoning or calls: null there, and "" here, because
clients expect a `content` in the first chunk. If a chat's answers may have tool calls, text that may become one is held
back until it is known, and a call is one chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.chat.answer_reader import AnswerReader, AnswerStream, MarkedText
from spmd_worker.chat.message import call_records
from spmd_worker.frontends.openai.audio_answer import audio_body
from spmd_worker.frontends.openai.audio_row import EncodedAudioRow
from spmd_worker.frontends.openai.openai_body import (
    JsonObject,
    call_ids,
    chat_body,
    chat_choice,
    completion_body,
    completion_choice,
    drop_first_logprob,
    echoed,
    ended,
    num_characters,
    total_usage,
)
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow
from spmd_worker.frontends.openai.pooling_body import pooling_body
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_outputs import EncodedSplitRow, RowOutputs
from spmd_worker.frontends.openai.row_writer import json_line
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput, TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"

_STATUSES: Final = {
    "unsupported_url": 404,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "invalid_multipart": 400,
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
"""Status by error code; all others are the request's own fault, 400."""
_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def status_of(code: str) -> int:
    """HTTP status of an error."""
    return _STATUSES.get(code, 400)


def error_body(code: str, message: str, param: str | None = None) -> JsonObject:
    """An error in OpenAI's format."""
    kind = _KINDS.get(status_of(code), "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(record: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_line(record) + b"\n"


@dataclass(frozen=True, slots=True)
class AnswerName:
    """Identity of an answer: the client's or a unique id, seconds since the epoch, and the model of requests that named
    none.
    """

    request: str
    created: int
    model: str


def response_body(
    rows: Sequence[EncodedRow | EncodedSplitRow], outputs: Sequence[RequestOutput | RowOutputs], name: AnswerName
) -> JsonObject | str:
    """Body of an answer that is not streamed, text for some of audio; of several prompts their choices in order, like
    OpenAI's.
    """
    (row, output), *_ = zip(rows, outputs, strict=True)
    if isinstance(row, EncodedAudioRow):
        assert isinstance(output, RowOutputs), output
        return audio_body(row, output.outputs)
    bodies = [_body(row, output, name) for row, output in zip(rows, outputs, strict=True)]
    if len(bodies) == 1:
        return bodies[0]
    choices = [choice for body in bodies for choice in body["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    body = {**bodies[0], "choices": choices, "usage": _sum_usage([body["usage"] for body in bodies])}
    for key in ("prompt_logprobs", "prompt_scores", "prompt_routed_experts"):
        if key in body:
            body[key] = [each[key] for each in bodies]
    return body


def _sum_usage(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: sum(each[key] for each in counts) for key in counts[0]}


def _body(row: EncodedRow | EncodedSplitRow, output: RequestOutput | RowOutputs, name: AnswerName) -> JsonObject:
    if isinstance(row, EncodedPooledRow):
        assert isinstance(output, RowOutputs), output
        body = pooling_body(row, output.outputs, name.model)
        own = {"id": f"{row.row.kind}-{name.request}", "created": name.created}
        return {key: own.get(key, value) for key, value in body.items()}
    assert isinstance(output, RequestOutput), output
    assert isinstance(row, EncodedRow), row
    body = (chat_body if row.kind == "chat" else completion_body)(row, output, name.model)
    return {**body, "id": _body_id(row, name), "created": name.created}


@dataclass(slots=True)
class _Sent:
    """State of one choice: what its chunks have sent, and its text and parser."""

    num_characters: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0
    offset: int = 0
    has_ended: bool = False
    has_prompt_ids: bool = False
    text: MarkedText | None = None
    answer: AnswerStream | None = None

    def add_logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> None:
        self.num_logprobs += len(logprobs or ())
        self.offset += sum(map(num_characters, logprobs or ()))


@dataclass(slots=True)
class ChunkWriter:
    """The chunks of one prompt's stream, from cumulative outputs. `first_index` is the index of its first choice.
    `includes_usage`: a chunk has a key for it, with `counts_in_chunks` the usage of its choice so far, as vLLM's.
    """

    row: EncodedRow
    name: AnswerName
    includes_usage: bool
    counts_in_chunks: bool = False
    first_index: int = 0
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def chunks(self, output: RequestOutput) -> list[JsonObject]:
        """Chunks of the new parts of `output`."""
        if self.row.echo is not None:
            if self.row.sampling.returns_logprobs and output.prompt_logprobs is None:
                # The prompt's log-probabilities come first, and are complete at the end.
                return []
            output = echoed(self.row, output)
        found = []
        for completion in output.outputs:
            before = self._sent.get(completion.index)
            num_tokens = 0 if before is None else before.num_tokens
            mask = completion.sampling_mask
            part = completion if mask is None else replace(completion, sampling_mask=mask.after(num_tokens))
            choice = self._choice(part)
            if choice is None:
                continue
            chunk = self._chunk([{**choice, "index": self.first_index + completion.index}])
            if self.counts_in_chunks:
                chunk["usage"] = total_usage(replace(output, outputs=[completion]))
            if self.row.returns_token_ids:
                # Like vLLM's chunks: the prompt's once.
                sent, (own,) = self._sent[completion.index], chunk["choices"]
                own["token_ids"] = completion.token_ids[num_tokens:]
                if not sent.has_prompt_ids:
                    sent.has_prompt_ids = True
                    holder = chunk if self.row.kind == "chat" else own
                    holder["prompt_token_ids"] = list(self.row.content.token_ids)
            found += _with_end_apart(chunk)
        return found

    def last_chunk(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """Last chunk, with the usage of all prompts."""
        return self._chunk([]) | {"usage": _sum_usage([total_usage(echoed(self.row, output)) for output in outputs])}

    def _choice(self, completion: CompletionOutput) -> JsonObject | None:
        """Choice of the new part; None if nothing is new."""
        if self.row.reader is not None:
            return self._read_choice(completion, self.row.reader)
        is_first = completion.index not in self._sent
        sent = self._sent.get(completion.index) or _Sent()
        logprobs = _ready_logprobs(completion, sent, is_text=self.row.sampling.detokenize)
        part = replace(completion, text=completion.text[sent.num_characters :], logprobs=logprobs)
        is_end = completion.finish_reason is not None and not sent.has_ended
        if not (part.text or part.logprobs or is_end):
            return None
        # Only now: the first chunk of a choice carries the role.
        self._sent[completion.index] = sent
        sent.num_characters, sent.num_tokens = len(completion.text), len(completion.token_ids)
        sent.has_ended = sent.has_ended or is_end
        first_offset = sent.offset
        sent.add_logprobs(logprobs)
        if self.row.kind == "chat":
            role = {"role": "assistant"} if is_first else {}
            return chat_choice(part, {"delta": {**role, "content": part.text}}, self.row)
        choice = completion_choice(part, first_offset)
        if self.row.echo is not None and is_first:
            drop_first_logprob(choice)
        return choice

    def _read_choice(self, completion: CompletionOutput, reader: AnswerReader) -> JsonObject | None:
        """Choice of a chat with reasoning and calls: text as soon as it is certain, a call in one piece."""
        is_first = completion.index not in self._sent
        sent = self._sent.setdefault(completion.index, _Sent())
        if sent.has_ended:
            return None
        if sent.text is None or sent.answer is None:
            sent.text = reader.marked_text(self.row.content.token_ids, self.row.sampling)
            sent.answer = AnswerStream(reader)
        num_calls, is_end = sent.answer.num_calls, completion.finished()
        new = sent.answer.read(sent.text.read(completion), is_end=is_end)
        delta: JsonObject = {"role": "assistant"} if is_first else {}
        delta |= {"reasoning_content": new.reasoning} if new.reasoning and self.row.includes_reasoning else {}
        delta |= {"content": new.content} if new.content or is_first else {}
        calls = call_records(new.tool_calls, call_ids(self.row, completion.index), num_calls)
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, num_calls)]
        logprobs = _ready_logprobs(completion, sent, is_text=True)
        if not (delta or logprobs or is_end):
            return None
        sent.add_logprobs(logprobs)
        sent.num_tokens, sent.has_ended = len(completion.token_ids), is_end
        part = replace(completion, logprobs=logprobs)
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


def _with_end_apart(chunk: JsonObject) -> list[JsonObject]:
    """The chunk, or two for one that has calls and ends its choice: OpenAI's clients report a call as complete when a
    later chunk comes.
    """
    (choice,) = chunk["choices"]
    if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", ()):
        return [chunk]
    reasons = {key: choice[key] for key in ("finish_reason", "stop_reason")}
    end = {"index": choice["index"], "delta": {}, "logprobs": None, **reasons}
    if "token_ids" in choice:
        end["token_ids"] = []
    others = {key: value for key, value in chunk.items() if key != "prompt_token_ids"}
    return [{**chunk, "choices": [choice | dict.fromkeys(reasons)]}, {**others, "choices": [end]}]


def _ready_logprobs(completion: CompletionOutput, sent: _Sent, *, is_text: bool) -> list[TokenLogprobs] | None:
    """New log-probabilities of tokens in the text so far: a stop string may still remove held-back ones."""
    if completion.logprobs is None:
        return None
    new, num_left = completion.logprobs[sent.num_logprobs :], len(completion.text) - sent.offset
    if completion.finish_reason is not None or not is_text:
        return new or None
    num_ready = 0
    for number, position in enumerate(new, 1):
        num_added = num_characters(position)
        num_left -= num_added
        if num_left < 0:
            break
        # Part of a character is final when the character is.
        num_ready = number if num_added else num_ready
    return new[:num_ready] or None


def _body_id(row: EncodedRow, name: AnswerName) -> str:
    return f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{name.request}"
