"""Before a call runs: whether every rank of an engine is ready to make it, with the same prompts or arguments.

A rank that takes turns makes no call of these: see `Turns.check_outside`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar

from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS
from spmd_worker.engine.engine import LLMEngine
from spmd_worker.engine.interruption import error_of_rank, error_text
from spmd_worker.executor.rpc_coding import encode_value
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.agreement import canonical, check_equal
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_CALLS: Final = "_spmd_worker_calls"
"""Of an error that an exchange has raised: the calls that the ranks were in."""


class EncodedPrompt(Protocol):
    """What is compared of a prompt, beside its parameters."""

    token_ids: tuple[int, ...]
    pooling: PoolingParams | None


_Prompt = TypeVar("_Prompt", bound=EncodedPrompt)
_Prepared = TypeVar("_Prepared")


def agree_on_prompts(
    engine: LLMEngine,
    call: str,
    prepare: Callable[[], list[tuple[_Prompt, SamplingParams]]],
    settings: Mapping[str, Any],
) -> list[tuple[_Prompt, SamplingParams]]:
    """What `prepare` returns, once every rank has the same; `call` is what the user called, `settings` are the same for
    all of its prompts. Every rank of the engine makes the same call.

    One exchange (`agree_to_compute`), in which each rank sends its settings and digests of its prompts. Raises
    RanksDisagreeError, naming setting, or prompt and field, and both values, unless every rank gives equal ones;
    prompts are not compared with `executor.digest_every` 0.
    """
    compares = engine.config.executor.digest_every > 0
    prompts, digests = agree_to_compute(engine, call, prepare, settings, lambda own: _digests(own) if compares else [])
    _check_digests(engine, digests, prompts)
    return prompts


def agree_to_compute(
    engine: LLMEngine,
    call: str,
    prepare: Callable[[], _Prepared],
    settings: Mapping[str, Any],
    answer_of: Callable[[_Prepared], Any],
) -> tuple[_Prepared, list[Any]]:
    """As `exchange`, of a call in which `prepare` commits new weights (`LLMEngine.commit_weights`). These are compared,
    and the number of the call, and `settings`, JSON values that can be read once `prepare` has returned.

    Raises RanksDisagreeError, too, naming the weight or the setting that differs and both values.
    """
    updates = engine.weight_updates

    def compared() -> dict[str, Any]:
        return {"new weights": updates.uncompared, "number of the call": engine.num_calls, **settings}

    prepared, answers = exchange(engine, call, prepare, lambda own: [compared(), answer_of(own)])
    check_equal("calls", [canonical(given) for given, _ in answers])
    updates.uncompared = {}
    return prepared, [answer for _, answer in answers]


def agree_on_call(
    engine: LLMEngine, call: str, prepare: Callable[[], _Prepared], *, is_optional: bool = False
) -> _Prepared:
    """As `agree_on_prompts`, of a call whose arguments, which `prepare` returns, can cross processes
    (`executor/rpc_coding.py`). Raises RanksDisagreeError unless every rank gives equal arguments.
    """
    arguments, calls = exchange(engine, call, prepare, lambda own: encode_value([call, own]).decode(), is_optional)
    if engine.config.executor.digest_every:
        check_equal("calls", [each.encode() for each in calls])
    return arguments


def fail_call(engine: LLMEngine, call: str, error: BaseException) -> None:
    """This rank will not make `call`, because of `error`: the others, which wait for it there, get RankFailedError with
    its words. Returns once they are there; does nothing in an engine that has ended, and where `error` came to the
    others when one was in `call` already: none is left that waits there.
    """
    if engine.is_closed or engine.engine_channel.size == 1 or call in getattr(error, _CALLS, ()):
        return

    def prepare() -> None:
        raise error

    # The caller raises its own.
    with suppress(BaseException), deferred_signals():
        engine.check_open()
        exchange(engine, call, prepare, lambda _: None)


def exchange(
    engine: LLMEngine,
    call: str,
    prepare: Callable[[], _Prepared],
    answer_of: Callable[[_Prepared], Any],
    is_optional: bool = False,
) -> tuple[_Prepared, list[Any]]:
    """What `prepare` returns, and each rank's answer, in rank order: JSON values; none in an engine of one rank.

    Each rank sends what was called, and its answer or the error that `prepare` raised. Where it raised anywhere,
    nothing is done and the engine can be used again: the rank raises its own error, the others RankFailedError with the
    words of the first, or KeyboardInterrupt where it was that. RanksDisagreeError where they called different things.
    Where a rank does not come, RankFailedError names it, and this engine has ended.

    `is_optional`: with other arguments the call needs no exchange, so ranks that were given such are in a later call.
    Theirs is then still to come, and they go on waiting for it.
    """
    channel = engine.engine_channel
    if channel.size == 1:
        return prepare(), []
    own_error: BaseException | None = None
    try:
        prepared = prepare()
        ready = {"call": call, "is_optional": is_optional, "answer": answer_of(prepared)}
    except BaseException as error:  # whatever it is, Ctrl-C too, the other ranks wait to hear of it
        own_error = error
        ready = {"call": call, "is_optional": is_optional, "error": error_text(error)}
    heartbeat = engine.times.heartbeat
    heartbeat.enter(f"waiting for the other ranks' {call}")
    with engine.exchanging(own_error):
        answers = _answers(channel, ready)
        while not is_optional and any(each["is_optional"] for each in answers):
            answers = _answers(channel, ready)
    heartbeat.enter(BETWEEN_STEPS)
    try:
        if own_error is not None:
            raise own_error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise error_of_rank(rank, answer["error"], f"failed before {call}")
        check_equal("calls", [canonical({"call": answer["call"]}) for answer in answers])
    except BaseException as error:
        # Ranks that go on waiting have heard nothing in the calls that they are in.
        heard_in = [answer["call"] for answer in answers if not is_optional or answer["is_optional"]]
        with suppress(AttributeError):  # of errors that take none
            setattr(error, _CALLS, tuple(heard_in))
        raise
    return prepared, [answer["answer"] for answer in answers]


def _answers(channel: ControlChannel, ready: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's, in rank order."""
    return [json.loads(payload) for payload in channel.gather(canonical(ready))]


def _check_digests(
    engine: LLMEngine, digests: list[list[str]], prompts: Sequence[tuple[EncodedPrompt, SamplingParams]]
) -> None:
    """`digests` by rank. Only a prompt that differs is sent whole."""
    for index, entries in enumerate(zip(*digests)):
        if len(dict.fromkeys(entries)) > 1:
            own = canonical({f"prompts[{index}]": _as_json(*prompts[index])})
            with engine.exchanging():
                everyones = engine.engine_channel.gather(own)
            check_equal("prompts", everyones)
    check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in digests])


def _digests(prompts: Sequence[tuple[EncodedPrompt, SamplingParams]]) -> list[str]:
    digests: list[str] = []
    last, coded = None, b""
    for prompt, sampling in prompts:
        # Prompts of a call often share their parameters, which are more to write down than a short prompt.
        if sampling is not last:
            last, coded = sampling, canonical(asdict(sampling))
        digests.append(blake2b(canonical(_own_json(prompt)) + coded, digest_size=8).hexdigest())
    return digests


def _as_json(prompt: EncodedPrompt, sampling: SamplingParams) -> dict[str, Any]:
    return {**_own_json(prompt), "sampling": asdict(sampling)}


def _own_json(prompt: EncodedPrompt) -> dict[str, Any]:
    own: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
    return own if prompt.pooling is None else {**own, "pooling": asdict(prompt.pooling)}
