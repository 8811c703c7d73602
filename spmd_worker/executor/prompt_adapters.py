"""Prompt adapters of an executor's workers, which have each all or none."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spmd_worker.base.errors import AdapterError, RanksDisagreeError
from spmd_worker.executor.adapters import reason_of
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.prompt_adapter_request import (
    ADD_PROMPT_ADAPTER,
    REMOVE_PROMPT_ADAPTER,
    PromptAdapterRequest,
)
from spmd_worker.worker.prompt_adapter_methods import PromptAdapterCalls


class _Executor(Protocol):
    def collective_rpc(self, method: str, timeout: None = None, args: Sequence[Any] = ()) -> list[Any]: ...
    def prepare_event(self, name: str, payload: Any) -> str: ...
    def end_event(self, is_committed: bool) -> Any: ...


class ExecutorPromptAdapters:
    """Implements `PromptAdapterCalls`: by the engine that drives the executor (`watch`), or, without one, in two phases
    on the executor's own workers, while its caller has no request in flight; nothing is evicted then.
    """

    def __init__(self, executor: _Executor) -> None:
        self._executor = executor
        self._engine: Callable[[], PromptAdapterCalls | None] = lambda: None
        self._digests: dict[int, int] = {}

    def watch(self, adapters: Callable[[], PromptAdapterCalls | None]) -> None:
        """Register the engine's prompt adapters; the reference must not keep the engine alive."""
        self._engine = adapters

    def stage(self, request: PromptAdapterRequest) -> tuple[int, str]:
        """Have every worker read an adapter for the worker event that follows. Returns the digest of its content on the
        first worker and "", or 0 and why it cannot be used.
        """
        number, path = request.prompt_adapter_id, request.prompt_adapter_local_path
        given = (number, path, request.prompt_adapter_num_virtual_tokens)
        digest, problem = self._executor.collective_rpc("stage_prompt_adapter", args=given)[0]
        return digest, problem

    def add(self, request: PromptAdapterRequest) -> bool:
        """Raises AdapterError, with nothing changed, if a worker cannot load it, naming the lowest such rank."""
        engine = self._engine()
        if engine is not None:
            return engine.add(request)
        number, (digest, problem) = request.prompt_adapter_id, self.stage(request)
        if not problem and self._digests.get(number, digest) != digest:
            problem = f"prompt_adapter_id={number} has another content: remove it first"
        change = AdapterChange(number, request.name, request.local_path, digest, problem=problem)
        self._change(ADD_PROMPT_ADAPTER, change)
        self._digests[number] = digest
        return True

    def remove(self, int_id: int) -> bool:
        engine = self._engine()
        if engine is not None:
            return engine.remove(int_id)
        if int_id not in self._digests:
            return False
        digest = self._digests[int_id]
        is_shared = list(self._digests.values()).count(digest) > 1
        self._change(REMOVE_PROMPT_ADAPTER, AdapterChange(int_id, "", "", digest, (), () if is_shared else (digest,)))
        del self._digests[int_id]
        return True

    def pin(self, int_id: int) -> bool:
        engine = self._engine()
        if engine is not None:
            return engine.pin(int_id)
        if int_id not in self._digests:
            raise AdapterError(f"prompt adapter {int_id} cannot be pinned: it is not loaded")
        return True

    def list(self) -> set[int]:
        """Raises RanksDisagreeError if a worker has others."""
        engine = self._engine()
        expected = set(self._digests) if engine is None else engine.list()
        for index, found in enumerate(self._executor.collective_rpc("list_prompt_adapters")):
            if found != expected:
                raise RanksDisagreeError(
                    f"worker {index} has the prompt adapters {sorted(found)}, not {sorted(expected)}"
                )
        return expected

    def _change(self, name: str, change: AdapterChange) -> None:
        problem = self._executor.prepare_event(name, change)
        self._executor.end_event(is_committed=not problem)
        if problem:
            raise AdapterError(reason_of(problem))
