"""Which call an engine is in, and in which thread: one thread at a time drives it, and others may leave requests.

A step reads and writes what no lock guards, and the ranks of an engine make the same calls in the same order, which
threads would draw by lot. So a call from another thread is refused while one is running. Requests and aborts are only
queued for the next step: they may come from any thread while an engine steps, and `lock` is held where they are queued
and where a step takes them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_worker.base.liveness.deferred_signals import deferred_signals


class OneCaller:
    """Of one engine. A thread that is in a call may make others."""

    def __init__(self) -> None:
        # A finalizer or a signal's handler may abort a request in the thread that queues one.
        self.lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._call, self._is_alone, self._depth = "", False, 0

    @contextmanager
    def inside(self, call: str, *, is_alone: bool = False) -> Iterator[None]:
        """A block in which this thread is in `call`, while other threads may queue requests, unless it `is_alone`.
        Within another call of the same thread the outer one counts. Signals are deferred in it. Raises RuntimeError
        while another thread is in a call.
        """
        with deferred_signals():
            with self.lock:
                self._check(call)
                if self._depth == 0:
                    self._thread, self._call, self._is_alone = threading.current_thread(), call, is_alone
                self._depth += 1
            try:
                yield
            finally:
                with self.lock:
                    self._depth -= 1
                    if self._depth == 0:
                        self._thread = None

    @contextmanager
    def queueing(self, call: str) -> Iterator[None]:
        """A block in which this thread queues something for the next step, with `lock` held. Raises RuntimeError while
        another thread is in a call that is alone: it answers what it was given, or needs an engine without requests.
        """
        with self.lock:
            if self._is_alone:
                self._check(call)
            yield

    def _check(self, call: str) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            raise RuntimeError(
                f"{call} was called in thread {threading.current_thread().name!r} while thread {self._thread.name!r} "
                f"is in {self._call}: one thread at a time drives an LLM; others may call llm_engine.add_request and "
                f"abort_request while one calls llm_engine.step"
            )
