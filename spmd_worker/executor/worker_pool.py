"""The worker processes of one executor: started, called, monitored and ended together.

A call goes to all workers, in one order for all callers, because workers that get collective calls in different orders
deadlock. If a worker ends unexpectedly, every waiter gets an error that says which and how, the others are ended, and
the pool stays failed.
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
"""Time for a worker that was asked to stop to leave its groups and free memory."""

_TERM_S: Final = 2.0
"""Time for a worker to end after SIGTERM."""

_KILL_S: Final = 5.0


class WorkerPool:
    """Call `start` once, `add_workers` as needed, `close` last. `on_failure` runs once, after a failure has ended all
    workers.
    """

    def __init__(self, send_timeout_s: float, on_failure: Callable[[], None]) -> None:
        self.workers: list[WorkerHandle] = []
        self.failure: Exception | None = None
        self._send_timeout_s, self._on_failure = send_timeout_s, on_failure
        self._pending = PendingResults()
        self._results = ResultHandler(self._pending, self._worker_ended)
        self._numbers = itertools.count()
        self._is_closed = False
        self._owner = os.getpid()
        self._failure_is_over = threading.Event()
        self._state_lock, self._send_lock = threading.Lock(), threading.Lock()

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers, rather than being forked from the one that did."""
        return os.getpid() == self._owner

    def start(self) -> None:
        self._results.start()

    def add_workers(self, num_workers: int, environment: Mapping[str, str], log_level: int) -> None:
        """Start processes for the next ranks. Raises OSError if one cannot be started."""
        ranks = range(len(self.workers), len(self.workers) + num_workers)
        new = [WorkerHandle(rank, environment, self._send_timeout_s, log_level) for rank in ranks]
        self.workers += new
        for worker in new:
            worker.start(self._results.wake)
        for worker in new:
            worker.wait_until_started()
            self._results.add(worker)

    def remove_workers(self, num_workers: int) -> None:
        """Stop the processes of the last ranks and wait for their end. Unanswered calls of other threads to them raise
        WorkerDiedError.
        """
        kept = len(self.workers) - num_workers
        # Another thread's call goes either to all workers or to those that stay.
        with self._send_lock:
            leaving, self.workers = self.workers[kept:], self.workers[:kept]
            self._ask_to_stop(leaving)
        _end(leaving)
        # Later calls may go to new workers of the same ranks.
        next_number = next(self._numbers)
        for worker in leaving:
            # Wait for its last answers.
            worker.read_to_end.wait(_KILL_S)
            self._pending.fail(partial(_left_error, worker), partial(_is_left, worker.rank, next_number))
            worker.close()

    def submit(self, kind: FrameKind, method: str, payload: bytes) -> list[Future[Any]]:
        """Send a call. Returns one future per worker, in rank order; `method` names the call in errors.

        Raises WorkerDiedError if the pool has failed, RuntimeError if it is closed.
        """
        # Before taking the locks, which a thread of the parent may have held when this process was forked.
        self._check_owner()
        with self._send_lock:
            with self._state_lock:
                self.check_usable()
                number = next(self._numbers)
                futures = self._pending.expect(number, method, [worker.rank for worker in self.workers])
            for worker in self.workers:
                self._send(worker, kind, number, payload)
        return futures

    def check_usable(self) -> None:
        """Raise if no calls are possible any more."""
        self._check_owner()
        if self._is_closed:
            raise RuntimeError("the executor was shut down: make a new one")
        if self.failure is not None:
            raise WorkerDiedError(f"{self.failure} (the executor has failed: make a new one)")

    def fail(self, error: Exception, waiter: "Future[Any] | None" = None) -> None:
        """Set `error` on every pending future and on `waiter`, then, once, end all workers and run `on_failure`. Does
        nothing in a forked process.
        """
        if not self.is_owner:
            return
        with self._state_lock:
            is_first = self.failure is None and not self._is_closed
            if is_first:
                self.failure = error
        if waiter is not None:
            waiter.set_exception(error)
        if not is_first:
            return
        self._pending.fail(lambda rank, method: error)
        _end(self.workers)
        try:
            self._on_failure()
        finally:
            self._failure_is_over.set()

    def wait_until_ended(self) -> None:
        """Wait for `fail`, which may still run in another thread, to end the workers."""
        if self.failure is not None and not self._results.is_current_thread:
            self._failure_is_over.wait(_TERM_S + _KILL_S)

    def close(self) -> None:
        """End all workers: by request if all are idle, else by signal. Idempotent; does nothing in a forked process."""
        if not self.is_owner:
            return
        with self._state_lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self.failure is None and not len(self._pending):
            self._ask_to_stop(self.workers)
        self._pending.fail(
            lambda rank, method: RuntimeError(f"the executor was shut down while rank {rank} ran {method}")
        )
        _end(self.workers)
        self._results.stop()
        for worker in self.workers:
            worker.close()

    def _check_owner(self) -> None:
        if not self.is_owner:
            raise RuntimeError(
                f"the workers belong to process {self._owner}, which forked this one: make a new LLM here, or make the "
                f"call there"
            )

    def _send(self, worker: WorkerHandle, kind: FrameKind, number: int, payload: bytes) -> None:
        try:
            worker.send(kind, number, payload)
        except PeerGoneError:
            # The result handler will report how it died.
            return
        except TimeoutError:
            state = worker.state()
            text = f"worker {worker} has not read its tasks for {self._send_timeout_s:g} s"
            self.fail(WorkerDiedError(f"{text} and is {state}" if state else text))

    def _worker_ended(self, worker: WorkerHandle) -> None:
        """Runs in the result handler's thread when a worker's process has ended."""
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


def _left_error(worker: WorkerHandle, rank: int, method: str) -> Exception:
    return WorkerDiedError(f"worker {worker} was ended while it ran {method}: there are fewer ranks now")


def _is_left(leaving_rank: int, next_number: int, number: int, rank: int) -> bool:
    return rank == leaving_rank and number < next_number


def _end(workers: Sequence[WorkerHandle]) -> None:
    """Send SIGTERM, then SIGKILL to processes that do not end in time, such as stopped ones."""
    for number, limit_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        for worker in workers:
            if not worker.exited.is_set():
                worker.signal(number)
        _wait_for(workers, time.monotonic() + limit_s)


def _wait_for(workers: Sequence[WorkerHandle], deadline_s: float) -> None:
    for worker in workers:
        worker.exited.wait(max(deadline_s - time.monotonic(), 0.0))
