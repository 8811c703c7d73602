"""A world's work in a pool, next to its engine: joins it, leases ranges ahead, commits answers, hands back the rest.

Everything that asks the store runs in a thread (`start`), or by turns (`turn`): the engine never waits for it.
Heartbeats are another thread's.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Final

from spmd_worker.frontends.batch.job_rows import JobInput
from spmd_worker.frontends.batch.pool import protocol
from spmd_worker.frontends.batch.pool.driver import PAUSES_S, run
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog, spans_of
from spmd_worker.frontends.batch.pool.members import Lease, Member, check_member, leave
from spmd_worker.frontends.batch.pool.protocol import MAX_LEASES, Unleased
from spmd_worker.frontends.batch.pool.store import PoolStore, Steps
from spmd_worker.frontends.batch.pool_world.held_range import HeldRange
from spmd_worker.frontends.batch.pool_world.parts import FinishedRow, encode_part
from spmd_worker.frontends.batch.run_dir.journal import JournalRecord, RowKey
from spmd_worker.frontends.openai.row_writer import RowAnswer

_COMMIT_BYTES: Final = 64 << 20
"""Answers are committed when they have this many bytes."""
_TURN_S: Final = 0.2
_MAX_POLL_S: Final = 2.0
_POLLS_A_LEASE: Final = 8
_STOP_S: Final = 30.0


class _Pauses:
    """Pauses before an operation is repeated, until the worker closes: its end must not wait for a store that fails."""

    def __init__(self, is_closing: Callable[[], bool]) -> None:
        self._is_closing = is_closing

    def __iter__(self) -> Iterator[float]:
        return takewhile(lambda pause_s: not self._is_closing(), PAUSES_S)


class PoolWorker:
    """`join` joins the pool; it returns None until that is possible. `open_rows` opens the rows of a lease. Implements
    `AnswerStore`.
    """

    def __init__(
        self,
        store: PoolStore,
        join: Callable[[], Member | None],
        open_rows: Callable[[LeaseLog], JobInput],
        commit_rows: int,
        commit_s: float,
    ) -> None:
        self.has_ended = False
        """Set when every row of the pool is done, by whatever world."""
        self.num_dropped_rows = 0
        """Answers to rows of leases that were lost."""
        self.num_ranges = 0
        self._store, self._join, self._open_rows = store, join, open_rows
        self._member: Member | None = None
        self._commit_rows, self._commit_s = commit_rows, commit_s
        self._held: list[HeldRange] = []
        self._changes = threading.Lock()
        """Guards `_held` and its answers, for moments; never held while the store is asked."""
        self._turns = threading.Lock()
        """Held while the store is asked: the member is not thread-safe."""
        self._wake, self._is_closing, self._has_left = threading.Event(), False, False
        self._pauses = _Pauses(lambda: self._is_closing)
        self._suspects: list[Lease] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run_turns, name="spmd-pool", daemon=True)

    # The engine's thread.

    def start(self) -> None:
        self._thread.start()

    @property
    def member(self) -> Member:
        """The worker in the pool, after it has joined."""
        assert self._member is not None, "it has not joined"
        return self._member

    def check(self) -> None:
        """Raise the error that ended the thread: ConfigError for another job, PoolError, OSError."""
        if self._error is not None:
            raise self._error

    def held(self) -> Sequence[HeldRange]:
        """The leased ranges, first leased first."""
        with self._changes:
            return tuple(self._held)

    def wants(self, index: int) -> bool:
        """True for a row of a leased range that has no answer."""
        with self._changes:
            return any(held.wants(index) for held in self._held)

    def append(self, key: RowKey, answer: RowAnswer) -> None:
        """Accept the answer to a row; dropped if its lease was lost. Raises as `check` does."""
        self.check()
        with self._changes:
            held = next((each for each in self._held if each.wants(answer.index)), None)
            if held is None:
                self.num_dropped_rows += 1
                return
            held.add(FinishedRow(key, answer))
            is_due = held.is_due(self._commit_rows, self._commit_s, _COMMIT_BYTES)
        if is_due:
            self._wake.set()

    def tick(self) -> None:
        """Raise as `check` does; the thread commits by itself."""
        self.check()

    def records(self) -> Iterator[JournalRecord]:
        """Rows that were done before this start: none of this world."""
        return iter(())

    # Any thread.

    def suspect(self, lease: Lease) -> None:
        """A lease that seems to be lost: the next turn gives it up."""
        self._suspects.append(lease)
        self._wake.set()

    def hand_back(self, timeout_s: float = _STOP_S, pauses_s: Sequence[float] = ()) -> None:
        """Commit the answers, hand the leases back, and leave the pool. Nothing is leased or committed afterwards.
        Idempotent. Raises OSError; TimeoutError if the thread waits for the store.
        """
        self._is_closing = True
        self._wake.set()
        if not self._turns.acquire(timeout=timeout_s):
            raise TimeoutError("the pool's store does not answer: its other worlds wait for the end of the leases")
        try:
            for held in self.held():
                if self._commit(held, pauses_s):
                    run(self._store, check_member(self.member.worker), pauses_s)
                    run(self._store, protocol.hand_back(self.member, held.lease), pauses_s)
                self._forget(held)
        finally:
            self._turns.release()

    def leave(self, end: dict[str, Any]) -> None:
        """Record how this world ended, after `hand_back` or `stop`; once. Raises PoolError, OSError."""
        if self._member is not None and not self._has_left:
            self._has_left = True
            run(self._store, leave(self._member.worker, end), ())

    def stop(self) -> None:
        """End the thread, which has nothing to do. Raises as `check` does."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.check()

    # The thread.

    def turn(self) -> None:
        """Join the pool, commit what is due, and lease what may be leased. Raises ConfigError, PoolError, OSError."""
        with self._turns:
            if self._is_closing:
                return
            if self._member is None:
                self._member = self._join()
                if self._member is None:
                    return
            self._give_up_suspects()
            for held in self.held():
                with self._changes:
                    is_due = held.is_due(self._commit_rows, self._commit_s, _COMMIT_BYTES)
                if is_due and not self._is_closing:
                    self._commit(held, self._pauses)
            while not (self._is_closing or self.has_ended) and len(self.member.leases) < MAX_LEASES:
                if not self._claim():
                    return

    def _run_turns(self) -> None:
        try:
            while not (self._is_closing or self.has_ended):
                self._wake.clear()
                self.turn()
                self._wake.wait(_TURN_S if self._held else self._poll_s())
        except Exception as error:  # raised in the engine's thread
            self._error = error

    def _poll_s(self) -> float:
        """Pause of a world that waits for others."""
        return _TURN_S if self._member is None else min(_MAX_POLL_S, self._member.job.lease_s / _POLLS_A_LEASE)

    def _ask(self, steps: Steps[Any]) -> Any:
        return run(self._store, steps, self._pauses)

    def _claim(self) -> bool:
        """Lease a range, if there is one."""
        lease = self._ask(protocol.claim(self.member))
        if isinstance(lease, Unleased):
            if lease is Unleased.OVER:
                for held in self.held():
                    # Lost, and done by others.
                    self._forget(held)
                self.has_ended = True
            return False
        held = HeldRange(lease, self._open_rows(lease.log))
        with self._changes:
            self._held.append(held)
            self.num_ranges += 1
        return True

    def _commit(self, held: HeldRange, pauses_s: Iterable[float]) -> bool:
        """Commit the answers of a range. Returns whether it is still held: it was neither lost nor finished."""
        lease = held.lease
        while True:
            with self._changes:
                rows = held.batch()
            if not rows:
                return True
            run(self._store, check_member(self.member.worker), pauses_s)
            spans = spans_of(each.answer.index for each in rows)
            is_held = run(self._store, protocol.commit(self.member, lease, spans, encode_part(rows)), pauses_s)
            if not is_held or lease.log.is_over:
                self._forget(held)
                return False
            held.end_batch()

    def _give_up_suspects(self) -> None:
        while self._suspects:
            lease = self._suspects.pop()
            for held in self.held():
                if held.lease is lease and not self._ask(protocol.still_holds(lease)):
                    self._ask(protocol.hand_back(self.member, lease))
                    self._forget(held)

    def _forget(self, held: HeldRange) -> None:
        with self._changes:
            self._held = [each for each in self._held if each is not held]
        held.rows.close()
