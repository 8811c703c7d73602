"""Builds the bodies of OpenAI responses: completions and chat completions.

Every value depends only on the row: `created` is 0 and ids carry its `request_id`, or its index, so that a repeated or
resumed job writes the same bytes. Values that depend on other rows (tokens found in the prefix cache) are left out.
"""

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.chat.answer_reader import ChatAnswer
from spmd_worker.chat.chat_format import NONE
from spmd_worker.chat.message import CallIds, chat_message
from spmd_worker.frontends.openai.row import Echo, EncodedRow, answer_name
from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS, SamplingParams

_LOWEST_LOGPROB: Final = -9999.0
"""Written for minus infinity, which JSON cannot represent; OpenAI's own value for "very unlikely"."""

JsonObject = dict[str, Any]


def completion_body(row: EncodedRow, output: RequestOutput, model_name: str) -> JsonObject:
    """Body of a /v1/completions response."""
    output = echoed(row, output)
    choices = [completion_choice(completion) for completion in output.outputs]
    body = _body("text_completion", f"cmpl-{answer_name(row)}", row, output, choices, model_name)
    for choice in choices:
        if row.echo is not None:
            drop_first_logprob(choice)
        if row.returns_token_ids:
            choice["prompt_token_ids"] = list(row.content.token_ids)
    return body


def echoed(row: EncodedRow, output: RequestOutput) -> RequestOutput:
    """The output of a row with `echo`: its prompt before each completion, in text and log-probabilities."""
    if row.echo is None:
        return output
    prompt: list[TokenLogprobs] = []
    if output.prompt_logprobs is not None:
        # The first token has none: `drop_first_logprob` leaves only its text.
        name = row.echo.first_token
        first = {row.content.token_ids[0]: Logprob(0.0, 1, name.text, tuple(name.own_bytes))}
        prompt = _in_text([first if each is None else each for each in output.prompt_logprobs], row.echo.text)
    return replace(output, outputs=[_behind_prompt(each, row.echo, prompt) for each in output.outputs])


def _in_text(positions: list[TokenLogprobs], text: str) -> list[TokenLogprobs]:
    """A prompt's positions, aligned to its text; a token that the tokenizer prepended (BOS) adds nothing."""
    found: list[TokenLogprobs] = []
    offset = 0
    for position in positions:
        (token_id, entry), *others = position.items()
        token = entry.decoded_token or ""
        if token and text.startswith(token, offset):
            own_bytes = entry.token_bytes or tuple(token.encode("utf-8", "surrogatepass"))
            entry = entry._replace(token_bytes=own_bytes)
        elif not found:
            entry = entry._replace(token_bytes=())
        found.append({token_id: entry, **dict(others)})
        offset += num_characters(found[-1])
    return found


def _behind_prompt(completion: CompletionOutput, echo: Echo, prompt: list[TokenLogprobs]) -> CompletionOutput:
    if not echo.is_alone:
        logprobs = None if completion.logprobs is None else [*prompt, *completion.logprobs]
        return replace(completion, text=echo.text + completion.text, logprobs=logprobs)
    has_ended = completion.finish_reason is not None
    return replace(
        completion,
        text=echo.text,
        token_ids=[],
        logprobs=None if completion.logprobs is None else prompt,
        finish_reason="length" if has_ended else None,
        stop_reason=None,
    )


def drop_first_logprob(choice: JsonObject) -> None:
    """Remove the log-probability of the first token of a choice that begins with its prompt."""
    if choice["logprobs"] is not None and choice["logprobs"]["tokens"]:
        choice["logprobs"]["token_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] = None


def chat_body(row: EncodedRow, output: RequestOutput, model_name: str) -> JsonObject:
    """Body of a /v1/chat/completions response."""
    choices = [_complete_chat_choice(completion, row) for completion in output.outputs]
    body = _body("chat.completion", f"chatcmpl-{answer_name(row)}", row, output, choices, model_name)
    if row.returns_token_ids:
        body["prompt_token_ids"] = list(row.content.token_ids)
    return body


def completion_choice(completion: CompletionOutput, first_offset: int = 0) -> JsonObject:
    """Choice of a completion, or of a part of one; `first_offset` is the offset of the part's first token."""
    return _choice(completion, {"text": completion.text}, _completion_logprobs(completion, first_offset))


def chat_choice(completion: CompletionOutput, content: Mapping[str, Any], row: EncodedRow) -> JsonObject:
    """Choice of a chat completion, or of a part of one; `content` is the choice's message or delta, by its key."""
    return _choice(completion, content, _chat_logprobs(completion, row.sampling))


def _complete_chat_choice(completion: CompletionOutput, row: EncodedRow) -> JsonObject:
    answer = ChatAnswer(completion.text)
    if row.reader is not None:
        answer = row.reader.read(row.reader.marked_text(row.content.token_ids, row.sampling).read(completion))
    message = chat_message(answer, call_ids(row, completion.index))
    if not row.includes_reasoning:
        message.pop("reasoning_content", None)
    return chat_choice(ended(row, completion, len(answer.tool_calls)), {"message": message}, row)


def call_ids(row: EncodedRow, sample: int) -> CallIds:
    """Ids of a sample's tool calls."""
    name = row.index if row.custom_id is None else row.custom_id
    return CallIds(name, sample, NONE if row.reader is None else row.reader.format.tool_calls)


def ended(row: EncodedRow, completion: CompletionOutput, num_calls: int) -> CompletionOutput:
    """The completion with OpenAI's reason for its end: `tool_calls`, except for a function that the row has named."""
    is_called = completion.finish_reason == "stop" and num_calls and row.reader and not row.reader.is_named
    return replace(completion, finish_reason="tool_calls") if is_called else completion


def logprob_records(position: TokenLogprobs) -> list[JsonObject]:
    """One position of a plain row: the sampled token first, then the top-k in order."""
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": finite(entry.logprob), "rank": entry.rank}
        for token_id, entry in position.items()
    ]


def usage(output: RequestOutput) -> dict[str, int]:
    """Token counts of a request; unlike OpenAI's, without samples that `best_of` ran and did not return."""
    num_output_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    return {"prompt_tokens": output.num_prompt_tokens, "completion_tokens": num_output_tokens}


def total_usage(output: RequestOutput) -> dict[str, int]:
    """`usage` with the total."""
    counts = usage(output)
    return {**counts, "total_tokens": sum(counts.values())}


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent; NaN becomes the lowest, like minus infinity."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _body(
    kind: str, body_id: str, row: EncodedRow, output: RequestOutput, choices: list[JsonObject], model_name: str
) -> JsonObject:
    body: JsonObject = {
        "id": body_id,
        "object": kind,
        "created": 0,
        "model": row.model if row.model is not None else model_name,
        "choices": choices,
        "usage": total_usage(output),
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprob_records(output)
    if output.prompt_routed_experts is not None:
        body["prompt_routed_experts"] = array_record(output.prompt_routed_experts)
    if output.prompt_scores is not None:
        body["prompt_scores"] = score_record(output.prompt_scores)
    if row.returns_token_ids:
        for choice, completion in zip(choices, output.outputs, strict=True):
            choice["token_ids"] = list(completion.token_ids)
    return body


def score_record(scores: PromptScores) -> JsonObject:
    """Arrays of a prompt's rows as lists, without those that the row did not ask for."""
    record: JsonObject = {"start": scores.start}
    for name in ("token_logprobs", "candidate_logprobs", "top_logprobs"):
        values = getattr(scores, name)
        if values is not None:
            record[name] = np.maximum(values, np.float32(_LOWEST_LOGPROB)).tolist()
    return record if scores.top_token_ids is None else record | {"top_token_ids": scores.top_token_ids.tolist()}


def prompt_logprob_records(output: RequestOutput) -> list[list[JsonObject] | None]:
    """Log-probabilities of the prompt, None for its first token."""
    positions = output.prompt_logprobs or []
    return [None if position is None else logprob_records(position) for position in positions]


def _choice(completion: CompletionOutput, content: Mapping[str, Any], logprobs: JsonObject | None) -> JsonObject:
    return {
        "index": completion.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **trainer_fields(completion),
    }


def trainer_fields(completion: CompletionOutput) -> JsonObject:
    """Data for trainers that the row asked for: `return_sampling_mask`, `return_routed_experts`."""
    mask, experts, found = completion.sampling_mask, completion.routed_experts, JsonObject()
    if mask is not None:
        found["sampling_mask"] = {"token_ids": mask.token_ids.tolist(), "offsets": mask.offsets.tolist()}
    if experts is not None:
        found["routed_experts"] = array_record(experts)
    return found


def array_record(array: NDArray[Any]) -> JsonObject:
    """Numpy's name of the type, shape, and little-endian bytes in base64."""
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _completion_logprobs(completion: CompletionOutput, first_offset: int) -> JsonObject | None:
    """Four parallel lists. A text offset is the number of characters before the token, plus `first_offset`."""
    if completion.logprobs is None:
        return None
    tokens, values, tops, offsets = [], [], [], []
    offset = first_offset
    for position in completion.logprobs:
        texts = {token_id: _token_text(token_id, entry) for token_id, entry in position.items()}
        sampled = next(iter(position))
        tokens.append(texts[sampled])
        values.append(finite(position[sampled].logprob))
        tops.append(_top_by_text(position, texts))
        offsets.append(offset)
        offset += num_characters(position)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def num_characters(position: TokenLogprobs) -> int:
    """Characters that the token at a position adds to the text: 0 if it is left out."""
    entry = next(iter(position.values()))
    return 0 if entry.token_bytes == () else len(entry.decoded_token or "")


def _top_by_text(position: TokenLogprobs, texts: Mapping[int, str]) -> dict[str, float]:
    """Text -> log-probability; of tokens with the same text (parts of characters) the first is kept."""
    top: dict[str, float] = {}
    for token_id, entry in position.items():
        top.setdefault(texts[token_id], finite(entry.logprob))
    return top


def _chat_logprobs(completion: CompletionOutput, sampling: SamplingParams) -> JsonObject | None:
    """One record per token, each with the top tokens of its position; of listed ids with all, the sampled first."""
    if completion.logprobs is None:
        return None
    content = []
    num_top = ALL_LOGPROBS if sampling.logprob_token_ids is not None else sampling.num_top_logprobs
    for position in completion.logprobs:
        sampled, entry = next(iter(position.items()))
        ranked = list(position.items())
        if sampling.logprob_token_ids is None:
            ranked.sort(key=lambda item: item[1].rank)
        # Cut by number: a sampled token as probable as the last of them has the same rank.
        num_shown = len(ranked) if num_top == ALL_LOGPROBS else num_top
        top = [_chat_record(token_id, each) for token_id, each in ranked[:num_shown]]
        content.append({**_chat_record(sampled, entry), "top_logprobs": top})
    return {"content": content}


def _chat_record(token_id: int, entry: Logprob) -> JsonObject:
    text, own_bytes = _token_text(token_id, entry), entry.token_bytes
    if own_bytes is None and entry.decoded_token is not None and "\ufffd" not in text:
        own_bytes = tuple(text.encode("utf-8", "surrogatepass"))
    return {
        "token": text,
        "logprob": finite(entry.logprob),
        "bytes": None if own_bytes is None else list(own_bytes),
    }


def _token_text(token_id: int, entry: Logprob) -> str:
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"
