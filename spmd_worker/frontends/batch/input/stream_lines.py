"""Rows of a stream, read ahead by a thread, so that a job answers available rows while it waits for more."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

_MOST_ROWS: Final = 4096
_MOST_BYTES: Final = 64 << 20
"""Most rows and bytes read ahead, plus one row."""


class StreamLines:
    """Iterates `lines`, which a thread reads once `is_ready` or `next` is called."""

    def __init__(self, lines: Iterator[tuple[int, bytes]]) -> None:
        self._lines = lines
        self._read: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._error: Exception | None = None
        self._has_ended = self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def is_ready(self) -> bool:
        """Whether `next` returns without waiting."""
        self._start()
        with self._changed:
            return bool(self._read) or self._has_ended

    def __iter__(self) -> "StreamLines":
        return self

    def __next__(self) -> tuple[int, bytes]:
        """The next row. Raises the error of reading."""
        self._start()
        with self._changed:
            self._changed.wait_for(lambda: self._read or self._has_ended)
            if self._read:
                row = self._read.popleft()
                self._num_bytes -= len(row[1])
                self._changed.notify_all()
                return row
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the thread, once it has its next row: nothing is read on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spmd-input", daemon=True)
            self._thread.start()

    @property
    def _has_room(self) -> bool:
        return len(self._read) < _MOST_ROWS and self._num_bytes < _MOST_BYTES

    def _run(self) -> None:
        try:
            for row in self._lines:
                with self._changed:
                    self._read.append(row)
                    self._num_bytes += len(row[1])
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed or self._has_room)
                    if self._is_closed:
                        break
        except Exception as error:  # any error is raised in the iterating thread
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
