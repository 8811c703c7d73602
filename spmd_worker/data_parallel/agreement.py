"""Whether every rank of an engine was given the same prompts, before any of them is answered.

Knows prompts as token ids and parameters. Knows nothing about who answers them.
"""

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from spmd_worker.engine.engine import LLMEngine
from spmd_worker.lockstep.agreement import canonical, check_equal
from spmd_worker.sequence.sampling_params import SamplingParams


def agree_on_prompts(engine: LLMEngine, prompts: list[tuple[tuple[int, ...], SamplingParams]]) -> None:
    """Raise RanksDisagreeError, naming prompt, field and both values, unless every rank gives equal prompts.

    Digests are compared; only a prompt that differs is sent whole. Compares nothing with `executor.digest_every` 0.
    Raises RankFailedError, naming the rank, where another one is gone.
    """
    if not engine.config.executor.digest_every or engine.engine_channel.size == 1:
        return
    digests = [blake2b(canonical(_as_json(prompt)), digest_size=8).hexdigest() for prompt in prompts]
    lists = [json.loads(payload) for payload in _gather(engine, canonical(digests))]
    for index, entries in enumerate(zip(*lists)):
        if len(dict.fromkeys(entries)) > 1:
            check_equal("prompts", _gather(engine, canonical({f"prompts[{index}]": _as_json(prompts[index])})))
    check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in lists])


def _gather(engine: LLMEngine, payload: bytes) -> list[bytes]:
    try:
        return engine.engine_channel.gather(payload)
    except RuntimeError as error:  # torch's own, which says that a connection was closed, and not by which rank
        explained = engine.explain(error)
        if explained is error:
            raise
        raise explained from error


def _as_json(prompt: tuple[tuple[int, ...], SamplingParams]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt[0]), "sampling": asdict(prompt[1])}
