"""State of a pool for people: its workers, open ranges, rows done. Reads only, but for the server's clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.pool.driver import is_out_of_reach, new_worker, run
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.members import live_of, read_existing
from spmd_worker.frontends.batch.pool.records import (
    CLOCK,
    DONE,
    JOB_NAME,
    MERGE_LOG,
    RANGES,
    WORKERS,
    Entry,
    Merged,
    PoolJob,
    RangeRecord,
    number_and_entry,
    range_name,
    read_free_record,
    worker_and_kind,
    worker_name,
)
from spmd_worker.frontends.batch.pool.store import Delete, List, Listed, Now, PoolStore, Read, Steps


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker. `age_s` is the time since its last heartbeat or its end, which had `counts`, `joined_age_s` since it
    joined; `end` is how it left, None if it did not. It is dead if it is neither live nor has left.
    """

    worker: str
    about: Mapping[str, Any]
    counts: Mapping[str, Any]
    age_s: float
    joined_age_s: float
    is_live: bool
    end: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class RangeState:
    """A range that is allocated and not done. `is_held`: `holder` is alive. `age_s`: time since the last entry of its
    log; `num_leases` counts the first.
    """

    number: int
    start: int
    stop: int
    holder: str | None
    is_held: bool
    num_rows_done: int
    num_leases: int
    age_s: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool at one time, roughly: it is read object by object. Rows that are neither done nor in an open range are not
    allocated yet. `merger` is the worker that merges, dead or alive. `now_s` is the server's time.
    """

    job: PoolJob
    num_rows_allocated: int
    num_rows_done: int
    num_ranges: int
    open_ranges: tuple[RangeState, ...]
    workers: tuple[WorkerState, ...]
    merger: str | None
    merged: Merged | None
    now_s: float


def read_pool(store: PoolStore, *, is_patient: bool = True) -> PoolState:
    """The state of a pool; a store that fails is asked again, for ten minutes or, without `is_patient`, for seconds.
    Raises ConfigError if there is none, PoolError, OSError.
    """
    try:
        clock = f"{CLOCK}/{new_worker()}"
        now_s: float | None = run(store, _clock(clock), pauses_s=())
    except OSError as error:
        if is_out_of_reach(error) and not is_patient:
            # Reading would take as long.
            raise
        # No permission to write: the newest heartbeat is the best known time.
        now_s = None
    return run(store, pool_state(now_s), is_patient=is_patient)


def _clock(name: str) -> Steps[float]:
    now_s: float = yield Now(name)
    yield Delete(name)
    return now_s


def pool_state(now_s: float | None) -> Steps[PoolState]:
    """The state of a pool at a time of the server's clock. Raises as `read_pool` does."""
    data: bytes | None = yield Read(JOB_NAME)
    if data is None:
        way_out = "start its job again if it was killed before it had begun, or give the value of job.pool"
        raise ConfigError(f"there is no pool: no {JOB_NAME}; {way_out}")
    job = PoolJob.from_bytes(data)
    # Done ranges first: what ends meanwhile is in both listings, and not read.
    done: list[Listed] = yield List(f"{DONE}/")
    entries: list[Listed] = yield List(f"{RANGES}/")
    listed: list[Listed] = yield List(f"{WORKERS}/")
    now_s = max((each.time_s for each in listed), default=0.0) if now_s is None else now_s
    live = live_of(listed, now_s, job.lease_s)
    logs = yield from _open_logs(done, entries)
    last = max((log.stop for log in logs), default=0)
    numbers = {found[0] for each in entries if (found := number_and_entry(each.name)) is not None}
    if numbers:
        name = range_name(max(numbers))
        last = RangeRecord.from_bytes(name, (yield from read_existing(name))).stop
    num_missing = sum(log.stop - log.start - log.num_rows_done for log in logs)
    times = {each.name: each.time_s for each in entries}
    ranges = [_range_state(log, live, now_s - _last_time(log, times)) for log in logs if not log.is_over]
    workers = yield from _worker_states(listed, live, now_s)
    merge = yield from _read_log(LeaseLog(MERGE_LOG))
    return PoolState(
        *(job, last, last - num_missing, len(numbers)), tuple(ranges), tuple(workers), merge.holder, merge.merged, now_s
    )


def _open_logs(done: list[Listed], entries: list[Listed]) -> Steps[list[LeaseLog]]:
    """Logs of the ranges without a summary."""
    is_done = {number_and_entry(each.name) for each in done}
    found = [each for each in map(number_and_entry, (each.name for each in entries)) if each is not None]
    logs = []
    for number in sorted({number for number, entry in found if (number, 1) not in is_done}):
        data = yield from read_existing(range_name(number))
        log = LeaseLog.of_range(number, RangeRecord.from_bytes(range_name(number), data))
        logs.append((yield from _read_log(log)))
    return logs


def _read_log(log: LeaseLog) -> Steps[LeaseLog]:
    while not log.is_over and (data := (yield Read(log.entry_name))) is not None:
        log.apply(Entry.from_bytes(log.entry_name, data))
    return log


def _last_time(log: LeaseLog, times: Mapping[str, float]) -> float:
    """Time of the last entry that was listed."""
    names = (f"{log.name}.{entry:04}" for entry in range(log.next_entry - 1, 1, -1))
    return next((times[name] for name in names if name in times), times.get(log.name, 0.0))


def _range_state(log: LeaseLog, live: frozenset[str], age_s: float) -> RangeState:
    is_held = log.holder in live
    counts = (log.num_rows_done, log.num_leases, max(age_s, 0.0))
    return RangeState(log.number, log.start, log.stop, log.holder, is_held, *counts)


def _worker_states(listed: list[Listed], live: frozenset[str], now_s: float) -> Steps[list[WorkerState]]:
    objects = [(found, each.time_s) for each in listed if (found := worker_and_kind(each.name)) is not None]
    times = dict(objects)
    states = []
    for worker in dict.fromkeys(worker for (worker, _), _ in objects):
        records = []
        for kind in ("json", "beat", "end"):
            data: bytes | None = (yield Read(worker_name(worker, kind))) if (worker, kind) in times else None
            records.append(read_free_record(data))
        joined_s = times.get((worker, "json"), times.get((worker, "beat"), now_s))
        # A worker that has left wrote its last counts then.
        last_s = max(times.get((worker, kind), joined_s) for kind in ("beat", "end"))
        ages = max(now_s - last_s, 0.0), max(now_s - joined_s, 0.0)
        end = records[2] if (worker, "end") in times else None
        counts = records[2].get("counts") or records[1]
        state = WorkerState(worker, records[0], counts, *ages, worker in live, end)
        states.append(state)
    return states
