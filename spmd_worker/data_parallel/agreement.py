"""Before a call runs: whether every rank of an engine makes it, with prompts that are ready and all the same."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar

from spmd_worker.engine.engine import LLMEngine
from spmd_worker.errors import RankFailedError
from spmd_worker.executor.rpc_coding import encode_value
from spmd_worker.liveness.heartbeat import BETWEEN_STEPS
from spmd_worker.lockstep.agreement import canonical, check_equal
from spmd_worker.sequence.sampling_params import SamplingParams

_MAX_ERROR_CHARACTERS: Final = 2000


class EncodedPrompt(Protocol):
    """What is compared of a prompt, beside its parameters."""

    token_ids: tuple[int, ...]


_Prompt = TypeVar("_Prompt", bound=EncodedPrompt)


def agree_on_prompts(
    engine: LLMEngine, call: str, prepare: Callable[[], list[tuple[_Prompt, SamplingParams]]]
) -> list[tuple[_Prompt, SamplingParams]]:
    """What `prepare` returns, once every rank has the same; `call` is what the user called. Every rank of the engine
    makes the same call.

    One exchange, in which each rank sends digests of its prompts or the error that `prepare` raised. Where it raised
    anywhere, nothing is answered and the engine can be used again: the rank raises its own error, the others
    RankFailedError with the words of the first. Where a rank does not come, RankFailedError names it, and this engine
    has ended. Raises RanksDisagreeError, naming prompt, field and both values, unless every rank gives equal prompts;
    they are not compared with `executor.digest_every` 0.
    """
    channel = engine.engine_channel
    if channel.size == 1:
        return prepare()
    own_error: Exception | None = None
    try:
        prompts = prepare()
        ready: dict[str, Any] = {"digests": _digests(prompts) if engine.config.executor.digest_every else []}
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        own_error = error
        ready = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]}
    heartbeat = engine.times.heartbeat
    heartbeat.enter(f"waiting for the other ranks' {call}")
    try:
        answers = [json.loads(payload) for payload in channel.gather(canonical(ready))]
    except RuntimeError as error:
        raise engine.explain(error) from (own_error or error)
    heartbeat.enter(BETWEEN_STEPS)
    if own_error is not None:
        raise own_error
    for rank, answer in enumerate(answers):
        if "error" in answer:
            failed = RankFailedError(f"rank {rank} failed before {call}: {answer['error']}")
            failed.names_cause = True
            raise failed
    _check_digests(engine, [answer["digests"] for answer in answers], prompts)
    return prompts


def _check_digests(
    engine: LLMEngine, digests: list[list[str]], prompts: Sequence[tuple[EncodedPrompt, SamplingParams]]
) -> None:
    """`digests` by rank. Only a prompt that differs is sent whole."""
    for index, entries in enumerate(zip(*digests)):
        if len(dict.fromkeys(entries)) > 1:
            own = canonical({f"prompts[{index}]": _as_json(*prompts[index])})
            check_equal("prompts", engine.engine_channel.gather(own))
    check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in digests])


def agree_on_call(engine: LLMEngine, method: str, *args: Any) -> None:
    """Raise RanksDisagreeError unless every rank of the engine makes the same call. `args` can cross processes.

    Compares nothing with `executor.digest_every` 0.
    """
    channel = engine.engine_channel
    if engine.config.executor.digest_every and channel.size > 1:
        check_equal("calls", channel.gather(encode_value([method, *args])))


def _digests(prompts: Sequence[tuple[EncodedPrompt, SamplingParams]]) -> list[str]:
    return [blake2b(canonical(_as_json(*prompt)), digest_size=8).hexdigest() for prompt in prompts]


def _as_json(prompt: EncodedPrompt, sampling: SamplingParams) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt.token_ids), "sampling": asdict(sampling)}
