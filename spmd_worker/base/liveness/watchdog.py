"""The watchdog: a thread that watches this rank and, over the heartbeat exchange, the others.

    soft limit   the main thread has made no progress for a while: one line is logged, and its stacks are written where
                 there is a run directory
    apart        ranks wait for others that are between steps: the first rank logs once where each is
    hard limit   it has made none for as long as any rank may wait for another: that is a failure, and its stacks go to
                 stderr where there is no run directory
    alarm        a rank failed, is gone or silent, or received a signal: coordinated shutdown. Every rank reads the same
                 heartbeats and finds the same diagnosis, one of them reports it with the rank status, and all end

In a program of ours (`exits`) the thread ends the process where the main thread, which may wait in native code, does
not by itself. In a caller's process it only reports: in the log, and in the exception that the main thread raises when
the step channel or the group that it waits in gives up, which is after the same `timeout_s`.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from spmd_worker.base.liveness.bounded import within
from spmd_worker.base.liveness.coordinated_shutdown import LEAVE_S, MOST_S, CoordinatedShutdown, end_silent, exit_now
from spmd_worker.base.liveness.error_file import ErrorRecord, write_elastic_file, write_record, write_stacks
from spmd_worker.base.liveness.failure_diagnosis import (
    SETTLE_S,
    Diagnosis,
    describe,
    explained_exit_code,
    is_secondary,
    status_lines,
)
from spmd_worker.base.liveness.heartbeat import (
    Failure,
    FailureKind,
    Heartbeat,
    Moment,
    RankHeartbeat,
    location_of,
)
from spmd_worker.base.liveness.heartbeat_store import HeartbeatExchange, HeartbeatStore
from spmd_worker.base.liveness.rank_places import RankPlaces
from spmd_worker.base.liveness.stall_clock import StallClock, WatchClock
from spmd_worker.base.process import node_name, start_time_of

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
_MIN_SOFT_LIMIT_S: Final = 3.0
_PUBLISH_S: Final = 0.5
_ABORT_S: Final = 1.0
DISK_S: Final = 2.0
"""Limit for the disk: it may hang, and the process must end nevertheless."""
_DIAGNOSE_S: Final = 1.0
"""Maximum duration of the diagnosis once all heartbeats are known."""
_SAVE_ANEW_S: Final = 0.5
"""Time for a second save after the first had its time: rows may have been finished meanwhile."""
_NUM_LAST_CALLS: Final = 2
_APART_SHARE: Final = 3
"""Ranks wait in different calls for this fraction (1/3) of `timeout_s` before it is logged."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The watched rank and its world. `run_dir` is the folder for its files, if it exists; with `exits` the watchdog
    may end the process.

    `abort_groups` is called before the process ends. With `has_launcher` the parent process is torchrun's agent,
    without which there is no heartbeat store, and which alone could restart the job. `spins`: the main thread computes
    while it waits, too.
    """

    rank: int
    ranks: tuple[int, ...]
    timeout_s: float
    run_dir: Path | None = None
    exits: bool = False
    abort_groups: Callable[[], None] | None = None
    has_launcher: bool = False
    spins: bool = False

    @property
    def soft_limit_s(self) -> float:
        """Time without progress after which a rank logs it."""
        return min(max(self.timeout_s / 5, _MIN_SOFT_LIMIT_S), 0.8 * self.timeout_s)


class Watchdog:
    """`heartbeat`, `fail` and `leave` are for the main thread; `signalled` is for the thread that receives a signal.

    `connect` opens the launcher's store, in a thread; without it only this rank is watched. `clock` lets tests drive
    the time.
    """

    def __init__(
        self,
        watched: Watched,
        connect: Callable[[], HeartbeatStore] | None = None,
        clock: WatchClock | None = None,
    ) -> None:
        self.watched = watched
        self.heartbeat = Heartbeat()
        self._main_thread, self._main_id = threading.get_ident(), threading.get_native_id()
        self._launcher = os.getppid()
        self._process = (node_name(), os.getpid(), start_time_of(os.getpid()) or 0)
        self._clock = clock or WatchClock()
        self._stall = StallClock(self.heartbeat, spins=watched.spins)
        self._places = RankPlaces(watched.timeout_s / _APART_SHARE)
        self._exchange = HeartbeatExchange(
            watched.rank, watched.ranks, connect, self._make_heartbeat, self._clock, self._process[0]
        )
        self._failure: Failure | None = None
        self._leaving: Failure | None = None
        self._failed_at: Moment | None = None
        self._traceback = ""
        self._count = 0
        self._has_ended = self._is_warned = self._is_main_done = False
        self._signalled_s: float | None = None
        self._exit_code: int | None = None
        self._diagnosis: Diagnosis | None = None
        self._is_diagnosed = threading.Event()
        self._run_lock = threading.Lock()
        """Held while a diagnosis is recorded as that of the run, and while the run begins."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called, in the watchdog's thread, before it ends the process: saves finished rows."""
        self.is_reporting = False
        """True from when this rank knows the cause until the ranks have reported it."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._ending = CoordinatedShutdown(
            watched.rank, watched.exits, self._exchange, self._clock, self._stop, self._wake
        )
        self._thread = threading.Thread(target=self._run, name="spmd-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching the calling thread."""
        self._main_thread, self._main_id = threading.get_ident(), threading.get_native_id()
        self._exchange.start()
        self._thread.start()

    def stop(self) -> None:
        """This rank has ended without a failure. Idempotent."""
        if self._stop.is_set():
            return
        self._has_ended = True
        self._stop.set()
        self._wake.set()
        # The watchdog's own thread may call this: garbage collection there may delete an engine.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._clock.join(self._thread, LEAVE_S)
        self._exchange.stop(may_retry=not self.watched.exits)

    def join_run(self, name: str) -> None:
        """All ranks have joined, and each calls this with the same name, under which their heartbeats are exchanged
        from now on. In a caller's process an earlier failure was of an abandoned attempt, and is forgotten.
        """
        with self._run_lock:
            self._exchange.move_to(name)
            if self.watched.exits:
                return
            self._failure = self._failed_at = self._diagnosis = None
            self._traceback = ""
            self._is_diagnosed.clear()

    def leave_unclosed(self) -> None:
        """This rank leaves without `close`: its program ends, perhaps by an exception, or its engine was garbage
        collected. Raises no alarm: the other ranks may be doing the same. Call it before any clean-up, so that ranks
        waiting for this one find the reason.
        """
        # Set by the interpreter for an uncaught exception.
        error: BaseException | None = getattr(sys, "last_value", None)
        why = f" after {type(error).__name__}: {error}" if error is not None else ""
        text = f"rank {self.watched.rank} has left without close(){why}: its program ended, or its LLM was deleted"
        self._leaving = Failure(FailureKind.LEFT, text)
        self._exchange.wake()

    def fail(self, error: BaseException, doing: str = "") -> None:
        """Report an exception raised here, in the current step and phase, or while `doing` something. The other ranks
        know of it when this returns, or soon after. A primary failure replaces a secondary one; else the first is kept.
        """
        step, phase = self.heartbeat.now
        exit_code = explained_exit_code(error)
        if exit_code is not None and not doing:
            self._fail(Failure(FailureKind.EXPLAINED, str(error), exit_code))
            return
        text = describe(error, self.watched.rank, 0 if doing else step, doing or phase)
        kind = FailureKind.SECONDARY if is_secondary(error) else FailureKind.PRIMARY
        self._fail(Failure(kind, text), error)

    def find_cause(self, error: BaseException) -> str | None:
        """The diagnosis of a secondary failure, in one sentence, in a caller's process and after `fail`; waits a few
        seconds for it. None for other errors, and where nothing is known but the error.
        """
        names_cause = getattr(error, "names_cause", False)
        if self.watched.exits or len(self.watched.ranks) == 1 or not is_secondary(error) or names_cause:
            return None
        self._clock.wait(self._is_diagnosed, SETTLE_S + _DIAGNOSE_S)
        diagnosis = self._diagnosis
        if diagnosis is None or diagnosis.is_explained or self._is_cause(diagnosis):
            return None
        return diagnosis.text

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """A signal asks this rank to end: the launcher's, because another rank failed, or one from outside. Does not
        wait.
        """
        self._signalled_s = self._clock.monotonic()
        text = f"rank {self.watched.rank} received {signal.Signals(number).name}"
        self._fail(Failure(FailureKind.SIGNALLED, text, 128 + number), wait_s=0.0)

    def leave(self, exit_code: int) -> NoReturn:
        """The main thread has failed and returned: end the process when the ranks know the cause, and the rank that
        failed has ended first. Only where the watchdog may end the process.
        """
        assert self.watched.exits, "this process is somebody else's"
        self._exit_code, self._is_main_done = exit_code, True
        self._wake.set()
        self._clock.join(self._thread, MOST_S)
        exit_now(exit_code)

    def _fail(self, failure: Failure, error: BaseException | None = None, wait_s: float = _PUBLISH_S) -> None:
        effects = (FailureKind.SIGNALLED, FailureKind.SECONDARY)
        if self._failure is not None and (failure.kind in effects or self._failure.kind not in effects):
            return
        from_inside = failure.kind not in (FailureKind.STALLED, FailureKind.ORPHANED)
        if len(self.watched.ranks) == 1 and from_inside:
            # The only rank: the main thread ends by itself.
            return
        self._failure, self._traceback = failure, _trace_of(error)
        if failure.kind in (FailureKind.PRIMARY, FailureKind.SECONDARY):
            self._failed_at = self.heartbeat.now
        if failure.kind is FailureKind.PRIMARY and self.watched.exits:
            # torchrun prints it last: the innermost calls alone.
            write_elastic_file(failure.text, _trace_of(error, -_NUM_LAST_CALLS), time.time())
        self._exchange.alarm(wait_s)
        self._wake.set()

    def _make_heartbeat(self, order: int) -> RankHeartbeat:
        # A failed rank's step and phase are those of the failure, not of its clean-up.
        now = self._failed_at or self.heartbeat.now
        where, is_waiting = location_of(self._main_thread)
        failure = self._failure or self._leaving
        if failure is not None:
            failure = Failure(failure.kind, failure.text, failure.exit_code, order)
        self._count += 1
        age_s = round(self._stall.age_s, 3)
        return RankHeartbeat(
            self.watched.rank,
            *self._process,
            self._count,
            now.step,
            now.phase,
            age_s,
            where,
            is_waiting,
            self._has_ended,
            failure,
        )

    # The watchdog's thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            # In a caller's process one diagnosis is enough, until the ranks join again.
            if not self._is_diagnosed.is_set():
                self._look()
            self._clock.wait(self._wake, TICK_S)
            self._wake.clear()

    def _look(self) -> None:
        self._look_at_main()
        self._look_for_launcher()
        self._look_at_places()
        knows_others = not self._exchange.is_moving
        if self._failure is not None or (knows_others and (self._exchange.is_alarmed or self._has_lost_a_rank())):
            self._end_together()

    def _look_at_main(self) -> None:
        where, is_waiting = location_of(self._main_thread)
        moment = self._stall.look(self._clock.tick(), self._main_id, is_waiting)
        stalled_s = self._stall.stalled_s
        if stalled_s < self.watched.soft_limit_s:
            self._is_warned = False
            return
        if not self._is_warned:
            self._is_warned = True
            self._warn(moment, where, is_waiting)
        if stalled_s >= self.watched.timeout_s and self._failure is None:
            if not self._has_run_dir():
                within(DISK_S, partial(write_stacks, None, self.watched.rank))
            text = (
                f"rank {self.watched.rank} {'waits' if is_waiting else 'is stuck'}: step {moment.step}, phase "
                f"{moment.phase}, for {stalled_s:.1f} s, at {where}"
            )
            self._fail(Failure(FailureKind.STALLED, text), wait_s=0.0)

    def _warn(self, moment: Moment, where: str, is_waiting: bool) -> None:
        """Log missing progress. Many ranks may wait for others, for one reason: they log at INFO, and leave the
        terminal to the cause.
        """
        stacks = ""
        if self._has_run_dir():
            written = within(DISK_S, partial(write_stacks, self.watched.run_dir, self.watched.rank))
            stacks = f"; stacks are in {written}" if written else "; the disk of the run directory does not answer"
        logger.log(
            logging.INFO if is_waiting else logging.WARNING,
            "step %d %s in phase %s for %.1f s now, at %s%s",
            moment.step,
            "waits for other ranks" if is_waiting else "makes no progress",
            *(moment.phase, self._stall.stalled_s, where, stacks),
        )

    def _has_run_dir(self) -> bool:
        run_dir = self.watched.run_dir
        return run_dir is not None and bool(within(DISK_S, run_dir.is_dir))

    def _look_for_launcher(self) -> None:
        if self.watched.has_launcher and os.getppid() != self._launcher:
            self._fail(Failure(FailureKind.ORPHANED, "the launcher is gone: torchrun's process has ended"), wait_s=0.0)

    def _look_at_places(self) -> None:
        if self.watched.rank != self.watched.ranks[0] or not self._exchange.is_shared:
            return
        statuses = self._exchange.statuses()
        stood_s = self._places.look(self._clock.tick(), statuses)
        if stood_s is not None:
            lines = "\n".join(f"  {line}" for line in status_lines(statuses))
            text = "ranks wait for others that are between steps, for %.1f s now: do all make the same calls?\n%s"
            logger.warning(text, stood_s, lines)

    def _has_lost_a_rank(self) -> bool:
        """Whether another rank's process is gone, or it has been silent for longer than any rank waits."""
        for each in self._exchange.statuses():
            if each.is_gone or (each.is_silent and each.heard_ago_s > self.watched.timeout_s):
                self._exchange.alarm()
                return True
        return False

    def _end_together(self) -> None:
        """Run a shutdown, from the alarm to the end of the process, or to a known diagnosis. Returns early if nothing
        was wrong.
        """
        num_alarms, run = self._exchange.num_alarms, self._exchange.name
        found = self._ending.find_diagnosis(self._look_at_main)
        if found is None:
            self._exchange.clear_alarms(num_alarms)
            return
        diagnosis, statuses = found
        with self._run_lock:
            if self._exchange.name != run:
                return
            self._diagnosis = diagnosis
            self._is_diagnosed.set()
            if self._failure is None:
                # A rank that diagnoses later must not see this one end without a failure.
                self._failure = Failure(FailureKind.SECONDARY, diagnosis.text)
        self.is_reporting = True
        if not diagnosis.is_explained:
            record = ErrorRecord(self.watched.rank, time.time(), tuple(statuses), diagnosis, self._traceback)
            within(DISK_S, partial(write_record, self.watched.run_dir, record))
            self._ending.report(diagnosis, statuses)
        self.is_reporting = False
        if not self.watched.exits:
            return
        if self._is_cause(diagnosis) and not diagnosis.is_explained and self._failure_kind is not FailureKind.PRIMARY:
            write_elastic_file(diagnosis.text, diagnosis.text, time.time())
        if diagnosis.is_silence:
            end_silent(statuses, diagnosis, self.watched.rank)
        self._ending.wait_for_main(
            diagnosis, lambda: self._is_main_done and (self._signalled_s is not None or self._is_cause(diagnosis))
        )
        if self._stop.is_set():
            return
        self._abort_groups()
        # Bounded: a disk may hang.
        within(self._saving_s(), self._run_before_exit)
        exit_now(self._code_of(diagnosis))

    def _saving_s(self) -> float:
        """Time limit for saving. A signalled rank has been saving since the signal."""
        if self._signalled_s is None:
            return LEAVE_S
        return max(LEAVE_S - (self._clock.monotonic() - self._signalled_s), _SAVE_ANEW_S)

    def _run_before_exit(self) -> None:
        try:
            self.before_exit()
        except Exception:  # the process ends nevertheless
            logger.exception("saving before the exit failed")

    def _abort_groups(self) -> None:
        """Abort the groups, with a limit: aborting may hang."""
        if self.watched.abort_groups is not None and not self._is_main_done:
            within(_ABORT_S, self.watched.abort_groups)

    def _is_cause(self, diagnosis: Diagnosis) -> bool:
        return self.watched.rank in diagnosis.ranks

    def _code_of(self, diagnosis: Diagnosis) -> int:
        if self._exit_code is not None:
            return self._exit_code
        ends_by_signal = (
            self._signalled_s is not None
            and not diagnosis.is_explained
            and self._failure_kind is not FailureKind.STALLED
        )
        return 143 if ends_by_signal else diagnosis.exit_code

    @property
    def _failure_kind(self) -> FailureKind | None:
        return None if self._failure is None else self._failure.kind


def _trace_of(error: BaseException | None, limit: int | None = None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error, limit=limit, chain=limit is None))
