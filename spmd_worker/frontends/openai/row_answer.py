"""Result of a row: its output line, and its counts for the job's metrics."""

from dataclasses import dataclass

from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import format_error


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """A row's output line and counts. `error_code` is None for a row that ran."""

    index: int
    line: bytes
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


def error_result(row: RowError) -> RowAnswer:
    """Answer of a row that does not run."""
    return RowAnswer(row.index, format_error(row), row.code)
