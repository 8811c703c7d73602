"""The worker processes of one executor: started, called, watched, and ended together.

A call goes to all workers, in one order for all callers, because workers that take collective calls in different orders
wait for each other for ever. When one worker ends that was not asked to, every waiter is told which and how, the others
are ended, and the pool stays failed.
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from spmd_worker.base.errors import WorkerDiedError
from spmd_worker.executor.result_handler import PendingResults, ResultHandler
from spmd_worker.executor.worker_channel import FrameKind
from spmd_worker.executor.worker_handle import WorkerHandle
from spmd_worker.ranks.transport.frames import PeerGoneError

logger = logging.getLogger(__name__)

_STOP_S: Final = 10.0
"""How long a worker that was asked to stop may take to leave its groups and give back memory."""

_TERM_S: Final = 2.0
"""How long a worker may live after SIGTERM."""

_KILL_S: Final = 5.0


class WorkerPool:
    """Call `start` once, `add_workers` as often as needed, `close` last. `on_failure` runs once, when all workers have
    been ended after a failure.
    """

    def __init__(self, send_timeout_s: float, on_failure: Callable[[], None]) -> None:
        self.workers: list[WorkerHandle] = []
        self.failure: Exception | None = None
        self._send_timeout_s, self._on_failure = send_timeout_s, on_failure
        self._pending = PendingResults()
        self._results = ResultHandler(self._pending, self._take_end)
        self._numbers = itertools.count()
        self._is_closed = False
        self._owner = os.getpid()
        self._failure_is_over = threading.Event()
        self._state_lock, self._send_lock = threading.Lock(), threading.Lock()

    @property
    def is_own(self) -> bool:
        """Whether this is the process that started the workers, and none that was forked from it."""
        return os.getpid() == self._owner

    def start(self) -> None:
        """Begin to listen."""
        self._results.start()

    def add_workers(self, num_workers: int, environment: Mapping[str, str], log_level: int) -> None:
        """Start processes for the next ranks. Raises OSError where one cannot be started."""
        first = len(self.workers)
        new = [
            WorkerHandle(rank, environment, self._send_timeout_s, log_level)
            for rank in range(first, first + num_workers)
        ]
        self.workers += new
        for worker in new:
            worker.start(self._results.wake)
        for worker in new:
            worker.wait_until_started()
            self._results.add(worker)

    def remove_workers(self, num_workers: int) -> None:
        """Stop the processes of the last ranks and wait for their end. Calls of other threads that they have not
        answered by then are WorkerDiedError there.
        """
        kept = len(self.workers) - num_workers
        # A call that another thread sends goes to all of them, before, or to those that stay.
        with self._send_lock:
            leaving, self.workers = self.workers[kept:], self.workers[:kept]
            self._ask_to_stop(leaving)
        _end(leaving)
        # Later calls may go to other workers of the same ranks.
        next_number = next(self._numbers)
        for worker in leaving:
            # Its last answers first.
            worker.read_to_end.wait(_KILL_S)
            self._pending.fail_before(next_number, worker.rank, partial(_left_error, worker))
            worker.close()

    def submit(self, kind: FrameKind, method: str, payload: bytes) -> list[Future[Any]]:
        """One future a worker, in rank order. `method` names the call in errors.

        Raises the failure of a pool that has failed, RuntimeError for one that is closed.
        """
        # Before the locks, which a thread of the parent's may have held as this process was forked.
        self._check_own()
        with self._send_lock:
            with self._state_lock:
                self.check_usable()
                number = next(self._numbers)
                futures = self._pending.expect(number, method, [worker.rank for worker in self.workers])
            for worker in self.workers:
                self._send(worker, kind, number, payload)
        return futures

    def check_usable(self) -> None:
        """Raise where nothing can be called any more, saying why."""
        self._check_own()
        if self._is_closed:
            raise RuntimeError("the executor was shut down: make a new one")
        if self.failure is not None:
            raise WorkerDiedError(f"{self.failure} (the executor has failed: make a new one)")

    def fail(self, error: Exception, waiter: "Future[Any] | None" = None) -> None:
        """Give every waiter `error`, `waiter` too, then end all workers and run `on_failure`: once. Nothing in a forked
        process.
        """
        if not self.is_own:
            return
        with self._state_lock:
            is_first = self.failure is None and not self._is_closed
            if is_first:
                self.failure = error
        if waiter is not None:
            waiter.set_exception(error)
        if not is_first:
            return
        self._pending.fail_all(lambda rank, method: error)
        _end(self.workers)
        try:
            self._on_failure()
        finally:
            self._failure_is_over.set()

    def wait_until_ended(self) -> None:
        """After `fail`, which may still run in another thread: until the workers have been ended."""
        if self.failure is not None and not self._results.is_current_thread:
            self._failure_is_over.wait(_TERM_S + _KILL_S)

    def close(self) -> None:
        """End all workers: at a word where they are idle, at once where one is at work. Idempotent. Nothing in a forked
        process.
        """
        if not self.is_own:
            return
        with self._state_lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self.failure is None and not len(self._pending):
            self._ask_to_stop(self.workers)
        self._pending.fail_all(_shut_down_error)
        _end(self.workers)
        self._results.stop()
        for worker in self.workers:
            worker.close()

    def _check_own(self) -> None:
        if not self.is_own:
            raise RuntimeError(
                f"the workers belong to process {self._owner}, which forked this one: make an LLM of its own here, or "
                f"make the call there"
            )

    def _send(self, worker: WorkerHandle, kind: FrameKind, number: int, payload: bytes) -> None:
        try:
            worker.send(kind, number, payload)
        except PeerGoneError:
            # The result handler finds it dead, and says how it died.
            return
        except TimeoutError:
            text = f"worker {worker} has not read its tasks for {self._send_timeout_s:g} s"
            self.fail(WorkerDiedError(_with_state(text, worker)))

    def _take_end(self, worker: WorkerHandle) -> None:
        """In the result handler's thread: a worker's process has ended."""
        if worker.is_leaving or self._is_closed or self.failure is not None:
            return
        error = WorkerDiedError(f"worker {worker} {worker.ending()}")
        logger.error("%s: the other workers are ended", error)
        self.fail(error)

    def _ask_to_stop(self, workers: Sequence[WorkerHandle]) -> None:
        deadline_s = time.monotonic() + _STOP_S
        for worker in workers:
            worker.is_leaving = True
            self._send(worker, FrameKind.STOP, next(self._numbers), b"")
        _wait_for(workers, deadline_s)


def _end(workers: Sequence[WorkerHandle]) -> None:
    """SIGTERM, and SIGKILL to whom that does not end in time (a stopped process, for one)."""
    for number, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        for worker in workers:
            if not worker.exited.is_set():
                worker.signal(number)
        _wait_for(workers, time.monotonic() + patience_s)


def _wait_for(workers: Sequence[WorkerHandle], deadline_s: float) -> None:
    for worker in workers:
        worker.exited.wait(max(deadline_s - time.monotonic(), 0.0))


def _with_state(text: str, worker: WorkerHandle) -> str:
    state = worker.state()
    return f"{text} and is {state}" if state else text


def _left_error(worker: WorkerHandle, rank: int, method: str) -> Exception:
    return WorkerDiedError(f"worker {worker} was ended while at work on {method}: there are fewer ranks now")


def _shut_down_error(rank: int, method: str) -> Exception:
    return RuntimeError(f"the executor was shut down while rank {rank} was at work on {method}")
