"""Runs pooling rows through one engine: a row is one request per text, and is answered when all are."""

from dataclasses import dataclass, field

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.decimals import SpelledNumbers, shortest_decimals
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow, PooledOutput, encode_pooled, pooled_response
from spmd_worker.frontends.openai.pooling_body import Spell, pooled_record
from spmd_worker.frontends.openai.row import Row, RowError, shape_of
from spmd_worker.frontends.openai.row_answer import RowAnswer, error_result
from spmd_worker.frontends.openai.row_writer import error_code_of, json_line, response_line
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.request import RequestId


def admit_pooled(engine: Engine, encoded: EncodedPooledRow) -> list[RequestId]:
    """Queue a row's texts for the next step; returns one request per text, in their order."""
    config = engine.limits.pooling
    assert config is not None, "what was encoded is pooled here"
    sampling, index = pooled_sampling(encoded.params, config), encoded.row.index
    return [engine.requests.admit(ids, sampling, index=index, pooling=params) for ids, params in encoded.texts]


@dataclass(slots=True)
class _PooledRow:
    """A row with some texts not pooled yet."""

    encoded: EncodedPooledRow
    request_ids: list[RequestId]
    outputs: dict[RequestId, RequestOutput] = field(default_factory=dict)


class PooledRows:
    """Pooling part of `RowRunner`."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._rows: dict[RequestId, _PooledRow] = {}
        self.num_rows = 0

    @property
    def num_sequences(self) -> int:
        """Texts that are not pooled yet."""
        return len(self._rows)

    def has(self, request_id: RequestId) -> bool:
        """Whether the request belongs to one of these rows."""
        return request_id in self._rows

    def admit(self, row: Row) -> RowAnswer | None:
        """Queue a row's texts for the next step; returns the answer of one that cannot run."""
        engine = self._engine
        encoded = encode_pooled(row, engine.tokenizer, engine.limits, engine.config.limits)
        if isinstance(encoded, RowError):
            return error_result(encoded)
        ids = admit_pooled(engine, encoded)
        self._rows |= dict.fromkeys(ids, _PooledRow(encoded, ids))
        self.num_rows += 1
        return None

    def take(self, request_id: RequestId, output: RequestOutput) -> RowAnswer | None:
        """Add one text's output; returns the row's answer after the last."""
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
        numbers = SpelledNumbers()
        line = numbers.fill(self._line(encoded, output, numbers.mark)) or self._line(encoded, output, shortest_decimals)
        return RowAnswer(row.index, line, None, num_tokens, num_cached)

    def _line(self, encoded: EncodedPooledRow, output: PooledOutput, spell: Spell) -> bytes:
        if encoded.row.kind == "pooled":
            return json_line(pooled_record(encoded.row, output.outputs, spell))
        return response_line(encoded.row, pooled_response(encoded, output, self._model_name, spell))
