"""Values of a pool for Prometheus, read in a thread of its own: a store may be slow, and the engine must not wait."""

import logging
import threading
from collections.abc import Mapping
from types import TracebackType

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool.view import PoolState, read_pool

logger = logging.getLogger(__name__)


def values(state: PoolState) -> dict[str, float | None]:
    """Values by name, which base/metrics/prometheus.py describes; None for one that is unknown."""
    progress = make_progress(state)
    return {
        "pool_rows": state.job.num_rows,
        "pool_rows_done": state.num_rows_done,
        "pool_rows_allocated": state.num_rows_allocated,
        "pool_rows_per_second": progress.rows_per_s,
        "pool_output_tokens_per_second": progress.tokens_per_s,
        "pool_seconds_left": progress.left_s,
        "pool_workers_alive": len(progress.with_status("alive", "slow")),
        "pool_workers_slow": len(progress.with_status("slow")),
        "pool_workers_dead": len(progress.with_status("dead")),
        "pool_workers_ended": len(progress.with_status("ended", "failed", "left")),
        "pool_ranges_open": len(state.open_ranges),
        "pool_ranges_waiting": len(progress.waiting_ranges),
        "pool_merged": int(state.merged is not None),
    }


class PoolValues:
    """The values of a pool, at most `every_s` seconds old between `__enter__` and `__exit__`. A pool that cannot be
    read keeps the values from before.
    """

    def __init__(self, store: PoolStore, every_s: float) -> None:
        self._store, self._every_s = store, every_s
        self._values: Mapping[str, float | None] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read_again, name="spmd-pool-values", daemon=True)

    def __call__(self, is_last: bool) -> Mapping[str, float | None]:
        """The latest values; with `is_last` they are read now."""
        if is_last:
            self._read()
        return self._values

    def __enter__(self) -> "PoolValues":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not joined: it may be waiting for the store.
        self._ending.set()

    def _read_again(self) -> None:
        while not self._ending.is_set():
            self._read()
            self._ending.wait(self._every_s)

    def _read(self) -> None:
        try:
            self._values = values(read_pool(self._store))
        except (OSError, PoolError, ConfigError) as error:
            logger.debug("The pool's values could not be read (%s)", error)
