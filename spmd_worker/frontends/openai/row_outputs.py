"""RowOutputs: outputs of a row of several requests."""

from dataclasses import dataclass

from spmd_worker.replica.sequence.outputs import RequestOutput


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
