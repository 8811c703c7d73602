"""The watchdog: a thread that watches this rank and, over the heartbeat exchange, the others.

    soft limit   the main thread has made no progress for a while: one line is logged, and its stacks are written where
                 there is a run directory
    mismatch     ranks wait for others that are between steps: the first rank logs once where each is
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
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from spmd_worker.base.liveness.bounded import within
from spmd_worker.base.liveness.call_mismatch import CallMismatch
from spmd_worker.base.liveness.coordinated_shutdown import (
    LEAVE_S,
    MAX_SHUTDOWN_S,
    CoordinatedShutdown,
    end_silent,
    exit_now,
)
from spmd_worker.base.liveness.error_file import ErrorRecord, write_elastic_file, write_record
from spmd_worker.base.liveness.failure_diagnosis import (
    SETTLE_S,
    Diagnosis,
    RankStatus,
    describe,
    explained_exit_code,
    is_secondary,
)
from spmd_worker.base.liveness.heartbeat import Failure, FailureKind, Heartbeat, Moment, RankHeartbeat
from spmd_worker.base.liveness.heartbeat_exchange import HeartbeatExchange
from spmd_worker.base.liveness.heartbeat_store import HeartbeatStore
from spmd_worker.base.liveness.main_thread import DISK_S, MainThreadMonitor, Stall
from spmd_worker.base.liveness.stall_clock import WatchClock
from spmd_worker.base.liveness.watched import Watched
from spmd_worker.base.process import node_name, start_time_of

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
_PUBLISH_S: Final = 0.5
_ABORT_S: Final = 1.0
_DIAGNOSE_S: Final = 1.0
"""Maximum duration of the diagnosis once all heartbeats are known."""
_SAVE_AGAIN_S: Final = 0.5
"""Time for a second save after the first had its time: rows may have been finished meanwhile."""
_NUM_LAST_CALLS: Final = 2
_MISMATCH_SHARE: Final = 3
"""Ranks wait in different calls for this fraction (1/3) of `timeout_s` before it is logged."""


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
        self._launcher = os.getppid()
        self._process = (node_name(), os.getpid(), start_time_of(os.getpid()) or 0)
        self._clock = clock or WatchClock()
        self._main = MainThreadMonitor(watched, self.heartbeat, self._clock)
        self._mismatch = CallMismatch(watched.timeout_s / _MISMATCH_SHARE)
        self._exchange = HeartbeatExchange(
            watched.rank, watched.ranks, connect, self._make_heartbeat, self._clock, self._process[0]
        )
        self._failure: Failure | None = None
        self._recorded: Failure | None = None
        """Failure of the only rank, which its run directory has."""
        self._leaving: Failure | None = None
        self._failed_at: Moment | None = None
        self._stall: Stall | None = None
        self._traceback = ""
        self._count = 0
        self._has_ended = self._is_main_done = False
        self._signalled_s: float | None = None
        self._exit_code: int | None = None
        self._diagnosis: Diagnosis | None = None
        self._is_diagnosed = threading.Event()
        self._run_lock = threading.Lock()
        """Held while a diagnosis is recorded as that of the run, and while the run begins."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called, in the watchdog's thread, before it ends the process: saves finished rows."""
        self.is_reporting = False
        """True while this rank knows the cause and the ranks have not reported it yet."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._ending = CoordinatedShutdown(watched, self._exchange, self._clock, self._stop, self._wake)
        self._thread = threading.Thread(target=self._run, name="spmd-watchdog", daemon=True)

    def start(self) -> None:
        self._main.begin()
        self._exchange.start()
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog: this rank has ended without a failure. Idempotent."""
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
        """All ranks have joined, and each calls this with the same name, under which heartbeats are exchanged
        from now on. In a caller's process an earlier failure was of an abandoned attempt, and is forgotten.
        """
        with self._run_lock:
            self._exchange.move_to(name)
            if self.watched.exits:
                return
            self._failure = self._failed_at = self._stall = self._diagnosis = None
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
        assert self.watched.exits, "a caller's process is not ended"
        self._exit_code, self._is_main_done = exit_code, True
        self._wake.set()
        self._clock.join(self._thread, MAX_SHUTDOWN_S)
        exit_now(exit_code)

    def _fail(self, failure: Failure, error: BaseException | None = None, wait_s: float = _PUBLISH_S) -> None:
        if not _counts_after(self._failure, failure):
            return
        if len(self.watched.ranks) == 1 and failure.kind not in (FailureKind.STALLED, FailureKind.ORPHANED):
            # The main thread of the only rank ends by itself.
            if (
                self.watched.exits
                and failure.kind is not FailureKind.EXPLAINED
                and _counts_after(self._recorded, failure)
            ):
                self._recorded = failure
                self._record_alone(failure, error)
            return
        self._failure, self._traceback = failure, _trace_of(error)
        if failure.kind in (FailureKind.PRIMARY, FailureKind.SECONDARY):
            self._failed_at = self.heartbeat.now
        if failure.kind is FailureKind.PRIMARY and self.watched.exits:
            # torchrun prints it last: the innermost calls alone.
            write_elastic_file(failure.text, _trace_of(error, -_NUM_LAST_CALLS), time.time())
        self._exchange.alarm(wait_s)
        self._wake.set()

    def _record_alone(self, failure: Failure, error: BaseException | None) -> None:
        """Record the failure of the only rank, which nobody has to be told of."""
        rank = self.watched.rank
        heartbeat = replace(self._make_heartbeat(0), failure=replace(failure, order=1))
        status, diagnosis = RankStatus(rank, heartbeat, 0.0, is_gone=False), Diagnosis((rank,), failure.text)
        record = ErrorRecord(rank, time.time(), (status,), diagnosis, _trace_of(error))
        within(DISK_S, partial(write_record, self.watched.run_dir, record))

    def _make_heartbeat(self, order: int) -> RankHeartbeat:
        # A failed rank's step and phase are those of the failure, not of its clean-up; one that waited until the hard
        # limit gives up soon afterwards.
        now, stall = self._failed_at or self.heartbeat.now, self._stall
        age_s, location = (stall.age_s, stall.location) if stall else (self._main.stall.age_s, self._main.location())
        failure = self._failure or self._leaving
        failure = None if failure is None else replace(failure, order=order)
        self._count += 1
        own = (self.watched.rank, *self._process, self._count)
        return RankHeartbeat(*own, *now, round(age_s, 3), *location, self._has_ended, failure)

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
        if self.watched.has_launcher and os.getppid() != self._launcher:
            self._fail(Failure(FailureKind.ORPHANED, "the launcher is gone: torchrun's process has ended"), wait_s=0.0)
        if self.watched.rank == self.watched.ranks[0] and self._exchange.is_shared:
            self._mismatch.look(self._clock.tick(), self._exchange.statuses())
        knows_others = not self._exchange.is_moving
        if self._failure is not None or (knows_others and (self._exchange.is_alarmed or self._has_lost_a_rank())):
            self._end_together()

    def _look_at_main(self) -> None:
        stall = self._main.look()
        if stall is not None and self._failure is None:
            self._main.write_stacks_to_stderr()
            self._stall, self._failed_at = stall, stall.moment
            self._fail(Failure(FailureKind.STALLED, stall.text), wait_s=0.0)

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
        # Bounded: aborting may hang, and so may a disk.
        if self.watched.abort_groups is not None and not self._is_main_done:
            within(_ABORT_S, self.watched.abort_groups)
        within(self._saving_s(), self._run_before_exit)
        exit_now(self._code_of(diagnosis))

    def _run_before_exit(self) -> None:
        try:
            self.before_exit()
        except Exception:  # the process ends nevertheless
            logger.exception("saving before the exit failed")

    def _saving_s(self) -> float:
        """Time limit for saving. A signalled rank has been saving since the signal."""
        saved_s = 0.0 if self._signalled_s is None else self._clock.monotonic() - self._signalled_s
        return max(LEAVE_S - saved_s, _SAVE_AGAIN_S)

    def _is_cause(self, diagnosis: Diagnosis) -> bool:
        return self.watched.rank in diagnosis.ranks

    def _code_of(self, diagnosis: Diagnosis) -> int:
        if self._exit_code is not None:
            return self._exit_code
        is_signalled = self._signalled_s is not None and self._failure_kind is not FailureKind.STALLED
        return 143 if is_signalled and not diagnosis.is_explained else diagnosis.exit_code

    @property
    def _failure_kind(self) -> FailureKind | None:
        return None if self._failure is None else self._failure.kind


def _counts_after(known: Failure | None, failure: Failure) -> bool:
    """Whether a failure counts, by `Watchdog.fail`'s rule, where another one may be known."""
    effects = (FailureKind.SIGNALLED, FailureKind.SECONDARY)
    return known is None or (failure.kind not in effects and known.kind in effects)


def _trace_of(error: BaseException | None, limit: int | None = None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error, limit=limit, chain=limit is None))
