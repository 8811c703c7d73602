"""Executor that starts one worker process per rank on this node, without a launcher; this process computes nothing.

The workers form their own world; a step is one message to all of them and one answer from each.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from spmd_worker.base.errors import ConfigError, WorkerError
from spmd_worker.base.metrics.log import LOGGER_NAME
from spmd_worker.executor.executor import Executor, check_call
from spmd_worker.executor.rpc_coding import encode_call
from spmd_worker.executor.worker_channel import FrameKind
from spmd_worker.executor.worker_environment import open_store, process_environment, rank_environment
from spmd_worker.executor.worker_pool import WorkerPool
from spmd_worker.executor.worker_process import output_rank
from spmd_worker.media.sent_audio import PreparedMedia, sent
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.network_interface import LOOPBACK
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.lockstep.wire.codec import Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory import host
from spmd_worker.worker.worker_wrapper import WorkerWrapper

logger = logging.getLogger(__name__)

_STEP_SHARE: Final = 0.9
"""Part of `executor.timeout_s` that a step may take: this executor can name the rank that does not answer, so it gives
up before the workers' groups and this process's watchdog.
"""

_SETTLE_S: Final = 1.0
"""Time for the other workers to answer, or to fail too, after one has failed."""


class MultiprocExecutor(Executor):
    """Tensor x pipeline workers. Calls may come from any thread; all workers get them in the same order."""

    has_local_workers = False

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        super().__init__(resolved, environment)
        self._pool = WorkerPool(resolved.config.executor.timeout_s, self._fail)
        self._store: TCPStore | None = None
        self._encoder = Encoder()
        self._step_lock = threading.Lock()
        self._sampled: dict[int, SampledIds] = {}
        self._may_have_update = False

    @property
    def driver_worker(self) -> WorkerWrapper:
        raise AttributeError(
            "the workers of executor.backend=multiproc live in other processes: no tensor can be passed to them; load "
            "weights from files, collective_rpc('reload_weights', args=(folder,)), or start the ranks with torchrun"
        )

    @property
    def num_workers(self) -> int:
        return self.layout.world_size

    @property
    def is_failed(self) -> bool:
        # Set before any waiter gets the error.
        return self._pool.failure is not None

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._pool.workers]

    def start(self) -> None:
        """Raises ConfigError for an unsupported layout or a launched process, RankFailedError naming a failed rank."""
        self.check_layout(self.layout)
        atexit.register(self.shutdown)
        self._pool.start()
        try:
            self._set_up()
        except BaseException:
            self.shutdown()
            raise

    def initialize_from_config(self, num_device_blocks: int, num_host_blocks: int) -> None:
        entries = [(num_device_blocks, num_host_blocks)] * self.num_workers
        self._call(FrameKind.SETUP, "initialize_from_config", (entries,))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        """Run a method on all workers. Returns results, or `concurrent.futures.Future`s, in rank order.

        Raises TypeError, before anything is sent, for values that cannot cross processes, functions above all;
        WorkerError with rank, type and message if a worker raised, without waiting for workers that are blocked by it;
        WorkerDiedError; TimeoutError naming the ranks that have not answered within `timeout` seconds. A late answer is
        dropped. In a coroutine, pass a future to `asyncio.wrap_future`.
        """
        check_call(method, timeout)
        if callable(method):
            raise TypeError(
                "collective_rpc got a function, but the workers live in other processes and nothing is unpickled: pass "
                "the name of a worker's method; add your own methods with executor.worker_extension_cls"
            )
        if method == "reload_weights" and self._num_in_flight():
            raise RuntimeError(f"{self._num_in_flight()} requests are being answered: weights are loaded between calls")
        try:
            futures = self._pool.submit(FrameKind.CALL, method, encode_call(method, args, kwargs or {}))
            return futures if non_block else self._wait_for(futures, method, timeout)
        finally:
            # The call may have loaded weights: later calls ask the workers.
            self._may_have_update = True

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepResult | Future[StepResult]:
        """One step in one round trip. Fails permanently if a worker raises, ends, or takes nearly `executor.timeout_s`
        (`wait_for_step` applies that limit to a future).
        """
        if not non_block:
            return self._run_step(plan)
        return _StepFuture(self._submit_step(plan), self._take_results, self._pool.fail)

    def wait_for_step(self, step: Future[StepResult]) -> StepResult:
        assert isinstance(step, _StepFuture), type(step)
        with self._failing_for_good():
            self._wait_for(step.answers, "step", self._step_timeout_s)
            return step.result()

    def hold_rows(self, request_id: int, content: bytes, data: bytes) -> None:
        """Does not wait: the workers take rows and steps in the order of the calls."""
        self._pool.submit(FrameKind.CALL, "hold_rows", encode_call("hold_rows", (request_id, content, data), {}))

    def hold_media(self, request_id: int, index: int, media: PreparedMedia) -> None:
        """Does not wait, as `hold_rows`."""
        args = (request_id, index, sent(media))
        self._pool.submit(FrameKind.CALL, "hold_media", encode_call("hold_media", args, {}))

    def get_weight_updates(self) -> list[WeightUpdateReport | None]:
        """Asks the workers only after calls that may have loaded weights."""
        if not self._may_have_update:
            return []
        # Reset first: another thread's call may come while the workers answer.
        self._may_have_update = False
        updates: list[WeightUpdateReport | None] = []
        try:
            updates = self._call(FrameKind.CALL, "get_weight_update")
        finally:
            if not updates or any(updates):
                self._may_have_update = True
        return updates

    def end_weight_update(self) -> None:
        self._may_have_update = False
        self._call(FrameKind.CALL, "end_weight_update")

    def peak_memory_bytes(self) -> int:
        return super().peak_memory_bytes() + host.peak_resident_bytes()

    def check_health(self) -> None:
        self._pool.check_usable()
        super().check_health()

    def check_layout(self, layout: RankLayout) -> None:
        """Any number of ranks of one replica, in a process without a launcher; raises ConfigError otherwise."""
        if self.environment.is_launched:
            raise ConfigError(
                f"executor.backend=multiproc starts its own workers, and this process is rank {self.environment.rank} "
                f"of {self.environment.world_size} that a launcher started: start one process without torchrun, or set "
                f"executor.backend=external_launcher"
            )
        if layout.data_parallel_size != 1:
            raise ConfigError(
                f"parallel.data_parallel_size={layout.data_parallel_size} cannot run with executor.backend=multiproc, "
                f"which runs one replica: start the ranks with torchrun and executor.backend=external_launcher"
            )

    def shutdown(self) -> None:
        """End the workers and all threads and sockets; waiting calls get an error. Idempotent. Does nothing in a forked
        process, which calls this at its exit too.
        """
        if not self._pool.is_owner:
            return
        self._pool.close()
        self._store = None
        atexit.unregister(self.shutdown)

    def _set_up(self) -> None:
        """Match the number of processes to the layout, then make a new worker in each and join the world."""
        surplus = len(self._pool.workers) - self.num_workers
        if surplus > 0:
            self._pool.remove_workers(surplus)
        elif surplus < 0:
            level = logging.getLogger(LOGGER_NAME).getEffectiveLevel()
            self._pool.add_workers(-surplus, process_environment(self.num_workers), level)
        # A process's rank is its index in the pool, not its rank when it started.
        self._call(FrameKind.SETUP, "adjust_rank", ({each.rank: i for i, each in enumerate(self._pool.workers)},))
        logger.debug("worker processes: %s", self.worker_pids)
        # Each world has its own store, without keys of an earlier one.
        self._store = open_store(self.config.executor.timeout_s)
        size, port = self.num_workers, self._store.port
        variables = [rank_environment(rank, size, port) for rank in range(size)]
        self._call(FrameKind.SETUP, "update_environment_variables", (variables,))
        kwargs = [self._worker_kwargs(RankEnvironment(rank, size, rank, size, True, LOOPBACK)) for rank in range(size)]
        self._call(FrameKind.SETUP, "init_worker", (kwargs,))
        self._encoder = Encoder(self.max_concurrent_batches)
        self._sampled.clear()
        self.init_kv_output_aggregator()
        self.collective_rpc("init_device")

    @property
    def _step_timeout_s(self) -> float:
        return _STEP_SHARE * self.config.executor.timeout_s

    def _call(self, kind: FrameKind, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return self._wait_for(self._pool.submit(kind, method, encode_call(method, args, {})), method, None)

    def _wait_for(self, futures: list[Future[Any]], method: str, timeout: float | None) -> list[Any]:
        done, late = wait(futures, timeout, FIRST_EXCEPTION)
        if any(future.exception() is not None for future in done):
            wait(late, _SETTLE_S)
            raise _primary_error([error for future in futures if future.done() and (error := future.exception())])
        if late:
            raise TimeoutError(f"{self._unanswered(futures)} not answered {method} within {timeout:g} s")
        return [future.result() for future in futures]

    def _unanswered(self, futures: list[Future[Any]]) -> str:
        """The ranks that have not answered, with their processes' states."""
        workers = [worker for worker, future in zip(self._pool.workers, futures) if not future.done()]
        ranks = [f"rank {each.rank} (pid {', '.join(filter(None, (str(each.pid), each.state())))})" for each in workers]
        return f"{', '.join(ranks)} {'has' if len(ranks) == 1 else 'have'}"

    def _run_step(self, plan: StepPlan) -> StepResult:
        with self._failing_for_good():
            return self._take_results(self._wait_for(self._submit_step(plan), "step", self._step_timeout_s))

    def _call_or_fail(self, method: str, *args: Any) -> list[Any]:
        with self._failing_for_good():
            return self.collective_rpc(method, self._step_timeout_s, args)

    def _fail_with(self, error: BaseException) -> None:
        self._pool.fail(error if isinstance(error, Exception) else RuntimeError(f"a step failed with {error!r}"))
        self._pool.wait_until_ended()

    def _submit_step(self, plan: StepPlan) -> list[Future[StepResult]]:
        """Encode the step once for all workers, as a delta to the plans before, and send it."""
        with self._step_lock:
            sampled = self._sampled.pop(plan.step - self.max_concurrent_batches, SampledIds())
            message = StepMessage(plan.step, (), plan, sampled.token_ids, b"", sampled.num_ids)
            payload = self._encoder.encode(message)
            return self._pool.submit(FrameKind.STEP, "step", payload)

    def _take_results(self, results: list[StepResult]) -> StepResult:
        result = self._aggregate(results, output_rank(self.layout))
        self._sampled[result.step] = SampledIds(result.token_ids, result.num_token_ids)
        return result


class _StepFuture(Future[StepResult]):
    """Future of a step's answers: resolved by the last answer, failed by the first error or by a disagreement."""

    def __init__(
        self,
        answers: list[Future[StepResult]],
        take: Callable[[list[StepResult]], StepResult],
        fail: Callable[[Exception, Future[StepResult]], None],
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.answers, self._take, self._fail = answers, take, fail
        self._num_missing, self._has_failed = len(answers), False
        self._lock = threading.Lock()
        for answer in answers:
            answer.add_done_callback(self._count)

    def _count(self, answer: Future[StepResult]) -> None:
        error = answer.exception()
        with self._lock:
            self._num_missing -= 1
            is_last = self._num_missing == 0
            is_first_error = error is not None and not self._has_failed
            self._has_failed |= is_first_error
        if is_first_error:
            assert isinstance(error, Exception), error
            self._fail(error, self)
        elif is_last and not self._has_failed:
            try:
                result = self._take([each.result() for each in self.answers])
            except Exception as disagreement:  # in a callback, which would swallow it
                self._fail(disagreement, self)
            else:
                self.set_result(result)


def _primary_error(errors: Sequence[BaseException]) -> BaseException:
    """The failure that arrived first, as reported by the lowest rank with the same cause."""
    raised = [error for error in errors if isinstance(error, WorkerError)]
    if not raised:
        return errors[0]
    first = min(raised, key=lambda error: error.order)
    return next(error for error in raised if error.cause == first.cause)
