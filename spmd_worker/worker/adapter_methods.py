"""vLLM's methods for LoRA and prompt adapters, which an engine, an executor and a worker have in common."""

from typing import Any, Protocol

from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest


class AdapterCalls(Protocol):
    """Loads adapters of one kind: an engine's on all ranks together, an executor's on its workers, a worker's on
    itself.
    """

    def add(self, request: Any) -> bool: ...
    def remove(self, int_id: int) -> bool: ...
    def pin(self, int_id: int) -> bool: ...
    def list(self) -> set[int]: ...


class AdapterMethods:
    """Calls of `_adapter_calls` and `_prompt_adapter_calls` under vLLM's names."""

    @property
    def _adapter_calls(self) -> AdapterCalls:
        raise NotImplementedError

    @property
    def _prompt_adapter_calls(self) -> AdapterCalls:
        raise NotImplementedError

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, as `LLM.add_lora` does where an engine drives this object; returns True. Raises
        AdapterError, with nothing changed, for one that cannot be loaded.
        """
        return self._adapter_calls.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; returns whether it was loaded. Raises AdapterError while unanswered requests need it."""
        return self._adapter_calls.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted; returns True. Raises AdapterError unless it is loaded."""
        return self._adapter_calls.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        return self._adapter_calls.list()

    def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a prompt adapter, otherwise as `add_lora`."""
        return self._prompt_adapter_calls.add(prompt_adapter_request)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Remove a prompt adapter, otherwise as `remove_lora`."""
        return self._prompt_adapter_calls.remove(prompt_adapter_id)

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Keep a prompt adapter from being evicted; returns True. Raises AdapterError unless it is loaded."""
        return self._prompt_adapter_calls.pin(prompt_adapter_id)

    def list_prompt_adapters(self) -> set[int]:
        """Ids of the loaded prompt adapters."""
        return self._prompt_adapter_calls.list()
