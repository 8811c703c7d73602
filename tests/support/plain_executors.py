"""Executors whose worker processes compute nothing, for tests of what stands around workers.

Knows how to make and to end them. Knows nothing about what is tested.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import REPOSITORY
from waiting import LIMIT_S, wait_until

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.executor import multiproc, result_handler, worker_handle, worker_pool
from spmd_worker.executor.multiproc import MultiprocExecutor
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import layout_of
from spmd_worker.resolved import resolve_run

MODEL = REPOSITORY / "scripts" / "demo" / "model"
PLAIN_WORKER = "plain_worker.PlainWorker"
LIMITS_OF_AN_END = (
    (worker_handle, "_LAST_LINES_S"),
    (worker_pool, "_KILL_S"),
    (result_handler, "_EXIT_S"),
    (result_handler, "_JOIN_S"),
)
"""How long the product waits at most for what comes soon after an end, or later on a machine that stands still."""


def new_plain(num_workers: int = 2, environment: RankEnvironment | None = None, **keys: Any) -> MultiprocExecutor:
    """Not started yet; `keys` are those of ExecutorConfig."""
    executor = ExecutorConfig(**{"backend": "multiproc", "worker_cls": PLAIN_WORKER, "timeout_s": 120.0, **keys})
    config = RunConfig(
        model=ModelOptions(path=str(MODEL)),
        executor=executor,
        cache=CacheConfig(num_blocks=32),
        device="cpu",
    )
    resolved = resolve_run(config, "cpu")
    # Workers that compute nothing may be as many as a test likes, whether the model divides or not.
    parallel = replace(config, parallel=ParallelConfig(num_workers))
    resolved = replace(resolved, config=parallel, layout=layout_of(parallel.parallel))
    return MultiprocExecutor(resolved, environment or RankEnvironment())


@contextmanager
def plain(num_workers: int = 2, **keys: Any) -> Iterator[MultiprocExecutor]:
    """Started, and ended whatever happens."""
    executor = new_plain(num_workers, **keys)
    with ExitStack() as limits:
        for module, name in LIMITS_OF_AN_END:
            limits.enter_context(mock.patch.object(module, name, LIMIT_S))
        executor.start()
        try:
            yield executor
        finally:
            executor.shutdown()


@contextmanager
def errors_of_all() -> Iterator[None]:
    """Where every rank raises, the error is that of the lowest, however late it comes: not of those within a second."""
    with mock.patch.object(multiproc, "_SETTLE_S", LIMIT_S):
        yield


@contextmanager
def timeouts_after(executor: MultiprocExecutor, is_so: Callable[[list[Future[Any]]], bool]) -> Iterator[None]:
    """The time that a call may take counts from when `is_so` of its futures: how slow the machine is does not."""
    submit = executor._pool.submit

    def submitted(*call: Any) -> list[Future[Any]]:
        futures = submit(*call)
        wait_until(lambda: is_so(futures))
        return futures

    with mock.patch.object(executor._pool, "submit", submitted):
        yield


def is_running(pid: int) -> bool:
    """Whether there is such a process and it has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
