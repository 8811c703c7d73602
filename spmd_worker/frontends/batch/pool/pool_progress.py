"""Progress of a pool: rates, time left, and the workers that need attention. Derived from its state alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal

from spmd_worker.frontends.batch.pool.view import PoolState, RangeState, WorkerState

SLOW_FACTOR: Final = 3.0
"""A worker is slow whose rate is this many times below the median of the others."""
OLD_FACTOR: Final = 3.0
"""A lease is old that made no progress for this many times the median of all, and for two leases' time."""

_SIZES: Final = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}

Status = Literal["alive", "slow", "dead", "failed", "left", "ended"]
"""`left`: it handed its ranges back on a signal; `ended`: every row was done."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker with its rates since it joined. `ranges` are the open ones that it holds, or held when it died."""

    state: WorkerState
    status: Status
    num_rows: int
    num_output_tokens: int
    active_s: float
    ranges: tuple[RangeState, ...]

    @property
    def name(self) -> str:
        return self.state.worker

    @property
    def num_ranges(self) -> int:
        """Ranges that it leased."""
        return _count(self.state.counts, "ranges")

    @property
    def layout(self) -> str:
        """Such as `tp 2, dp 4`."""
        sizes = self.state.about.get("layout")
        sizes = sizes if isinstance(sizes, Mapping) else {}
        words = [f"{short} {sizes[key]}" for key, short in _SIZES.items() if sizes.get(key, 1) != 1]
        return ", ".join(words) or "one rank"

    @property
    def rows_per_s(self) -> float:
        return self.num_rows / self.active_s if self.active_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.active_s if self.active_s else 0.0


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """`left_s` is None if no worker computes. `old_ranges` are held by live workers and made no progress for long;
    `waiting_ranges` have no live holder.
    """

    state: PoolState
    workers: tuple[WorkerProgress, ...]
    rows_per_s: float
    tokens_per_s: float
    left_s: float | None
    old_ranges: tuple[RangeState, ...]
    waiting_ranges: tuple[RangeState, ...]

    def with_status(self, *statuses: Status) -> list[WorkerProgress]:
        return [worker for worker in self.workers if worker.status in statuses]


def make_progress(state: PoolState) -> PoolProgress:
    """The progress of a pool in this state."""
    counted = [_counted(worker, state) for worker in state.workers]
    rates = [worker.rows_per_s for worker in counted if worker.status == "alive" and worker.num_rows]
    usual = median(rates) if rates else 0.0
    workers = tuple(
        replace(worker, status="slow") if _is_slow(worker, usual, state.job.lease_s) else worker for worker in counted
    )
    live = [worker for worker in workers if worker.status in ("alive", "slow")]
    rows_per_s, tokens_per_s = sum(each.rows_per_s for each in live), sum(each.tokens_per_s for each in live)
    num_left = state.job.num_rows - state.num_rows_done
    left_s = num_left / rows_per_s if rows_per_s else None if num_left else 0.0
    waiting = tuple(each for each in state.open_ranges if not each.is_held)
    return PoolProgress(state, workers, rows_per_s, tokens_per_s, left_s, _old_ranges(state), waiting)


def _counted(worker: WorkerState, state: PoolState) -> WorkerProgress:
    status: Status = "alive" if worker.is_live else "dead"
    if worker.end is not None:
        how = worker.end.get("how")
        status = "failed" if how == "failed" else "left" if how == "signalled" else "ended"
    ranges = tuple(each for each in state.open_ranges if each.holder == worker.worker)
    # Between joining and the last heartbeat.
    active_s = max(worker.joined_age_s - worker.age_s, 0.0)
    num_rows, num_tokens = (_count(worker.counts, name) for name in ("rows", "output_tokens"))
    return WorkerProgress(worker, status, num_rows, num_tokens, active_s, ranges)


def _is_slow(worker: WorkerProgress, usual: float, lease_s: float) -> bool:
    """Not one that has just begun, or has nothing to do."""
    is_working = worker.status == "alive" and bool(worker.ranges) and worker.active_s >= 2 * lease_s
    return is_working and SLOW_FACTOR * worker.rows_per_s < usual


def _old_ranges(state: PoolState) -> tuple[RangeState, ...]:
    held = [each for each in state.open_ranges if each.is_held]
    if not held:
        return ()
    usual_s = median(each.age_s for each in held)
    limit_s = max(OLD_FACTOR * usual_s, 2 * state.job.lease_s)
    return tuple(each for each in held if each.age_s > limit_s)


def _count(counts: Mapping[str, Any], name: str) -> int:
    """A heartbeat's count; 0 for one that is missing or wrong, as everything here is only shown."""
    value = counts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
