"""Interface of an executor, which runs an engine's steps on one or several workers. Names follow vLLM's."""

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Final, Protocol
from weakref import proxy

from kv_cache.cache_spec import CacheSpec
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError, ReplicaDivergedError, WorkerEventError
from spmd_worker.executor.adapters import ExecutorAdapters
from spmd_worker.media.sent_audio import PreparedMedia, sent
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.lockstep.transfers import TransferBook
from spmd_worker.replica.sequence.adapter_kind import LORA, PROMPT
from spmd_worker.replica.sequence.draft_token_ids import DraftTokenIds
from spmd_worker.replica.sequence.routed_experts import joined_stages
from spmd_worker.replica.sequence.sleep_tags import SLEEP, WAKE_UP, checked_level, checked_tags, tags_after
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.adapter_methods import AdapterCalls, AdapterMethods
from spmd_worker.worker.save_options import DEFAULT_SIZE
from spmd_worker.worker.worker_base import WorkerReport
from spmd_worker.worker.worker_wrapper import resolve_class

logger = logging.getLogger(__name__)

MAX_CALL_S: Final = threading.TIMEOUT_MAX
"""Maximum timeout of Python's waits, seconds."""

BACKENDS = {
    "external_launcher": "spmd_worker.executor.external_launcher.ExternalLauncherExecutor",
    "uniproc": "spmd_worker.executor.uniproc.UniProcExecutor",
    "multiproc": "spmd_worker.executor.multiproc.MultiprocExecutor",
}


class EventEngine(Protocol):
    """The engine whose steps carry the worker events of its executors."""

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    def worker_event(self, name: str, payload: Any = None) -> list[Any]: ...

    def reset_mm_cache(self) -> None: ...


class Executor(AdapterMethods, ABC):
    """Call `start`, `load_model`, `determine_num_available_blocks`, `initialize_from_config`, then steps, last
    `shutdown`.
    """

    has_local_workers = True
    """Whether the workers are in this process, so that tensors can be passed to them."""
    uses_ray: ClassVar[bool] = False
    supports_pp: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        self.resolved, self.environment = resolved, environment
        self._has_failed = False
        self._failure_callbacks: list[Callable[[], None]] = []
        self._callback_lock = threading.Lock()
        self._transfers = TransferBook(self.num_workers)
        self._num_in_flight: Callable[[], int] = lambda: 0
        self.sleeping_tags: tuple[str, ...] = ()
        """Tags that sleep on every worker: "weights", "kv_cache"."""
        self._prepared_event: tuple[str, Any] = ("", None)
        limits = resolved.config.model.adapter_limits
        self.adapters = ExecutorAdapters(proxy(self), 0 if limits is None else limits.max_cpu_loras, LORA)
        self.prompt_adapters = ExecutorAdapters(proxy(self), resolved.config.model.max_prompt_adapters, PROMPT)
        self._engine: Callable[[], EventEngine | None] = lambda: None

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def layout(self) -> RankLayout:
        return self.resolved.layout

    @property
    def num_workers(self) -> int:
        """Number of workers that this executor calls; one if each rank has its own executor."""
        return 1

    @property
    def is_failed(self) -> bool:
        """Whether the executor has failed, so that no more steps can run."""
        return self._has_failed

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    @staticmethod
    def get_class(backend: str, environment: RankEnvironment, num_ranks: int = 1) -> type["Executor"]:
        """The class of `executor.backend`, which may be a qualified name. `auto` is external_launcher under a launcher;
        elsewhere uniproc for one rank, multiproc for more. Raises ConfigError for an invalid class.
        """
        if backend == "auto":
            unlaunched = "uniproc" if num_ranks == 1 else "multiproc"
            backend = "external_launcher" if environment.is_launched else unlaunched
        if backend not in BACKENDS and "." not in backend:
            known = ", ".join(["auto", *BACKENDS])
            raise ConfigError(f"executor.backend={backend} is not one of {known}, nor the qualified name of a class")
        try:
            executor_class: type[Executor] = resolve_class(BACKENDS.get(backend, backend), Executor)
        except ValueError as error:
            raise ConfigError(f"executor.backend: {error}") from None
        return executor_class

    @abstractmethod
    def start(self) -> None:
        """Make the workers, choose devices, join groups."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        """Run a method on every worker of this executor. Returns results, or futures of them, in rank order.

        A callable gets the worker as its first argument; it must live in the worker's process. Raises TypeError or
        ValueError, before anything runs, for an invalid `method` or `timeout` (`check_call`).
        """

    def load_model(self) -> None:
        self.collective_rpc("load_model")

    def get_kv_cache_specs(self) -> list[CacheSpec]:
        """Each worker's share of the cache, in rank order."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks) that fit on every worker."""
        counts = self.collective_rpc("determine_num_available_blocks")
        return min(device for device, _ in counts), min(host for _, host in counts)

    def determine_num_state_slots(self) -> tuple[int, int, int]:
        """Slots of recurrent states that fit on every worker: of sequences, of snapshots and of the host."""
        counts = self.collective_rpc("determine_num_state_slots")
        num_seqs, num_snapshots, num_host_slots = (min(each) for each in zip(*counts, strict=True))
        return num_seqs, num_snapshots, num_host_slots

    def determine_available_memory(self) -> list[int]:
        """Bytes of memory that each worker has for its cache, in rank order."""
        return self.collective_rpc("determine_available_memory")

    @abstractmethod
    def initialize_from_config(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate every worker's cache."""

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepResult | Future[StepResult]:
        """Run one step: all workers execute the same plan and sample the same ids."""
        result = self._run_step(plan)
        if not non_block:
            return result
        future: Future[StepResult] = Future()
        future.set_result(result)
        return future

    def wait_for_step(self, step: Future[StepResult]) -> StepResult:
        """Result of a future of `execute_model`, in the order of the calls. Raises the step's error."""
        return step.result()

    def hold_rows(self, request_id: int, content: bytes, data: bytes) -> None:
        """Give the workers the rows of a request that this rank admits (`WorkerBase.hold_rows`)."""
        self.collective_rpc("hold_rows", args=(request_id, content, data))

    def hold_media(self, request_id: int, index: int, media: PreparedMedia) -> None:
        """Give the workers image or recording `index` of a request that this rank admits (`WorkerBase.hold_media`)."""
        self.collective_rpc("hold_media", args=(request_id, index, sent(media)))

    def prepare_event(self, name: str, payload: Any) -> str:
        """Have every worker prepare a worker event. Returns "" or why the lowest rank that rejects it does so."""
        self._prepared_event = (name, payload)
        for index, problem in enumerate(self._call_or_fail("prepare_event", name, payload)):
            if problem:
                return f"rank {self.environment.rank + index}: {problem}"
        return ""

    def end_event(self, is_committed: bool) -> list[Any]:
        """Have every worker commit the prepared event or undo it. Returns the commits' results, in rank order."""
        results = self._call_or_fail("end_event", is_committed)
        if is_committed:
            self.sleeping_tags = tags_after(*self._prepared_event, self.sleeping_tags)
        return results

    @property
    def _adapter_calls(self) -> AdapterCalls:
        return self.adapters

    @property
    def _prompt_adapter_calls(self) -> AdapterCalls:
        return self.prompt_adapters

    def attach_engine(self, engine: EventEngine) -> None:
        """Register the engine that drives this executor: `sleep`, `wake_up` and `profile` go through its steps. The
        executor does not keep it alive.
        """
        self._engine = weakref.ref(engine)

    def sleep(self, level: int = 1) -> None:
        """Release the workers' memory until `wake_up`, as `LLM.sleep` does; every rank calls this. Warns if they sleep
        already: level 2 then drops weights that slept at level 1, level 1 changes nothing. Logs the time.

        Raises ValueError for another level, RuntimeError while requests are unanswered, WorkerEventError if a worker
        cannot; nothing sleeps then that did not before.
        """
        if checked_level(level) and self.is_sleeping:
            logger.warning("sleep(level=%d): %s sleep already", level, " and ".join(self.sleeping_tags))
        started, engine = perf_counter(), self._engine()
        if engine is None:
            self._run_event(SLEEP, level)
        else:
            engine.sleep(level)
        logger.info("all workers fell asleep in %.3f s", perf_counter() - started)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the released memory of `tags` again (None: all), as `LLM.wake_up` does; every rank calls this. Warns
        if none of them sleeps. Logs the time. Raises ValueError for unknown tags, WorkerEventError if a worker has too
        little memory.
        """
        waking = [tag for tag in checked_tags(tags) if tag in self.sleeping_tags]
        if not waking:
            logger.warning("wake_up(%s): nothing of it sleeps", "" if tags is None else list(tags))
            return
        started, engine = perf_counter(), self._engine()
        if engine is None:
            self._run_event(WAKE_UP, waking)
        else:
            engine.wake_up(waking)
        logger.info("%s of all workers woke up in %.3f s", " and ".join(waking), perf_counter() - started)

    def profile(self, is_start: bool = True, folder: str | Path | None = None) -> list[Any]:
        """Start every worker's profiler, which will write to `folder`, or stop it and return the paths of the traces,
        as `LLM.start_profile` and `stop_profile` do; every rank calls this. Raises ValueError for a start without a
        folder, WorkerEventError if a worker cannot.
        """
        if is_start and folder is None:
            raise ValueError("profile needs the folder to write to: profile(folder=...)")
        engine = self._engine()
        run = self._run_event if engine is None else engine.worker_event
        return run("start_profile", str(folder)) if is_start else run("stop_profile", None)

    def execute_dummy_batch(self) -> None:
        """Have every worker compute one token that belongs to no request; every rank calls this. Raises RuntimeError
        while requests are unanswered or the workers sleep.
        """
        if self._num_in_flight():
            raise RuntimeError(f"{self._num_in_flight()} requests are being answered: call this between them")
        if self.is_sleeping:
            raise RuntimeError("the workers sleep: call wake_up first")
        self._call_or_fail("execute_dummy_batch")

    def reset_mm_cache(self) -> None:
        """`LLM.reset_mm_cache`, if an engine drives this executor: every worker drops rows when a plan says so."""
        engine = self._engine()
        if engine is not None:
            engine.reset_mm_cache()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts of the last step in which a model drafted, once; None on ranks of other stages, and where no model
        drafts: replicas make the drafts of n-grams and suffixes.
        """
        found = self._call_or_fail("take_draft_token_ids")
        return next((each for each in found if each is not None), None)

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        """Register the count of requests in flight, during which no weight may change."""
        self._num_in_flight = num_in_flight

    def watch_layers(self, on_layer: Callable[[], None]) -> None:
        """Register what is called behind each layer of a tower; no effect unless the workers are in this process."""

    def get_weight_updates(self) -> list[WeightUpdateReport | None]:
        """Each worker's open weight update, in rank order; may be empty if there is none."""
        return self.collective_rpc("get_weight_update")

    def end_weight_update(self) -> None:
        self.collective_rpc("end_weight_update")

    def save_sharded_state(
        self,
        path: str | Path,
        pattern: str | None = None,
        max_size: int | str | None = None,
        weight_version: int | None = None,
    ) -> None:
        """Save every rank's parameters: `LLM.save_sharded_state`, without its step. Every rank's executor is called."""
        self.collective_rpc("save_sharded_state", args=(str(path), pattern, max_size, weight_version))

    def save_checkpoint(self, path: str | Path, max_size: int | str | None = DEFAULT_SIZE) -> None:
        """Save in the hub's names: `LLM.save_checkpoint`, without its step. Every rank's executor is called."""
        self.collective_rpc("save_checkpoint", args=(str(path), max_size))

    def save_streamed(self, path: str | Path) -> None:
        """Save the model in one file: `LLM.save_streamed`, without its step. Every rank's executor is called."""
        self.collective_rpc("save_streamed", args=(str(path),))

    def check_health(self) -> None:
        """Raise if a worker can no longer compute."""
        if self.is_failed:
            raise RuntimeError("the executor has failed: make a new one")
        self.collective_rpc("check_health", timeout=self.config.executor.timeout_s)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when the executor fails permanently, or now if it has failed already."""
        with self._callback_lock:
            is_late = self._has_failed
            if not is_late:
                self._failure_callbacks.append(callback)
        if is_late:
            callback()

    @property
    def max_concurrent_batches(self) -> int:
        """Number of steps that may be in flight at once."""
        return self.resolved.num_in_flight

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks that every worker supports, such as "generate"."""
        first, *others = self.collective_rpc("get_supported_tasks")
        return tuple(task for task in first if all(task in tasks for tasks in others))

    def peak_memory_bytes(self) -> int:
        """Peak host memory of this executor's processes, including this one."""
        return sum(each.peak_memory_bytes for each in self.reports())

    def reports(self) -> list[WorkerReport]:
        return self.collective_rpc("get_report")

    def init_kv_output_aggregator(self) -> None:
        """Reset the count of transfers: one is finished when every worker of this executor has finished it. Across
        executors of one worker each, rank 0's lockstep counts the same way.
        """
        self._transfers = TransferBook(self.num_workers)

    def reinitialize_distributed(self, resolved: ResolvedRun) -> None:
        """Leave the groups, drop model and cache, and join the world of another layout; the state is then as after
        `start`. Only `restart_engine` calls this. Raises ConfigError, with nothing changed, for a layout that cannot
        run here; any later failure is permanent.
        """
        self.check_layout(resolved.layout)
        with self._failing_for_good():
            self.collective_rpc("shutdown")
            self.resolved = resolved
            self._set_up()

    def check_layout(self, layout: RankLayout) -> None:
        """Raise ConfigError for a layout of more or fewer ranks, because this executor does not start them."""
        if layout.world_size != self.layout.world_size:
            raise ConfigError(
                f"{layout.product()} ranks, but this engine has {self.layout.world_size}, which it did not start: "
                f"choose sizes of {self.layout.world_size} ranks, or use executor.backend=multiproc"
            )

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        self.collective_rpc("shutdown")

    @abstractmethod
    def _set_up(self) -> None:
        """Make the workers of `layout` and join their groups."""

    def _call_or_fail(self, method: str, *args: Any) -> list[Any]:
        """`collective_rpc` whose error fails the executor, as in a step, because workers may then differ."""
        with self._failing_for_good():
            return self.collective_rpc(method, args=args)

    def _run_event(self, name: str, payload: Any) -> list[Any]:
        """Worker event of an executor that no engine drives. Raises WorkerEventError if it was undone."""
        problem = self.prepare_event(name, payload)
        results = self.end_event(is_committed=not problem)
        if problem:
            raise WorkerEventError(f"worker event {name!r} was undone: {problem}")
        return results

    def _run_step(self, plan: StepPlan) -> StepResult:
        with self._failing_for_good():
            result = self.collective_rpc("execute_model", args=(plan,))[0]
            if result is None:
                result = self.collective_rpc("sample_tokens")[0]
        return self._aggregate([result], 0)

    def _aggregate(self, results: Sequence[StepResult], output_rank: int) -> StepResult:
        """The step's result: the output rank's ids, all stages' experts, and the transfers that every worker has
        finished. Raises ReplicaDivergedError if the workers that sample, from the output rank on, used different masks.
        """
        expected = results[output_rank].mask_checksums
        for rank, result in enumerate(results[output_rank:], start=output_rank):
            if result.mask_checksums != expected:
                raise ReplicaDivergedError(
                    f"step {result.step}: rank {rank} diverged from rank {output_rank}: mask_checksums: "
                    f"{list(expected)} on rank {output_rank}, {list(result.mask_checksums)} on rank {rank}; the "
                    f"sampled ids are dropped"
                )
        for rank, result in enumerate(results):
            self._transfers.add(rank, result.finished_transfers)
        step = replace(results[output_rank], finished_transfers=self._transfers.take_complete())
        if not (output_rank and step.routed_experts):
            return step
        stages = results[: output_rank : self.layout.tensor_parallel_size]
        data = [b"".join([tokens.data for tokens in each.routed_experts]) for each in stages]
        return replace(step, routed_experts=joined_stages(step.routed_experts, data))

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail_with(error)
            raise

    def _fail_with(self, error: BaseException) -> None:
        """Fail the executor because of `error`, which the caller raises."""
        self._fail()

    def _fail(self) -> None:
        """Run the callbacks, once."""
        with self._callback_lock:
            self._has_failed = True
            callbacks, self._failure_callbacks = self._failure_callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the caller must get the failure itself
                logger.exception("a failure callback raised")

    def _worker_kwargs(self, environment: RankEnvironment) -> dict[str, Any]:
        """A rank's entry for `WorkerWrapper.init_worker`."""
        return {
            "worker_cls": self.config.executor.worker_cls,
            "worker_extension_cls": self.config.executor.worker_extension_cls,
            "resolved": self.resolved,
            "environment": environment,
        }


def check_call(method: object, timeout: float | None) -> None:
    """Raise TypeError unless `method` is a name or callable and `timeout` None, an int or a float; ValueError for a
    timeout out of range or NaN.
    """
    if not isinstance(method, str) and not callable(method):
        kind = type(method).__name__
        raise TypeError(f"method is a {kind}: give the name of a worker's method, or a function that gets the worker")
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a {type(timeout).__name__}: give seconds, or leave it out for no limit")
    if not 0 <= timeout <= MAX_CALL_S:
        raise ValueError(f"timeout={timeout} must be from 0 to {MAX_CALL_S:g} seconds: leave it out for no limit")
