"""An executor's handle on the worker of one rank: builds the worker and calls its methods by name.

`rpc_rank` is the rank in this executor (0 under an external launcher, where executors have one worker each),
`global_rank` the rank in the world. Imports no torch before it builds a worker.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Final

from kv_cache.connectors.factory import find_factory
from kv_cache.connectors.interface import ConnectorContext, KVConnector
from spmd_worker.base.errors import ConfigError, PluginError
from spmd_worker.base.liveness.failure_diagnosis import is_secondary
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.worker.worker_base import WorkerBase

logger = logging.getLogger(__name__)

DEFAULT_WORKER_CLASS: Final = "spmd_worker.worker.worker.Worker"
PLUGIN_GROUP: Final = "spmd_worker.plugins"
"""Entry points of installed packages: functions without arguments, called once per process before a worker is built."""

_STEP_METHODS: Final = ("execute_model", "launch_step", "read_step", "sample_tokens")


class WorkerWrapper:
    """Call `init_worker` first."""

    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: WorkerBase | None = None

    @property
    def model_runner(self) -> Any:
        """The worker's runner: trainers call its `model.load_weights(...)`. Raises RuntimeError if there is none."""
        runner = None if self.worker is None else self.worker.model_runner
        if runner is None:
            raise RuntimeError("this worker has no model: its LLM was closed, or has not started")
        return runner

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Other public attributes are the worker's: `rank`, `device`, `model_config`."""
            worker = None if name.startswith("_") else vars(self).get("worker")
            if worker is None:
                raise AttributeError(f"WorkerWrapper has no attribute {name!r}")
            return getattr(worker, name)

    def adjust_rank(self, rank_mapping: Mapping[int, int]) -> None:
        """Renumber this worker, once all exist: `rpc_rank` by the mapping, and `global_rank` if it is the same."""
        rank = rank_mapping.get(self.rpc_rank, self.rpc_rank)
        if self.global_rank == self.rpc_rank:
            self.global_rank = rank
        self.rpc_rank = rank

    def update_environment_variables(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Apply the entry of this `rpc_rank`; call it before anything reads the environment."""
        os.environ.update(variables[self.rpc_rank])

    def init_worker(self, all_kwargs: Sequence[Mapping[str, Any]]) -> None:
        """Load the plug-ins, then build the worker from the entry of this `rpc_rank`.

        Its `worker_cls` and `worker_extension_cls` are qualified names or None; the rest goes to the constructor.
        Raises ConfigError for an invalid class and PluginError for a plug-in that fails.
        """
        load_plugins()
        kwargs = dict(all_kwargs[self.rpc_rank])
        worker_name, extension_name = kwargs.pop("worker_cls", None), kwargs.pop("worker_extension_cls", None)
        key = "executor.worker_cls"
        try:
            worker_class = resolve_class(worker_name or DEFAULT_WORKER_CLASS, WorkerBase)
            key = "executor.worker_extension_cls"
            extension = None if extension_name is None else resolve_class(extension_name, object)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        worker = (worker_class if extension is None else extend_class(worker_class, extension))(**kwargs)
        if extension is not None:
            _reject_collisions(worker_class, extension, vars(worker))
        self.worker = worker

    def initialize_from_config(self, all_configs: Sequence[tuple[int, int]]) -> None:
        """Allocate the cache from the entry of this `global_rank`: (device blocks, host blocks)."""
        self.execute_method("initialize_cache", *all_configs[self.global_rank])

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """`WorkerBase.add_lora`, on this worker alone."""
        return bool(self.execute_method("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """`WorkerBase.remove_lora`, on this worker alone."""
        return bool(self.execute_method("remove_lora", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """`WorkerBase.pin_lora`."""
        return bool(self.execute_method("pin_lora", lora_id))

    def list_loras(self) -> set[int]:
        """`WorkerBase.list_loras`."""
        return set(self.execute_method("list_loras"))

    def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """`WorkerBase.add_prompt_adapter`, on this worker alone."""
        return bool(self.execute_method("add_prompt_adapter", prompt_adapter_request))

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """`WorkerBase.remove_prompt_adapter`, on this worker alone."""
        return bool(self.execute_method("remove_prompt_adapter", prompt_adapter_id))

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """`WorkerBase.pin_prompt_adapter`."""
        return bool(self.execute_method("pin_prompt_adapter", prompt_adapter_id))

    def list_prompt_adapters(self) -> set[int]:
        """`WorkerBase.list_prompt_adapters`."""
        return set(self.execute_method("list_prompt_adapters"))

    @property
    def mm_receiver_cache(self) -> Any:
        """The worker's rows of images (`MediaStore`), which plans change; None in a model that takes no images."""
        return getattr(self.model_runner, "media", None)

    def _apply_mm_cache(self, scheduler_output: Any) -> None:
        """Nothing to do before a step: its plan says itself which rows are dropped and made."""

    def execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a public method of the worker by name. Raises AttributeError if there is none. A failed step is logged
        before the error is raised, because peers may be waiting.
        """
        assert self.worker is not None, "init_worker comes first"
        # Not by its value: a property of a worker that sleeps may have none.
        is_property = isinstance(getattr_static(self.worker, method, None), property)
        function = None if is_property or method.startswith("_") else getattr(self.worker, method, None)
        if not callable(function):
            raise AttributeError(f"rank {self.global_rank}: a worker has no method {method!r}")
        try:
            with self.worker.on_device():
                return function(*args, **kwargs)
        except Exception as error:
            # The engine exchanges other failures between the ranks and reports them once. When a rank has left, the
            # others fail too; these secondary failures share one line.
            is_primary = method in _STEP_METHODS and not is_secondary(error)
            level = logging.WARNING if is_primary else logging.DEBUG
            logger.log(level, "rank %d raised %s in %s", self.global_rank, type(error).__name__, method)
            raise


@cache
def load_plugins() -> None:
    """Import and call every entry point of `PLUGIN_GROUP`, ordered by name, once per process. Raises PluginError in
    each call if one fails.
    """
    for entry in sorted(entry_points(group=PLUGIN_GROUP), key=lambda each: (each.name, each.value)):
        try:
            entry.load()()
        except Exception as error:  # third-party code
            text = f"plug-in {entry.name!r} ({entry.value}) failed: {type(error).__name__}: {error}"
            raise PluginError(text) from error
        logger.debug("plug-in %s (%s) is loaded", entry.name, entry.value)


def new_connector(factory: str, context: ConnectorContext) -> KVConnector:
    """The connector of `cache.connector`, `package.module:factory`. Raises ConfigError."""
    with connector_errors(factory):
        return find_factory(factory)(context)


@contextmanager
def connector_errors(factory: str) -> Iterator[None]:
    """Block in which a connector is made: its ValueError and OSError become a ConfigError that names the key."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"cache.connector={factory}: {error}") from error


def extend_class(worker_class: type[WorkerBase], extension: type) -> type[WorkerBase]:
    """A worker class with the extension's methods. Raises ConfigError naming attributes that both have."""
    if "__init__" in [name for base in extension.__mro__[:-1] for name in vars(base)]:
        raise ConfigError(
            f"executor.worker_extension_cls: {_name(extension)} has an __init__, which would never run: remove it, and "
            f"do the set-up in a method that you call"
        )
    handler_names = [name for handler in worker_class.event_handler_classes for name in dir(handler)]
    events = [name for name in handler_names if name.startswith(("prepare_", "commit_", "undo_"))]
    _reject_collisions(worker_class, extension, [*dir(worker_class), *events])
    return type(worker_class.__name__, (worker_class, extension), {"__module__": worker_class.__module__})


def _reject_collisions(worker_class: type, extension: type, reserved: Iterable[str]) -> None:
    both = sorted(name for name in {*dir(extension)} & {*reserved} if not (name[:2] == name[-2:] == "__"))
    if both:
        raise ConfigError(
            f"executor.worker_extension_cls: {_name(extension)} and {_name(worker_class)} both have "
            f"{', '.join(both)}: rename the extension's"
        )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def resolve_class(qualified_name: str, base: type) -> Any:
    """Import `package.module.Class`. Raises ValueError unless it exists and is a subclass of `base`."""
    module_name, _, class_name = qualified_name.rpartition(".")
    if not module_name:
        raise ValueError(f"{qualified_name!r} is not a qualified name: write it as package.module.Class")
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{qualified_name!r} cannot be imported: {error}: install it, or add its folder to PYTHONPATH"
        ) from error
    except Exception as error:  # a user's module
        if module_name.startswith("spmd_worker."):
            # A fault of ours, whose traceback is wanted.
            raise
        raise ValueError(
            f"{qualified_name!r} cannot be imported: {type(error).__name__}: {error}: python -c 'import {module_name}' "
            f"shows where"
        ) from error
    if found is None and module_name == "__main__":
        raise ValueError(
            f"{qualified_name!r} is a class of a script, which worker processes cannot import: move it to a module of "
            f"its own"
        )
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{qualified_name!r} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found
