"""Executor of one worker in this process."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from spmd_worker.base.errors import ConfigError
from spmd_worker.executor.executor import Executor, check_call
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.worker_wrapper import WorkerWrapper


class UniProcExecutor(Executor):
    """Executor of rank 0 in a world of 1."""

    driver_worker: WorkerWrapper

    def start(self) -> None:
        """Raises ConfigError when the layout has more ranks than this process."""
        self._check_world()
        self._set_up()

    def _set_up(self) -> None:
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
        """One result, or one completed future. An error has a note with rank and method.

        With a `timeout` the call runs in its own thread, which continues after TimeoutError.
        """
        check_call(method, timeout)
        name = method if isinstance(method, str) else str(getattr(method, "__name__", method))
        call = partial(self._call, method, name, args, kwargs or {})
        if not non_block and timeout is None:
            return [call()]
        future: Future[Any] = Future()
        if non_block:
            _run_into(future, call)
            return [future]
        threading.Thread(target=_run_into, args=(future, call), name=f"spmd-{name}", daemon=True).start()
        done, _ = wait([future], timeout)
        if not done:
            raise TimeoutError(f"rank {self.environment.rank} has not answered {name} within {timeout:g} s")
        return [future.result()]

    def execute_model(self, plan: StepPlan, non_block: bool = False) -> StepResult | Future[StepResult]:
        """A future, with async scheduling, reads the step when its result is requested, in the order of the calls."""
        if not (non_block and self.resolved.num_steps_ahead):
            return super().execute_model(plan, non_block)
        self._call_or_fail("launch_step", plan)
        return _LaunchedStep(lambda: self._aggregate(self._call_or_fail("read_step"), 0))

    def initialize_from_config(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.collective_rpc("initialize_cache", args=(num_device_blocks, num_host_blocks))

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        super().watch_requests(num_in_flight)
        # The worker itself rejects new weights.
        self.collective_rpc("watch_requests", args=(num_in_flight,))

    def watch_layers(self, on_layer: Callable[[], None]) -> None:
        self.collective_rpc("watch_layers", args=(on_layer,))

    def _call(self, method: str | Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            if callable(method):
                worker = self.driver_worker.worker
                assert worker is not None, "start comes first"
                with worker.on_device():
                    return method(worker, *args, **kwargs)
            return self.driver_worker.execute_method(method, *args, **kwargs)
        except Exception as error:
            error.add_note(f"on rank {self.environment.rank}, in {name}")
            raise

    def _check_world(self) -> None:
        if self.layout.world_size != 1:
            raise ConfigError(
                f"executor.backend=uniproc runs one rank but the layout has {self.layout.world_size}: "
                f"start them with torchrun and executor.backend=external_launcher, or on this node with "
                f"executor.backend=multiproc"
            )


class _LaunchedStep(Future[StepResult]):
    """A launched step; `read` waits for its result."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        super().__init__()
        self._read: Callable[[], StepResult] | None = read

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the device, without a time limit."""
        read, self._read = self._read, None
        if read is not None:
            _run_into(self, read)
        return super().result(timeout)


def _run_into(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # raised by the future
        future.set_exception(error)
