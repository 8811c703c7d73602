"""Executors whose worker processes compute nothing, for tests of what stands around workers.

Knows how to make and to end them. Knows nothing about what is tested.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ranks import REPOSITORY

from spmd_worker.base.config.schema import CacheConfig, ExecutorConfig, ModelOptions, ParallelConfig, RunConfig
from spmd_worker.executor.multiproc import MultiprocExecutor
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import layout_of
from spmd_worker.resolved import resolve_run

MODEL = REPOSITORY / "scripts" / "demo" / "model"
PLAIN_WORKER = "plain_worker.PlainWorker"


def new_plain(num_workers: int = 2, environment: RankEnvironment | None = None, **keys: Any) -> MultiprocExecutor:
    """Not started yet; `keys` are those of ExecutorConfig."""
    executor = ExecutorConfig(**{"backend": "multiproc", "worker_cls": PLAIN_WORKER, "timeout_s": 30.0, **keys})
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
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown()


def is_running(pid: int) -> bool:
    """Whether there is such a process and it has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def open_descriptors() -> list[str]:
    """What this process has open: sockets and pipes by what they are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            # The one that lists.
            continue
    return found
