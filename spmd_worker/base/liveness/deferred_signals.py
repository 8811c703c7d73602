"""Signal handlers deferred until an exception does no harm: between two steps of a call, or at its end.

Python runs a handler between any two bytecodes of the main thread, and an exception from it (KeyboardInterrupt at
Ctrl-C, TimeoutError at an alarm) leaves half a step behind. In a `deferred_signals` block a signal is noted, and
`deliver_signals` calls the handlers that the host has installed. Signals without one are untouched, and so are all
signals where another thread than the main one is in the block.
"""

# signal's functions without its enums, which take ten times as long: they are called in every step.
import _signal  # type: ignore[import-not-found]  # it has no stub
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final

MAX_DEFERRED_S: Final = 5.0
"""A repeated signal is handled at once after this time: something hangs."""

_NUMBERS: Final = tuple(
    int(number)
    # Ctrl-C first, so restored last: from then on it interrupts nothing here.
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
    )
)
"""Signals that a host may handle; all others are not deferred."""


class _Deferral:
    """The deferral of this process: signals and the main thread are process-wide. `depth` counts the open blocks."""

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: dict[int, Any] = {}
        self._noted: list[tuple[int, FrameType | None, float]] = []
        self.errors: list[BaseException] = []
        """Exceptions of handlers that the caller could not raise (`deliver_later`)."""

    def install(self) -> None:
        """Note signals from here on."""
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # from a handler that is still the host's
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the host's handlers, except those replaced within the block."""
        try:
            while self.handlers:
                number = next(reversed(self.handlers))
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, self.handlers[number])
                self.handlers.pop(number, None)
        except BaseException:  # from a handler that is the host's again
            self.restore()
            raise

    def forget(self) -> None:
        """Restore the host's handlers in a forked process: its parent's calls are not its own."""
        self._noted.clear()
        self.errors.clear()
        self.depth = 0
        self.restore()

    def deliver(self) -> None:
        """Call the host's handlers for the noted signals, once for each time, up to the first that raises."""
        if self.errors:
            error, self.errors = self.errors[0], []
            raise error
        while self._noted:
            number, frame, _ = self._noted.pop(0)
            handler = self.handlers.get(number) or _signal.getsignal(number)
            try:
                if callable(handler):
                    handler(number, frame)
            except BaseException:
                # Handled: pressed twice, Ctrl-C ends one call.
                self._noted = [each for each in self._noted if each[0] != number]
                raise

    def leave(self) -> None:
        """End the outermost block. Raises what a handler raises."""
        try:
            self.deliver()
        finally:
            self.depth = 0
            self.restore()
        # Signals noted between the two.
        self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        since_s = next((each_s for each, _, each_s in self._noted if each == number), now_s)
        self._noted.append((number, frame, now_s))
        if now_s - since_s > MAX_DEFERRED_S:
            self.deliver()


_deferral = _Deferral()
os.register_at_fork(after_in_child=_deferral.forget)


class deferred_signals:  # used as a function
    """`with deferred_signals():` a block in which handlers run in `deliver_signals` alone, and at its end. In nested
    blocks the outer one counts.
    """

    def __init__(self) -> None:
        self._is_main = False

    def __enter__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return
        if _deferral.depth == 0:
            _deferral.install()
        _deferral.depth += 1

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if not self._is_main:
            return
        if _deferral.depth > 1:
            _deferral.depth -= 1
        else:
            _deferral.leave()


def deliver_signals() -> None:
    """Call the host's handlers of noted signals, in a block, between two steps. Raises what they raise."""
    if _deferral.depth and threading.current_thread() is threading.main_thread():
        _deferral.deliver()


def deliver_later(error: BaseException) -> None:
    """Keep an exception of a handler, which the caller in a block could not raise, for the next delivery."""
    _deferral.errors.append(error)


@contextmanager
def host_signals() -> Iterator[None]:
    """A block of the host's own code within a deferral: its handlers run as signals arrive. Raises what they raise."""
    if not _deferral.depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferral.deliver()
    depth, _deferral.depth = _deferral.depth, 0
    try:
        _deferral.restore()
        # Signals noted between the two.
        _deferral.deliver()
        yield
    finally:
        try:
            _deferral.install()
        except BaseException:  # from the last signal that was the host's: the outer block stays installed
            _deferral.install()
            raise
        finally:
            _deferral.depth = depth
