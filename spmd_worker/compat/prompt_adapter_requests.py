"""The prompt adapters of a call's prompts: `prompt_adapter_request`, one or a list."""

from collections.abc import Sequence
from typing import Any

from spmd_worker.base.config.plain_values import shown
from spmd_worker.compat.lora_requests import one_each
from spmd_worker.compat.prompts import Encoded
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest

PromptAdapterRequests = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
"""The prompt adapter of all prompts, or one, or None, for each."""


def set_prompt_adapters(encoded: Sequence[Encoded], given: Any) -> None:
    """Set the prompt adapter of each prompt: `given` is one for all, or a list with one, or None, for each. Raises
    TypeError for other types, ValueError for a list of another length.
    """
    requests = one_each(given, len(encoded), check_prompt_adapter, "prompt adapter")
    for prompt, each in zip(encoded, requests, strict=True):
        prompt.prompt_adapter = each


def check_no_prompt_adapter(given: Any) -> None:
    """Raise ValueError for a prompt adapter of a row that is pooled, TypeError for anything but a PromptAdapterRequest
    or None.
    """
    check_prompt_adapter(given)
    if given is not None:
        raise ValueError("prompt_adapter_request is for generated text: leave it out, or give prompt_embeds")


def check_prompt_adapter(given: Any) -> None:
    """Raise TypeError for anything but a PromptAdapterRequest or None."""
    if not isinstance(given, PromptAdapterRequest | None):
        raise TypeError(
            f"prompt_adapter_request={shown(given)} is a {type(given).__name__}: give PromptAdapterRequest, None, or, "
            f"for several prompts, a list of these"
        )
