"""The two ends of a job, both on rank 0: rows of the input in order, lines of the output in order.

Knows files, counts and the progress display. Knows nothing about engines or who answers a row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from spmd_worker.batch.progress import Progress
from spmd_worker.batch.row import Row, RowError
from spmd_worker.batch.row_answer import RowAnswer
from spmd_worker.batch.row_parser import CustomIds, parse_row
from spmd_worker.batch.row_reader import RowReader
from spmd_worker.batch.row_writer import OrderedWriter
from spmd_worker.config import JobConfig
from spmd_worker.sequence.sampling_params import SamplingParams

_MAX_WAITING_LINES: Final = 100_000
"""Finished rows that may wait for an earlier one before no more are admitted."""


class InputRow(NamedTuple):
    """A line, and what it says: a row, or why it is none."""

    line: bytes
    row: Row | RowError


class JobInput:
    """Reads rows one by one, up to `job.max_rows`, and remembers every custom id."""

    def __init__(self, job: JobConfig, defaults: SamplingParams) -> None:
        assert job.input is not None, "check_job comes first"
        self.num_rows = 0
        self.has_ended = False
        self._max_rows, self._defaults = job.max_rows, defaults
        self._lines: Iterator[tuple[int, bytes]] = iter(RowReader(job.input))
        self._custom_ids = CustomIds()

    def next_row(self) -> InputRow | None:
        """The next row; None when there are no more."""
        is_enough = self._max_rows is not None and self.num_rows >= self._max_rows
        index, line = (-1, b"") if is_enough else next(self._lines, (-1, b""))
        if index < 0:
            self.has_ended = True
            return None
        self.num_rows += 1
        return InputRow(line, self._custom_ids.check(parse_row(index, line, self._defaults)))


def count_rows(job: JobConfig) -> int | None:
    """Rows of the input, for the progress display; None for standard input, which can be read once only."""
    if job.input is None or job.input == "-":
        return None
    num_rows = sum(1 for _ in RowReader(job.input))
    return num_rows if job.max_rows is None else min(num_rows, job.max_rows)


@dataclass(slots=True)
class JobCounts:
    """What the answered rows came to."""

    rows: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)

    @property
    def error_rows(self) -> int:
        """Rows that did not run."""
        return sum(self.error_codes.values())

    def add(self, answer: RowAnswer) -> None:
        """One more row."""
        self.rows += 1
        self.prompt_tokens += answer.num_prompt_tokens
        self.cached_prompt_tokens += answer.num_cached_tokens
        self.output_tokens += answer.num_output_tokens
        if answer.error_code is not None:
            self.error_codes[answer.error_code] = self.error_codes.get(answer.error_code, 0) + 1


class JobOutput:
    """Takes answers in any order; writes them in order, counts them and shows how far the job is."""

    def __init__(self, writer: OrderedWriter, progress: Progress) -> None:
        self.counts = JobCounts()
        self._writer, self._progress = writer, progress
        self._shown = (0, 0)

    @property
    def is_crowded(self) -> bool:
        """Whether so many lines wait for an earlier one that no more rows should be begun."""
        return self._writer.num_waiting >= _MAX_WAITING_LINES

    def take(self, answer: RowAnswer) -> None:
        """One row's answer; every row comes once."""
        self.counts.add(answer)
        self._writer.write(answer.index, answer.line)

    def take_all(self, answers: Iterable[RowAnswer]) -> None:
        """Several."""
        for answer in answers:
            self.take(answer)

    def show(self, num_output_tokens: int) -> None:
        """Call once a step, also while no row has ended: tokens are counted as they are generated."""
        now = (self.counts.rows, num_output_tokens)
        self._progress.update(now[0] - self._shown[0], now[1] - self._shown[1])
        self._shown = now
