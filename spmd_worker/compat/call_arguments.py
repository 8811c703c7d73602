"""vLLM's arguments of calls of `LLM` and `LLMEngine`: priorities, and those that are accepted only with neutral
values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.names import hint
from spmd_worker.compat.media_keywords import sound_fault
from spmd_worker.replica.sequence.record_checks import INT64

_UNSUPPORTED: Final = ("data_parallel_rank", "reasoning_ended", "reasoning_parser_kwargs")
"""Further arguments of vLLM's `add_request`."""
_NAMED: Final = (
    *("request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs", "trace_headers"),
    *("priority", "prompt_text", "prompt_adapter_request", "custom_id", "index"),
)


def check_request_extras(trace_headers: Any, others: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument with an effect, TypeError for an unknown one."""
    for name in others:
        if name not in _UNSUPPORTED:
            raise TypeError(f"LLMEngine.add_request has no keyword {name}{hint(name, _NAMED)}")
    for name, value in {"trace_headers": trace_headers, **others}.items():
        if value:
            raise ValueError(
                f"{name}={str(value)[:80]} is rejected: a request is a prompt and its parameters; leave it out"
            )


def check_extras(tokenization: Any = None, mm_processor: Any = None) -> None:
    """Raise ValueError for an argument with an effect, naming it and the alternative."""
    if tokenization:
        raise ValueError(
            f"tokenization_kwargs={str(tokenization)[:80]} is rejected: give prompt_token_ids, encoded as you like, or "
            f"truncate_prompt_tokens of SamplingParams"
        )
    if fault := sound_fault(mm_processor):
        raise ValueError(fault)
    if mm_processor:
        raise ValueError(
            f"mm_processor_kwargs={str(mm_processor)[:80]} is rejected: give it to LLM(...), for all prompts"
        )


def priorities_of(num_prompts: int, priority: Any) -> list[int]:
    """The priority of each prompt, from one of all or a list; 0 for None. Raises ValueError for anything else."""
    if priority is None:
        return [0] * num_prompts
    number = plain_int(priority)
    listed = [number] * num_prompts if number is not None else priority
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str | bytes) and len(listed) == num_prompts
    numbers = [plain_int(each) for each in listed] if is_list else [None]
    known = [each for each in numbers if each is not None and each in INT64]
    if len(known) < len(numbers):
        raise ValueError(
            f"priority={shown(priority)} must be a number, or a list of {num_prompts}, one for each prompt"
        )
    return known
