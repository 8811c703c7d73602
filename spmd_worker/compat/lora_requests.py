"""The adapters of a call's prompts: `lora_request`, one or a list, and its place in outputs."""

from collections.abc import Callable, Sequence
from typing import Any

from spmd_worker.base.config.plain_values import shown
from spmd_worker.compat.prompts import Encoded
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one, or None, for each."""


def set_lora_requests(encoded: Sequence[Encoded], given: Any) -> None:
    """Set the adapter of each prompt: `given` is one for all, or a list with one, or None, for each. Raises TypeError
    for other types, ValueError for a list of another length.
    """
    for prompt, each in zip(encoded, one_each(given, len(encoded), check_lora_request, "lora"), strict=True):
        prompt.lora_request = each


def one_each(given: Any, num_prompts: int, check: Callable[[Any], None], kind: str) -> list[Any]:
    """A request of this kind, or None, for each prompt, from one for all or a list of as many; `check` raises TypeError
    for other types. Raises ValueError for a list of another length.
    """
    listed = list(given) if isinstance(given, list | tuple) else [given] * num_prompts
    for each in listed:
        check(each)
    if len(listed) != num_prompts:
        raise ValueError(
            f"{len(listed)} {kind} requests for {num_prompts} prompts: give one, or one, or None, for each prompt"
        )
    return listed


def check_lora_request(given: Any) -> None:
    """Raise TypeError for anything but a LoRARequest or None."""
    if not isinstance(given, LoRARequest | None):
        raise TypeError(
            f"lora_request={shown(given)} is a {type(given).__name__}: give LoRARequest, None, or, for several "
            f"prompts, a list of these"
        )


def set_in_output(output: RequestOutput, lora_request: LoRARequest | None) -> None:
    """Set the adapter of an output and its completions."""
    output.lora_request = lora_request
    for completion in output.outputs:
        completion.lora_request = lora_request
