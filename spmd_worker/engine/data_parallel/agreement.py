"""Agreement before a call runs: every rank of an engine is ready to make it, with the same prompts or arguments.

A rank in a block of `LLM.turns` makes none of these calls (`PerRankCalls.check_outside`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final, TypeVar

from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.interruption import error_of_rank, error_text
from spmd_worker.executor.rpc_coding import encode_value
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.agreement import canonical, check_equal
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_CALLS: Final = "_spmd_worker_calls"
"""Attribute of an error raised by an exchange: the calls that the ranks were in."""
_NEW: Final = "new weights"
_SAME_WEIGHTS: Final = "load these weights again, the same on every rank"
_SAME_CALLS: Final = "make the same call on every rank"


_Prepared = TypeVar("_Prepared")


def agree_on_prompts(
    engine: Engine,
    call: str,
    prepare: Callable[[], list[tuple[Encoded, SamplingParams]]],
    settings: Mapping[str, Any],
) -> list[tuple[Encoded, SamplingParams]]:
    """Result of `prepare`, once every rank has the same; `call` is the user's call, `settings` apply to all of its
    prompts. Every rank of the engine makes the same call.

    One exchange (`agree_to_compute`), in which each rank sends its settings and digests of its prompts. Raises
    RanksDisagreeError, naming the setting, or prompt and field, and both values, unless every rank passes equal ones;
    prompts are not compared with `executor.digest_every` 0.
    """
    compares = engine.config.executor.digest_every > 0
    prompts, digests = agree_to_compute(engine, call, prepare, settings, lambda own: _digests(own) if compares else [])
    _check_digests(engine, digests, prompts)
    return prompts


def agree_to_compute(
    engine: Engine,
    call: str,
    prepare: Callable[[], _Prepared],
    settings: Mapping[str, Any],
    answer_of: Callable[[_Prepared], Any],
) -> tuple[_Prepared, list[Any]]:
    """`exchange` for a call in which `prepare` commits new weights (`Changes.commit_weights`). They are compared, as
    are the number of the call and `settings`, JSON values that can be read once `prepare` has returned.

    RanksDisagreeError names the weight or the setting that differs and both values, too.
    """
    updates = engine.changes.weights

    def compared() -> dict[str, Any]:
        return {_NEW: updates.uncompared, "number of the call": engine.requests.num_calls, **settings}

    prepared, answers = exchange(engine, call, prepare, lambda own: [compared(), answer_of(own)])
    check_equal("calls", [canonical({_NEW: given[_NEW]}) for given, _ in answers], _SAME_WEIGHTS)
    check_equal("calls", [canonical(given) for given, _ in answers], _SAME_CALLS)
    updates.uncompared = {}
    return prepared, [answer for _, answer in answers]


def agree_on_call(
    engine: Engine, call: str, prepare: Callable[[], _Prepared], *, is_optional: bool = False
) -> _Prepared:
    """`agree_on_prompts` for a call whose arguments, which `prepare` returns, can cross processes
    (`executor/rpc_coding.py`). Raises RanksDisagreeError unless every rank passes equal arguments, and has committed
    equal weights unless the call `is_optional`.
    """
    updates = engine.changes.weights

    def answer_of(own: _Prepared) -> list[Any]:
        named = own if isinstance(own, dict) else {call: own}
        coded = {"call": call, **{name: json.loads(encode_value(value)) for name, value in named.items()}}
        return [{} if is_optional else updates.uncompared, canonical(coded).decode()]

    arguments, answers = exchange(engine, call, prepare, answer_of, is_optional)
    check_equal("calls", [canonical({_NEW: weights}) for weights, _ in answers], _SAME_WEIGHTS)
    if engine.config.executor.digest_every:
        check_equal("calls", [each.encode() for _, each in answers], _SAME_CALLS)
    if not is_optional:
        updates.uncompared = {}
    return arguments


def fail_call(engine: Engine, call: str, error: BaseException) -> None:
    """Report that this rank will not make `call`, because of `error`: the others, which wait for it there, get
    RankFailedError with its text. Returns once they are there; does nothing in an engine that has ended, or if `error`
    was reported while a rank was in `call` already: none is left waiting there.
    """
    if engine.is_closed or engine.engine_channel.size == 1 or call in getattr(error, _CALLS, ()):
        return

    def prepare() -> None:
        raise error

    # The caller raises its own.
    with suppress(BaseException), deferred_signals():
        engine.life.check_open()
        exchange(engine, call, prepare, lambda _: None)


def exchange(
    engine: Engine,
    call: str,
    prepare: Callable[[], _Prepared],
    answer_of: Callable[[_Prepared], Any],
    is_optional: bool = False,
) -> tuple[_Prepared, list[Any]]:
    """Result of `prepare`, and each rank's answer, in rank order: JSON values; empty in an engine of one rank.

    Each rank sends the name of its call, and its answer or the error that `prepare` raised. If it raised anywhere,
    nothing is done and the engine can be used again: the rank raises its own error, the others RankFailedError with the
    text of the first, or KeyboardInterrupt for one. RanksDisagreeError if they called different things. If a rank does
    not come, RankFailedError names it, and this engine has ended.

    `is_optional`: with other arguments the call needs no exchange, so ranks that passed such are in a later call. Their
    own exchange is then still to come, and they continue to wait for it.
    """
    channel = engine.engine_channel
    if channel.size == 1:
        return prepare(), []
    own_error: BaseException | None = None
    try:
        prepared = prepare()
        ready = {"call": call, "is_optional": is_optional, "answer": answer_of(prepared)}
    except BaseException as error:  # any error, Ctrl-C too, is sent to the waiting ranks
        own_error = error
        ready = {"call": call, "is_optional": is_optional, "error": error_text(error)}
    heartbeat = engine.times.heartbeat
    heartbeat.enter(f"waiting for the other ranks' {call}")
    with engine.life.exchanging(own_error):
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
        check_equal("calls", [canonical({"call": answer["call"]}) for answer in answers], _SAME_CALLS)
    except BaseException as error:
        # Ranks that continue to wait have heard nothing in their calls.
        heard_in = [answer["call"] for answer in answers if not is_optional or answer["is_optional"]]
        with suppress(AttributeError):  # errors without attributes
            setattr(error, _CALLS, tuple(heard_in))
        raise
    return prepared, [answer["answer"] for answer in answers]


def _answers(channel: ControlChannel, ready: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of all ranks, in rank order."""
    return [json.loads(payload) for payload in channel.gather(canonical(ready))]


def _check_digests(engine: Engine, digests: list[list[str]], prompts: Sequence[tuple[Encoded, SamplingParams]]) -> None:
    """Compare `digests`, by rank. Only a prompt that differs is sent completely."""
    for index, entries in enumerate(zip(*digests)):
        if len(dict.fromkeys(entries)) > 1:
            prompt, sampling = prompts[index]
            own = canonical({f"prompts[{index}]": {**_compared_fields(prompt), "sampling": asdict(sampling)}})
            with engine.life.exchanging():
                everyones = engine.engine_channel.gather(own)
            check_equal("prompts", everyones, _SAME_CALLS)
    check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in digests], _SAME_CALLS)


def _digests(prompts: Sequence[tuple[Encoded, SamplingParams]]) -> list[str]:
    digests: list[str] = []
    last, coded = None, b""
    for prompt, sampling in prompts:
        # Prompts of a call often share their parameters, which cost more to encode than a short prompt.
        if sampling is not last:
            last, coded = sampling, canonical(asdict(sampling))
        digests.append(blake2b(canonical(_compared_fields(prompt)) + coded, digest_size=8).hexdigest())
    return digests


def _compared_fields(prompt: Encoded) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
    if prompt.priority:
        fields["priority"] = prompt.priority
    if prompt.rows is not None:
        fields["prompt_embeds"] = blake2b(prompt.rows.content, digest_size=8).hexdigest()
    if prompt.media_items:
        fields["images"] = [each.media_id.hex() for each in prompt.media_items]
    if prompt.encoder is not None:
        fields["encoder_input"] = [prompt.encoder.media_id.hex(), *prompt.encoder.token_ids]
    if prompt.pooling is not None:
        fields["pooling"] = asdict(prompt.pooling)
    if prompt.lora_request is not None:
        # The ranks' folders may differ: contents are compared when the adapter is loaded.
        request = prompt.lora_request
        fields["lora_request"] = {"lora_name": request.lora_name, "lora_int_id": request.lora_int_id}
    if prompt.prompt_adapter is not None:
        wanted = prompt.prompt_adapter
        name, number, count = wanted.name, wanted.prompt_adapter_id, wanted.prompt_adapter_num_virtual_tokens
        fields["prompt_adapter_request"] = {"name": name, "id": number, "num_virtual_tokens": count}
    return fields
