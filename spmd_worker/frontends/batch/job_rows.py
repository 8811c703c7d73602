"""Input and output of a job, both on rank 0: rows that are not done yet, and answers into the journal."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.prometheus import PrometheusFile
from spmd_worker.base.remote_names import shown_name
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.job_counts import JobCounts
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.row_source import AnswerStore, DoneRows, InputRow
from spmd_worker.frontends.batch.run_dir.journal import NO_CUSTOM_ID, RowKey, row_key
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_parser import CustomIds, custom_id_digest, parse_row
from spmd_worker.frontends.openai.row_writer import RowAnswer
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_MAX_SKIPPED_ROWS: Final = 1000
_MAX_SKIP_S: Final = 0.1
"""Bounds of the done rows skipped per call: the caller has steps to run in between."""


class JobInput:
    """Parses `lines`, with the indices of their rows, one by one, up to `job.max_rows`, and remembers every custom id.
    Rows in `done` are skipped; `keys` are of the returned rows without an answer. `adapters` are the names that are
    counted in `num_rows_by_adapter`. `folder` is for a temporary file.
    """

    def __init__(
        self,
        lines: Iterable[tuple[int, bytes]],
        job: JobConfig,
        limits: RowLimits,
        defaults: SamplingParams,
        done: DoneRows,
        adapters: Iterable[str] = (),
        folder: Path | None = None,
    ) -> None:
        self.num_rows = 0
        self.first_row: int | None = None
        """Index of the first row, once it is read."""
        self.num_rows_by_adapter = dict.fromkeys(adapters, 0)
        self.has_ended = self._is_closed = False
        self.may_read: Callable[[], bool] = lambda: True
        self.keys: dict[int, RowKey] = {}
        self._done, self._input = done, shown_name(job.input or "")
        self._num_unread_done = done.num_rows
        self._max_rows, self._defaults, self._limits = job.max_rows, defaults, limits
        # A slow stream must not delay the rows that it has already written.
        self._stream = lines if isinstance(lines, StreamLines) else None
        self._lines: Iterator[tuple[int, bytes]] = iter(lines)
        self._custom_ids = CustomIds(folder)

    def is_ready(self) -> bool:
        """Whether `next_row` would not wait. A stream is read for no more than `max_rows`."""
        return self.may_read() and (self._has_all() or self._stream is None or self._stream.is_ready())

    def _has_all(self) -> bool:
        return self._max_rows is not None and self.num_rows >= self._max_rows

    def next_row(self) -> InputRow | None:
        """The next row to answer; None when there are no more (`has_ended`), or none yet. Never waits for a stream.
        Raises ConfigError for a row that was done and has changed since, or is missing.
        """
        until_s = time.monotonic() + _MAX_SKIP_S
        for _ in range(_MAX_SKIPPED_ROWS):
            if not self.is_ready():
                return None
            index, line = (-1, b"") if self._has_all() else next(self._lines, (-1, b""))
            if index < 0 or self._is_closed:
                if self._num_unread_done and not self._is_closed:
                    raise ConfigError(
                        f"job.input={self._input} has {self.num_rows} rows now, and {self._num_unread_done} later rows "
                        f"were answered before: give the input and job.max_rows that the run began with, or another "
                        f"job.run_dir"
                    )
                self.has_ended = True
                self._custom_ids.close()
                return None
            self.num_rows += 1
            if self.first_row is None:
                self.first_row = index
            parsed = parse_row(index, line, self._defaults, self._limits)
            row = self._custom_ids.check(parsed)
            for name in () if isinstance(row, RowError) else (row.adapter, row.prompt_adapter, row.model):
                if name in self.num_rows_by_adapter:
                    self.num_rows_by_adapter[name] += 1
            key = row_key(line)
            if not self._done.has(index):
                custom_id = NO_CUSTOM_ID if parsed.custom_id is None else custom_id_digest(parsed.custom_id)
                self.keys[index] = RowKey(key, custom_id, isinstance(parsed, RowError))
                return InputRow(line, row)
            if self._done.key_of(index) not in (key, None):
                raise ConfigError(
                    f"job.input={self._input}: row {index} has changed since it was answered: give the input that the "
                    f"run began with, or another job.run_dir"
                )
            self._num_unread_done -= 1
            if time.monotonic() >= until_s:
                break
        return None

    def is_lost(self, index: int) -> bool:
        """False: a job has its rows alone."""
        return False

    def close(self) -> None:
        """End the rows, and the thread that reads ahead if there is one. In any thread."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def forget(self) -> None:
        """Remove the file of custom ids; in the thread that reads rows."""
        self._custom_ids.close()


class JobOutput:
    """Accepts answers in any order, stores them in the journal, counts them and displays progress.

    `keys` are of the rows in flight (`JobInput.keys`); `num_rows` is of the complete input, if known. `__exit__` ends
    the display, and reports the job's end to outside monitors.
    """

    def __init__(
        self,
        journal: AnswerStore,
        keys: dict[int, RowKey],
        progress: Progress,
        num_rows: int | None = None,
        prometheus: PrometheusFile | None = None,
    ) -> None:
        self.counts = JobCounts()
        self.is_complete = False
        """Set once the output is written."""
        self._journal, self._keys, self._progress = journal, keys, progress
        self._num_rows, self._prometheus = num_rows, prometheus
        for record in journal.records():
            self.counts.add_record(record)
        self._shown = self._sums(0)

    def expect(self, num_rows: int | None) -> None:
        self._num_rows = num_rows
        self._progress.expect(num_rows)

    def add(self, answer: RowAnswer) -> None:
        """Store one row's answer; every row comes once. Raises OSError."""
        self.counts.add(answer)
        self._journal.append(self._keys.pop(answer.index), answer)

    def add_all(self, answers: Iterable[RowAnswer]) -> None:
        for answer in answers:
            self.add(answer)

    def show(self, num_output_tokens: int) -> None:
        """Update the display; call it once a step, also if no row has ended: it counts generated tokens."""
        self._journal.tick()
        now = self._sums(num_output_tokens)
        self._progress.update(*(new - old for new, old in zip(now, self._shown, strict=True)))
        self._shown = now
        if self._prometheus is not None:
            self._prometheus.update(self._values())

    def _sums(self, num_output_tokens: int) -> tuple[int, int, int, int]:
        """Arguments of `Progress.update`, from the start on."""
        return self.counts.rows, num_output_tokens, self.counts.prompt_tokens, self.counts.error_rows

    def __enter__(self) -> "JobOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        if self._prometheus is not None:
            self._prometheus.end(self._values(), is_complete=self.is_complete)

    def _values(self) -> dict[str, float | None]:
        return {
            "rows": self._num_rows,
            "rows_done": self.counts.rows,
            "rows_resumed": self.counts.resumed_rows,
            "error_rows": self.counts.error_rows,
            "prompt_tokens": self.counts.prompt_tokens,
            "output_tokens": self._shown[1],
        }
