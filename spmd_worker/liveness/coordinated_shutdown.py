"""How ranks end together once there was an alarm: a diagnosis, one rank status, whoever is to blame first.

Every rank reads the same heartbeats, and so comes to the same diagnosis by itself. Knows the heartbeat exchange. Knows
nothing about what this rank did.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from spmd_worker.liveness.bounded import within
from spmd_worker.liveness.failure_diagnosis import SETTLE_S, Diagnosis, RankStatus, diagnose, status_lines
from spmd_worker.liveness.heartbeat import RankHeartbeat
from spmd_worker.liveness.heartbeat_store import HeartbeatExchange
from spmd_worker.liveness.stall_clock import WatchClock
from spmd_worker.process import children_of, parent_of, start_time_of, variables_of

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
REPORT_S: Final = 1.0
"""How long rank 0 has the word, before whoever lives may take it."""

LEAVE_S: Final = 2.0
"""How long after the diagnosis the main thread may take to get out by itself, and whoever is to blame to leave first.
"""

_TERMINAL_S: Final = 1.0
"""A terminal that is held, or a pipe that nobody reads, takes nothing."""

MOST_S: Final = SETTLE_S + REPORT_S + 3 * LEAVE_S
"""All of it together."""


class CoordinatedShutdown:
    """One rank's part in it. `stop` is set when there is nothing left to end, `wake` when there is news."""

    def __init__(
        self,
        rank: int,
        exits: bool,
        exchange: HeartbeatExchange,
        clock: WatchClock,
        stop: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._rank, self._exits, self._exchange, self._clock = rank, exits, exchange, clock
        self._stop, self._wake = stop, wake

    def find_diagnosis(self, look: Callable[[], object]) -> tuple[Diagnosis, list[RankStatus]] | None:
        """Wait for one; `look` is called each time before the ranks are looked at. None when the rank ended
        meanwhile, or nothing is wrong.
        """
        started_s = self._clock.tick()
        while not self._stop.is_set():
            elapsed_s = self._clock.tick() - started_s
            look()
            statuses = self._exchange.statuses()
            # Alone, nothing better can come.
            diagnosis = diagnose(statuses, SETTLE_S if self._exchange.is_private else elapsed_s)
            if diagnosis is not None:
                return diagnosis, statuses
            if elapsed_s > SETTLE_S:
                return None
            self._clock.wait(self._wake, TICK_S)
            self._wake.clear()
        return None

    def report(self, diagnosis: Diagnosis, statuses: Sequence[RankStatus]) -> None:
        """Exactly one rank does: rank 0, or the first that lives, or after a while whoever asks first. Returns when it
        was done.
        """
        reporter = next((each.rank for each in statuses if self._may_report(each)), self._rank)
        has_asked = False
        started_s = self._clock.tick()
        while self._exchange.is_shared and not self._exchange.is_reporter:
            waited_s = self._clock.tick() - started_s
            if self._exchange.is_reported or waited_s > REPORT_S + LEAVE_S:
                return
            if not has_asked and (reporter == self._rank or waited_s > REPORT_S):
                has_asked = True
                self._exchange.ask_to_report()
            if self._clock.wait(self._stop, TICK_S):
                return
        if self._exchange.is_reporter or reporter == self._rank:
            self._write_report(diagnosis, statuses)
            self._exchange.has_reported()
            self._wait_until_reported()

    def _wait_until_reported(self) -> None:
        """The others wait for the word, and this process may end any moment."""
        started_s = self._clock.tick()
        while self._exchange.is_shared and not self._exchange.is_reported and self._clock.tick() - started_s < REPORT_S:
            if self._clock.wait(self._stop, TICK_S):
                return

    def _may_report(self, status: RankStatus) -> bool:
        """Without a heartbeat store nobody hears that another has spoken: then somebody on each node does."""
        if status.last_heartbeat is None:
            return not self._exchange.is_connected
        return status.is_living and (self._exchange.is_shared or status.last_heartbeat.node == self._exchange.node)

    def wait_for_main(self, diagnosis: Diagnosis, is_out: Callable[[], bool]) -> None:
        """Give the main thread time, and whoever is to blame: the launcher's summary begins with who leaves first."""
        # Time for the main thread of a rank that waits to be heard whether rank 0 says it.
        patience_s = 3 * LEAVE_S if diagnosis.is_explained else LEAVE_S
        started_s = self._clock.tick()
        while not is_out() and self._clock.tick() - started_s < patience_s:
            if self._clock.wait(self._stop, TICK_S):
                return

    def _write_report(self, diagnosis: Diagnosis, statuses: Sequence[RankStatus]) -> None:
        lines = "\n".join(f"  {line}" for line in status_lines(statuses))
        if not self._exits:
            logger.error("%s; the ranks when they were last heard of:\n%s", diagnosis.text, lines)
            return
        # In one piece: the ranks share a terminal.
        text = f"the ranks when they were last heard of:\n{lines}\nerror: {diagnosis.text}\n"
        within(_TERMINAL_S, partial(_write, text))


def end_silent(statuses: Sequence[RankStatus], diagnosis: Diagnosis, own_rank: int) -> None:
    """A stopped process does not react to the launcher's SIGTERM, and would keep the job from ending for half a minute.

    Only processes on this node that the same launcher started: the very one that spoke, or, of a rank that never did,
    the one that was started as that rank.
    """
    own = next(each.last_heartbeat for each in statuses if each.rank == own_rank)
    assert own is not None, "this rank knows itself"
    # Where the system does not tell, or a process has gone meanwhile.
    with contextlib.suppress(OSError):
        for each in statuses:
            if each.rank in diagnosis.ranks and each.rank != own_rank:
                for pid in _siblings(each, own):
                    os.kill(pid, signal.SIGKILL)


def _siblings(status: RankStatus, own: RankHeartbeat) -> list[int]:
    """The processes of a rank, if they have the same parent as this one."""
    launcher, last_heartbeat = parent_of(own.pid), status.last_heartbeat
    if launcher is None:
        return []
    if last_heartbeat is None:
        return [pid for pid in children_of(launcher) if _is_rank_of_this_job(pid, status.rank)]
    pid = last_heartbeat.pid
    is_near = bool(own.node) and last_heartbeat.node == own.node
    is_the_same = is_near and start_time_of(pid) == last_heartbeat.start_time and parent_of(pid) == launcher
    return [pid] if is_the_same else []


def _is_rank_of_this_job(pid: int, rank: int) -> bool:
    """By the variables that a process was started with, whatever became of it since: a shell may have started ranks of
    several jobs.
    """
    variables = variables_of(pid) or {}
    is_of_this_job = all(variables.get(name) == os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return is_of_this_job and variables.get("RANK") == str(rank)


def exit_now(code: int) -> NoReturn:
    """The interpreter's own way out waits for threads, and native code for ranks that are gone."""
    within(_TERMINAL_S, _flush)
    os._exit(code)


def _write(text: str) -> None:
    """The terminal may be gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
