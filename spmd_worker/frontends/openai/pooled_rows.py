"""Runs pooling rows through one engine: a row is one request per text, and is answered when all are."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.decimals import FormattedVectors, shortest_decimals
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow, PooledOutput, encode_pooled
from spmd_worker.frontends.openai.pooling_body import FormatVector, pooled_record, pooling_body
from spmd_worker.frontends.openai.row import ImagesOfRow, Row, row_error
from spmd_worker.frontends.openai.row_writer import (
    RowAnswer,
    error_code_of,
    error_result,
    format_error,
    json_line,
    response_line,
)
from spmd_worker.frontends.openai.served_models import ServedModels
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.tokenizer.messages import InvalidRequestError


def admit_pooled(engine: Engine, encoded: EncodedPooledRow) -> list[RequestId]:
    """Queue a row's texts for the next step; returns one request per text, in their order."""
    config = engine.limits.pooling
    assert config is not None, "checked by encode_pooled"
    sampling, index = pooled_sampling(encoded.params, config), encoded.row.index
    # Only a row of one prompt has images.
    images: dict[str, Any] = {"media": encoded.media, "media_items": encoded.media_items} if encoded.media else {}
    return [
        engine.requests.admit(ids, sampling, index=index, pooling=params, adapter=encoded.adapter_id, **images)
        for ids, params in encoded.texts
    ]


@dataclass(slots=True)
class _PooledRow:
    """A row with some texts not pooled yet."""

    encoded: EncodedPooledRow
    request_ids: list[RequestId]
    images: ImagesOfRow
    outputs: dict[RequestId, RequestOutput] = field(default_factory=dict)


class PooledRows:
    """Pooling part of `RowRunner`."""

    def __init__(self, engine: Engine, models: ServedModels) -> None:
        self._engine, self._models = engine, models
        self._rows: dict[RequestId, _PooledRow] = {}
        self.num_rows = self.num_media_bytes = 0
        """Rows that are not answered yet, and bytes of their prepared images."""

    @property
    def num_sequences(self) -> int:
        """Texts that are not pooled yet."""
        return len(self._rows)

    def has(self, request_id: RequestId) -> bool:
        return request_id in self._rows

    def admit(self, row: Row, media: Sequence[PreparedImage] | None = None) -> RowAnswer | None:
        """Queue a row's texts for the next step; returns the answer of one that cannot run. `media` are its images."""
        engine = self._engine
        try:
            encoded = encode_pooled(row, engine.tokenizer, engine.limits, engine.config.limits, self._models, media)
        except InvalidRequestError as error:
            return error_result(row_error(row, error.code, str(error)))
        ids = admit_pooled(engine, encoded)
        # The engine holds the images.
        images, encoded = ImagesOfRow.of(encoded.media), replace(encoded, media=())
        self._rows |= dict.fromkeys(ids, _PooledRow(encoded, ids, images))
        self.num_rows += 1
        self.num_media_bytes += images.num_bytes
        return None

    def take(self, request_id: RequestId, output: RequestOutput) -> RowAnswer | None:
        """Add one text's output; returns the row's answer after the last."""
        pooled = self._rows.pop(request_id)
        pooled.outputs[request_id] = output
        if len(pooled.outputs) < len(pooled.request_ids):
            return None
        self.num_rows -= 1
        self.num_media_bytes -= pooled.images.num_bytes
        return self._answer(pooled, PooledOutput(tuple([pooled.outputs[each] for each in pooled.request_ids])))

    def _answer(self, pooled: _PooledRow, output: PooledOutput) -> RowAnswer:
        encoded = pooled.encoded
        row, outputs, failed, code = encoded.row, output.outputs, output.failed, None
        if failed is not None:
            code = error_code_of(failed)
            line = format_error(row_error(row, code, str(failed.error)))
        else:
            vectors = FormattedVectors()
            line = vectors.fill(self._line(encoded, outputs, vectors.mark)) or self._line(
                encoded, outputs, shortest_decimals
            )
        num_tokens = sum(len(each.prompt_token_ids) for each in outputs)
        num_cached = sum(each.num_cached_tokens for each in outputs)
        digest = pooled.images.digest if code is None else ""
        return RowAnswer(row.index, line, code, num_tokens, num_cached, media_digest=digest)

    def _line(self, encoded: EncodedPooledRow, outputs: Sequence[RequestOutput], format_vector: FormatVector) -> bytes:
        if encoded.row.kind == "pooled":
            return json_line(pooled_record(encoded.row, outputs[0], format_vector))
        return response_line(encoded.row, pooling_body(encoded, outputs, self._models.base, format_vector))
