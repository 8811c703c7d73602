"""Rows of a pool, as its world leases them."""

from collections.abc import Iterable

from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.row_source import InputRow
from spmd_worker.frontends.batch.run_dir.journal import RowKey
from spmd_worker.frontends.openai.row import RowError


class PoolInput:
    """A `RowSource` that ends when every row of the pool is done, by this world or another: it waits for theirs, and
    goes on with what they leave. `num_rows` counts the returned rows.
    """

    def __init__(self, worker: PoolWorker, adapters: Iterable[str] = ()) -> None:
        self.num_rows = self.num_dropped_rows = 0
        self.num_rows_by_adapter = dict.fromkeys(adapters, 0)
        self.keys: dict[int, RowKey] = {}
        self._worker = worker

    @property
    def has_ended(self) -> bool:
        return self._worker.has_ended

    def may_read(self) -> bool:
        """True. Raises the error of the pool's thread."""
        self._worker.check()
        return True

    def is_ready(self) -> bool:
        self._worker.check()
        return self.has_ended or any(not held.rows.has_ended and held.rows.is_ready() for held in self._worker.held())

    def next_row(self) -> InputRow | None:
        """The next row; None if no range has one yet, or at the end. Raises as the ranges' rows do, and the error of
        the pool's thread.
        """
        self._worker.check()
        for held in self._worker.held():
            while not held.rows.has_ended:
                found = held.rows.next_row()
                if found is None:
                    # Its lines are being read.
                    break
                index = found.row.index
                if index in self.keys:
                    # In flight since an earlier lease of its range, which was lost: the answer is the same.
                    continue
                self.keys[index] = held.rows.keys.pop(index)
                self._count(found)
                return found
        return None

    def is_lost(self, index: int) -> bool:
        """True for a returned row whose range is not held any more; it is forgotten then, and counted."""
        if self._worker.wants(index):
            return False
        del self.keys[index]
        self.num_dropped_rows += 1
        return True

    def _count(self, found: InputRow) -> None:
        self.num_rows += 1
        row = found.row
        for name in () if isinstance(row, RowError) else (row.adapter, row.prompt_adapter, row.model):
            if name in self.num_rows_by_adapter:
                self.num_rows_by_adapter[name] += 1
