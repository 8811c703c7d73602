"""One worker in this process, and no other ranks.

Knows one wrapper. Knows nothing about launchers.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from spmd_worker.config import ConfigError
from spmd_worker.executor.executor import Executor
from spmd_worker.worker.worker_wrapper import WorkerWrapper


class UniProcExecutor(Executor):
    """An executor of one: rank 0 of a world of 1."""

    driver_worker: WorkerWrapper

    def start(self) -> None:
        """Raises ConfigError when the layout has more ranks than this process."""
        self._check_world()
        self.driver_worker = WorkerWrapper(rpc_rank=0, global_rank=self.environment.rank)
        self.driver_worker.init_worker([self._worker_kwargs(self.environment)])
        self.collective_rpc("init_device")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        """One answer, or one future that holds it. The call runs here, so no timeout could cut it short."""
        if not non_block:
            return [self._call(method, args, kwargs or {})]
        future: Future[Any] = Future()
        try:
            future.set_result(self._call(method, args, kwargs or {}))
        except Exception as error:  # handed to whoever asks the future
            future.set_exception(error)
        return [future]

    def initialize_from_config(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """The worker allocates its cache."""
        self.collective_rpc("initialize_cache", args=(num_device_blocks, num_host_blocks))

    def _call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if callable(method):
            return method(self.driver_worker.worker, *args, **kwargs)
        return self.driver_worker.execute_method(method, *args, **kwargs)

    def _check_world(self) -> None:
        if self.layout.world_size != 1:
            raise ConfigError(
                f"executor.backend=uniproc runs one rank but the layout has {self.layout.world_size}: "
                f"start them with torchrun and executor.backend=external_launcher, or on this node with "
                f"executor.backend=multiproc"
            )
