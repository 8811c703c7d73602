"""Worker processes on this node, started by this process, which itself computes nothing: no launcher is needed.

The workers make a world of their own among themselves; a step is one message to all of them and one answer from each.
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
from spmd_worker.executor.executor import Executor, check_call_timeout
from spmd_worker.executor.rpc_coding import encode_call
from spmd_worker.executor.worker_channel import FrameKind
from spmd_worker.executor.worker_environment import open_store, process_environment, rank_environment
from spmd_worker.executor.worker_pool import WorkerPool
from spmd_worker.executor.worker_process import output_rank
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
"""How much of `executor.timeout_s` a step may take: this executor can name the rank that does not answer, and so it
speaks before the workers' own groups, and this process's watchdog, give up.
"""

_SETTLE_S: Final = 1.0
"""How long the other workers may take to answer, or to fail too, once one has failed."""


class MultiprocExecutor(Executor):
    """Tensor x pipeline workers. Calls may come from any thread; workers take them in one order."""

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
        """Raises AttributeError: there is none in this process."""
        raise AttributeError(
            "the workers of executor.backend=multiproc live in other processes, which no tensor reaches: load weights "
            "from files there, collective_rpc('reload_weights', args=(folder,)), or start ranks with torchrun"
        )

    @property
    def num_workers(self) -> int:
        return self.layout.world_size

    @property
    def is_failed(self) -> bool:
        """See `Executor.is_failed`; true before any waiter hears of the failure."""
        return self._pool.failure is not None

    @property
    def worker_pids(self) -> list[int]:
        """The workers' processes, in rank order."""
        return [worker.pid for worker in self._pool.workers]

    def start(self) -> None:
        """Raises ConfigError for a layout or a launch that this executor is not for, RankFailedError with the rank."""
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
        """Run a method of the worker on all workers: answers, or `concurrent.futures.Future`s, in rank order.

        Raises TypeError, before anything is sent, for what cannot cross processes, a function above all; WorkerError
        naming rank, type and message where a worker raised, without waiting for workers that wait for that one;
        WorkerDiedError; TimeoutError naming the ranks that have not answered in `timeout` seconds. A late answer is
        dropped. For coroutines, give a future to `asyncio.wrap_future`.
        """
        check_call_timeout(timeout)
        if callable(method):
            raise TypeError(
                "collective_rpc was given a function, but the workers live in other processes and nothing is unpickled "
                "from a wire: give the name of a worker's method; methods of your own come with "
                "executor.worker_extension_cls"
            )
        if method == "reload_weights" and self._num_in_flight():
            raise RuntimeError(f"{self._num_in_flight()} requests are being answered: weights are loaded between calls")
        try:
            if non_block:
                return self._pool.submit(FrameKind.CALL, method, encode_call(method, args, kwargs or {}))
            return self._call(FrameKind.CALL, method, args, kwargs or {}, timeout)
        finally:
            # Once it is sent: the workers are asked behind it.
            self._may_have_update = True

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepResult | Future[StepResult]:
        """One step in one round trip. Fails for good when a worker raises or ends, or takes nearly `executor.timeout_s`
        (a future has no time limit of its own).
        """
        if not non_block:
            return self._run_step(plan)
        return _StepFuture(self._submit_step(plan), self._take_results, self._pool.fail)

    def wait_for_step(self, step: Future[StepResult]) -> StepResult:
        """With the time limit that `execute_model` has where it blocks."""
        assert isinstance(step, _StepFuture), type(step)
        with self._failing_for_good():
            self._wait_for(step.answers, "step", _STEP_SHARE * self.config.executor.timeout_s)
            return step.result()

    def get_weight_updates(self) -> list[WeightUpdateReport | None]:
        """See `Executor.get_weight_updates`. The workers are asked after calls that may have loaded weights."""
        if not self._may_have_update:
            return []
        # Another thread's call may come while the workers answer.
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
        """See `Executor.peak_memory_bytes`: the workers' processes and this one."""
        return super().peak_memory_bytes() + host.peak_resident_bytes()

    def check_health(self) -> None:
        """Asks every worker. Raises where the executor has failed, or a worker cannot compute or does not answer."""
        self._pool.check_usable()
        super().check_health()

    def check_layout(self, layout: RankLayout) -> None:
        """See `Executor.check_layout`: any number of ranks of one replica, in a process that nobody launched."""
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
        """End the workers: no process, thread or socket is left. Idempotent; calls that wait get an error. Nothing in a
        forked process: at its end, too, this is called.
        """
        if not self._pool.is_own:
            return
        self._pool.close()
        self._store = None
        atexit.unregister(self.shutdown)

    def _set_up(self) -> None:
        """As many processes as the layout has ranks, each with a new worker that has joined the world."""
        surplus = len(self._pool.workers) - self.num_workers
        if surplus > 0:
            self._pool.remove_workers(surplus)
        elif surplus < 0:
            level = logging.getLogger(LOGGER_NAME).getEffectiveLevel()
            self._pool.add_workers(-surplus, process_environment(self.num_workers), level)
        # Ranks are places in the pool, whatever a process was called when it started.
        self._call(FrameKind.SETUP, "adjust_rank", ({each.rank: i for i, each in enumerate(self._pool.workers)},))
        logger.debug("worker processes: %s", self.worker_pids)
        # One store a world: what an earlier world left in its own cannot be taken for this one's.
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

    def _call(
        self,
        kind: FrameKind,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        futures = self._pool.submit(kind, method, encode_call(method, args, kwargs or {}))
        return self._wait_for(futures, method, timeout)

    def _wait_for(self, futures: list[Future[Any]], method: str, timeout: float | None) -> list[Any]:
        done, late = wait(futures, timeout, FIRST_EXCEPTION)
        if any(future.exception() is not None for future in done):
            wait(late, _SETTLE_S)
            raise _culprit([error for future in futures if future.done() and (error := future.exception())])
        if late:
            raise TimeoutError(f"{self._silent(futures)} not answered {method} within {timeout:g} s")
        return [future.result() for future in futures]

    def _silent(self, futures: list[Future[Any]]) -> str:
        """Who has not answered, and what the kernel says of them."""
        workers = [worker for worker, future in zip(self._pool.workers, futures) if not future.done()]
        words = []
        for worker in workers:
            state = worker.state()
            words.append(f"rank {worker.rank} (pid {worker.pid}{', ' if state else ''}{state})")
        return f"{', '.join(words)} {'has' if len(words) == 1 else 'have'}"

    def _run_step(self, plan: StepPlan) -> StepResult:
        with self._failing_for_good():
            answers = self._submit_step(plan)
            results = self._wait_for(answers, "step", _STEP_SHARE * self.config.executor.timeout_s)
            return self._take_results(results)

    def _call_or_fail(self, method: str, *args: Any) -> list[Any]:
        with self._failing_for_good():
            return self.collective_rpc(method, _STEP_SHARE * self.config.executor.timeout_s, args)

    def _fail_with(self, error: BaseException) -> None:
        self._pool.fail(error if isinstance(error, Exception) else RuntimeError(f"a step met {error!r}"))
        self._pool.wait_until_ended()

    def _submit_step(self, plan: StepPlan) -> list[Future[StepResult]]:
        """Coded once for all workers, against the plans before."""
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
    """One future for a step's answers: its result when all have come, its error with the first that is one, or where
    the answers do not agree.
    """

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
            is_news = error is not None and not self._has_failed
            self._has_failed |= is_news
        if is_news:
            assert isinstance(error, Exception), error
            self._fail(error, self)
        elif is_last and not self._has_failed:
            try:
                result = self._take([each.result() for each in self.answers])
            except Exception as disagreement:  # the last answer's callback: nobody else would hear of it
                self._fail(disagreement, self)
            else:
                self.set_result(result)


def _culprit(errors: Sequence[BaseException]) -> BaseException:
    """The first failure that arrived, told by the lowest rank that failed for the same reason."""
    raised = [error for error in errors if isinstance(error, WorkerError)]
    if not raised:
        return errors[0]
    first = min(raised, key=lambda error: error.order)
    return next(error for error in raised if error.cause == first.cause)
