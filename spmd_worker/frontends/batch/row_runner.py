"""Runs rows through one engine: every admitted row returns as its output line."""

from collections.abc import Sequence

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.engine_models import row_context
from spmd_worker.frontends.openai.row import NO_IMAGES, EncodedRow, ImagesOfRow, Row, RowError
from spmd_worker.frontends.openai.row_encoding import resolve
from spmd_worker.frontends.openai.row_outputs import is_split
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_code_of, error_result, format_result
from spmd_worker.frontends.openai.split_rows import SplitRows
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.request import RequestId


class RowRunner:
    """Rows in an engine, on rank 0 of its replica. Answers to rows that name no model name `model_name`."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._context = engine, row_context(engine, model_name)
        self._rows: dict[RequestId, EncodedRow] = {}
        self._images: dict[RequestId, ImagesOfRow] = {}
        self._split = SplitRows(engine, self._context)

    @property
    def num_rows(self) -> int:
        """Rows admitted and not answered."""
        return len(self._rows) + self._split.num_rows

    @property
    def num_requests(self) -> int:
        """Running requests: a pooling row has one per text, a row of audio one per window."""
        return len(self._rows) + self._split.num_requests

    @property
    def num_sequences(self) -> int:
        """Running samples, and texts to pool."""
        return sum(row.sampling.num_sequences for row in self._rows.values()) + self._split.num_sequences

    @property
    def num_compile_bytes(self) -> int:
        """Bytes of the grammars that admission has compiled."""
        grammars = self._engine.limits.grammars
        return 0 if grammars is None else grammars.num_checked_bytes

    @property
    def num_media_bytes(self) -> int:
        """Bytes of the prepared images and audio of the admitted rows."""
        return sum(each.num_bytes for each in self._images.values()) + self._split.num_media_bytes

    def admit(self, row: Row, media: Sequence[PreparedMedia] | None = None) -> RowAnswer | None:
        """Queue a row for the next step; returns the answer of one that cannot run. `media` are its prepared images,
        or the windows of its audio; None: they are prepared here.
        """
        if is_split(row):
            return self._split.admit(row, media)
        encoded = resolve(row, self._context, media)
        if isinstance(encoded, RowError):
            return error_result(encoded)
        content, name = encoded.content, encoded.custom_id
        request_id = self._engine.requests.admit(content, encoded.sampling, custom_id=name, index=row.index)
        if content.media:
            self._images[request_id] = ImagesOfRow.of(content.media)
        self._rows[request_id] = encoded.without_media() if content.media or content.rows is not None else encoded
        return None

    def step(self) -> list[RowAnswer]:
        answers = [self._answer(output) for output in self._engine.step()]
        return [answer for answer in answers if answer is not None]

    def _answer(self, output: RequestOutput) -> RowAnswer | None:
        request_id = RequestId(int(output.request_id))
        if self._split.has(request_id):
            return self._split.take(request_id, output)
        row = self._rows.pop(request_id)
        images = self._images.pop(request_id, NO_IMAGES)
        return RowAnswer(
            row.index,
            format_result(row, output, self._context.models.base),
            error_code_of(output) if output.error is not None else None,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
            media_digest=images.digest if output.error is None else "",
        )
