"""Adapters of a call's prompts: `lora_request` and `prompt_adapter_request`, one or a list; those of outputs."""

from collections.abc import Sequence
from typing import Any

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.names import counted
from spmd_worker.compat.prompts import Encoded
from spmd_worker.replica.sequence.adapter_kind import LORA, PROMPT, AdapterKind
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one, or None, for each."""
PromptAdapterRequests = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None


def set_adapters(encoded: Sequence[Encoded], lora_request: Any, prompt_adapter_request: Any) -> None:
    """Set the adapters of each prompt: one for all, or a list with one, or None, for each. Raises TypeError for other
    types, ValueError for a list of another length.
    """
    for prompt, each in zip(encoded, one_each(lora_request, len(encoded), LORA), strict=True):
        prompt.lora_request = each
    for prompt, each in zip(encoded, one_each(prompt_adapter_request, len(encoded), PROMPT), strict=True):
        prompt.prompt_adapter = each


def one_each(given: Any, num_prompts: int, kind: AdapterKind) -> list[Any]:
    """A request of this kind, or None, for each prompt, from one for all or a list of as many. Raises TypeError for
    other types, ValueError for a list of another length.
    """
    listed = list(given) if isinstance(given, list | tuple) else [given] * num_prompts
    for each in listed:
        check_request(each, kind)
    if len(listed) != num_prompts:
        name = kind.call.replace("_", " ")
        raise ValueError(
            f"{len(listed)} {name} requests for {counted(num_prompts, 'prompt')}: give one, or one, or None, for "
            f"each prompt"
        )
    return listed


def check_request(given: Any, kind: AdapterKind) -> None:
    """Raise TypeError for anything but a request of this kind or None."""
    if not isinstance(given, kind.request_class | None):
        raise TypeError(
            f"{kind.request_key}={shown(given)} is a {type(given).__name__}: give {kind.request_class.__name__}, None, "
            f"or, for several prompts, a list of these"
        )


def check_no_prompt_adapter(given: Any) -> None:
    """Raise ValueError for a prompt adapter of a row that is pooled, TypeError as `check_request`."""
    check_request(given, PROMPT)
    if given is not None:
        raise ValueError("prompt_adapter_request is for generated text: leave it out, or give prompt_embeds")


def set_in_output(output: RequestOutput, lora_request: LoRARequest | None) -> None:
    """Set the adapter of an output and its completions."""
    output.lora_request = lora_request
    for completion in output.outputs:
        completion.lora_request = lora_request
