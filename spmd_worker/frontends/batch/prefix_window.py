"""Rows that wait, in the order of their beginnings: those with a common prefix are admitted one after another.

The window is filled while rows are handed out, and passed from its smallest key to its largest, again and again, as
an elevator passes floors: a row that is read behind the present key waits for the next pass. So a pass finds about
twice the rows of each beginning that a window which is emptied before it is filled again would find. Every row is
handed out: so many rows may join a pass, others wait for the next one. Each priority has passes of its own.

The prefix cache needs no more than this order. Rows of one step share what the first of them computes in that step (a
block can be found as soon as the step that fills it is planned), and while a prompt takes several steps it uses up
their tokens, so no row that would compute the same joins beside it (tests/replica/scheduler/test_shared_work.py).
"""

import time
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.frontends.batch.prefix_key import prefix_key
from spmd_worker.frontends.batch.row_source import InputRow, RowSource
from spmd_worker.frontends.openai.row import RowError

_MAX_BYTES: Final = 64 << 20
"""Bytes of the lines and keys that wait; the rows read from them take a few times as much."""
_FIRST_ROWS: Final = 1024
"""Rows that are read before the first is handed out: a pass that begins with few of each beginning shares little."""
_ROWS_PER_CALL: Final = 256
_ROWS_PER_ROW: Final = 4
_MAX_CALL_S: Final = 0.1
"""Most rows read per call, before the first row is handed out and later, and the time after which no other is read (a
source may skip many done rows before each): the caller has steps to run in between.
"""
_WINDOWS_PER_PASS: Final = 4
"""Rows that may join a pass, in windows: else common rows ahead of it would keep a rare one behind it for ever."""


class _Waiting(NamedTuple):
    """A row in the order of the window; indices are unique, so what was read is never compared."""

    priority: int
    pass_number: int
    key: bytes
    row_index: int
    found: InputRow

    @property
    def num_bytes(self) -> int:
        return len(self.key) + len(self.found.line)


class PrefixWindow:
    """A source of the rows of `source`, at most `max_rows` of them read ahead: rows of lower priority numbers first,
    rows that begin alike together. Errors of rows do not wait.
    """

    def __init__(self, source: RowSource, max_rows: int) -> None:
        self._source, self._max_rows = source, max_rows
        # A heap.
        self._waiting: list[_Waiting] = []
        # Of the last row that was handed out.
        self._priority = self._pass_number = 0
        self._key = b""
        self._num_joined = self._num_bytes = 0
        self._is_starting = True

    @property
    def keys(self) -> Mapping[int, object]:
        return self._source.keys

    @property
    def num_rows_by_adapter(self) -> Mapping[str, int]:
        return self._source.num_rows_by_adapter

    @property
    def has_ended(self) -> bool:
        return self._source.has_ended and not self._num_waiting

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting)

    def may_read(self) -> bool:
        return self._source.may_read()

    def is_ready(self) -> bool:
        return self._num_waiting > 0 or self._source.is_ready()

    def is_lost(self, index: int) -> bool:
        return self._source.is_lost(index)

    def next_row(self) -> InputRow | None:
        """The next row in the order of the window, or an error; None when there is none yet, or none any more. A row
        of a slow stream is handed out although the window is not full.
        """
        until_s = time.monotonic() + _MAX_CALL_S
        for _ in range(_ROWS_PER_CALL if self._is_starting else _ROWS_PER_ROW):
            if self._is_full or self._source.has_ended or (found := self._source.next_row()) is None:
                break
            if isinstance(found.row, RowError):
                return found
            self._put(found, found.row.priority, prefix_key(found.row))
            if time.monotonic() >= until_s:
                break
        if self._is_starting and self._num_waiting:
            has_few = self._num_waiting < _FIRST_ROWS and not self._is_full
            self._is_starting = has_few and not self._source.has_ended and self._source.is_ready()
        while self._num_waiting and not self._is_starting:
            found = self._pop()
            if not self._source.is_lost(found.row.index):
                return found
        return None

    @property
    def _is_full(self) -> bool:
        return self._num_waiting >= self._max_rows or self._num_bytes >= _MAX_BYTES

    def _put(self, found: InputRow, priority: int, key: bytes) -> None:
        pass_number = self._pass_number
        if priority == self._priority:
            joins = key >= self._key and self._num_joined < _WINDOWS_PER_PASS * self._max_rows
            self._num_joined += joins
            pass_number += not joins
        waiting = _Waiting(priority, pass_number, key, found.row.index, found._replace(key=key))
        self._num_bytes += waiting.num_bytes
        heappush(self._waiting, waiting)

    def _pop(self) -> InputRow:
        waiting = heappop(self._waiting)
        if (waiting.priority, waiting.pass_number) != (self._priority, self._pass_number):
            self._num_joined = 0
        self._priority, self._pass_number, self._key = waiting.priority, waiting.pass_number, waiting.key
        self._num_bytes -= waiting.num_bytes
        return waiting.found


def in_prefix_order(source: RowSource, config: RunConfig) -> RowSource:
    """The source of a job's rows, by `job.window_rows`; in the order of the file where no prefix is kept."""
    max_rows = config.job.window_rows
    return PrefixWindow(source, max_rows) if max_rows > 1 and config.cache.enable_prefix_caching else source
