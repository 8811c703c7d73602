"""A simulated worker of a pool, its server, and operations that are not the store's. See pool_simulator.py."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from spmd_worker.frontends.batch.pool import members, protocol
from spmd_worker.frontends.batch.pool.lease_log import spans_of
from spmd_worker.frontends.batch.pool.members import Lease, Member
from spmd_worker.frontends.batch.pool.protocol import Unleased
from spmd_worker.frontends.batch.pool.records import Merged, PoolJob, digest_of, done_name
from spmd_worker.frontends.batch.pool.store import Create, Delete, List, Listed, Now, Operation, Read, Touch


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
