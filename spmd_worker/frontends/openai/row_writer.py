"""Formats output rows: an answer or an error becomes a line."""

import json
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.frontends.openai.openai_body import (
    JsonObject,
    array_record,
    chat_body,
    completion_body,
    logprob_records,
    prompt_logprob_records,
    score_record,
    trainer_fields,
    usage,
)
from spmd_worker.frontends.openai.row import EncodedRow, Row, RowError, row_error
from spmd_worker.replica.sequence.outputs import RequestOutput

REJECTED: Final = "request_refused"
"""Code of an error without one of its own."""

_LINE_BREAKS: Final = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that some readers interpret as line ends; JSON allows them in strings, JSONL is safer without."""


def format_result(row: EncodedRow, output: RequestOutput, model_name: str = "") -> bytes:
    """Output line of a row that ran, with its line end. `model_name` is used when the row's body names none."""
    if output.error is not None:
        return format_error(row_error(row, error_code_of(output), output.error))
    if row.kind == "plain":
        return json_line(plain_result(row, output))
    build = completion_body if row.kind == "completion" else chat_body
    return response_line(row, build(row, output, model_name))


def response_line(row: EncodedRow | Row, body: JsonObject | str) -> bytes:
    """Output line of an OpenAI row that ran."""
    response = {"status_code": 200, "request_id": f"req-{row.index}", "body": body}
    return json_line({"id": f"batch-{row.index}", "custom_id": row.custom_id, "response": response, "error": None})


def error_code_of(output: RequestOutput) -> str:
    """Error code of a request that failed."""
    return output.error_code or REJECTED


def format_error(row: RowError) -> bytes:
    """Output line of a row that did not run, with its line end: an error and no outputs."""
    error = {"code": row.code, "message": row.message}
    if row.shape == "plain":
        return json_line({"custom_id": row.custom_id, "index": row.index, "error": error})
    return json_line({"id": f"batch-{row.index}", "custom_id": row.custom_id, "response": None, "error": error})


def plain_result(row: EncodedRow, output: RequestOutput) -> JsonObject:
    """Record of a plain row that ran."""
    outputs: list[JsonObject] = []
    for completion in output.outputs:
        names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
        outputs.append({name: getattr(completion, name) for name in names})
        if completion.logprobs is not None:
            outputs[-1]["logprobs"] = [logprob_records(position) for position in completion.logprobs]
        outputs[-1] |= trainer_fields(completion)
    result: JsonObject = {
        "custom_id": row.custom_id,
        "index": row.index,
        **({} if row.adapter is None else {"adapter": row.adapter}),
        **({} if row.prompt_adapter is None else {"prompt_adapter": row.prompt_adapter}),
        "outputs": outputs,
        "usage": usage(output),
        "error": None,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprob_records(output)
    if output.prompt_routed_experts is not None:
        result["prompt_routed_experts"] = array_record(output.prompt_routed_experts)
    if output.prompt_scores is not None:
        result["prompt_scores"] = score_record(output.prompt_scores)
    return result


def json_line(record: Any) -> bytes:
    """JSON with a line end, in UTF-8; with escapes only if it contains a lone surrogate."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """A row's output line and counts. `error_code` is None for a row that ran, `media_digest` is that of the bytes of
    its images, "" without any.
    """

    index: int
    line: bytes
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    media_digest: str = ""


def error_result(row: RowError) -> RowAnswer:
    """Answer of a row that does not run."""
    return RowAnswer(row.index, format_error(row), row.code)
