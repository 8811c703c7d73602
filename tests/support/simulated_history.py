"""One history of a simulated pool: what may happen next, what happens, and the promises at its end. See
pool_simulator.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from simulated_worker import Compute, Flaws, LocalTime, MemoryStore, Plan, Publish, Sleep, Worker, line_of, require

from spmd_worker.frontends.batch.pool.records import PoolJob
from spmd_worker.frontends.batch.pool.store import Create

TICKS_A_LEASE = 4
MAX_STEPS = 20_000
"""Of a history: one that takes more makes no progress."""


class Action(NamedTuple):
    """`kind` is step, heartbeat, tick, time, arrive (of a delayed operation), crash, interrupt, repeat, delay, pause,
    lapse, jump or join, `worker` an index.
    `has_effect`: the worker's operation took effect before it crashed or was interrupted; of delay: the worker crashes.
    """

    kind: str
    worker: int = 0
    has_effect: bool = False


class History:
    """One history. `faults_left` bounds crashes, interruptions, repetitions, pauses, jumps and joins."""

    def __init__(
        self, job: PoolJob, plans: list[Plan], flaws: Flaws | None = None, faults_left: int = 0, has_jumps: bool = False
    ) -> None:
        self.job, self.flaws, self.faults_left, self.has_jumps = job, flaws or Flaws(), faults_left, has_jumps
        self.store = MemoryStore()
        self.expected = b"".join(map(line_of, range(job.num_rows)))
        self.workers: list[Worker] = []
        self.num_computed = self.num_losses = self.num_steps = 0
        self.output: bytes | None = None
        self.kinds = Counter[str]()
        self.delayed: list[Any] = []
        for plan in plans:
            self._join(plan)

    def _join(self, plan: Plan) -> None:
        worker = Worker(f"w{len(self.workers)}", plan, self.flaws, self.job)
        worker.start()
        self.workers.append(worker)

    # Choices.

    def actions(self) -> list[Action]:
        """What may happen next, without faults; empty when every worker has ended."""
        found = []
        may_tick, is_idle = True, True
        for index, worker in enumerate(self.workers):
            if worker.is_running and worker.paused_until <= self.store.now:
                if self._may_go(worker, "main", worker.next_main):
                    found.append(Action("step", index))
                if worker.next_heartbeat is not None:
                    if self._may_go(worker, "heartbeat", worker.next_heartbeat):
                        found.append(Action("heartbeat", index))
                    may_tick = may_tick and self._last_heartbeat(worker) == self.store.now
            is_idle = is_idle and not worker.is_running
        if may_tick and not is_idle:
            found.append(Action("tick"))
        return found

    def faults(self) -> list[Action]:
        """What may go wrong next."""
        if not self.faults_left:
            return []
        found = []
        for index, worker in enumerate(self.workers):
            if worker.is_running and worker.paused_until <= self.store.now:
                kinds = ("crash", "interrupt")
                found += [Action(kind, index, has_effect) for kind in kinds for has_effect in (False, True)]
                found += [Action("pause", index)]
                if not isinstance(worker.next_main, Compute | Sleep):
                    found += [Action("repeat", index), Action("delay", index), Action("delay", index, True)]
                found += [Action("jump", index)] if self.has_jumps else []
        return found

    def may_step(self, index: int) -> bool:
        worker = self.workers[index]
        is_awake = worker.main is not None and worker.paused_until <= self.store.now
        return is_awake and self._may_go(worker, "main", worker.next_main)

    def _may_go(self, worker: Worker, thread: str, operation: Any) -> bool:
        if not isinstance(operation, Sleep):
            return True
        last = self._last_heartbeat(worker) if thread == "heartbeat" else worker.slept_at
        return last < self.store.now

    def _last_heartbeat(self, worker: Worker) -> int:
        return self.store.objects[f"workers/{worker.name}.beat"][1]

    def steps(self) -> list[Action]:
        """What the workers' main threads may do next; time passes only when they wait."""
        found = [Action("step", index) for index in range(len(self.workers)) if self.may_step(index)]
        return found or [Action("time")] if any(worker.is_running for worker in self.workers) else []

    def arrivals(self) -> list[Action]:
        """Delayed operations."""
        return [Action("arrive", index) for index in range(len(self.delayed))]

    def mishaps(self) -> list[Action]:
        """What may go wrong next, where a pause ends before anything else happens."""
        return [each._replace(kind="lapse") if each.kind == "pause" else each for each in self.faults()]

    # Events.

    def pass_time(self) -> None:
        """Send every heartbeat that is due, and let a tick pass."""
        for worker in self.workers:
            while worker.next_heartbeat and worker.paused_until <= self.store.now > self._last_heartbeat(worker):
                self._step(worker, "heartbeat")
        self.store.now += 1

    def do(self, action: Action) -> None:
        """Let it happen. Raises Violation; and what a worker raises, which is one too."""
        self.num_steps += 1
        require(self.num_steps < MAX_STEPS, "no progress")
        if action.kind == "arrive":
            self._perform(self.workers[0], self.delayed.pop(action.worker))
            return
        worker = self.workers[action.worker]
        if action.kind == "tick":
            self.store.now += 1
        elif action.kind == "time":
            self.pass_time()
        elif action.kind == "step":
            self._step(worker, "main")
        elif action.kind == "heartbeat":
            self._step(worker, "heartbeat")
        else:
            self.faults_left -= 1
            self.kinds[action.kind] += 1
            self._fail(worker, action)

    def _fail(self, worker: Worker, action: Action) -> None:
        if action.kind == "join":
            self._join(Plan())
        elif action.kind == "jump":
            worker.clock_error += 2 * TICKS_A_LEASE
        elif action.kind == "repeat":
            self._perform(worker, worker.next_main)
        elif action.kind == "delay":
            self.delayed.append(worker.next_main)
            if action.has_effect:
                self.num_losses += 1
                worker.end()
        elif action.kind in ("pause", "lapse"):
            self.num_losses += 1
            worker.paused_until = self.store.now + TICKS_A_LEASE + 1
            while action.kind == "lapse" and self.store.now < worker.paused_until:
                self.pass_time()
        else:
            self.num_losses += 1
            if action.has_effect:
                self._perform(worker, worker.next_main)
            if action.kind == "crash":
                worker.end()
            else:
                worker.interrupt()

    def _step(self, worker: Worker, thread: str) -> None:
        operation = worker.next_main if thread == "main" else worker.next_heartbeat
        is_create = isinstance(operation, Create) and (self.flaws.creates_twice or self.flaws.creates_in_halves)
        if is_create and not worker.is_halfway:
            worker.is_halfway = self._begin_create(operation)
            if worker.is_halfway:
                return
        if worker.is_halfway and thread == "main":
            worker.is_halfway = False
            self.store.objects[operation.name] = operation.data, self.store.now
            worker.answer(thread, True)
            return
        worker.answer(thread, self._perform(worker, operation))
        if thread == "main" and isinstance(worker.next_main, Sleep):
            worker.slept_at = self.store.now

    def _begin_create(self, operation: Create) -> bool:
        """The first half of a flawed create. False: the name exists."""
        if operation.name in self.store.objects:
            return False
        if self.flaws.creates_in_halves:
            self.store.objects[operation.name] = operation.data[: len(operation.data) // 2], self.store.now
        return True

    def _perform(self, worker: Worker, operation: Any) -> Any:
        match operation:
            case Compute():
                self.num_computed += 1
            case Publish(data):
                require(data == self.expected, f"the output is {data!r}")
                self.output = data
            case LocalTime():
                return self.store.now + worker.clock_error
            case Sleep():
                pass
            case _:
                return self.store.perform(operation)
        return None

    # Ends.

    def finish(self) -> None:
        """Let every worker go on in turn to its end, and one more if none has finished the job. Then `check`."""
        self._go_on()
        while not self._has_ended():
            self._join(Plan())
            self._go_on()
        for action in reversed(self.arrivals()):
            self.do(action)
        self.check()

    def _go_on(self) -> None:
        while steps := self.steps():
            for action in steps:
                self.do(action)
        require(not any(worker.is_running for worker in self.workers), "every worker waits")

    def _has_ended(self) -> bool:
        return any(b'"end"' in data for name, (data, _) in self.store.objects.items() if name.startswith("merged/"))

    @property
    def num_takeovers(self) -> int:
        """Leases of ranges after the first."""
        found = (data for name, (data, _) in self.store.objects.items() if name.startswith("ranges/"))
        return sum(b'"lease"' in data for data in found)

    @property
    def num_lost(self) -> int:
        """Leases that heartbeats found to be lost."""
        return sum(len(worker.lost) for worker in self.workers)

    def check(self) -> None:
        """The promises at the end of a history."""
        require(self.output == self.expected, f"the output is {self.output!r}")
        done = Counter(row for number in count_ranges(self.store) for row in rows_of_log(self.store, number))
        require(done == Counter(range(self.job.num_rows)), f"rows {done} are committed")
        extra, bound = self.num_computed - self.job.num_rows, self.num_losses * self.job.lease_rows
        require(extra <= bound, f"{extra} rows were computed again, after {self.num_losses} losses")

    def state(self) -> tuple[Any, ...]:
        """What the rest of the history depends on."""
        workers = tuple(
            (worker.observed, worker.is_running, worker.paused_until, worker.slept_at, worker.clock_error)
            for worker in self.workers
        )
        counts = (self.store.now, self.faults_left, self.num_losses, self.num_computed)
        return workers, frozenset(self.store.objects.items()), tuple(map(repr, self.delayed)), counts


def count_ranges(store: MemoryStore) -> Iterator[int]:
    for number in count():
        if f"ranges/{number:08}" not in store.objects:
            return
        yield number


def rows_of_log(store: MemoryStore, number: int) -> list[int]:
    """Committed rows of a range, by rules of its own: nothing of `LeaseLog`."""
    name = f"ranges/{number:08}"
    first = json.loads(store.objects[name][0])
    holder, rows = first["worker"], []
    for entry in count(2):
        if (found := store.objects.get(f"{name}.{entry:04}")) is None:
            return rows
        record = json.loads(found[0])
        if record["kind"] == "lease":
            holder = record["worker"]
        else:
            require(
                record["worker"] == holder, f"{name}.{entry:04}: {record['worker']} commits, {holder} has the lease"
            )
            holder = None if record["kind"] == "handback" else holder
        for start, stop in record.get("part", {}).get("spans", []):
            require(first["start"] <= start < stop <= first["stop"], f"rows {start} to {stop} are not of {name}")
            rows += range(start, stop)
    return rows
