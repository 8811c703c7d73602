"""A worker's membership in a pool: joining it, heartbeats, who is alive, leaving."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.records import (
    JOB_NAME,
    MERGE_LOG,
    REPLACED,
    WORKERS,
    PoolJob,
    check_worker,
    free_record,
    read_free_record,
    worker_and_kind,
    worker_name,
)
from spmd_worker.frontends.batch.pool.store import Create, List, Listed, Read, Steps, Touch

_NUM_READS = 5
"""Reads of a name that exists, before it counts as unreadable: a client may have cached that it does not."""


@dataclass(eq=False, slots=True)
class Lease:
    """A lease of this worker, of a range or of the merge. `is_lost`: another worker has it, and nothing can be
    committed. `unsettled`: name and bytes of an entry of which it is not known whether it was created.
    """

    log: LeaseLog
    is_lost: bool = False
    unsettled: tuple[str, bytes] | None = None


@dataclass(eq=False, slots=True)
class Member:
    """A worker in a pool, and its knowledge of it. `worker` is an id that no other process has or had."""

    worker: str
    job: PoolJob
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Shown by its next heartbeat."""
    nonces: Iterator[int] = field(default_factory=count)
    next_number: int = 0
    """The first range that may not be allocated yet, which would begin with row `next_row`."""
    next_row: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    """Its ranges, by number."""
    open: dict[int, LeaseLog | None] | None = None
    """Ranges that are not known to be done, and the parts of their logs that were read; None before all are allocated.
    """
    merge: LeaseLog = field(default_factory=lambda: LeaseLog(MERGE_LOG))


def join(job: PoolJob, worker: str, about: Mapping[str, Any]) -> Steps[Member]:
    """Join a pool, or begin it. `about` describes the worker. Raises ConfigError naming the first value that differs
    from the pool's job, PoolError.
    """
    data = yield from put_once(JOB_NAME, job.to_bytes())
    text = difference(PoolJob.from_bytes(data), job)
    if text is not None:
        raise ConfigError(text)
    member = Member(check_worker(worker), job)
    # Before any lease: a holder without heartbeat counts as dead.
    yield Touch(worker_name(worker, "beat"), free_record(member.counts))
    name = worker_name(worker, "json")
    if not (yield from create_own(name, free_record(about))):
        raise PoolError(f"{name} exists in the pool: the id of a worker must be new")
    return member


def check_remains(folders: Iterable[str]) -> Steps[None]:
    """Raise PoolError for a pool of which only job.json was removed: its rows may be another job's."""
    if (yield Read(JOB_NAME)) is not None:
        return
    for folder in folders:
        listed: list[Listed] = yield List(f"{folder}/")
        # A pool that another world began meanwhile has the record by now.
        if listed and (yield Read(JOB_NAME)) is None:
            raise PoolError(
                f"job.pool has {listed[0].name}, but no {JOB_NAME}: remove what is left of that pool, or give job.pool "
                f"another folder"
            )


def heartbeat(worker: str, counts: Mapping[str, Any], leases: Iterable[Lease]) -> Steps[list[Lease]]:
    """Show that a worker is alive. Returns leases that were lost; only a hint that comes early."""
    yield Touch(worker_name(worker, "beat"), free_record(counts))
    lost = []
    for lease in leases:
        data = yield Read(lease.log.entry_name)
        # The worker itself may be creating its next entry.
        if data is not None and read_free_record(data).get("worker") != worker:
            lost.append(lease)
    return lost


def live_workers(member: Member) -> Steps[frozenset[str]]:
    """Workers that are alive, by the server's clock; empty if that is unknown.

    What a log says must be read before this: a holder joined before its lease, so it is in a later listing.
    """
    yield Touch(worker_name(member.worker, "beat"), free_record(member.counts))
    listed: list[Listed] = yield List(f"{WORKERS}/")
    times = {each.name: each.time_s for each in listed}
    if worker_name(member.worker, "json") not in times:
        yield from check_member(member.worker)
    now_s = times.get(worker_name(member.worker, "beat"))
    return frozenset() if now_s is None else live_of(listed, now_s, member.job.lease_s)


def check_member(worker: str) -> Steps[None]:
    """Raise PoolError unless the worker joined this pool: another may have the name of one that was removed."""
    if (yield Read(worker_name(worker, "json"))) is None:
        raise PoolError(
            f"the pool was removed while worlds used it, and its name may be another pool's: it has no "
            f"{worker_name(worker, 'json')}; {REPLACED}"
        )


def live_of(listed: Iterable[Listed], now_s: float, lease_s: float) -> frozenset[str]:
    """Workers in a listing whose heartbeat is younger than a lease, and that have not left."""
    live, ended = set(), set()
    for each in listed:
        worker, kind = worker_and_kind(each.name) or ("", "")
        if kind == "beat" and now_s - each.time_s < lease_s:
            live.add(worker)
        elif kind == "end":
            ended.add(worker)
    return frozenset(live - ended)


def leave(worker: str, end: Mapping[str, Any]) -> Steps[None]:
    """Leave a pool; nothing of this worker may follow. Leases that were not handed back count as a dead worker's."""
    yield Touch(worker_name(worker, "end"), free_record(end))


def put_once(name: str, data: bytes) -> Steps[bytes]:
    """Create an object, unless it exists; returns what it holds."""
    if (yield Create(name, data)):
        return data
    return (yield from read_existing(name))


def create_own(name: str, data: bytes) -> Steps[bool]:
    """Create an object; also True if an earlier try created it, of which the answer was lost. No other worker makes
    the same bytes, and this one only once: they have its id and a nonce.
    """
    return (yield from put_once(name, data)) == data


def read_existing(name: str) -> Steps[bytes]:
    """Read an object that exists. Raises PoolError."""
    for _ in range(_NUM_READS):
        data: bytes | None = yield Read(name)
        if data is not None:
            return data
    raise PoolError(f"{name} of the pool exists but cannot be read: was it removed by hand?")


def _shown(value: Any) -> str:
    """A value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def difference(pool: PoolJob, own: PoolJob) -> str | None:
    """The first difference between the pool's job and a worker's, as a message."""
    before, now = pool.values(), own.values()
    for key in dict.fromkeys((*before, *now)):
        if before.get(key) != now.get(key):
            values = [_shown(values.get(key, "not set"))[:160] for values in (now, before)]
            return (
                f"{key} is {values[0]}, and {values[1]} in the pool: every world of a pool must have the same job; "
                f"start with what the pool has, or give another job.pool"
            )
    return None
