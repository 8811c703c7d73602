"""Kinds of adapters by their names in texts, calls and keys: LoRA adapters and prompt adapters."""

from dataclasses import dataclass
from typing import Final

from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest

AdapterRequest = LoRARequest | PromptAdapterRequest


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """`add_<call>`, `remove_<call>` and `pin_<call>` are calls, the first two worker events as well; `limit_key` is the
    most that are loaded.
    """

    noun: str
    call: str
    id_key: str
    request_key: str
    request_class: type[AdapterRequest]
    limit_key: str

    def counted(self, number: int) -> str:
        """Such as "1 LoRA adapter is" and "2 LoRA adapters are"."""
        return f"{number} {self.noun} is" if number == 1 else f"{number} {self.noun}s are"


LORA: Final = AdapterKind("LoRA adapter", "lora", "lora_int_id", "lora_request", LoRARequest, "model.max_cpu_loras")
PROMPT: Final = AdapterKind(
    *("prompt adapter", "prompt_adapter", "prompt_adapter_id", "prompt_adapter_request"),
    PromptAdapterRequest,
    "model.max_prompt_adapters",
)
