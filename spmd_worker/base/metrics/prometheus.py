"""Progress of a job, as a file for node_exporter's textfile collector; prometheus-client writes it."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.files import write_file

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 5.0
_PREFIX: Final = "spmd_worker_job_"
_HELP: Final = {
    "rows": "Rows of the input; absent if unknown.",
    "rows_done": "Rows that have their answer, those from before a restart too.",
    "rows_resumed": "Rows that an earlier start of the job answered.",
    "error_rows": "Rows that did not run.",
    "prompt_tokens": "Tokens of the prompts of rows that are done.",
    "output_tokens": "Tokens generated since this start.",
    "running": "1 while the job runs, 0 when it has ended.",
    "complete": "1 when the output is complete.",
    "start_time_seconds": "When this start of the job began (Unix time).",
    "update_time_seconds": "When this file was written (Unix time): a job that was killed leaves running at 1.",
    "pool_rows": "Rows of the input of all worlds of the pool.",
    "pool_rows_done": "Rows that a world of the pool has answered and committed.",
    "pool_rows_allocated": "Rows that are in a range, done or leased.",
    "pool_rows_per_second": "Rows that the live worlds answer in a second, each since it joined.",
    "pool_output_tokens_per_second": "Tokens that the live worlds generate in a second, each since it joined.",
    "pool_seconds_left": "Time until every row is done, at these rates; absent if no world computes.",
    "pool_workers_alive": "Worlds with a heartbeat that is younger than job.lease_s.",
    "pool_workers_slow": "Those of them whose rate is a third of the median or less.",
    "pool_workers_dead": "Worlds that stopped without leaving.",
    "pool_workers_ended": "Worlds that left, well or not.",
    "pool_ranges_open": "Ranges of rows that are leased, or were, and not done.",
    "pool_ranges_waiting": "Those of them that no live world holds.",
    "pool_merged": "1 when the output of all ranges is written.",
}


class PrometheusFile:
    """Rewrites `path` atomically every few seconds. A file that cannot be written is one warning: the job goes on.
    Values that are None are left out. `more` returns values of something else, or, with True, its last ones.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        more: Callable[[bool], Mapping[str, float | None]] = lambda is_last: {},
    ) -> None:
        self._path, self._clock, self._more = path, clock, more
        self._started_s = clock()
        self._written_s = float("-inf")
        self._has_failed = False

    def update(self, values: Mapping[str, float | None]) -> None:
        """The job runs; writes the file when it is due."""
        if self._clock() - self._written_s >= _PERIOD_S:
            self._write({**values, **self._more(False), "running": 1, "complete": 0})

    def end(self, values: Mapping[str, float | None], *, is_complete: bool) -> None:
        self._write({**values, **self._more(True), "running": 0, "complete": int(is_complete)})

    def _write(self, values: Mapping[str, float | None]) -> None:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        now_s = self._written_s = self._clock()
        own = {"start_time_seconds": self._started_s, "update_time_seconds": now_s}
        registry = CollectorRegistry()
        for name, value in {**values, **own}.items():
            if value is not None:
                Gauge(f"{_PREFIX}{name}", _HELP[name], registry=registry).set(value)
        try:
            write_file(self._path, generate_latest(registry), is_durable=False)
        except OSError as error:
            if not self._has_failed:
                logger.warning("job.prometheus_file=%s cannot be written (%s)", self._path, error.strerror)
            self._has_failed = True


def require_prometheus(path: str) -> None:
    """Raise ConfigError where the extra `metrics` is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise_missing_package("prometheus-client", "metrics", f"job.prometheus_file={path}", error)
