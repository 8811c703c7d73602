"""Histories of a pool: the real protocol of several workers over a store in memory, one operation at a time.

    history = History(job, plans)
    while actions := history.actions(): history.do(actions[0])
    history.check()

Between any two operations a worker may crash or be interrupted (before or after its operation took effect), lose the
answer and ask again, be paused for longer than a lease, or have its local clock moved; another may join. An operation
may also be delayed: the worker crashes, or asks again, and its first try takes effect any time later. The server's time
passes in ticks of a quarter of a lease, and only when every worker that is not paused has sent a heartbeat in the last
one. A worker's local state depends only on the answers that it received: `state` uses that.

`Flaws` break a rule on purpose. Knows nothing of models or files.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

from spmd_worker.frontends.batch.pool import members, protocol
from spmd_worker.frontends.batch.pool.lease_log import spans_of
from spmd_worker.frontends.batch.pool.members import Lease, Member
from spmd_worker.frontends.batch.pool.protocol import Unleased
from spmd_worker.frontends.batch.pool.records import Merged, PoolJob, digest_of, done_name
from spmd_worker.frontends.batch.pool.store import Create, Delete, List, Listed, Now, Operation, Read, Touch

TICKS_A_LEASE = 4
MAX_STEPS = 20_000
"""Of a history: one that takes more makes no progress."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A worker computes a row."""

    row: int


@dataclass(frozen=True, slots=True)
class Publish:
    """A merge gives the output its name."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Sleep:
    """Until the next tick."""


@dataclass(frozen=True, slots=True)
class LocalTime:
    """A worker reads its own clock; only flawed code does."""


World = Generator[Any, Any, None]


class Interrupted(Exception):
    """SIGTERM: a worker hands its leases back and leaves."""


class Violation(AssertionError):
    """A history broke a promise."""


class Action(NamedTuple):
    """`kind` is step, heartbeat, tick, time, arrive (of a delayed operation), crash, interrupt, repeat, delay, pause,
    lapse, jump or join, `worker` an index.
    `has_effect`: the worker's operation took effect before it crashed or was interrupted; of delay: the worker crashes.
    """

    kind: str
    worker: int = 0
    has_effect: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Habits of a worker: rows after which it commits a part, and whether it computes the last rows first."""

    part_rows: int = 100
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class Flaws:
    """Rules that are broken."""

    merges_early: bool = False
    creates_twice: bool = False
    """Create looks whether the name exists, and writes later."""
    creates_in_halves: bool = False


class MemoryStore:
    """The server: objects and its clock."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.now = 0

    def perform(self, operation: Operation) -> Any:
        objects = self.objects
        match operation:
            case Create(name, data):
                if name in objects:
                    return False
                objects[name] = data, self.now
                return True
            case Read(name):
                return objects[name][0] if name in objects else None
            case List(prefix):
                return [
                    Listed(name, len(objects[name][0]), objects[name][1])
                    for name in sorted(objects)
                    if name.startswith(prefix)
                ]
            case Touch(name, data):
                objects[name] = data, self.now
            case Now(own):
                objects[own] = b"", self.now
                return self.now
            case Delete(name):
                objects.pop(name, None)
        return None


def line_of(row: int) -> bytes:
    return b"answer %d\n" % row


@dataclass(eq=False)
class Worker:
    """A world: its main thread and its heartbeats, each with the operation that comes next; None: it has ended."""

    name: str
    plan: Plan
    flaws: Flaws
    job: PoolJob
    member: Member | None = None
    lost: list[Lease] = field(default_factory=list)
    main: World | None = None
    heartbeats: World | None = None
    next_main: Any = None
    next_heartbeat: Any = None
    paused_until: int = -1
    slept_at: int = -1
    is_halfway: bool = False
    clock_error: int = 0
    is_observed: bool = False
    observed: int = 0
    """Hash of the answers that it received, if `is_observed`."""

    def start(self) -> None:
        self.main = self._work()
        self.next_main = next(self.main)

    @property
    def is_running(self) -> bool:
        return self.main is not None

    def end(self) -> None:
        self.main = self.heartbeats = self.next_main = self.next_heartbeat = None

    def answer(self, thread: str, answer: Any) -> None:
        """Give a thread the result of its operation, and take the next one."""
        if self.is_observed:
            self.observed = hash((self.observed, thread, repr(answer)))
        try:
            if thread == "main":
                assert self.main is not None
                self.next_main = self.main.send(answer)
            elif self.heartbeats is not None:
                self.next_heartbeat = self.heartbeats.send(answer)
        except StopIteration:
            self.end()
        if self.member is not None and self.heartbeats is None and self.main is not None:
            self.heartbeats = self._send_heartbeats()
            self.next_heartbeat = next(self.heartbeats)

    def interrupt(self) -> None:
        self.observed = hash((self.observed, "interrupted"))
        try:
            assert self.main is not None
            self.next_main = self.main.throw(Interrupted())
        except (StopIteration, Interrupted):
            self.end()

    def _send_heartbeats(self) -> World:
        member = self.member
        assert member is not None
        while True:
            yield Sleep()
            self.lost += yield from members.heartbeat(self.name, {}, list(member.leases.values()))

    def _work(self) -> World:
        member = self.member = yield from members.join(self.job, self.name, {"host": self.name})
        merge: Lease | None = None
        try:
            yield from self._compute_all(member)
            while not isinstance(merge, Merged):
                merge = yield from protocol.claim_merge(member)
                if isinstance(merge, Lease):
                    yield from self._merge(member, merge)
                elif merge is None:
                    yield Sleep()
        except Interrupted:
            for lease in [*member.leases.values(), *([merge] if isinstance(merge, Lease) else [])]:
                yield from protocol.hand_back(member, lease)
        yield from members.leave(self.name, {"reason": "done"})

    def _compute_all(self, member: Member) -> World:
        mine: list[Lease] = []
        while True:
            unleased = None
            while len(member.leases) < protocol.MAX_LEASES and unleased is None:
                found = yield from protocol.claim(member)
                if isinstance(found, Lease):
                    mine.append(found)
                else:
                    unleased = found
            if self.flaws.merges_early and unleased is Unleased.WAIT:
                member.open, unleased = {}, Unleased.OVER
            if mine:
                yield from self._compute(member, mine.pop(0))
            elif unleased is Unleased.OVER:
                return
            else:
                yield Sleep()

    def _compute(self, member: Member, lease: Lease) -> World:
        rows = [row for start, stop in lease.log.missing() for row in range(start, stop)]
        rows = rows[::-1] if self.plan.is_reversed else rows
        for first in range(0, len(rows), self.plan.part_rows):
            part = sorted(rows[first : first + self.plan.part_rows])
            for row in part:
                yield Compute(row)
                if lease in self.lost:
                    protocol.forget(member, lease)
                    return
            if not (yield from protocol.commit(member, lease, spans_of(part), b"".join(map(line_of, part)))):
                return

    def _merge(self, member: Member, merge: Lease) -> World:
        lines: dict[int, bytes] = {}
        named, start = [], 0
        for number in range(member.next_number):
            if self.flaws.merges_early and (yield Read(done_name(number))) is None:
                continue
            record = yield from protocol.read_done(member, number, start)
            start = record.stop
            for part in record.parts:
                data = yield Read(part.name)
                require(data is not None and digest_of(data) == part.digest, f"{part.name} has other bytes")
                rows = [row for first, stop in part.spans for row in range(first, stop)]
                lines |= zip(rows, data.splitlines(keepends=True))
                named.append(part.name)
        yield from protocol.remove_garbage(0, frozenset(named))
        data = b"".join(lines[row] for row in sorted(lines))
        yield Publish(data)
        yield from protocol.end_merge(member, merge, Merged(len(lines), len(data), "sha"))


def require(is_kept: object, broken: str) -> None:
    if not is_kept:
        raise Violation(broken)


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


def random_history(seed: int, flaws: Flaws | None = None, has_jumps: bool = False) -> History:
    """Run one history to its end. Raises what broke it."""
    draw = random.Random(seed)
    lease_rows = draw.randint(2, 6)
    job = PoolJob({"seed": 1}, draw.randint(0, 8), "out", float(TICKS_A_LEASE), lease_rows)
    plans = [Plan(draw.choice((1, 2, 100)), draw.random() < 0.3) for _ in range(draw.choice((2, 2, 2, 3, 3, 4, 5, 6)))]
    history = History(job, plans, flaws, draw.randint(0, 5), has_jumps)
    fault_rate = draw.choice((0.02, 0.05, 0.15))
    favourite = draw.randrange(len(plans))
    with mock.patch.object(protocol, "_RANGES_A_WORKER", draw.choice((1, 1, 2, 4))):
        while True:
            if history.faults_left and draw.random() < fault_rate:
                history.do(draw.choice([*history.faults(), Action("join")]))
                continue
            if history.delayed and draw.random() < 0.03:
                history.do(draw.choice(history.arrivals()))
            # One worker is often faster: long runs of one, not only fair mixtures.
            if draw.random() < 0.02:
                favourite = draw.randrange(len(history.workers))
            chance = draw.random()
            index = favourite if chance < 0.3 else int(draw.random() * len(history.workers))
            if chance < 0.9 and history.may_step(index):
                history.do(Action("step", index))
            elif actions := history.actions():
                history.do(draw.choice(actions))
            else:
                break
        history.faults_left = 0
        history.finish()
    return history


def explore(make: Callable[[], History], depth: int) -> tuple[int, int]:
    """Every interleaving up to `depth` events, with every fault at every moment; equal states once. The rest of each
    history is fair and without faults. Returns (states, histories).
    """
    seen: set[int] = set()
    num_histories = 0

    def go(history: History, path: tuple[Action, ...]) -> None:
        nonlocal num_histories
        state = hash(history.state())
        if state in seen:
            return
        seen.add(state)
        actions = [*history.steps(), *history.arrivals(), *history.mishaps()] if len(path) < depth else []
        if not actions:
            num_histories += 1
            history.faults_left = 0
            history.finish()
            return
        for index, action in enumerate(actions):
            if index:
                history = make()
                for each in path:
                    history.do(each)
            history.do(action)
            go(history, (*path, action))

    go(make(), ())
    return len(seen), num_histories
