"""Writes the parts of an output in a thread, while the job answers the rows of later parts."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import count
from typing import Any, Final

from spmd_worker.frontends.batch.run_dir.journal import RowJournal

_POLL_S: Final = 0.1
_WAIT_S: Final = 1.0
_LEAVE_S: Final = 5.0


class _StoppedError(Exception):
    """The job ends without its output."""


class PartsThread:
    """Gives `write` the journal's lines in order of the rows, as they are committed; `end` or `close` ends it."""

    def __init__(self, journal: RowJournal, write: Callable[[Iterable[bytes]], dict[str, Any]]) -> None:
        self._journal, self._write = journal, write
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
        for row in count():
            while row >= self._journal.num_leading:
                if self._is_stopped:
                    raise _StoppedError
                if row == self._num_rows:
                    return
                self._changed.wait(_POLL_S)
            if self._is_stopped:
                raise _StoppedError
            yield self._journal.line_of(row)
