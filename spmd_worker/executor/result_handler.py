"""The result handler: one thread that reads what all workers answer and resolves the futures that wait for it.

A worker's end is reported only after everything it had sent was read, so its own abort message come before the news of
its death.
"""

import itertools
import logging
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from spmd_worker.base.errors import WorkerError
from spmd_worker.executor.rpc_coding import decode_value
from spmd_worker.executor.worker_channel import FrameKind
from spmd_worker.executor.worker_handle import WorkerHandle
from spmd_worker.ranks.transport.frames import Frame, FrameError, FrameParser

logger = logging.getLogger(__name__)

_EXIT_S: Final = 5.0
"""How long a worker may live after it has closed its queue."""

_JOIN_S: Final = 10.0


class _Waiting(NamedTuple):
    method: str
    future: Future[Any]


class PendingResults:
    """Futures by call and rank. Every method may be called from any thread; each future is resolved once."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, number: int, method: str, ranks: Sequence[int]) -> list[Future[Any]]:
        """A future for each rank's answer to call `number`. They cannot be cancelled: a worker does not stop."""
        futures = []
        for rank in ranks:
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()
            with self._lock:
                self._waiting[number, rank] = _Waiting(method, future)
            futures.append(future)
        return futures

    def take(self, number: int, rank: int) -> _Waiting | None:
        """Who waits for this answer, None when nobody does any more."""
        with self._lock:
            return self._waiting.pop((number, rank), None)

    def fail_before(self, number: int, rank: int, error_of: Callable[[int, str], Exception]) -> None:
        """Give the futures of one rank's answers to calls before `number` an error, made of rank and method."""
        with self._lock:
            keys = [key for key in self._waiting if key[0] < number and key[1] == rank]
            waiting = [self._waiting.pop(key) for key in keys]
        for each in waiting:
            each.future.set_exception(error_of(rank, each.method))

    def fail_all(self, error_of: Callable[[int, str], Exception]) -> None:
        """Give every future an error, made of rank and method."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for (_, rank), each in waiting.items():
            each.future.set_exception(error_of(rank, each.method))


class ResultHandler:
    """Reads until `stop`. `on_end` is called, in this thread, for each worker whose process has ended."""

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
        """Whether the caller runs in this handler's thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Begin to read."""
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def add(self, worker: WorkerHandle) -> None:
        """Read this worker's answers too."""
        self._new.put(worker)
        self.wake()

    def wake(self) -> None:
        """Have the thread look for workers that have come or gone."""
        try:
            self._waker.send(b"!")
        except OSError:
            # It has stopped.
            return

    def stop(self) -> None:
        """End the thread; from the thread itself, once it is done with what it does."""
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
            self._take_in_new()
            self._look_for_ended()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _take_in_new(self) -> None:
        while True:
            try:
                worker = self._new.get_nowait()
            except Empty:
                return
            self._parsers[worker] = FrameParser(FrameKind)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _look_for_ended(self) -> None:
        for worker in [each for each in self._parsers if each.exited.is_set()]:
            # What it said before it ended.
            while worker in self._parsers and self._read(worker):
                continue
            if worker in self._parsers:
                self._forget(worker)

    def _read(self, worker: WorkerHandle) -> bool:
        """Take in what has come; False when nothing has, or nothing more will."""
        piece = worker.receive()
        if piece:
            try:
                for frame in self._parsers[worker].feed(piece):
                    self._take(worker.rank, frame)
                return True
            except FrameError:
                logger.exception("%s sent what is no answer: it is ended", worker)
                worker.signal(signal.SIGKILL)
        if piece is not None:
            self._forget(worker)
        return False

    def _forget(self, worker: WorkerHandle) -> None:
        """Nothing more comes from this worker."""
        self._selector.unregister(worker.connection)
        del self._parsers[worker]
        if not worker.exited.wait(_EXIT_S):
            worker.signal(signal.SIGKILL)
            worker.exited.wait(_EXIT_S)
        self._on_end(worker)
        worker.read_to_end.set()

    def _take(self, rank: int, frame: Frame) -> None:
        waiting = self._pending.take(frame.number, rank)
        if waiting is None:
            return
        try:
            value = decode_value(frame.payload)
        except (ValueError, TypeError) as error:
            waiting.future.set_exception(WorkerError(rank, waiting.method, type(error).__name__, str(error)))
            return
        if frame.kind is FrameKind.RESULT:
            waiting.future.set_result(value)
            return
        type_name, message, trace = value
        order = next(self._failure_order)
        waiting.future.set_exception(WorkerError(rank, waiting.method, type_name, message, trace, order))
