"""Rows that are pooled, through one engine: a row is a request for each of its texts, and is answered when all are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spmd_worker.batch.input.prompt_values import RowProblem
from spmd_worker.batch.input.row_parser import encode
from spmd_worker.batch.output.pooling_body import pair_scores, pooled_record, pooling_body
from spmd_worker.batch.output.row_answer import RowAnswer, error_result
from spmd_worker.batch.output.row_writer import error_code_of, json_line, response_line
from spmd_worker.batch.row import Prompt, Row, RowError, TextPrompt, shape_of
from spmd_worker.engine.engine import LLMEngine
from spmd_worker.engine.validation import RequestError
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.pooling_params import PoolingParams, pooled_sampling, taken_pooling, truncated_row
from spmd_worker.sequence.request import RequestId


@dataclass(slots=True)
class _PooledRow:
    """A row of which some texts are not pooled yet."""

    row: Row
    request_ids: list[RequestId]
    are_pairs: bool
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
        try:
            pooling, parts = self._encoded(row)
        except (RowProblem, RequestError) as problem:
            error = RowError(row.index, row.custom_id, shape_of(row.kind), problem.code, str(problem))
            return error_result(error)
        config = self._engine.limits.pooling
        assert config is not None, "what was let pass is pooled here"
        sampling = pooled_sampling(pooling, config)
        ids = [self._engine.admit_request(part, sampling, index=row.index, pooling=pooling) for part in parts]
        pooled = _PooledRow(row, ids, config.task == "classify")
        self._rows |= dict.fromkeys(ids, pooled)
        self.num_rows += 1
        return None

    def take(self, request_id: RequestId, output: RequestOutput) -> RowAnswer | None:
        """One text's output; the row's answer where it was the last."""
        pooled = self._rows.pop(request_id)
        pooled.outputs[request_id] = output
        if len(pooled.outputs) < len(pooled.request_ids):
            return None
        self.num_rows -= 1
        return self._answer(pooled.row, [pooled.outputs[each] for each in pooled.request_ids], pooled.are_pairs)

    def _encoded(self, row: Row) -> tuple[PoolingParams, list[tuple[int, ...]]]:
        """Raises RowProblem or RequestError for a row of which some text cannot be pooled here."""
        engine, ask = self._engine, row.pooling
        assert ask is not None
        engine.limits.check_runner(ask.params)
        config = engine.limits.pooling
        assert config is not None, "what was let pass is pooled here"
        try:
            taken = taken_pooling(ask.params, config)
        except ValueError as error:
            raise RowProblem("invalid_value", str(error)) from None
        prompts: Iterable[Prompt] = ask.prompts
        if ask.num_firsts and config.task == "classify":
            firsts, seconds = ask.prompts[: ask.num_firsts], ask.prompts[ask.num_firsts :]
            firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
            # One at a time: the first that is too long ends it, before all are there.
            prompts = (TextPrompt(_text(first) + _text(second)) for first, second in zip(firsts, seconds))
        parts = []
        for prompt in prompts:
            _, token_ids = encode(prompt, engine.tokenizer)
            token_ids = truncated_row(token_ids, ask.params.truncate_prompt_tokens, engine.max_model_len)
            engine.limits.check(token_ids, pooled_sampling(taken, config), taken)
            most = engine.config.limits.max_prompt_tokens
            if most is not None and len(token_ids) > most:
                message = f"the prompt has {len(token_ids)} tokens, more than limits.max_prompt_tokens={most}"
                raise RowProblem("prompt_too_long", message)
            parts.append(token_ids)
        return taken, parts

    def _answer(self, row: Row, outputs: Sequence[RequestOutput], are_pairs: bool) -> RowAnswer:
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            code = error_code_of(failed)
            line = error_result(RowError(row.index, row.custom_id, shape_of(row.kind), code, str(failed.error))).line
            return RowAnswer(row.index, line, code, num_tokens, num_cached)
        assert row.pooling is not None
        if row.kind == "pooled":
            return RowAnswer(row.index, json_line(pooled_record(row, outputs)), None, num_tokens, num_cached)
        scores = pair_scores(row.pooling, outputs, are_pairs=are_pairs)
        line = response_line(row, pooling_body(row, outputs, scores, self._model_name))
        return RowAnswer(row.index, line, None, num_tokens, num_cached)


def _text(prompt: object) -> str:
    assert isinstance(prompt, TextPrompt), "rows that score have texts"
    return prompt.text
