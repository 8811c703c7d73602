"""Index of a pool's input: the first world that has it puts it into the pool, and every other uses that one."""

import contextlib
import threading
import time
from concurrent.futures import Future, wait
from typing import Final

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.frontends.batch.input.input_index import InputIndex, index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.pool.driver import run
from spmd_worker.frontends.batch.pool.members import put_once
from spmd_worker.frontends.batch.pool.records import INPUT_INDEX_NAME
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool_world.input_content import OWN_INDEX, POOLS_INDEX, check_content

_ASK_S: Final = 5.0
"""Time between two looks for an index that another world has made."""
_LEAVE_S: Final = 1.0


class PoolIndex:
    """Finds or makes the index in a thread, started at once, while the model is loaded. `own` is an index that the user
    gave. `close` ends it early.
    """

    def __init__(self, store: PoolStore, reader: RowReader, own: InputIndex | None = None) -> None:
        self._store, self._reader, self._own = store, reader, own
        self._future: Future[InputIndex] = Future()
        self._is_closed = False
        self._other: bytes | None = None
        self._asked_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="spmd-pool-index", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = 0.0) -> InputIndex | None:
        """The index; None when the timeout (None: there is none) has passed. Raises ConfigError, also for another
        input than the pool's as far as `check_content` finds it, PoolError, OSError.
        """
        if timeout_s != 0:
            wait([self._future], timeout_s)
        return self._future.result() if self._future.done() else None

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            self._future.set_result(self._find())
        except Exception as error:  # raised where the index is waited for
            self._future.set_exception(error)

    def _find(self) -> InputIndex:
        index = self._own
        if index is not None:
            # Before it is every world's.
            check_content(self._reader, index, OWN_INDEX, lambda: self._is_closed)
        elif not self._is_over():
            index = index_input(self._reader, self._is_over)
        is_known = self._own is None and self._other is None
        if self._other is None:
            assert index is not None
            if self._is_closed:
                raise PoolError("the job ended before its input was read")
            self._other = run(self._store, put_once(INPUT_INDEX_NAME, index.to_bytes()))
        try:
            found = InputIndex.from_bytes(self._other)
        except ConfigError as error:
            raise PoolError(f"{INPUT_INDEX_NAME} of the pool {error}: give job.pool another folder") from None
        whole = index if is_known else self._own
        if whole is not None and found.digest != whole.digest:
            key, given = ("job.input", "pool's input") if is_known else ("job.input_index", "index of the pool's input")
            raise ConfigError(
                f"{key} has {whole.digest}, and the pool's index {found.digest}: give the {given}, or another job.pool"
            )
        if whole is None:
            check_content(self._reader, found, POOLS_INDEX, lambda: self._is_closed)
        return found

    def _is_over(self) -> bool:
        """Whether another world has made the index, or nobody needs it."""
        now_s = time.monotonic()
        if self._other is None and now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            # Only a look: what fails for good fails again when the own index is put into the pool.
            with contextlib.suppress(OSError):
                self._other = self._store.read(INPUT_INDEX_NAME)
        return self._is_closed or self._other is not None
