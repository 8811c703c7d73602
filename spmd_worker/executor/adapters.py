"""LoRA adapters of the workers of one executor, which have each adapter all or none, where no engine drives them."""

from typing import Any, Protocol

from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.scheduler.adapter_plans import addition_of, plan_addition, plan_removal
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.sequence.adapter_change import ADD_LORA, REMOVE_LORA, AdapterChange
from spmd_worker.replica.sequence.lora_request import LoRARequest


class AdapterCalls(Protocol):
    """Loads adapters; an engine's `Adapters` loads them on all ranks."""

    def add(self, request: LoRARequest) -> bool: ...
    def remove(self, int_id: int) -> bool: ...
    def pin(self, int_id: int) -> bool: ...
    def list(self) -> set[int]: ...


class _Executor(Protocol):
    def stage_adapter(self, request: LoRARequest) -> tuple[int, str]: ...
    def prepare_event(self, name: str, payload: Any) -> str: ...
    def end_event(self, is_committed: bool) -> Any: ...


class ExecutorAdapters:
    """Implements `AdapterCalls` for an executor without an engine: its caller has no request in flight meanwhile."""

    def __init__(self, executor: _Executor, max_adapters: int) -> None:
        self._executor, self._registry = executor, AdapterRegistry(max_adapters)

    def add(self, request: LoRARequest) -> bool:
        """Raises AdapterError, with nothing changed, if a worker cannot load it, naming the lowest such rank."""
        change = plan_addition(self._registry, request, self._executor.stage_adapter(request), lambda _: 0)
        self._change(ADD_LORA, change)
        self._registry.add(addition_of(change))
        return True

    def remove(self, int_id: int) -> bool:
        if int_id not in self._registry.entries:
            return False
        self._change(REMOVE_LORA, plan_removal(self._registry, int_id, lambda _: 0))
        self._registry.remove(int_id)
        return True

    def pin(self, int_id: int) -> bool:
        if int_id not in self._registry.entries:
            raise AdapterError(f"adapter {int_id} cannot be pinned: it is not loaded")
        self._registry.pin(int_id)
        return True

    def list(self) -> set[int]:
        return set(self._registry.entries)

    def _change(self, name: str, change: AdapterChange) -> None:
        problem = self._executor.prepare_event(name, change)
        self._executor.end_event(is_committed=not problem)
        if problem:
            raise AdapterError(problem)
