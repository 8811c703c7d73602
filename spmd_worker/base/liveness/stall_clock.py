"""Time of the main thread in its phase, and without progress.

The definition of progress decides whether a slow step, a slow disk or a long compilation is mistaken for a hang.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, Heartbeat, Moment
from spmd_worker.base.process import cpu_seconds_of

_LOOK_S: Final = 1.0
"""Time over which CPU use is measured: the kernel counts it in hundredths of a second."""

_BUSY_SHARE: Final = 0.05
"""A thread below this share of CPU time is waiting, and wakes up now and then."""


class WatchClock:
    """Seconds during which this process ran: a pause of all of it, as when a container is frozen, hardly counts. All
    waiting of a watchdog goes through its clock, so that a test can drive the time.
    """

    MAX_TICK_S: Final = 1.0
    """Maximum per tick: a thread that ticks several times a second and was silent for longer was not running."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self.now_s = 0.0
        self._last_s = monotonic()

    def tick(self) -> float:
        """Read the clock. Returns the time in seconds."""
        now_s = self.monotonic()
        self.now_s += min(now_s - self._last_s, self.MAX_TICK_S)
        self._last_s = now_s
        return self.now_s

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Wait for the event, for `limit_s` at most. Returns whether it is set."""
        return event.wait(limit_s)

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        """Wait for the end of the thread, for `limit_s` at most."""
        thread.join(limit_s)


class StallClock:
    """Time without progress, on a watch clock. Progress is:

    between steps   anything
    at the start    anything, unless this rank waits for others: files, compilers and locks may take any time, and
                    the ranks that wait for this one have a limit of their own
    in a step       another phase, another step; computing too, unless this thread also computes while it waits
                    (`spins`), as it does for a GPU
    """

    def __init__(self, heartbeat: Heartbeat, *, spins: bool = False) -> None:
        self._heartbeat, self._spins = heartbeat, spins
        self._seen = heartbeat.now
        self._since_s = self._progress_s = 0.0
        self._measured_s = 0.0
        self._measured_cpu_s: float | None = None
        self.age_s = self.stalled_s = 0.0
        """Seconds in this phase, and seconds of them without progress."""

    def look(self, now_s: float, thread_id: int, is_waiting: bool) -> Moment:
        """Update the times; `thread_id` is the system's number of the main thread. Returns the main thread's step and
        phase.
        """
        now, has_computed = self._heartbeat.now, self._has_computed(now_s, thread_id)
        if now is not self._seen:
            self._seen, self._since_s, self._progress_s = now, now_s, now_s
        elif now.phase == BETWEEN_STEPS or (not is_waiting if now.step == 0 else has_computed):
            self._progress_s = now_s
        self.age_s, self.stalled_s = now_s - self._since_s, now_s - self._progress_s
        return now

    def _has_computed(self, now_s: float, thread_id: int) -> bool:
        """Whether it computed since the last measurement; False before the next is due."""
        elapsed_s = now_s - self._measured_s
        if self._spins or elapsed_s < _LOOK_S:
            return False
        last_s, cpu_s = self._measured_cpu_s, cpu_seconds_of(thread_id)
        self._measured_s, self._measured_cpu_s = now_s, cpu_s
        return last_s is not None and cpu_s is not None and cpu_s - last_s > _BUSY_SHARE * elapsed_s
