"""Pools with a past: worlds that join, compute, die, pause and leave, by the protocol itself and a clock of the test.

    make_pool(100_000, [World("gpu-1", 0, 200), World("gpu-2", 5, 190, dies_s=90)]).write(folder)

Rows are computed at a world's rate; the parts have no lines.
"""

import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from spmd_worker.frontends.batch.pool.driver import run
from spmd_worker.frontends.batch.pool.members import Lease, Member, heartbeat, join, leave
from spmd_worker.frontends.batch.pool.protocol import Unleased, claim, claim_merge, commit, end_merge, hand_back
from spmd_worker.frontends.batch.pool.records import Merged, PoolJob, Spans
from spmd_worker.frontends.batch.pool.store import Listed
from spmd_worker.frontends.batch.pool.view import PoolState, RangeState, WorkerState

TOKENS_A_ROW = 250
STARTED_S = 1_790_000_000.0


@dataclass
class TimedStore:
    """Implements `PoolStore` in memory, at a time that the test sets."""

    now: float = STARTED_S
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    folders: dict[str, set[str]] = field(default_factory=dict)

    def create(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.touch(name, data)
        return True

    def read(self, name: str) -> bytes | None:
        return self.objects.get(name, (None, 0.0))[0]

    def list(self, prefix: str) -> list[Listed]:
        names = self.folders.get(prefix.partition("/")[0], ())
        found = sorted(name for name in names if name.startswith(prefix))
        return [Listed(name, len(self.objects[name][0]), self.objects[name][1]) for name in found]

    def touch(self, name: str, data: bytes) -> None:
        self.objects[name] = (data, self.now)
        self.folders.setdefault(name.partition("/")[0], set()).add(name)

    def now_s(self, own: str) -> float:
        return self.now

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)
        self.folders.get(name.partition("/")[0], set()).discard(name)

    def write(self, folder: Path, age_s: float = 0.0) -> None:
        """Write every object as a file, as a pool that had this state `age_s` ago."""
        shift_s = time.time() - age_s - self.now
        for name, (data, time_s) in self.objects.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            os.utime(path, (time_s + shift_s, time_s + shift_s))


@dataclass
class World:
    """A world. Times are seconds since the pool began; it `pauses` from a second to another, heartbeats too. A
    signal, or a failure, ends it at `ends_s`.
    """

    name: str
    joins_s: float
    rows_per_s: float
    load_s: float = 20.0
    dies_s: float = float("inf")
    ends_s: float = float("inf")
    pauses: tuple[float, float] | None = None
    fails: bool = False
    num_ranges: int = 0

    def steps(self, store: TimedStore, job: PoolJob) -> Iterator[float]:
        """Act, and yield the seconds until the next act."""
        about = {
            "host": self.name.split("-")[0],
            "pid": 4711,
            "layout": {"tensor_parallel_size": 2, "data_parallel_size": 4},
        }
        member = run(store, join(job, self.name, about))
        yield self.load_s
        while not isinstance(lease := run(store, claim(member)), Unleased):
            yield from self._compute(store, member, lease)
        while lease is Unleased.WAIT:
            yield 5.0
            while not isinstance(lease := run(store, claim(member)), Unleased):
                yield from self._compute(store, member, lease)
        while not isinstance(merge := run(store, claim_merge(member)), Merged):
            if merge is not None:
                yield 12.0
                run(store, end_merge(member, merge, Merged(job.num_rows, 811 * job.num_rows, "ab" * 32)))
            yield 5.0
        self._leave(store, member, "ended")

    def _compute(self, store: TimedStore, member: Member, lease: Lease) -> Iterator[float]:
        self.num_ranges += 1
        for start, stop in pieces(lease.log.missing(), lease.log.stop - lease.log.start):
            yield (stop - start) / self.rows_per_s
            if store.now - STARTED_S >= self.ends_s:
                run(store, hand_back(member, lease))
                self._leave(store, member, "failed" if self.fails else "signalled")
                yield float("inf")
            if not run(store, commit(member, lease, ((start, stop),), b"")):
                return
            rows = int(member.counts.get("rows", 0)) + stop - start
            member.counts = {"rows": rows, "output_tokens": rows * TOKENS_A_ROW, "ranges": self.num_ranges}

    def _leave(self, store: TimedStore, member: Member, how: str) -> None:
        run(store, heartbeat(member.worker, member.counts, ()))
        run(store, leave(member.worker, {"how": how}))

    def is_silent(self, second: float) -> bool:
        return second >= self.dies_s or (self.pauses is not None and self.pauses[0] <= second < self.pauses[1])


def pieces(missing: list[tuple[int, int]], num_rows: int) -> Spans:
    """Rows of a lease in four commits."""
    size = max(1, -(-num_rows // 4))
    return tuple((first, min(first + size, stop)) for start, stop in missing for first in range(start, stop, size))


def make_pool(num_rows: int, worlds: list[World], until_s: float = float("inf"), **job_values: float) -> TimedStore:
    """The pool after `until_s` seconds, or when every world has ended."""
    values = {"lease_s": 60.0, "lease_rows": 4096, **job_values}
    job = PoolJob({"model": "demo"}, num_rows, "answers.jsonl", float(values["lease_s"]), int(values["lease_rows"]))
    store, numbers = TimedStore(), count()
    queue = [(world.joins_s, next(numbers), world, world.steps(store, job), False) for world in worlds]
    queue += [(world.joins_s + 15.0, next(numbers), world, iter(()), True) for world in worlds]
    heapq.heapify(queue)
    ended = set()
    while queue:
        second, _, world, steps, is_heartbeat = heapq.heappop(queue)
        if second > until_s or (world.name in ended and is_heartbeat):
            continue
        store.now = STARTED_S + second
        if second >= world.dies_s:
            continue
        if world.is_silent(second):
            assert world.pauses is not None
            heapq.heappush(queue, (world.pauses[1], next(numbers), world, steps, is_heartbeat))
        elif is_heartbeat:
            name = f"workers/{world.name}.beat"
            store.touch(name, store.read(name) or b"{}")
            heapq.heappush(queue, (second + job.lease_s / 4, next(numbers), world, steps, True))
        else:
            wait_s = next(steps, None)
            if wait_s is None or wait_s == float("inf"):
                ended.add(world.name)
            else:
                heapq.heappush(queue, (second + wait_s, next(numbers), world, steps, False))
    store.now = min(STARTED_S + until_s, max(store.now, STARTED_S)) if until_s != float("inf") else store.now
    return store


def crowd(num_workers: int, dead: int) -> PoolState:
    """A running pool of many workers, of which one is dead; without a history."""
    ranges = [
        RangeState(number, number, number + 1, f"pod-{number:03}", True, 0, 1, 1.0) for number in range(num_workers)
    ]
    counts = [{"rows": 9_000 + number % 7, "output_tokens": 900_000, "ranges": 9} for number in range(num_workers)]
    workers = [
        WorkerState(
            f"spmd-worker-pool-{number}-abcde-1-{number:016x}",
            *({}, counts[number], 500.0 if number == dead else 3.0, 600.0, number != dead, None),
        )
        for number in range(num_workers)
    ]
    job = PoolJob({}, 10_000_000, "answers.jsonl", 60.0, 4096)
    return PoolState(
        *(job, 2_000_000, 9_000 * num_workers, 900), tuple(ranges), tuple(workers), None, None, STARTED_S + 600.0
    )
