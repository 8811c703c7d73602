"""Arguments of `LLM.generate` and `LLM.chat` that vLLM has and that may ask for nothing here."""

from collections.abc import Sequence
from typing import Any


def check_extras(num_prompts: int, lora_request: Any, priority: Any) -> None:
    """Raise ValueError for what asks for something, naming it and the way out."""
    adapters = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(each is not None for each in adapters):
        raise ValueError(
            f"lora_request={str(lora_request)[:80]} is refused: there are no adapters; merge it into the checkpoint "
            f"(PEFT's merge_and_unload)"
        )
    if priority is None:
        return
    if not isinstance(priority, Sequence) or len(priority) != num_prompts:
        raise ValueError(f"priority={str(priority)[:80]} must be a list of {num_prompts} numbers, one for each prompt")
    if any(priority):
        raise ValueError("priority is refused: prompts are served first come, first served; leave it out or give zeros")
