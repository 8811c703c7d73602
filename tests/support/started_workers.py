"""Workers of this process that have a model and no cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.ranks.environment import read_rank_environment
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.worker import Worker


@contextmanager
def started_workers() -> Iterator[Callable[[RunConfig], Worker]]:
    """A function that starts the worker of a run; all of them are shut down at the end."""
    workers = []

    def start(config: RunConfig) -> Worker:
        workers.append(Worker(resolve_run(config, "cpu"), read_rank_environment()))
        workers[-1].init_device()
        workers[-1].load_model()
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()
