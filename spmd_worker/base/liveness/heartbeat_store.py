"""The heartbeat store, where ranks publish their heartbeats: keys on the launcher's store, which outlives every rank.

`HeartbeatExchange` publishes this rank's heartbeat and reads those of the others, once a second. It uses its own
thread, because a store whose machine is gone may take long to answer; callers get the result of the last exchange. The
alarm is a counter that any rank increments and every rank reads; after an alarm ranks exchange ten times a second.

Until the ranks have joined they share no name, and each starts under its own, where heartbeats may not be exchanged.
`move_to` sets the agreed name. A store that does not answer is reconnected.
"""

import logging
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from spmd_worker.base.liveness.failure_diagnosis import SILENT_AFTER_S, RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.liveness.stall_clock import WatchClock
from spmd_worker.base.process import start_time_of

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
ALARMED_PERIOD_S: Final = 0.1
MAX_RANKS_THAT_SEE_ALL: Final = 64
"""Ranks other than 0 of a bigger world read rank 0 only, until there is an alarm."""

_ANSWER_S: Final = 3.0
"""A store answers in milliseconds; torch waits for an unreachable one for its connection timeout."""

_LEAVE_S: Final = 2.0
"""Time for which a store in this process is kept for ranks that have not ended yet, and a silent one is waited for."""


_LEAVE_POLL_S: Final = 0.01

_FIRST_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 4.0
"""Maximum delay before the store is reconnected; it doubles each time."""

_ERRORS: Final = (RuntimeError, OSError, ValueError)
"""Errors of a store that is gone or does not answer, and of invalid heartbeats."""

OVER: Final = "over"
"""Flag of a rank's own name that is not used any more: an agreed name has replaced it, or the attempt has failed and
there may be another in the same process.
"""


class KeyValueStore(Protocol):
    """Methods of the launcher's store in use. They raise RuntimeError when it is gone."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that exist."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0. Returns the new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys exist."""


@dataclass(frozen=True, slots=True)
class HeartbeatStore:
    """A store, and the prefix of this run's keys. `is_host`: the store is in this process."""

    store: KeyValueStore
    prefix: str
    is_host: bool = False

    def publish(self, heartbeat: RankHeartbeat) -> None:
        """Replace this rank's last heartbeat."""
        self.store.set(f"{self.prefix}/heartbeat/{heartbeat.rank}", heartbeat.pack().decode())

    def find(self, ranks: Sequence[int], known: Container[int] = ()) -> dict[int, RankHeartbeat]:
        """The last heartbeats of those of `ranks` that have published one. The `known` ranks have: if all are known,
        one request suffices.
        """
        keys = {rank: f"{self.prefix}/heartbeat/{rank}" for rank in ranks}
        there = [rank for rank, key in keys.items() if rank in known or self.store.check([key])]
        payloads = self.store.multi_get([keys[rank] for rank in there]) if there else []
        return {rank: RankHeartbeat.unpack(payload) for rank, payload in zip(there, payloads, strict=True)}

    def count(self, what: str, amount: int = 1) -> int:
        """Increment a counter of all ranks, which starts at 0. Returns its new value; an `amount` of 0 reads it."""
        return self.store.add(f"{self.prefix}/{what}", amount)

    def raise_flag(self, name: str) -> None:
        """Set a flag for all ranks. Flags are never cleared."""
        self.store.set(f"{self.prefix}/{name}", "1")

    def has_flag(self, name: str) -> bool:
        """Whether a rank set it."""
        return self.store.check([f"{self.prefix}/{name}"])


class HeartbeatExchange:
    """This rank's view of the heartbeat store. `connect` runs in the thread, again after each failure of the store;
    None is for a rank that no other watches.

    `make_heartbeat` makes this rank's current heartbeat, given the order of its failure (0: none yet). `node` is this
    node's name.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        connect: Callable[[], HeartbeatStore] | None,
        make_heartbeat: Callable[[int], RankHeartbeat],
        clock: WatchClock,
        node: str = "",
    ) -> None:
        self._rank, self._ranks = rank, tuple(ranks)
        self.node = node
        self._connect, self._make_heartbeat, self._clock = connect, make_heartbeat, clock
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._heard_s: dict[int, float] = {}
        self._gone: dict[int, bool] = {}
        self._published: set[int] = set()
        """Ranks that have a heartbeat under the current name."""
        self._name: str | None = None
        self._taken: str | None = None
        self._may_retry = False
        self._order = self._num_cleared = self._num_alarms_before = 0
        self._wants_alarm = self._is_raising = self._wants_to_report = self._has_reported = False
        self._asked_s: float | None = None
        self._has_failed = self._has_said_so = False
        self._retry_s = _FIRST_RETRY_S
        self.is_connected = False
        self.num_alarms = 0
        """Number of alarms that ranks have raised, as of the last exchange."""
        self.is_reporter = self.is_reported = False
        """Whether this rank is the one that reports; whether it, or another, has reported."""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._is_known = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spmd-exchange", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._connect is not None:
            self._thread.start()

    @property
    def name(self) -> str | None:
        """The name that the ranks have agreed on; None before."""
        return self._name

    def move_to(self, name: str) -> None:
        """Use the name of the run, which every rank has: heartbeats, alarms and reports are under it from now on. Other
        ranks' last heartbeats are kept until new ones come, except those of ranks that had failed or ended, or whose
        process is gone: these belong to another attempt.
        """
        self._name = name
        self._wake.set()

    @property
    def is_moving(self) -> bool:
        """Whether the known heartbeats of other ranks are still from before `move_to`."""
        return self.is_shared and self._name != self._taken

    def stop(self, *, may_retry: bool = False) -> None:
        """Publish the last heartbeat and end the thread; waits a few seconds at most for an unreachable store.
        `may_retry`: this process may make another attempt.
        """
        self._may_retry = may_retry
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._clock.join(self._thread, 2 * _LEAVE_S)

    @property
    def is_lost(self) -> bool:
        """Whether the store is gone, or has been silent for so long that its machine must be."""
        asked_s = self._asked_s
        return self._has_failed or (asked_s is not None and self._clock.now_s - asked_s > _ANSWER_S)

    @property
    def is_shared(self) -> bool:
        """Whether this rank exchanges heartbeats with others."""
        return self.is_connected and not self.is_lost

    @property
    def is_alarmed(self) -> bool:
        """Whether there was an alarm that this rank has not cleared."""
        return self.num_alarms > self._num_cleared

    @property
    def is_private(self) -> bool:
        """Whether no other rank will read this rank's heartbeats any more."""
        return self._connect is None or self.is_lost

    def wake(self) -> None:
        """Publish this rank's heartbeat now, before it is due."""
        self._wake.set()

    def alarm(self, wait_s: float = 0.0) -> None:
        """Raise an alarm, with this rank's current heartbeat. Waits up to `wait_s` until all ranks can read it."""
        self._is_known.clear()
        self._wants_alarm = True
        self._wake.set()
        if self.is_shared:
            self._clock.wait(self._is_known, wait_s)

    def clear_alarms(self, num_alarms: int) -> None:
        """Clear the first `num_alarms` alarms, which had no lasting cause: for example, a silent rank sends heartbeats
        again.
        """
        self._num_cleared = num_alarms

    def ask_to_report(self) -> None:
        """Ask to be the rank that reports: the first one to ask becomes `is_reporter`."""
        self._wants_to_report = True
        self._wake.set()

    def has_reported(self) -> None:
        """This rank has reported: the others need not."""
        self._has_reported = True
        self._wake.set()

    def statuses(self) -> list[RankStatus]:
        """Status of every rank, in order, as far as it is known here."""
        return [self._status(rank) for rank in self._ranks]

    def _status(self, rank: int) -> RankStatus:
        if rank == self._rank:
            return RankStatus(rank, self._make_heartbeat(self._order))
        heard_ago_s = max(self._clock.now_s - self._heard_s.get(rank, self._clock.now_s), 0.0)
        last_heartbeat = self._heartbeats.get(rank)
        if self.is_lost and last_heartbeat is not None and self._is_near(last_heartbeat):
            # No heartbeats arrive any more, but a process on this node can be looked up, and does not count as silent.
            is_gone = self._has_no_process(last_heartbeat) and not last_heartbeat.has_ended
            return RankStatus(rank, last_heartbeat, min(heard_ago_s, SILENT_AFTER_S), is_gone)
        return RankStatus(rank, last_heartbeat, heard_ago_s, self._gone.get(rank, False))

    def _run(self) -> None:
        assert self._connect is not None, "start comes first"
        heartbeat_store: HeartbeatStore | None = None
        while True:
            is_last_try = self._stop.is_set()
            try:
                if heartbeat_store is None:
                    heartbeat_store = self._connect()
                    self.is_connected = True
                    self._published.clear()
                heartbeat_store = self._take_name(heartbeat_store)
                if self._stop.is_set():
                    self._leave(heartbeat_store)
                    return
                self._asked_s = self._clock.now_s
                self._exchange(heartbeat_store)
            except _ERRORS as error:
                heartbeat_store = None
                self._lose(error)
                if is_last_try:
                    return
                # A rank that ends meanwhile tries once more, to publish that: else its process would count as gone.
                self._clock.wait(self._stop, self._retry_s)
                self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
                continue
            if self._has_failed:
                # Heartbeats missed meanwhile mean nothing.
                self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s)
            self._asked_s, self._has_failed, self._has_said_so = None, False, False
            self._retry_s = _FIRST_RETRY_S
            self._clock.wait(self._wake, ALARMED_PERIOD_S if self.is_alarmed else PERIOD_S)
            self._wake.clear()

    def _lose(self, error: Exception) -> None:
        """Note that the store failed; callers read `is_lost`. Logged only if it lasts, unlike at the end of a job."""
        if self._has_failed and not self._has_said_so and not self._stop.is_set():
            self._has_said_so = True
            text = "the heartbeat store does not answer (%s): until it does, other ranks may take this one for silent"
            logger.warning(text, error)
        self._has_failed = True
        self._asked_s = None
        self._wants_alarm = self._wants_alarm or self._is_raising
        self._is_known.set()

    def _take_name(self, heartbeat_store: HeartbeatStore) -> HeartbeatStore:
        """The store under the name that the ranks have agreed on, once they have."""
        name = self._name
        if name is None:
            return heartbeat_store
        if name != self._taken:
            # Later attempts must not use the old name, under which this one has left heartbeats.
            heartbeat_store.raise_flag(OVER)
            self._forget_attempt()
            self._taken = name
        return replace(heartbeat_store, prefix=f"spmd_worker/watch/run {name}")

    def _forget_attempt(self) -> None:
        self._published.clear()
        for rank, each in list(self._heartbeats.items()):
            if each.has_ended or each.failure is not None or self._gone.get(rank, False):
                del self._heartbeats[rank]
                self._gone.pop(rank, None)
        self._order = 0
        self.is_reporter = self.is_reported = False
        # Counts continue: one that another thread has just read must not hide a later alarm.
        self._num_alarms_before = self._num_cleared = self.num_alarms
        self._wants_alarm = self._wants_alarm or self._make_heartbeat(0).failure is not None

    def _exchange(self, heartbeat_store: HeartbeatStore) -> None:
        self._write_report(heartbeat_store)
        sees_all = self._rank == 0 or self.is_alarmed or len(self._ranks) <= MAX_RANKS_THAT_SEE_ALL
        others = [rank for rank in (self._ranks if sees_all else self._ranks[:1]) if rank != self._rank]
        for rank in [rank for rank in self._heartbeats if rank not in others]:
            # Read during an alarm only: after it, its last heartbeat would look like silence.
            del self._heartbeats[rank]
        # Processes first, heartbeats after: a rank that ended well has published so before its process ended.
        gone = [
            rank
            for rank, last_heartbeat in self._heartbeats.items()
            if self._is_near(last_heartbeat) and self._has_no_process(last_heartbeat)
        ]
        found = heartbeat_store.find(others, self._published)
        self._published = set(found)
        for rank in gone:
            self._gone[rank] = not self._heartbeats[rank].has_ended
        for rank, last_heartbeat in found.items():
            last = self._heartbeats.get(rank)
            if last is None or (last_heartbeat.pid, last_heartbeat.count) != (last.pid, last.count):
                self._heartbeats[rank], self._heard_s[rank] = last_heartbeat, self._clock.now_s
            self._gone[rank] = rank in gone and not last_heartbeat.has_ended

    def _write_report(self, heartbeat_store: HeartbeatStore) -> None:
        # Before the heartbeat is made: a later alarm stays requested, and the next heartbeat has its failure.
        self._is_raising, self._wants_alarm = self._wants_alarm, False
        last_heartbeat = self._make_heartbeat(self._order)
        if last_heartbeat.failure is not None and self._order == 0:
            self._order = heartbeat_store.count("failures")
            last_heartbeat = self._make_heartbeat(self._order)
        heartbeat_store.publish(last_heartbeat)
        self.num_alarms = self._num_alarms_before + heartbeat_store.count("alarms", int(self._is_raising))
        if self._is_raising:
            self._is_raising = False
            self._is_known.set()
        if self._wants_to_report:
            self.is_reporter = heartbeat_store.count("reporters") == 1
            self._wants_to_report = False
        if self._has_reported:
            heartbeat_store.raise_flag("reported")
        self.is_reported = self.is_reported or heartbeat_store.has_flag("reported")

    def _is_near(self, last_heartbeat: RankHeartbeat) -> bool:
        """Whether a rank's process is on this node."""
        return bool(self.node) and last_heartbeat.node == self.node

    def _has_no_process(self, last_heartbeat: RankHeartbeat) -> bool:
        """Whether the process of a rank on this node is known to have ended."""
        try:
            return start_time_of(last_heartbeat.pid) != last_heartbeat.start_time
        except OSError:
            return False

    def _leave(self, heartbeat_store: HeartbeatStore) -> None:
        self._write_report(heartbeat_store)
        if self._may_retry and self._taken is None:
            heartbeat_store.raise_flag(OVER)
        others = [rank for rank in self._ranks if rank != self._rank]
        deadline_s = self._clock.monotonic() + _LEAVE_S
        while heartbeat_store.is_host and others and self._clock.monotonic() < deadline_s:
            # The store ends with this process; ranks that still read it would see that as a failure.
            others = [
                rank for rank, last_heartbeat in heartbeat_store.find(others).items() if not last_heartbeat.has_ended
            ]
            self._clock.wait(threading.Event(), _LEAVE_POLL_S)
