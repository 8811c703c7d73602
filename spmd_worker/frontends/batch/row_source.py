"""Interfaces between a job's rows and the engine: where rows come from, and where their answers go.

A local job, a shard and a world of a pool implement both; what answers rows knows neither files nor journals.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from spmd_worker.frontends.batch.job_counts import JobCounts
from spmd_worker.frontends.batch.run_dir.journal import JournalRecord, RowKey
from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_writer import RowAnswer


class InputRow(NamedTuple):
    """A line, parsed: a row, or the error in it. Neighbours with a common beginning have one in `key` too."""

    line: bytes
    row: Row | RowError
    key: bytes = b""


class RowSource(Protocol):
    """Rows to answer, one by one. No call waits for a slow input."""

    @property
    def has_ended(self) -> bool:
        """Whether no row will come any more."""

    @property
    def num_rows_by_adapter(self) -> Mapping[str, int]:
        """Rows that name each of the job's adapters."""

    @property
    def keys(self) -> Mapping[int, object]:
        """Rows that were returned and have no answer yet, by index."""

    def may_read(self) -> bool:
        """Whether rows may be read; it may become true later. Also called when all are read."""

    def is_ready(self) -> bool:
        """Whether `next_row` would return a row, or the end, at once."""

    def next_row(self) -> InputRow | None:
        """The next row; None when there are no more (`has_ended`), or none yet."""

    def is_lost(self, index: int) -> bool:
        """True for a row that was returned, and not begun, and needs no answer any more; it is forgotten then."""


class DoneRows(Protocol):
    """Rows that have their answers already."""

    @property
    def num_rows(self) -> int: ...

    def has(self, index: int) -> bool: ...

    def key_of(self, index: int) -> int | None:
        """Key of the row's input line when it was done; None if it cannot have changed."""


class AnswerStore(Protocol):
    """Keeps answers: a journal, or the parts of a pool."""

    def append(self, key: RowKey, answer: RowAnswer) -> None:
        """Keep the answer to a row. Raises OSError."""

    def tick(self) -> None:
        """Commit if a commit is due. Raises OSError."""

    def records(self) -> Iterator[JournalRecord]:
        """Rows that were done before this start."""


class AnswerSink(Protocol):
    """Accepts answers in any order: one for each row of the source."""

    @property
    def counts(self) -> JobCounts:
        """Sums over the answers, and over those of an earlier start."""

    def expect(self, num_rows: int | None) -> None:
        """Set the number of rows of the complete input, once it is known."""

    def add(self, answer: RowAnswer) -> None:
        """Store one row's answer; every row comes once. Raises OSError."""

    def add_all(self, answers: Iterable[RowAnswer]) -> None: ...

    def show(self, num_output_tokens: int) -> None:
        """Update the display; called once a step, also if no row has ended. Raises OSError."""
