"""Rows that are pooled, through one engine: a row is a request for each of its texts, and is answered when all are."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from spmd_worker.batch.input.prompt_values import RowProblem
from spmd_worker.batch.input.row_parser import encode
from spmd_worker.batch.output.openai_body import JsonObject
from spmd_worker.batch.output.pooling_body import pair_scores, pooled_record, pooling_body
from spmd_worker.batch.output.row_answer import RowAnswer, error_result
from spmd_worker.batch.output.row_writer import error_code_of, json_line, response_line
from spmd_worker.batch.row import Prompt, Row, RowError, TextPrompt, shape_of
from spmd_worker.config.schema import RowLimits
from spmd_worker.engine.engine import LLMEngine
from spmd_worker.engine.validation import RequestError, RequestLimits
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.pooling_params import PoolingParams, pooled_sampling, taken_pooling, truncated_row
from spmd_worker.sequence.request import RequestId
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPooledRow:
    """A row that can run: the ids of each of its texts. `are_pairs`: a text is both of a pair."""

    row: Row
    params: PoolingParams
    texts: tuple[tuple[int, ...], ...]
    are_pairs: bool


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Of all texts of a row, in their order."""

    outputs: tuple[RequestOutput, ...]
    finished: bool = True

    @property
    def failed(self) -> RequestOutput | None:
        """The first of a text that has no vector; its error is the row's."""
        return next((output for output in self.outputs if output.error is not None), None)

    @property
    def error(self) -> str | None:
        """The row's error."""
        return None if self.failed is None else self.failed.error

    @property
    def error_code(self) -> str | None:
        """The same as a code."""
        return None if self.failed is None else self.failed.error_code


def encode_pooled(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, limits: RowLimits
) -> EncodedPooledRow | RowError:
    """A row with its texts as ids that an engine with the limits `engine` can pool."""
    try:
        return _encoded(row, tokenizer, engine, limits.max_prompt_tokens)
    except (RowProblem, RequestError) as problem:
        return RowError(row.index, row.custom_id, shape_of(row.kind), problem.code, str(problem))


def _encoded(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, max_prompt_tokens: int | None
) -> EncodedPooledRow:
    ask = row.pooling
    assert ask is not None, "a row that is pooled"
    engine.check_runner(ask.params)
    config = engine.pooling
    assert config is not None, "what was let pass is pooled here"
    try:
        taken = taken_pooling(ask.params, config)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None
    are_pairs = bool(ask.num_firsts) and config.task == "classify"
    prompts: Iterable[Prompt] = ask.prompts
    if are_pairs:
        firsts, seconds = ask.prompts[: ask.num_firsts], ask.prompts[ask.num_firsts :]
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        # One at a time: the first that is too long ends it, before all are there.
        prompts = (TextPrompt(_text(first) + _text(second)) for first, second in zip(firsts, seconds))
    texts = []
    for prompt in prompts:
        _, token_ids = encode(prompt, tokenizer)
        token_ids = truncated_row(token_ids, ask.params.truncate_prompt_tokens, engine.max_model_len)
        engine.check(token_ids, pooled_sampling(taken, config), taken)
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            message = f"the prompt has {len(token_ids)} tokens, more than limits.max_prompt_tokens={max_prompt_tokens}"
            raise RowProblem("prompt_too_long", message)
        texts.append(token_ids)
    return EncodedPooledRow(row, taken, tuple(texts), are_pairs)


def admit_pooled(engine: LLMEngine, encoded: EncodedPooledRow) -> list[RequestId]:
    """Queue a row's texts for the next step; a request each, in their order."""
    config = engine.limits.pooling
    assert config is not None, "what was encoded is pooled here"
    sampling, index = pooled_sampling(encoded.params, config), encoded.row.index
    return [engine.admit_request(each, sampling, index=index, pooling=encoded.params) for each in encoded.texts]


def pooled_response(encoded: EncodedPooledRow, output: PooledOutput, model_name: str) -> JsonObject:
    """The body of the response to an OpenAI row."""
    row = encoded.row
    assert row.pooling is not None, "a row that is pooled"
    scores = pair_scores(row.pooling, output.outputs, are_pairs=encoded.are_pairs)
    return pooling_body(row, output.outputs, scores, model_name)


@dataclass(slots=True)
class _PooledRow:
    """A row of which some texts are not pooled yet."""

    encoded: EncodedPooledRow
    request_ids: list[RequestId]
    outputs: dict[RequestId, RequestOutput] = field(default_factory=dict)


class PooledRows:
    """See `RowRunner`, whose part this is."""

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._rows: dict[RequestId, _PooledRow] = {}
        self.num_rows = 0

    @property
    def num_sequences(self) -> int:
        """Texts that are not pooled yet."""
        return len(self._rows)

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is of one of these rows."""
        return request_id in self._rows

    def admit(self, row: Row) -> RowAnswer | None:
        """Queue a row's texts for the next step; the answer, now, of one that cannot run."""
        engine = self._engine
        encoded = encode_pooled(row, engine.tokenizer, engine.limits, engine.config.limits)
        if isinstance(encoded, RowError):
            return error_result(encoded)
        ids = admit_pooled(engine, encoded)
        self._rows |= dict.fromkeys(ids, _PooledRow(encoded, ids))
        self.num_rows += 1
        return None

    def take(self, request_id: RequestId, output: RequestOutput) -> RowAnswer | None:
        """One text's output; the row's answer where it was the last."""
        pooled = self._rows.pop(request_id)
        pooled.outputs[request_id] = output
        if len(pooled.outputs) < len(pooled.request_ids):
            return None
        self.num_rows -= 1
        return self._answer(pooled.encoded, PooledOutput(tuple([pooled.outputs[each] for each in pooled.request_ids])))

    def _answer(self, encoded: EncodedPooledRow, output: PooledOutput) -> RowAnswer:
        row, outputs = encoded.row, output.outputs
        num_tokens = sum(len(each.prompt_token_ids) for each in outputs)
        num_cached = sum(each.num_cached_tokens for each in outputs)
        failed = output.failed
        if failed is not None:
            code = error_code_of(failed)
            line = error_result(RowError(row.index, row.custom_id, shape_of(row.kind), code, str(failed.error))).line
            return RowAnswer(row.index, line, code, num_tokens, num_cached)
        if row.kind == "pooled":
            return RowAnswer(row.index, json_line(pooled_record(row, outputs)), None, num_tokens, num_cached)
        line = response_line(row, pooled_response(encoded, output, self._model_name))
        return RowAnswer(row.index, line, None, num_tokens, num_cached)


def _text(prompt: object) -> str:
    assert isinstance(prompt, TextPrompt), "rows that score have texts"
    return prompt.text
