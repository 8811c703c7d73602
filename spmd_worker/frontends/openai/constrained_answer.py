"""Compiles a row's tools and response_format into a grammar and an output parser."""

from dataclasses import replace

from spmd_worker.chat.answer_grammar import AnswerGrammar, json_grammar
from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import ChatFormat, goes_on_inside, prompt_opens_reasoning
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.engine.request_error import RequestError
from spmd_worker.frontends.openai.prompt_values import invalid_request
from spmd_worker.frontends.openai.row import ChatPrompt, Row
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

_ENGINE_KEY = "structured_outputs: "


def constrained_sampling(
    row: Row, prompt: str | None, tokenizer: Tokenizer | None, chat_format: ChatFormat
) -> SamplingParams:
    """The row's parameters with its answer's grammar; `prompt` is None for token ids. Raises InvalidRequestError."""
    request, own = row.request, row.sampling.structured_outputs
    key = "structured_outputs" if request is None or own is not None else _key(request)
    with invalid_request(f"{key}: "):
        if row.kind == "completion" and request is not None and request.schema is not None:
            return replace(row.sampling, structured_outputs=json_grammar(request.schema))
        if row.kind != "chat" or prompt is None or tokenizer is None:
            return row.sampling
        grammar = AnswerGrammar(chat_format, tokenizer.marker_id, _continued(row))
        params = None if request is None else grammar.compile(request, prompt)
        if params is None and own is not None:
            params = grammar.after_reasoning(own, prompt)
        return row.sampling if params is None else replace(row.sampling, structured_outputs=params)


def error_message(row: Row, error: RequestError) -> str:
    """Message of an engine's error, with the key of the row that it is about."""
    message = str(error)
    if row.request is None or not message.startswith(_ENGINE_KEY) or row.sampling.structured_outputs is not None:
        return message
    return f"{_key(row.request)}: {message.removeprefix(_ENGINE_KEY)}"


def _key(request: ChatRequest) -> str:
    return "tools" if request.must_call else "response_format"


def answer_reader(
    row: Row, prompt: str | None, tokenizer: Tokenizer | None, sampling: SamplingParams, chat_format: ChatFormat
) -> AnswerReader | None:
    """Parser of the answers of a row that can run; None if they are only content."""
    if row.kind != "chat" or prompt is None or not sampling.detokenize:
        return None
    continued = _continued(row)
    is_open = prompt_opens_reasoning(chat_format, prompt, continued)
    reader = AnswerReader(chat_format, row.request, is_open, tokenizer, goes_on_inside(chat_format, prompt, continued))
    return reader if reader.reads else None


def _continued(row: Row) -> str | None:
    return row.prompt.continued if isinstance(row.prompt, ChatPrompt) else None
