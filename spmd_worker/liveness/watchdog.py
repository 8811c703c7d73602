"""A thread that watches this rank and, over the heartbeat exchange, the others; that says who is to blame; that ends
together.

    soft limit   the main thread has made no progress for a while: its stacks, and one line
    hard limit   it has made none for as long as any rank may wait for another: that is a failure
    alarm        a rank failed, went, is silent, or was told to end: the ranks gather what they know, agree on who is to
                 blame because they read the same heartbeats, one of them prints the rank status, and all leave

In a program of ours (`exits`) the thread ends the process where the main thread, which may wait in native code, does
not by itself. In somebody else's process it only says what it knows, in the log and in the exception that the main
thread raises when the step channel or the group that it waits in gives up, which is after the same `timeout_s`. Knows
heartbeats. Knows nothing about torch.
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

from spmd_worker.liveness.bounded import within
from spmd_worker.liveness.coordinated_shutdown import LEAVE_S, MOST_S, CoordinatedShutdown, end_silent, exit_now
from spmd_worker.liveness.error_file import ErrorRecord, write_elastic_file, write_record, write_stacks
from spmd_worker.liveness.failure_diagnosis import SETTLE_S, Diagnosis, describe, explained_exit_code, is_secondary
from spmd_worker.liveness.heartbeat import (
    Failure,
    FailureKind,
    Heartbeat,
    Moment,
    RankHeartbeat,
    stand_of,
)
from spmd_worker.liveness.heartbeat_store import HeartbeatExchange, HeartbeatStore
from spmd_worker.liveness.stall_clock import StallClock, WatchClock
from spmd_worker.process import node_name, start_time_of

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
_MIN_SOFT_LIMIT_S: Final = 3.0
_PUBLISH_S: Final = 0.5
_ABORT_S: Final = 1.0
DISK_S: Final = 2.0
"""A disk may hang, and what hangs with it must end all the same."""
_DIAGNOSE_S: Final = 1.0
"""How long after all is known the diagnosis takes at most."""
_NUM_LAST_CALLS: Final = 2


@dataclass(frozen=True, slots=True)
class Watched:
    """Which rank this is, among which; `run_dir` is where its files go, if it exists; `exits` says whose process it is.

    `abort_groups` is tried before the process ends. With `has_launcher` the parent process is torchrun's agent, without
    which there is no heartbeat store, and nobody to start the job again. `spins`: the main thread computes while it
    waits, too.
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
        """Without progress for so long, a rank writes its stacks."""
        return min(max(self.timeout_s / 5, _MIN_SOFT_LIMIT_S), 0.8 * self.timeout_s)


class Watchdog:
    """`heartbeat` is for the main thread, and so are `fail` and `leave`; `signalled` is for whoever gets the signal.

    `connect` opens the launcher's store, in a thread; None where there is none: then only this rank is watched. `clock`
    is for tests, which drive it.
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
        self._exchange = HeartbeatExchange(
            watched.rank, watched.ranks, connect, self._make_heartbeat, self._clock, self._process[0]
        )
        self._failure: Failure | None = None
        self._leaving: Failure | None = None
        self._failed_at: Moment | None = None
        self._traceback = ""
        self._count = 0
        self._has_ended = self._is_warned = self._is_told = self._is_out = False
        self._exit_code: int | None = None
        self._diagnosis: Diagnosis | None = None
        self._is_judged = threading.Event()
        self.before_exit: Callable[[], None] = lambda: None
        """Called, in the watchdog's thread, before it ends the process: what must not be lost."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._ending = CoordinatedShutdown(
            watched.rank, watched.exits, self._exchange, self._clock, self._stop, self._wake
        )
        self._thread = threading.Thread(target=self._run, name="spmd-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch. The calling thread is the one that is watched."""
        self._main_thread, self._main_id = threading.get_ident(), threading.get_native_id()
        self._exchange.start()
        self._thread.start()

    def stop(self) -> None:
        """This rank has ended as it should; idempotent."""
        if self._stop.is_set():
            return
        self._has_ended = True
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._clock.join(self._thread, LEAVE_S)
        self._exchange.stop()

    def leave_unclosed(self) -> None:
        """This rank leaves without `close`: its program ends, by an exception perhaps, or nobody holds its engine any
        more. No alarm: the other ranks may be doing the same. To be called before anything is taken down, so that those
        that wait for this rank find the reason.
        """
        # Set by the interpreter for an exception that nobody caught.
        error: BaseException | None = getattr(sys, "last_value", None)
        why = f" after {type(error).__name__}: {error}" if error is not None else ""
        text = f"rank {self.watched.rank} has left without close(){why}: its program ended, or its LLM was deleted"
        self._leaving = Failure(FailureKind.LEFT, text)
        self._exchange.wake()

    def fail(self, error: BaseException, doing: str = "") -> None:
        """Something raised here, in the step and phase of now, or while `doing` something. The ranks know of it when
        this returns, or soon after. What failed here counts more than what is known from others; then the first.
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
        """In somebody else's process, after `fail`: who is to blame for an error that tells of another rank's end, in
        one sentence; waits a moment for it. None for other errors, and where nothing is known but the error.
        """
        names_cause = getattr(error, "names_cause", False)
        if self.watched.exits or len(self.watched.ranks) == 1 or not is_secondary(error) or names_cause:
            return None
        self._clock.wait(self._is_judged, SETTLE_S + _DIAGNOSE_S)
        diagnosis = self._diagnosis
        is_news = diagnosis is not None and not diagnosis.is_explained and not self._is_to_blame(diagnosis)
        return diagnosis.text if diagnosis is not None and is_news else None

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """Somebody sent a signal: because another rank failed, or for reasons of their own. Does not wait."""
        self._is_told = True
        text = f"rank {self.watched.rank} was told to end ({signal.Signals(number).name})"
        self._fail(Failure(FailureKind.SIGNALLED, text, 128 + number), wait_s=0.0)

    def leave(self, exit_code: int) -> NoReturn:
        """The main thread is out and failed: the process ends when the ranks know why, and who has to leave first
        has left. Only where the watchdog may end the process.
        """
        assert self.watched.exits, "this process is somebody else's"
        self._exit_code, self._is_out = exit_code, True
        self._wake.set()
        self._clock.join(self._thread, MOST_S)
        exit_now(exit_code)

    def _fail(self, failure: Failure, error: BaseException | None = None, wait_s: float = _PUBLISH_S) -> None:
        is_news = failure.kind not in (FailureKind.SIGNALLED, FailureKind.SECONDARY)
        if self._failure is not None and not (
            is_news and self._failure.kind in (FailureKind.SIGNALLED, FailureKind.SECONDARY)
        ):
            return
        if len(self.watched.ranks) == 1 and failure.kind is not FailureKind.STALLED:
            # Nobody needs to be told, and the main thread ends by itself.
            return
        self._failure, self._traceback = failure, _trace_of(error)
        if failure.kind in (FailureKind.PRIMARY, FailureKind.SECONDARY):
            self._failed_at = self.heartbeat.now
        if failure.kind is FailureKind.PRIMARY and self.watched.exits:
            # torchrun prints it, last of all: where it happened, not how the program came there.
            write_elastic_file(failure.text, _trace_of(error, -_NUM_LAST_CALLS), time.time())
        self._exchange.alarm(wait_s)
        self._wake.set()

    def _make_heartbeat(self, order: int) -> RankHeartbeat:
        # What matters of a rank that failed is where it did, not where it cleans up.
        now = self._failed_at or self.heartbeat.now
        where, is_waiting = stand_of(self._main_thread)
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
            self._look_at_main()
            self._look_for_launcher()
            is_alarmed = self._failure is not None or self._exchange.is_alarmed or self._misses_a_rank()
            if is_alarmed and self._end_together():
                return
            self._clock.wait(self._wake, TICK_S)
            self._wake.clear()

    def _look_at_main(self) -> None:
        where, is_waiting = stand_of(self._main_thread)
        moment = self._stall.look(self._clock.tick(), self._main_id, is_waiting)
        stalled_s = self._stall.stalled_s
        if stalled_s < self.watched.soft_limit_s:
            self._is_warned = False
            return
        if not self._is_warned:
            self._is_warned = True
            self._warn(moment, where, is_waiting)
        if stalled_s >= self.watched.timeout_s and self._failure is None:
            text = (
                f"rank {self.watched.rank} {'waits' if is_waiting else 'is stuck'}: step {moment.step}, phase "
                f"{moment.phase}, for {stalled_s:.1f} s, at {where}"
            )
            self._fail(Failure(FailureKind.STALLED, text), wait_s=0.0)

    def _warn(self, moment: Moment, where: str, is_waiting: bool) -> None:
        """Of ranks that wait for others there may be many, for one reason: they leave the terminal to that one."""
        run_dir = self.watched.run_dir
        has_folder = run_dir is not None and within(DISK_S, run_dir.is_dir)
        stacks = ""
        if has_folder or not is_waiting:
            place = within(DISK_S, partial(write_stacks, self.watched.run_dir, self.watched.rank))
            stacks = f"; stacks are in {place}" if place else "; its disk does not answer"
        logger.log(
            logging.INFO if is_waiting else logging.WARNING,
            "step %d %s in phase %s for %.1f s now, at %s%s",
            moment.step,
            "waits for other ranks" if is_waiting else "does not go on",
            *(moment.phase, self._stall.stalled_s, where, stacks),
        )

    def _look_for_launcher(self) -> None:
        if self.watched.has_launcher and os.getppid() != self._launcher:
            self._fail(Failure(FailureKind.ORPHANED, "the launcher is gone: torchrun's process has ended"), wait_s=0.0)

    def _misses_a_rank(self) -> bool:
        """Another rank's process has gone, or it was not heard of for longer than any rank waits."""
        for each in self._exchange.statuses():
            if each.is_gone or (each.is_silent and each.heard_ago_s > self.watched.timeout_s):
                self._exchange.alarm()
                return True
        return False

    def _end_together(self) -> bool:
        """From the alarm to the end of the process, or of the watch. False where nothing was wrong after all."""
        num_alarms = self._exchange.num_alarms
        found = self._ending.find_diagnosis(self._look_at_main)
        if found is None:
            self._exchange.calm_down(num_alarms)
            return False
        diagnosis, statuses = found
        self._diagnosis = diagnosis
        self._is_judged.set()
        if self._failure is None:
            # Whoever judges later must not think that this rank went without a word.
            self._failure = Failure(FailureKind.SECONDARY, diagnosis.text)
        if not diagnosis.is_explained:
            record = ErrorRecord(self.watched.rank, time.time(), tuple(statuses), diagnosis, self._traceback)
            within(DISK_S, partial(write_record, self.watched.run_dir, record))
            self._ending.report(diagnosis, statuses)
        if not self.watched.exits:
            return True
        if (
            self._is_to_blame(diagnosis)
            and not diagnosis.is_explained
            and self._failure.kind is not FailureKind.PRIMARY
        ):
            write_elastic_file(diagnosis.text, diagnosis.text, time.time())
        if diagnosis.is_silence:
            end_silent(statuses, diagnosis, self.watched.rank)
        self._ending.wait_for_main(diagnosis, lambda: self._is_out and (self._is_told or self._is_to_blame(diagnosis)))
        if self._stop.is_set():
            return True
        self._abort_groups()
        # A disk that hangs must not keep this process from ending.
        within(LEAVE_S, self._run_before_exit)
        return exit_now(self._code_of(diagnosis))

    def _run_before_exit(self) -> None:
        try:
            self.before_exit()
        except Exception:  # whatever it is, the process ends
            logger.exception("what was to be kept could not be")

    def _abort_groups(self) -> None:
        """What is aborted may hang, and this process ends all the same."""
        if self.watched.abort_groups is not None and not self._is_out:
            within(_ABORT_S, self.watched.abort_groups)

    def _is_to_blame(self, diagnosis: Diagnosis) -> bool:
        return self.watched.rank in diagnosis.ranks

    def _code_of(self, diagnosis: Diagnosis) -> int:
        if self._exit_code is not None:
            return self._exit_code
        is_led_away = self._is_told and not diagnosis.is_explained and self._failure_kind is not FailureKind.STALLED
        return 143 if is_led_away else diagnosis.exit_code

    @property
    def _failure_kind(self) -> FailureKind | None:
        return None if self._failure is None else self._failure.kind


def _trace_of(error: BaseException | None, limit: int | None = None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error, limit=limit, chain=limit is None))
