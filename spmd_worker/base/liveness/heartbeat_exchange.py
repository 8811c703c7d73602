"""Exchanges heartbeats through the heartbeat store: publishes this rank's and reads those of the others, once a second.

It uses its own thread, because a store whose machine is gone may take long to answer; callers get the result of the
last exchange. The alarm is a counter that any rank increments and every rank reads; after an alarm ranks exchange ten
times a second.

Until the ranks have joined they share no name, and each starts under its own, where heartbeats may not be exchanged.
`move_to` sets the agreed name. A store that does not answer is reconnected.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from spmd_worker.base.liveness.failure_diagnosis import RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.liveness.heartbeat_store import OVER, HeartbeatStore
from spmd_worker.base.liveness.peer_heartbeats import PeerHeartbeats
from spmd_worker.base.liveness.stall_clock import WatchClock

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
_MAX_RETRY_S: Final = 4.0
"""Maximum delay before the store is reconnected; it doubles each time."""

_ERRORS: Final = (RuntimeError, OSError, ValueError)
"""Errors of a store that is gone or does not answer, and of invalid heartbeats."""


class HeartbeatExchange:
    """This rank's view of the heartbeat store. `connect` runs in the thread, again after each failure of the store;
    None is for a rank that no other watches.

    `make_heartbeat` makes this rank's current heartbeat, given the order of its failure (0: none yet). `node` is this
    node's name. `name` is the one that the ranks have agreed on; None before.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        connect: Callable[[], HeartbeatStore] | None,
        make_heartbeat: Callable[[int], RankHeartbeat],
        clock: WatchClock,
        node: str,
    ) -> None:
        self._rank, self._ranks = rank, tuple(ranks)
        self._connect, self._make_heartbeat, self._clock = connect, make_heartbeat, clock
        self.peers = PeerHeartbeats(clock, node)
        self.name: str | None = None
        self._current_name: str | None = None
        self._may_retry = False
        self._order = self._num_cleared = self._num_alarms_before = 0
        self._wants_alarm = self._is_raising = self._wants_to_report = self._has_reported = False
        self._asked_s: float | None = None
        self._has_failed = self._is_loss_logged = False
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
        if self._connect is not None:
            self._thread.start()

    def move_to(self, name: str) -> None:
        """Use the name of the run, which every rank has: heartbeats, alarms and reports are under it from now on. Other
        ranks' last heartbeats are kept until new ones come, except those of ranks that had failed or ended, or whose
        process is gone: these belong to another attempt.
        """
        self.name = name
        self._wake.set()

    @property
    def is_moving(self) -> bool:
        """Whether the known heartbeats of other ranks are still from before `move_to`."""
        return self.is_shared and self.name != self._current_name

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
        return [
            RankStatus(rank, self._make_heartbeat(self._order))
            if rank == self._rank
            else self.peers.status(rank, is_store_lost=self.is_lost)
            for rank in self._ranks
        ]

    def _run(self) -> None:
        assert self._connect is not None, "start comes first"
        heartbeat_store: HeartbeatStore | None = None
        while True:
            is_last_try = self._stop.is_set()
            try:
                if heartbeat_store is None:
                    heartbeat_store = self._connect()
                    self.is_connected = True
                    self.peers.published.clear()
                heartbeat_store = self._with_agreed_name(heartbeat_store)
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
                self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
                continue
            if self._has_failed:
                self.peers.restart_silence()
            self._asked_s, self._has_failed, self._is_loss_logged = None, False, False
            self._retry_s = _FIRST_RETRY_S
            self._clock.wait(self._wake, ALARMED_PERIOD_S if self.is_alarmed else PERIOD_S)
            self._wake.clear()

    def _lose(self, error: Exception) -> None:
        """Note that the store failed; callers read `is_lost`. Logged only if it lasts, unlike at the end of a job."""
        if self._has_failed and not self._is_loss_logged and not self._stop.is_set():
            self._is_loss_logged = True
            text = "the heartbeat store does not answer (%s): until it does, other ranks may consider this one silent"
            logger.warning(text, error)
        self._has_failed = True
        self._asked_s = None
        self._wants_alarm = self._wants_alarm or self._is_raising
        self._is_known.set()

    def _with_agreed_name(self, heartbeat_store: HeartbeatStore) -> HeartbeatStore:
        """The store under the name that the ranks have agreed on, once they have."""
        name = self.name
        if name is None:
            return heartbeat_store
        if name != self._current_name:
            # Later attempts must not use the old name, under which this one has left heartbeats.
            heartbeat_store.raise_flag(OVER)
            self.peers.forget_attempt()
            self._order = 0
            self.is_reporter = self.is_reported = False
            # Counts continue: one that another thread has just read must not hide a later alarm.
            self._num_alarms_before = self._num_cleared = self.num_alarms
            self._wants_alarm = self._wants_alarm or self._make_heartbeat(0).failure is not None
            self._current_name = name
        return replace(heartbeat_store, prefix=f"spmd_worker/watch/run {name}")

    def _exchange(self, heartbeat_store: HeartbeatStore) -> None:
        self._write_report(heartbeat_store)
        sees_all = self._rank == 0 or self.is_alarmed or len(self._ranks) <= MAX_RANKS_THAT_SEE_ALL
        ranks = self._ranks if sees_all else self._ranks[:1]
        self.peers.read(heartbeat_store, [rank for rank in ranks if rank != self._rank])

    def _write_report(self, heartbeat_store: HeartbeatStore) -> None:
        # Before the heartbeat is made: a later alarm stays requested, and the next heartbeat has its failure.
        self._is_raising, self._wants_alarm = self._wants_alarm, False
        heartbeat = self._make_heartbeat(self._order)
        if heartbeat.failure is not None and self._order == 0:
            self._order = heartbeat_store.count("failures")
            heartbeat = self._make_heartbeat(self._order)
        heartbeat_store.publish(heartbeat)
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

    def _leave(self, heartbeat_store: HeartbeatStore) -> None:
        self._write_report(heartbeat_store)
        if self._may_retry and self._current_name is None:
            heartbeat_store.raise_flag(OVER)
        others = [rank for rank in self._ranks if rank != self._rank]
        deadline_s = self._clock.monotonic() + _LEAVE_S
        while heartbeat_store.is_host and others and self._clock.monotonic() < deadline_s:
            # The store ends with this process; ranks that still read it would see that as a failure.
            others = [rank for rank, heartbeat in heartbeat_store.find(others).items() if not heartbeat.has_ended]
            self._clock.wait(threading.Event(), _LEAVE_POLL_S)
