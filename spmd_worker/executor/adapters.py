"""Adapters of an executor's workers, which have each adapter all or none."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spmd_worker.base.errors import AdapterError, RanksDisagreeError
from spmd_worker.replica.scheduler.adapter_plans import addition_of, plan_addition, plan_removal
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import AdapterKind, AdapterRequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.worker.adapter_methods import AdapterCalls


class _Executor(Protocol):
    has_local_workers: bool

    def collective_rpc(self, method: str, timeout: None = None, args: Sequence[Any] = ()) -> list[Any]: ...
    def prepare_event(self, name: str, payload: Any) -> str: ...
    def end_event(self, is_committed: bool) -> Any: ...


class ExecutorAdapters:
    """Adapters of one kind, loaded by the engine that drives the executor (`watch`), or, without one, in two phases on
    the executor's own workers, while its caller has no request in flight. Implements `AdapterCalls`.
    """

    def __init__(self, executor: _Executor, max_adapters: int, kind: AdapterKind) -> None:
        self._executor, self._kind = executor, kind
        self._registry = AdapterRegistry(max_adapters, kind=kind)
        self._engine: Callable[[], AdapterCalls | None] = lambda: None

    def watch(self, adapters: Callable[[], AdapterCalls | None]) -> None:
        """Register the engine's adapters; the reference must not keep the engine alive."""
        self._engine = adapters

    def stage(self, request: AdapterRequest) -> tuple[int, str]:
        """Have every worker read an adapter for the worker event that follows, or `unstage`. Returns the digest of its
        content on the first worker and "", or 0 and why it cannot be used.
        """
        given: tuple[Any, ...]
        if isinstance(request, PromptAdapterRequest):
            given = (request.adapter_id, request.local_path, request.prompt_adapter_num_virtual_tokens)
        elif request.lora_tensors is not None and not self._executor.has_local_workers:
            return 0, (
                f"{request}: the workers of executor.backend=multiproc live in other processes, and no tensor can be "
                f"passed to them: save the adapter and give its folder as lora_path, or start the ranks with torchrun"
            )
        else:
            given = (request.lora_int_id, request.lora_path, request.peft_config, request.lora_tensors)
        digest, problem = self._executor.collective_rpc(f"stage_{self._kind.call}", args=given)[0]
        return digest, problem

    def unstage(self) -> None:
        self._executor.collective_rpc(f"unstage_{self._kind.call}")

    def add(self, request: AdapterRequest) -> bool:
        """Raises AdapterError, with nothing changed, if a worker cannot load it, naming the lowest such rank."""
        engine = self._engine()
        if engine is not None:
            return engine.add(request)
        change = plan_addition(self._registry, request, self.stage(request), lambda _: 0)
        self._change(f"add_{self._kind.call}", change)
        self._registry.add(addition_of(self._kind, change))
        return True

    def remove(self, int_id: int) -> bool:
        engine = self._engine()
        if engine is not None:
            return engine.remove(int_id)
        if int_id not in self._registry.entries:
            return False
        self._change(f"remove_{self._kind.call}", plan_removal(self._registry, int_id, lambda _: 0))
        self._registry.remove(int_id)
        return True

    def pin(self, int_id: int) -> bool:
        engine = self._engine()
        if engine is not None:
            return engine.pin(int_id)
        if int_id not in self._registry.entries:
            raise AdapterError(f"{self._kind.noun} {int_id} cannot be pinned: it is not loaded")
        self._registry.pin(int_id)
        return True

    def list(self) -> set[int]:
        """Raises RanksDisagreeError if a worker has others."""
        engine = self._engine()
        expected = set(self._registry.entries) if engine is None else engine.list()
        for index, found in enumerate(self._executor.collective_rpc(f"list_{self._kind.call}s")):
            if found != expected:
                what = f"worker {index} has the {self._kind.noun}s {sorted(found)}"
                raise RanksDisagreeError(f"{what}, not {sorted(expected)}")
        return expected

    def _change(self, name: str, change: AdapterChange) -> None:
        problem = self._executor.prepare_event(name, change)
        self._executor.end_event(is_committed=not problem)
        if problem:
            raise AdapterError(reason_of(problem))


def reason_of(problem: str) -> str:
    """Text of a worker that could not prepare (`Executor.prepare_event`), or rank 0's reason of a refusal."""
    refused = re.fullmatch(r"rank \d+: AdapterRefusal: (.*)", problem, re.DOTALL)
    return refused[1] if refused else re.sub(r"^(rank \d+): AdapterError: ", r"\1: ", problem)
