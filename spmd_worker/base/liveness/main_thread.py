"""Monitor of the main thread: logs once that it makes no progress, and describes the failure at the hard limit."""

import logging
import threading
from functools import partial
from typing import Final, NamedTuple

from spmd_worker.base.liveness.bounded import within
from spmd_worker.base.liveness.error_file import write_stacks
from spmd_worker.base.liveness.heartbeat import Heartbeat, Moment, location_of
from spmd_worker.base.liveness.stall_clock import StallClock, WatchClock
from spmd_worker.base.liveness.watched import Watched

logger = logging.getLogger(__name__)

DISK_S: Final = 2.0
"""Limit for the disk: it may hang, and the process must end nevertheless."""


class Stall(NamedTuple):
    """A main thread at the hard limit: the failure in one sentence, the time in its phase, its line, and whether it
    waited there for other ranks.
    """

    text: str
    moment: Moment
    age_s: float
    location: tuple[str, bool]


class MainThreadMonitor:
    """Monitors the thread that calls `begin`, at first the one that creates the monitor. At the soft limit of the time
    without progress, stacks are written to the run directory if it exists, otherwise to stderr at `timeout_s`.
    """

    def __init__(self, watched: Watched, heartbeat: Heartbeat, clock: WatchClock) -> None:
        self._watched, self._clock = watched, clock
        self.stall = StallClock(heartbeat, spins=watched.spins)
        self._is_warned = False
        self.begin()

    def begin(self) -> None:
        """Monitor the calling thread."""
        self._thread_id, self._native_id = threading.get_ident(), threading.get_native_id()

    def location(self) -> tuple[str, bool]:
        """The thread's line, and whether it waits for other ranks."""
        return location_of(self._thread_id)

    def look(self) -> Stall | None:
        """Update the time without progress. Returns the failure once that exceeds the hard limit."""
        where, is_waiting = self.location()
        moment = self.stall.look(self._clock.tick(), self._native_id, is_waiting)
        stalled_s = self.stall.stalled_s
        if stalled_s < self._watched.soft_limit_s:
            self._is_warned = False
            return None
        if not self._is_warned:
            self._is_warned = True
            # Many ranks may wait for others, for one reason: INFO leaves the terminal to the cause.
            logger.log(
                logging.INFO if is_waiting else logging.WARNING,
                "step %d %s in phase %s for %.1f s now, at %s%s",
                moment.step,
                "waits for other ranks" if is_waiting else "makes no progress",
                *(moment.phase, stalled_s, where, self._write_stacks_to_run_dir()),
            )
        if stalled_s < self._watched.timeout_s:
            return None
        state = "waits" if is_waiting else "is stuck"
        at = f"step {moment.step}, phase {moment.phase}, for {stalled_s:.1f} s, at {where}"
        return Stall(f"rank {self._watched.rank} {state}: {at}", moment, self.stall.age_s, (where, is_waiting))

    def write_stacks_to_stderr(self) -> None:
        """Write the stacks of all threads, unless `look` has written them to the run directory."""
        if not self._has_run_dir():
            within(DISK_S, partial(write_stacks, None, self._watched.rank))

    def _write_stacks_to_run_dir(self) -> str:
        if not self._has_run_dir():
            return ""
        written = within(DISK_S, partial(write_stacks, self._watched.run_dir, self._watched.rank))
        return f"; stacks are in {written}" if written else "; the disk of the run directory does not answer"

    def _has_run_dir(self) -> bool:
        return self._watched.run_dir is not None and bool(within(DISK_S, self._watched.run_dir.is_dir))
