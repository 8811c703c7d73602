"""Whether every rank of an engine was given the same prompts, and makes the same calls, before anything is done.

Knows prompts as token ids and parameters. Knows nothing about who answers them.
"""

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from spmd_worker.engine.engine import LLMEngine
from spmd_worker.executor.rpc_coding import encode_value
from spmd_worker.lockstep.agreement import canonical, check_equal
from spmd_worker.sequence.sampling_params import SamplingParams


def agree_on_prompts(engine: LLMEngine, prompts: list[tuple[tuple[int, ...], SamplingParams]]) -> None:
    """Raise RanksDisagreeError, naming prompt, field and both values, unless every rank gives equal prompts.

    Digests are compared; only a prompt that differs is sent whole. Compares nothing with `executor.digest_every` 0.
    """
    channel = engine.engine_channel
    if not engine.config.executor.digest_every or channel.size == 1:
        return
    digests = [blake2b(canonical(_as_json(prompt)), digest_size=8).hexdigest() for prompt in prompts]
    lists = [json.loads(payload) for payload in channel.gather(canonical(digests))]
    for index, entries in enumerate(zip(*lists)):
        if len(dict.fromkeys(entries)) > 1:
            check_equal("prompts", channel.gather(canonical({f"prompts[{index}]": _as_json(prompts[index])})))
    check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in lists])


def agree_on_call(engine: LLMEngine, method: str, *args: Any) -> None:
    """Raise RanksDisagreeError unless every rank of the engine makes the same call. `args` can cross processes.

    Compares nothing with `executor.digest_every` 0.
    """
    channel = engine.engine_channel
    if engine.config.executor.digest_every and channel.size > 1:
        check_equal("calls", channel.gather(encode_value([method, *args])))


def _as_json(prompt: tuple[tuple[int, ...], SamplingParams]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt[0]), "sampling": asdict(prompt[1])}
