"""What an engine runs steps on: one or several workers behind one interface.

Knows how to reach workers. Knows nothing about scheduling or requests. Names follow vLLM's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kv_cache.cache_spec import CacheSpec
from spmd_worker.config import ConfigError, RunConfig
from spmd_worker.model_shape import ModelShape
from spmd_worker.parallel.environment import RankEnvironment
from spmd_worker.parallel.layout import RankLayout
from spmd_worker.sequence.step import StepPlan, StepResult
from spmd_worker.worker.worker_wrapper import resolve_class

BACKENDS = {
    "external_launcher": "spmd_worker.executor.external_launcher.ExternalLauncherExecutor",
    "uniproc": "spmd_worker.executor.uniproc.UniProcExecutor",
}


class Executor(ABC):
    """Call `start`, then `determine_num_available_blocks` and `initialize_from_config`, then steps, then `shutdown`."""

    def __init__(self, config: RunConfig, shape: ModelShape, layout: RankLayout, environment: RankEnvironment) -> None:
        self.config, self.shape, self.layout, self.environment = config, shape, layout, environment
        self.is_failed = False
        self._failure_callbacks: list[Callable[[], None]] = []

    @staticmethod
    def get_class(backend: str, environment: RankEnvironment) -> type["Executor"]:
        """`auto` is external_launcher under a launcher and uniproc elsewhere; a qualified name is imported.

        Raises ConfigError for what is neither, listing what is known.
        """
        if backend == "auto":
            backend = "external_launcher" if environment.is_launched else "uniproc"
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
        """Run a method on every worker of this executor; a callable gets the worker as its first argument."""

    def load_model(self) -> None:
        """Every worker fills its shard."""
        self.collective_rpc("load_model")

    def get_kv_cache_specs(self) -> list[CacheSpec]:
        """Each worker's share of the cache."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks) that every rank of the replica has room for."""
        counts = self.collective_rpc("determine_num_available_blocks")
        return min(device for device, _ in counts), min(host for _, host in counts)

    @abstractmethod
    def initialize_from_config(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Every worker allocates its cache."""

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepResult | Future[StepResult]:
        """One step; every worker executes the same plan, and all sample the same ids."""
        result = self._run_step(plan)
        if not non_block:
            return result
        future: Future[StepResult] = Future()
        future.set_result(result)
        return future

    def check_health(self) -> None:
        """Raise when a worker can no longer compute."""
        if self.is_failed:
            raise RuntimeError("the executor has failed: make a new one")
        self.collective_rpc("check_health")

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """`callback` runs once, when the executor fails for good; at once if it has failed already."""
        if self.is_failed:
            callback()
        else:
            self._failure_callbacks.append(callback)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be under way at once."""
        return self.config.parallel.pipeline_parallel_size

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        self.collective_rpc("shutdown")

    def _run_step(self, plan: StepPlan) -> StepResult:
        try:
            result = self.collective_rpc("execute_model", args=(plan,))[0]
            if result is None:
                result = self.collective_rpc("sample_tokens")[0]
        except BaseException:
            self._fail()
            raise
        assert isinstance(result, StepResult), type(result)
        return result

    def _fail(self) -> None:
        self.is_failed = True
        callbacks, self._failure_callbacks = self._failure_callbacks, []
        for callback in callbacks:
            callback()
