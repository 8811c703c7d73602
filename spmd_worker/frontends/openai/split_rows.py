"""Rows of several requests in one engine, texts to pool or windows of audio: a row is answered when all are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.audio_answer import audio_line
from spmd_worker.frontends.openai.audio_row import EncodedAudioRow, encode_audio
from spmd_worker.frontends.openai.pooled_row import encode_pooled
from spmd_worker.frontends.openai.pooling_body import pooled_line
from spmd_worker.frontends.openai.row import ImagesOfRow, Row, row_error
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.openai.row_outputs import EncodedSplitRow, RowOutputs
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_code_of, error_result, format_error
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.tokenizer.messages import InvalidRequestError


def admit_split(engine: Engine, encoded: EncodedSplitRow) -> list[RequestId]:
    """Queue a row's requests for the next step; returns them in their order."""
    return (_admit_audio if isinstance(encoded, EncodedAudioRow) else _admit_pooled)(engine, encoded)


def _admit_pooled(engine: Engine, encoded: Any) -> list[RequestId]:
    config = engine.limits.pooling
    assert config is not None, "checked by encode_pooled"
    sampling, index = pooled_sampling(encoded.params, config), encoded.row.index
    return [engine.requests.admit(each, sampling, index=index) for each in encoded.texts]


def _admit_audio(engine: Engine, encoded: Any) -> list[RequestId]:
    """Each window under its own name: random numbers of the first are those of a row of one."""
    ids = []
    for number, window in enumerate(encoded.windows):
        name = window.custom_id
        name = f"{name}#{number}" if name is not None and number else name
        given = (window.content, window.sampling)
        ids.append(engine.requests.admit(*given, custom_id=name, index=window.index, call=number))
    return ids


@dataclass(slots=True)
class _SplitRow:
    """A row with some requests not answered yet, each of so many sequences."""

    encoded: EncodedSplitRow
    request_ids: list[RequestId]
    images: ImagesOfRow
    num_sequences: int
    outputs: dict[RequestId, RequestOutput] = field(default_factory=dict)


class SplitRows:
    """Part of `RowRunner` for rows of several requests."""

    def __init__(self, engine: Engine, context: RowContext) -> None:
        self._engine, self._context = engine, context
        self._rows: dict[RequestId, _SplitRow] = {}
        self.num_rows = self.num_sequences = self.num_media_bytes = 0
        """Rows that are not answered yet, their texts and samples, and bytes of their prepared images and audio."""

    @property
    def num_requests(self) -> int:
        """Texts and windows without an answer."""
        return len(self._rows)

    def has(self, request_id: RequestId) -> bool:
        return request_id in self._rows

    def admit(self, row: Row, media: Sequence[PreparedMedia] | None = None) -> RowAnswer | None:
        """Queue a row's requests for the next step; returns the answer of one that cannot run. `media` are its images,
        or the windows of its audio.
        """
        encode = encode_pooled if row.pooling is not None else encode_audio
        try:
            encoded = encode(row, self._context, media)
        except InvalidRequestError as error:
            return error_result(row_error(row, error.code, str(error)))
        ids, images = admit_split(self._engine, encoded), ImagesOfRow.of(encoded.media)
        num_sequences = encoded.num_sequences // len(ids)
        # The engine holds the images and the audio.
        self._rows |= dict.fromkeys(ids, _SplitRow(encoded.without_media(), ids, images, num_sequences))
        self.num_rows += 1
        self.num_sequences += encoded.num_sequences
        self.num_media_bytes += images.num_bytes
        return None

    def take(self, request_id: RequestId, output: RequestOutput) -> RowAnswer | None:
        """Add one request's output; returns the row's answer after the last."""
        split = self._rows.pop(request_id)
        self.num_sequences -= split.num_sequences
        split.outputs[request_id] = output
        if len(split.outputs) < len(split.request_ids):
            return None
        self.num_rows -= 1
        self.num_media_bytes -= split.images.num_bytes
        return self._answer(split, RowOutputs(tuple([split.outputs[each] for each in split.request_ids])))

    def _answer(self, split: _SplitRow, output: RowOutputs) -> RowAnswer:
        encoded, failed, code = split.encoded, output.failed, None
        if failed is not None:
            code = error_code_of(failed)
            line = format_error(row_error(encoded.row, code, str(failed.error)))
        elif isinstance(encoded, EncodedAudioRow):
            line = audio_line(encoded, output.outputs, self._context.models.base)
        else:
            line = pooled_line(encoded, output.outputs, self._context.models.base)
        return RowAnswer(
            encoded.row.index,
            line,
            code,
            num_prompt_tokens=sum(each.num_prompt_tokens for each in output.outputs),
            num_cached_tokens=sum(each.num_cached_tokens for each in output.outputs),
            num_output_tokens=sum(len(each.token_ids) for one in output.outputs for each in one.outputs),
            media_digest=split.images.digest if code is None else "",
        )
