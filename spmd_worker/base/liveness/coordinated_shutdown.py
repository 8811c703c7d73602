"""Coordinated shutdown: after an alarm all ranks find the diagnosis, one of them reports it, and all end.

Every rank reads the same heartbeats and so finds the same diagnosis by itself. The rank that failed ends first, because
the launcher's summary begins with the rank that ended first.
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

from spmd_worker.base.liveness.bounded import within
from spmd_worker.base.liveness.failure_diagnosis import (
    SETTLE_S,
    STATUS_HEADING,
    Diagnosis,
    RankStatus,
    diagnose,
    status_lines,
)
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.liveness.heartbeat_exchange import HeartbeatExchange
from spmd_worker.base.liveness.stall_clock import WatchClock
from spmd_worker.base.liveness.watched import Watched
from spmd_worker.base.process import children_of, parent_of, start_time_of, variables_of

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
REPORT_S: Final = 2.0
"""Time for rank 0 to report before any living rank may: longer than it takes to learn of an alarm and of the cause."""

LEAVE_S: Final = 2.0
"""Time after the diagnosis for the main thread to return by itself, and for the rank that failed to end first."""

_TERMINAL_S: Final = 1.0
"""Time limit for output: a stopped terminal, or a pipe that is not read, blocks its writer."""

MAX_SHUTDOWN_S: Final = SETTLE_S + REPORT_S + 3 * LEAVE_S
"""Maximum duration of the shutdown."""


class CoordinatedShutdown:
    """One rank's part. `stop` is set when the rank has ended by itself, `wake` when its failure is known."""

    def __init__(
        self,
        watched: Watched,
        exchange: HeartbeatExchange,
        clock: WatchClock,
        stop: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._rank, self._exits, self._exchange, self._clock = watched.rank, watched.exits, exchange, clock
        self._stop, self._wake = stop, wake

    def find_diagnosis(self, look: Callable[[], object]) -> tuple[Diagnosis, list[RankStatus]] | None:
        """Wait for a diagnosis; `look` is called before each look at the ranks. None when the rank ended meanwhile, or
        nothing is wrong.
        """
        started_s = self._clock.tick()
        while not self._stop.is_set():
            elapsed_s = self._clock.tick() - started_s
            look()
            statuses = self._exchange.statuses()
            # Without other ranks' heartbeats no better diagnosis can come.
            diagnosis = diagnose(statuses, SETTLE_S if self._exchange.is_private else elapsed_s)
            if diagnosis is not None:
                return diagnosis, statuses
            if elapsed_s > SETTLE_S:
                return None
            self._clock.wait(self._wake, TICK_S)
            self._wake.clear()
        return None

    def report(self, diagnosis: Diagnosis, statuses: Sequence[RankStatus]) -> None:
        """Print the diagnosis on exactly one rank: rank 0, or the first living one, or after a while the first that
        asks. Returns when it was printed, here or elsewhere.
        """
        reporter = next((each.rank for each in statuses if self._may_report(each, diagnosis)), self._rank)
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
            # The other ranks wait for the report, and this process is about to end.
            self._wait(REPORT_S, lambda: self._exchange.is_reported or not self._exchange.is_shared)

    def _wait(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        started_s = self._clock.tick()
        while not is_over() and self._clock.tick() - started_s < limit_s:
            if self._clock.wait(self._stop, TICK_S):
                return

    def _may_report(self, status: RankStatus, diagnosis: Diagnosis) -> bool:
        """Whether a rank may report. Without a heartbeat store no rank knows that another has reported, so one on each
        node does.
        """
        if status.last_heartbeat is None:
            # A store that was never reached may have ended with rank 0, which hosts it without torchrun.
            is_host = status.rank == 0 and (self._exchange.is_lost or status.rank in diagnosis.ranks)
            return not self._exchange.is_connected and not is_host
        return status.is_living and (
            self._exchange.is_shared or status.last_heartbeat.node == self._exchange.peers.node
        )

    def wait_for_main(self, diagnosis: Diagnosis, is_done: Callable[[], bool]) -> None:
        """Give the main thread time to end the process itself, and the rank that failed to end first."""
        # A rank other than 0 that knows the reason waits for rank 0 to print it, and prints it if it does not.
        self._wait(3 * LEAVE_S if diagnosis.is_explained else LEAVE_S, is_done)

    def _write_report(self, diagnosis: Diagnosis, statuses: Sequence[RankStatus]) -> None:
        lines = "\n".join(f"  {line}" for line in status_lines(statuses))
        if not self._exits:
            logger.error("%s; %s\n%s", diagnosis.text, STATUS_HEADING, lines)
            return
        # One write: the ranks share a terminal.
        text = f"{STATUS_HEADING}\n{lines}\nerror: {diagnosis.text}\n"
        within(_TERMINAL_S, partial(_write, text))


def end_silent(statuses: Sequence[RankStatus], diagnosis: Diagnosis, own_rank: int) -> None:
    """Kill the processes of silent ranks: a stopped process does not react to the launcher's SIGTERM, and would keep
    the job from ending for half a minute.

    Only processes on this node that the same launcher started: the one that sent the heartbeats, or, for a rank that
    sent none, the one that was started as that rank.
    """
    own = next(each.last_heartbeat for each in statuses if each.rank == own_rank)
    assert own is not None, "a rank has its own heartbeat"
    # OSError where /proc cannot be read, or a process has ended meanwhile.
    with contextlib.suppress(OSError):
        for each in statuses:
            if each.rank in diagnosis.ranks and each.rank != own_rank:
                for pid in _siblings(each, own):
                    os.kill(pid, signal.SIGKILL)


def _siblings(status: RankStatus, own: RankHeartbeat) -> list[int]:
    """Processes of a rank, if they have the same parent as this one."""
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
    """Whether the environment that a process was started with is of this job and rank: a shell may have started ranks
    of several jobs.
    """
    variables = variables_of(pid) or {}
    is_of_this_job = all(variables.get(name) == os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return is_of_this_job and variables.get("RANK") == str(rank)


def exit_now(code: int) -> NoReturn:
    """End the process. The interpreter's own exit waits for threads, and native code for ranks that are gone."""
    within(_TERMINAL_S, _flush)
    os._exit(code)


def _write(text: str) -> None:
    """Write to stderr, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
