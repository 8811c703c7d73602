"""Writes the parts of an output in a thread, while the job answers the rows of later parts."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any, Final

from spmd_worker.frontends.batch.run_dir.journal import RowJournal

_POLL_S: Final = 0.1
_WAIT_S: Final = 1.0
_LEAVE_S: Final = 5.0
_READ_ROWS: Final = 8192
"""Rows that are read together, when they are there."""


class _StoppedError(Exception):
    """The job ends without its output."""


class PartsThread:
    """Gives `write` the journal's lines in order of the rows, when those of a part of `part_rows` are committed; `end`
    or `close` ends it. `first_row` is the index of the input's first row, None until it is known.
    """

    def __init__(
        self,
        journal: RowJournal,
        first_row: Callable[[], int | None],
        part_rows: int,
        write: Callable[[Iterable[bytes]], dict[str, Any]],
    ) -> None:
        self._journal, self._first_row, self._part_rows, self._write = journal, first_row, part_rows, write
        self._num_rows: int | None = None
        self._is_stopped = False
        self._changed = threading.Event()
        self._written: Future[dict[str, Any]] = Future()
        self._thread = threading.Thread(target=self._run, name="spmd-parts", daemon=True)
        self._thread.start()

    def end(self, num_rows: int, on_wait: Callable[[], None]) -> dict[str, Any]:
        """Wait until all rows, which are committed, are written; `on_wait` is called every second. Raises the error of
        writing: OSError.
        """
        self._num_rows = num_rows
        self._changed.set()
        while not wait([self._written], _WAIT_S).done:
            on_wait()
        return self._written.result()

    def close(self) -> None:
        """Stop, once the current line is written; do not wait for a store that does not answer. Idempotent."""
        self._is_stopped = True
        self._changed.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            self._written.set_result(self._write(self._lines()))
        except Exception as error:  # raised by `end`; the answers are kept
            self._written.set_exception(error)

    def _lines(self) -> Iterator[bytes]:
        num_given = 0
        while num_given != self._num_rows:
            num_ready = self._num_ready(num_given)
            if not num_ready:
                self._changed.wait(_POLL_S)
            first_row = self._first_row() or 0
            for line in islice(self._journal.lines(first_row + num_given), num_ready):
                if self._is_stopped:
                    raise _StoppedError
                num_given += 1
                yield line
            if self._is_stopped:
                raise _StoppedError

    def _num_ready(self, num_given: int) -> int:
        """Rows to give now: those of a part, or many, or the last ones."""
        first_row, num_rows = self._first_row(), self._num_rows
        if first_row is None:
            return 0
        num_wanted = min(self._part_rows - num_given % self._part_rows, _READ_ROWS)
        if num_rows is not None:
            num_wanted = min(num_wanted, num_rows - num_given)
        start = first_row + num_given
        return num_wanted if self._journal.committed_until(start) >= start + num_wanted else 0
