"""Rows of several requests, texts to pool or windows of audio, and their outputs."""

from dataclasses import dataclass

from spmd_worker.frontends.openai.audio_row import EncodedAudioRow
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow
from spmd_worker.frontends.openai.row import AudioPrompt, Row
from spmd_worker.replica.sequence.outputs import RequestOutput

EncodedSplitRow = EncodedPooledRow | EncodedAudioRow


def is_split(row: Row) -> bool:
    """Whether a row is of a kind that has several requests."""
    return row.pooling is not None or isinstance(row.prompt, AudioPrompt)


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """Outputs of all texts of a pooling row, or of all windows of audio, in their order."""

    outputs: tuple[RequestOutput, ...]
    finished: bool = True

    @property
    def failed(self) -> RequestOutput | None:
        """The first output without an answer; its error is the row's."""
        return next((output for output in self.outputs if output.error is not None), None)

    @property
    def error(self) -> str | None:
        return None if self.failed is None else self.failed.error

    @property
    def error_code(self) -> str | None:
        return None if self.failed is None else self.failed.error_code
