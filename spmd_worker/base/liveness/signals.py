"""Signals that end a job: finished rows are saved, and the process ends soon, whatever its main thread waits for.

    SIGTERM, SIGUSR1,  save, stay a while to learn which rank is the cause, exit with 128 + the signal's number;
    SIGHUP             SIGHUP stays ignored where it was (nohup)
    Ctrl-C             save, KeyboardInterrupt in the main thread; a second one, or a slow end: exit with 130

A program that drains is notified of the first signal, and has its time. After that it ends as above; so it does at a
second Ctrl-C.

A thread handles them, because the main thread may wait in a collective, where Python's own handlers do not run.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

from spmd_worker.base.liveness.bounded import within

_ENDING: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Batch systems send SIGUSR1 as a warning before the time is up; a terminal that is closed, SIGHUP."""

_NOHUP: Final = (signal.SIGHUP, signal.SIG_IGN)
_INTERRUPTED_S: Final = 5.0
"""Time for the main thread to end after Ctrl-C."""

_TICK_S: Final = 0.05
_REPORTED_S: Final = 1.5
"""Additional time for a process that is about to report the cause."""

_LEAVE_S: Final = 5.0
"""Time limit for saving finished rows, on a disk that may never answer, before the process ends."""


class EndingSignals:
    """`keep` is called, in a thread, for each signal; `signalled` for the first that is no Ctrl-C, with its number.

    `patience_s` is the time that the main thread then has to learn the cause, and to end by itself; while the process
    `is_reporting` it, it stays a little longer; `report` is called last, with the number. With `drain`, which must not
    block, the first signal calls that alone, and the rest begins `drain_s` later.
    """

    def __init__(
        self,
        keep: Callable[[], None],
        signalled: Callable[[int], None],
        patience_s: float,
        drain: Callable[[], None] | None = None,
        drain_s: float = 0.0,
        is_reporting: Callable[[], bool] = lambda: False,
        report: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._is_reporting, self._report = is_reporting, report
        self._keep, self._signalled, self._patience_s = keep, signalled, patience_s
        self._drain, self._drain_s = drain, drain_s
        self._num_interrupts = 0
        self._timers: list[threading.Timer] = []
        self.is_ending = threading.Event()
        self._writer = -1
        _made.add(self)

    def install(self) -> None:
        """Install the handlers; in the main thread."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Started by nohup, a program goes on without its terminal.
        ending = [number for number in _ENDING if (number, signal.getsignal(number)) != _NOHUP]
        handlers = {**dict.fromkeys(ending, lambda *_: None), signal.SIGINT: self._interrupt}
        self._former_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._thread = threading.Thread(target=self._run, args=(reader,), name="spmd-end", daemon=True)
        self._thread.start()

    def uninstall(self) -> None:
        """Restore the state before `install`, for a process that goes on: the thread has ended, unless it is the one
        that ends the process. In the main thread. Idempotent.
        """
        if self._writer < 0:
            return
        self._restore_handlers()
        if not self.is_ending.is_set():
            self._thread.join(_LEAVE_S)
        for timer in self._timers:
            timer.cancel()

    def _restore_handlers(self) -> None:
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former_handlers.items():
            # None: a handler set by another language.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self._writer)
        self._writer = -1

    def _interrupt(self, *_: Any) -> None:
        """Raise KeyboardInterrupt once: a second one must not interrupt what the main thread does after the first."""
        self._num_interrupts += 1
        if self._num_interrupts == 1 and self._drain is None:
            raise KeyboardInterrupt

    def _run(self, reader: int) -> None:
        """Read the numbers of signals as they come, until the other end is closed."""
        is_first = True
        with open(reader, "rb", buffering=0) as numbers:
            while read := numbers.read(1):
                if read[0] in (*_ENDING, signal.SIGINT):
                    self._act(read[0], is_first=is_first)
                    is_first = False

    def _act(self, number: int, *, is_first: bool) -> None:
        if self._drain is None and number in _ENDING:
            self._end_soon(number)
        if not is_first:
            # Ctrl-C of a person who does not want to wait. SIGTERM is ignored: a launcher may repeat it.
            if number == signal.SIGINT:
                self._leave(number)
        elif self._drain is not None:
            self._drain()
            self._later(self._drain_s, self._end_soon, number)
        else:
            # The timer first: saving may never end.
            self._later(_INTERRUPTED_S, self._leave, number)
            self._save()

    def _later(self, wait_s: float, end: Callable[[int], NoReturn], number: int) -> None:
        timer = threading.Timer(wait_s, end, (number,))
        self._timers.append(timer)
        timer.start()

    def _end_soon(self, number: int) -> NoReturn:
        self.is_ending.set()
        self._signalled(number)
        # At once: the sender of the signal may not wait.
        within(_LEAVE_S, self._save)
        time.sleep(self._patience_s)
        # In small steps: the report may come from a thread that waits for the interpreter.
        for _ in range(int(_REPORTED_S / _TICK_S)):
            if not self._is_reporting():
                break
            time.sleep(_TICK_S)
        # Bounded: a terminal may be stopped.
        within(_REPORTED_S, partial(self._report, number))
        os._exit(128 + number)

    def _leave(self, number: int) -> NoReturn:
        """Save and exit, whatever the main thread does."""
        within(_LEAVE_S, self._save)
        os._exit(128 + number)

    def _save(self) -> None:
        try:
            self._keep()
        except Exception as error:  # printed here: the main thread may never get to it, and the process ends
            print(f"error: finished rows could not be kept: {error}", file=sys.stderr, flush=True)


_made: weakref.WeakSet[EndingSignals] = weakref.WeakSet()


def _restore_in_child() -> None:
    """Restore the handlers in a forked process: it has no thread, and its signal numbers would go to its parent's."""
    for each in _made:
        if each._writer >= 0:
            each._restore_handlers()


os.register_at_fork(after_in_child=_restore_in_child)
