"""Compiles a row's tools and response_format into a grammar and an output parser."""

from dataclasses import replace

from spmd_worker.chat.answer_grammar import AnswerGrammar, json_form
from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import ChatFormat, check_takes_tools, prompt_opens_reasoning
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.engine.validation import RequestError
from spmd_worker.frontends.openai.prompt_values import RowProblem
from spmd_worker.frontends.openai.row import Row
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import MessageProblem
from spmd_worker.tokenizer.tokenizer import Tokenizer

_ENGINE_KEY = "structured_outputs: "


def check_template(row: Row, chat_format: ChatFormat) -> None:
    """Raise RowProblem for tools that the model's chat template does not support."""
    try:
        if row.request is not None:
            check_takes_tools(row.request, chat_format)
    except MessageProblem as problem:
        raise RowProblem(problem.code, str(problem)) from None


def formed_sampling(row: Row, prompt: str | None, tokenizer: Tokenizer | None, format_: ChatFormat) -> SamplingParams:
    """The row's parameters, with the grammar that its answer must match. `prompt` is the row's text, None for token
    ids. Raises RowProblem.
    """
    if row.kind == "completion" and row.request is not None and row.request.schema is not None:
        try:
            return replace(row.sampling, structured_outputs=json_form(row.request.schema))
        except ValueError as error:
            raise RowProblem("invalid_value", f"{_key(row.request)}: {error}"[:500]) from None
    if row.kind != "chat" or prompt is None or tokenizer is None:
        return row.sampling
    grammar, own = AnswerGrammar(format_, tokenizer.marker_id), row.sampling.structured_outputs
    try:
        form = None if row.request is None else grammar.form(row.request, prompt)
        if form is None and own is not None:
            form = grammar.after_reasoning(own, prompt)
        return row.sampling if form is None else replace(row.sampling, structured_outputs=form)
    except MessageProblem as problem:
        raise RowProblem(problem.code, str(problem)) from None
    except ValueError as error:
        key = "structured_outputs" if row.request is None or own is not None else _key(row.request)
        raise RowProblem("invalid_value", f"{key}: {error}"[:500]) from None


def form_problem(row: Row, problem: RequestError) -> str:
    """Message of a request error, by the key that the row has."""
    words = str(problem)
    if row.request is None or not words.startswith(_ENGINE_KEY) or row.sampling.structured_outputs is not None:
        return words
    return f"{_key(row.request)}: {words.removeprefix(_ENGINE_KEY)}"


def _key(request: ChatRequest) -> str:
    """Key that asked for the grammar."""
    return "tools" if request.must_call else "response_format"


def answer_reader(
    row: Row, prompt: str | None, tokenizer: Tokenizer | None, sampling: SamplingParams, format_: ChatFormat
) -> AnswerReader | None:
    """Parser of the answers of a row that can run; None if they are only content."""
    if row.kind != "chat" or prompt is None or not sampling.detokenize:
        return None
    reader = AnswerReader(format_, row.request, prompt_opens_reasoning(format_, prompt), tokenizer)
    return reader if reader.reads else None
