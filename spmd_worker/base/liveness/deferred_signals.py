"""Signal handlers deferred to where an exception does no harm: between two steps of a call, or at its end.

Python runs a handler between any two bytecodes of the main thread, and what it raises (KeyboardInterrupt at Ctrl-C,
TimeoutError at an alarm) leaves half a step behind. In a `deferred_signals` block a signal is noted, and
`deliver_signals` calls the handlers that the host has installed. Signals that have none are untouched, and so are all
signals where another thread than the main one is in the block.
"""

# signal's functions without its enums, which take ten times as long: this is done in every step.
import _signal  # type: ignore[import-not-found]  # it has no stub
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final

MOST_DEFERRED_S: Final = 5.0
"""A signal that comes again when it has been deferred for longer is handled at once: something does not end."""

_NUMBERS: Final = tuple(
    int(number)
    # Ctrl-C first: what is restored last can interrupt nothing more.
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
    )
)
"""Signals that a host may handle; those of other numbers are handled where they come."""


class _Deferral:
    """The deferral of this process, whose signals and main thread there are once. `depth` counts the open blocks."""

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: dict[int, Any] = {}
        self._noted: list[tuple[int, FrameType | None, float]] = []
        self.errors: list[BaseException] = []
        """Raised by handlers where the caller could not raise them (`deliver_later`)."""

    def install(self) -> None:
        """Note signals from here on."""
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # of a handler that is still the host's
            self.restore()
            raise

    def restore(self) -> None:
        """The host's handlers again, but for those that were replaced within the block."""
        try:
            while self.handlers:
                number = next(reversed(self.handlers))
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, self.handlers[number])
                self.handlers.pop(number, None)
        except BaseException:  # of a handler that is the host's again
            self.restore()
            raise

    def forget(self) -> None:
        """A forked process has the host's handlers: the calls of its parent are not its own."""
        self._noted.clear()
        self.errors.clear()
        self.depth = 0
        self.restore()

    def deliver(self) -> None:
        """Call the host's handlers of what was noted, once for each time, up to the first that raises."""
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
                # It has been heard: pressed twice, Ctrl-C ends one call.
                self._noted = [each for each in self._noted if each[0] != number]
                raise

    def leave(self) -> None:
        """The end of the outermost block. Raises what a handler raises."""
        try:
            self.deliver()
        finally:
            self.depth = 0
            self.restore()
        # What came between the two.
        self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        since_s = next((each_s for each, _, each_s in self._noted if each == number), now_s)
        self._noted.append((number, frame, now_s))
        if now_s - since_s > MOST_DEFERRED_S:
            self.deliver()


_deferral = _Deferral()
os.register_at_fork(after_in_child=_deferral.forget)


class deferred_signals:  # used as a function
    """`with deferred_signals():` a block in which no handler runs but in `deliver_signals`; those noted last run at its
    end. Within another block the outer one counts.
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
    """Call the host's handlers of noted signals, in a block, where nothing is half done. Raises what they raise."""
    if _deferral.depth and threading.current_thread() is threading.main_thread():
        _deferral.deliver()


def deliver_later(error: BaseException) -> None:
    """Raise what a handler has raised, and the caller in a block could not raise, with what is delivered next."""
    _deferral.errors.append(error)


@contextmanager
def host_signals() -> Iterator[None]:
    """A block of the host's own code within a deferral: its handlers run where signals come. Raises what they raise."""
    if not _deferral.depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferral.deliver()
    depth, _deferral.depth = _deferral.depth, 0
    try:
        _deferral.restore()
        # What came between the two.
        _deferral.deliver()
        yield
    finally:
        try:
            _deferral.install()
        except BaseException:  # of the last signal that was the host's: the outer block is still one
            _deferral.install()
            raise
        finally:
            _deferral.depth = depth
