"""One worker behind names: an executor's handle on a rank, before the worker itself exists.

`rpc_rank` is the rank in this executor (0 under an external launcher, whose executors have one worker each),
`global_rank` the rank in the world; they are different on purpose. Knows how to build a worker and call it. Knows
nothing about steps.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from spmd_worker.worker.worker_base import WorkerBase

logger = logging.getLogger(__name__)

DEFAULT_WORKER_CLASS: Final = "spmd_worker.worker.worker.Worker"

_STEP_METHODS: Final = ("execute_model", "sample_tokens")


class WorkerWrapper:
    """Call `init_worker` first; everything else goes to the worker."""

    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: WorkerBase | None = None

    def adjust_rank(self, rank_mapping: Mapping[int, int]) -> None:
        """Renumber `rpc_rank`, once all workers exist."""
        self.rpc_rank = rank_mapping.get(self.rpc_rank, self.rpc_rank)

    def update_environment_variables(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Apply the entry of this `rpc_rank`; to be called before anything reads the environment."""
        os.environ.update(variables[self.rpc_rank])

    def init_worker(self, all_kwargs: Sequence[Mapping[str, Any]]) -> None:
        """Build the worker from the entry of this `rpc_rank`; `worker_cls` in it is a qualified name."""
        kwargs = dict(all_kwargs[self.rpc_rank])
        self.worker = resolve_class(kwargs.pop("worker_cls", DEFAULT_WORKER_CLASS), WorkerBase)(**kwargs)

    def initialize_from_config(self, all_configs: Sequence[tuple[int, int]]) -> None:
        """Allocate the cache from the entry of this `global_rank`: (device blocks, host blocks)."""
        self.execute_method("initialize_cache", *all_configs[self.global_rank])

    def execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a worker method by name. A step's failure is logged before it is raised: peers may be waiting.

        Raises AttributeError for what is no public method of the worker.
        """
        assert self.worker is not None, "init_worker comes first"
        function = getattr(self.worker, method, None)
        if function is None or method.startswith("_"):
            raise AttributeError(f"rank {self.global_rank}: a worker has no method {method!r}")
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # Other failures are exchanged between the ranks, and the engine reports them once.
            level = logging.WARNING if method in _STEP_METHODS else logging.DEBUG
            logger.log(level, "rank %d raised %s in %s", self.global_rank, type(error).__name__, method)
            raise


def resolve_class(qualified_name: str, base: type) -> Any:
    """Import `package.module.Class`. Raises ValueError unless it exists and is a subclass of `base`."""
    module_name, _, class_name = qualified_name.rpartition(".")
    if not module_name:
        raise ValueError(f"{qualified_name!r} is not a qualified name: write it as package.module.Class")
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{qualified_name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{qualified_name!r} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found
