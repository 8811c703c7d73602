"""Time that a test drives, for watchdogs whose ranks are threads of one process: seconds pass when all of them wait.

It stands still while any thread that takes part, the test's own too, does something; then it goes on to the moment at
which the first of them stops waiting. So nothing depends on how fast the machine is, and no second takes longer than
what is done in it.
"""

import threading
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from spmd_worker.base.liveness.stall_clock import WatchClock

_POLL_S = 0.001


class _Waiting(NamedTuple):
    """A thread that waits until `is_so`, or until `end_s`."""

    is_so: Callable[[], object]
    end_s: float

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.end_s or bool(self.is_so())


class DrivenTime:
    """`now_s` is 0 at first. The thread that makes it takes part, and every other from its first wait on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting: dict[threading.Thread, _Waiting | None] = {threading.current_thread(): None}
        self._moved = threading.Condition()

    def clock(self) -> "DrivenClock":
        """One a watchdog."""
        return DrivenClock(self)

    def wait_until(self, is_so: Callable[[], object], limit_s: float = inf) -> bool:
        """Let time pass until something is so, for `limit_s` of this time at most. Returns whether it is."""
        thread = threading.current_thread()
        waiting = _Waiting(is_so, self.now_s + limit_s)
        with self._moved:
            self._waiting[thread] = waiting
            while not waiting.is_over(self.now_s):
                if not self._go_on():
                    # Until time goes on, or another thread, which is not asked to say so, has set an event.
                    self._moved.wait(_POLL_S)
            self._waiting[thread] = None
        return bool(is_so())

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self.wait_until(lambda: False, seconds)

    def takes_part(self, thread: threading.Thread) -> bool:
        """Whether a thread has waited before."""
        return thread in self._waiting

    def _go_on(self) -> bool:
        """To the next moment at which a thread stops waiting, if all of them wait, and for nothing but time."""
        waiting = [each for thread, each in self._waiting.items() if thread.is_alive()]
        ends_s = [each.end_s for each in waiting if each is not None and each.end_s < inf]
        if not ends_s or any(each is None or each.is_over(self.now_s) for each in waiting):
            return False
        self.now_s = min(ends_s)
        self._moved.notify_all()
        return True


class DrivenClock(WatchClock):
    """A watch clock on driven time."""

    def __init__(self, time: DrivenTime) -> None:
        super().__init__(lambda: time.now_s)
        self._time = time

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        return self._time.wait_until(event.is_set, limit_s)

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        self._time.wait_until(lambda: not thread.is_alive(), limit_s)
