"""A range of rows that a world has leased: its rows that have no answer, and answers that are not committed."""

import time
from bisect import bisect_right
from collections.abc import Sequence

from spmd_worker.frontends.batch.job_rows import JobInput
from spmd_worker.frontends.batch.pool.members import Lease
from spmd_worker.frontends.batch.pool.records import Spans
from spmd_worker.frontends.batch.pool_world.parts import FinishedRow


class SpansDone:
    """Rows of a range that others finished, as a job's input asks for them. Their lines are unchanged: what is read is
    compared with the input's index.
    """

    def __init__(self, spans: Spans) -> None:
        self._starts, self._stops = [start for start, _ in spans], [stop for _, stop in spans]
        self.num_rows = sum(self._stops) - sum(self._starts)

    def has(self, index: int) -> bool:
        slot = bisect_right(self._starts, index) - 1
        return slot >= 0 and index < self._stops[slot]

    def key_of(self, index: int) -> int | None:
        assert self.has(index), index
        return None


class HeldRange:
    """`rows` are read by the engine's thread. The caller locks the rest."""

    def __init__(self, lease: Lease, rows: JobInput) -> None:
        self.lease, self.rows = lease, rows
        self.pending: list[FinishedRow] = []
        """Answers to commit."""
        self.num_pending_bytes = 0
        self._batch: list[FinishedRow] = []
        self._done = SpansDone(lease.log.spans)
        self._answered: set[int] = set()
        self._committed_s = time.monotonic()

    @property
    def num_unanswered(self) -> int:
        log = self.lease.log
        return log.stop - log.start - self._done.num_rows - len(self._answered)

    def wants(self, index: int) -> bool:
        """Whether the row is of this range, and has no answer."""
        log = self.lease.log
        return log.start <= index < log.stop and index not in self._answered and not self._done.has(index)

    def add(self, row: FinishedRow) -> None:
        self._answered.add(row.answer.index)
        self.pending.append(row)
        self.num_pending_bytes += len(row.answer.line)

    def batch(self) -> Sequence[FinishedRow]:
        """The answers to commit, which are the same until `end_batch`: a commit that was interrupted may be known to
        other worlds.
        """
        if not self._batch:
            self._batch, self.pending, self.num_pending_bytes = self.pending, [], 0
            self._committed_s = time.monotonic()
        return self._batch

    def end_batch(self) -> None:
        self._batch = []

    def is_due(self, commit_rows: int, commit_s: float, commit_bytes: int) -> bool:
        """Whether answers should be committed now: the range is finished, or there are many, or they have waited."""
        if not self.pending:
            return False
        is_late = time.monotonic() - self._committed_s >= commit_s
        is_much = len(self.pending) >= commit_rows or self.num_pending_bytes >= commit_bytes
        return is_late or is_much or not self.num_unanswered
