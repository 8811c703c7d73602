"""The result handler: one thread that reads all workers' answers and resolves the pending futures.

A worker's end is reported only after all its answers are read, so its own error comes before that of its death.
"""

import itertools
import logging
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final

from spmd_worker.base.errors import WorkerError
from spmd_worker.executor.rpc_coding import decode_value
from spmd_worker.executor.worker_channel import FrameKind
from spmd_worker.executor.worker_handle import WorkerHandle
from spmd_worker.ranks.transport.frames import Frame, FrameError, FrameParser

logger = logging.getLogger(__name__)

_EXIT_S: Final = 5.0
"""Time for a worker to end after it has closed its queue."""

_JOIN_S: Final = 10.0


class PendingResults:
    """Futures by call and rank. Every method may be called from any thread; each future is resolved once."""

    def __init__(self) -> None:
        self._futures: dict[tuple[int, int], tuple[str, Future[Any]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._futures)

    def expect(self, number: int, method: str, ranks: Sequence[int]) -> list[Future[Any]]:
        """A future for each rank's answer to call `number`. They cannot be cancelled, because a worker cannot stop."""
        futures = []
        for rank in ranks:
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()
            with self._lock:
                self._futures[number, rank] = (method, future)
            futures.append(future)
        return futures

    def take(self, number: int, rank: int) -> tuple[str, Future[Any]] | None:
        """Method and future of an answer; None if it is no longer pending."""
        with self._lock:
            return self._futures.pop((number, rank), None)

    def fail(
        self, error_of: Callable[[int, str], Exception], applies: Callable[[int, int], bool] = lambda *key: True
    ) -> None:
        """Set an error, made from rank and method, on the futures whose call number and rank `applies` accepts."""
        with self._lock:
            failed = {key: self._futures.pop(key) for key in [*self._futures] if applies(*key)}
        for (_, rank), (method, future) in failed.items():
            future.set_exception(error_of(rank, method))


class ResultHandler:
    """Reads until `stop`. `on_end` is called in its thread for each worker whose process has ended."""

    def __init__(self, pending: PendingResults, on_end: Callable[[WorkerHandle], None]) -> None:
        self._pending, self._on_end = pending, on_end
        self._selector = selectors.DefaultSelector()
        self._parsers: dict[WorkerHandle, FrameParser] = {}
        self._new: SimpleQueue[WorkerHandle] = SimpleQueue()
        self._failure_order = itertools.count()
        self._is_stopping = False
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="spmd-results", daemon=True)

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def add(self, worker: WorkerHandle) -> None:
        self._new.put(worker)
        self.wake()

    def wake(self) -> None:
        """Have the thread check for added and ended workers."""
        try:
            self._waker.send(b"!")
        except OSError:
            # It has stopped.
            return

    def stop(self) -> None:
        """End the thread; if called in it, after its current work."""
        self._is_stopping = True
        self.wake()
        if self._thread.is_alive() and not self.is_current_thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._is_stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                elif key.data in self._parsers:
                    self._read(key.data)
            while not self._new.empty():
                worker = self._new.get()
                self._parsers[worker] = FrameParser(FrameKind)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
            for worker in [each for each in self._parsers if each.exited.is_set()]:
                # First its last answers.
                while worker in self._parsers and self._read(worker):
                    continue
                if worker in self._parsers:
                    self._forget(worker)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _read(self, worker: WorkerHandle) -> bool:
        """Process the available answers; False if there are none."""
        piece = worker.receive()
        if piece:
            try:
                for frame in self._parsers[worker].feed(piece):
                    self._take(worker.rank, frame)
                return True
            except FrameError:
                logger.exception("%s sent an invalid answer: it is ended", worker)
                worker.signal(signal.SIGKILL)
        if piece is not None:
            self._forget(worker)
        return False

    def _forget(self, worker: WorkerHandle) -> None:
        """Stop reading a worker that closed its queue, and wait for its end."""
        self._selector.unregister(worker.connection)
        del self._parsers[worker]
        if not worker.exited.wait(_EXIT_S):
            worker.signal(signal.SIGKILL)
            worker.exited.wait(_EXIT_S)
        self._on_end(worker)
        worker.read_to_end.set()

    def _take(self, rank: int, frame: Frame) -> None:
        pending = self._pending.take(frame.number, rank)
        if pending is None:
            return
        method, future = pending
        try:
            value = decode_value(frame.payload)
        except (ValueError, TypeError) as error:
            future.set_exception(WorkerError(rank, method, type(error).__name__, str(error)))
            return
        if frame.kind is FrameKind.RESULT:
            future.set_result(value)
            return
        type_name, message, trace = value
        future.set_exception(WorkerError(rank, method, type_name, message, trace, next(self._failure_order)))
