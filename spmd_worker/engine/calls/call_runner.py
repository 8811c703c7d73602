"""Runs a call: encoded prompts -> outputs in the caller's order.

The ranks of the engine compare their prompts, invalid prompts are rejected, and one or all replicas answer the rest.
With `gather` and in `turns()` the prompts of a call, and its outputs, are this rank's own.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from spmd_worker.base.config.plain_values import plain_bool, required_bool
from spmd_worker.base.errors import PromptsRefusedError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.compat.adapter_requests import set_in_output
from spmd_worker.compat.call_images import half_window_bytes
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.calls.progress_bar import CallBar, UseTqdm
from spmd_worker.engine.calls.prompt_encoding import Params, PromptEncoder
from spmd_worker.engine.data_parallel.agreement import agree_on_prompts
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls, answer_per_rank
from spmd_worker.engine.data_parallel.prompts import CheckedPrompt, answer_prompts
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.decoder_prompt import RuledParams
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.sampling_params import SamplingParams

OnError = Literal["raise", "row"]

_ON_ERROR: Final = get_args(OnError)
_Given = list[tuple[Encoded, SamplingParams]]
"""Prompts of one call with their parameters."""


class CallRunner:
    """Runs the calls of one engine, one at a time. `replicas` is None for an engine of one replica."""

    def __init__(self, engine: Engine, replicas: Replicas | None, turns: PerRankCalls, encoder: PromptEncoder) -> None:
        self._engine, self._replicas, self._turns, self._encoder = engine, replicas, turns, encoder

    def run(
        self,
        call: str,
        encode: Callable[[], list[Encoded]],
        sampling_params: Params,
        on_error: OnError | None = None,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
    ) -> list[RequestOutput]:
        """Run the user's `call`; with `on_error` None it has no such argument, and raises. An error that `encode`
        raises is raised on this rank and reported to the others.
        """
        with self._engine.calls.inside(call, is_alone=True):
            engine, replicas = self._engine, self._replicas
            # Without an exchange: a rank that cannot continue has no channel, or has caused the others' errors already.
            engine.life.check_open()
            if replicas is not None:
                replicas.check_not_failed()

            def prepare() -> _Given:
                # Errors in `prepare` reach the other ranks: even a truth value may raise, as a tensor's does.
                check_options(on_error, gather, use_tqdm)
                engine.requests.check_idle()
                engine.changes.complete_weights()
                return self._prepared(encode, sampling_params)

            is_per_rank = bool(plain_bool(gather)) or self._turns.is_open
            self._encoder.max_pixel_bytes = self._max_pixel_bytes(is_per_rank=is_per_rank)
            if is_per_rank:
                return self._answer_per_rank(call, prepare, on_error)
            given = agree_on_prompts(engine, call, prepare, {"on_error": "raise" if on_error is None else on_error})
            outputs = self._rejected(call, given, on_error)
            self._load_adapters(given, outputs)
            prompts = _accepted(given, outputs)
            with contextlib.closing(CallBar(use_tqdm, len(prompts), is_shown=engine.is_first_rank)) as bar:
                outputs |= answer_prompts(engine, replicas, prompts, bar.update)
            return _in_order(given, outputs)

    def prepare_queued(
        self, call: str, encode: Callable[[], list[Encoded]], sampling_params: Params
    ) -> list[tuple[CheckedPrompt, LoRARequest | None]]:
        """Prompts of a `call` that leaves them in the queue, and their adapters. Its errors are those of `run`."""
        engine = self._engine
        with engine.calls.inside(call, is_alone=True):
            engine.life.check_open()
            self._turns.check_outside(call)

            def prepare() -> _Given:
                engine.life.check_awake()
                return self._prepared(encode, sampling_params)

            # They are admitted at once.
            self._encoder.max_pixel_bytes = math.inf if engine.is_leader else 0.0
            given = agree_on_prompts(engine, call, prepare, {})
            self._rejected(call, given, None)
            self._load_adapters(given, ())
            requests = [each.lora_request for each, _ in given]
            return list(zip(_accepted(given, ()).values(), requests, strict=True))

    def _prepared(self, encode: Callable[[], list[Encoded]], sampling_params: Params) -> _Given:
        """Encoded prompts with their parameters, before any rank knows those of the others."""
        encoded, pooling, ruled = encode(), self._engine.limits.pooling, RuledParams()
        params = self._encoder.params(sampling_params, len(encoded))
        for index, each in enumerate(encoded):
            if each.pooling is not None and pooling is not None:
                params[index] = pooled_sampling(each.pooling, pooling)
            elif each.form is not None and params[index].structured_outputs is not None:
                each.error = "structured_outputs and tool_choice both constrain the answer: leave one out"
            elif each.form is not None:
                params[index] = replace(params[index], structured_outputs=each.form).frozen()
            try:
                params[index] = each.completed(params[index], ruled)
            except ValueError as error:
                each.error = each.error or str(error)
        self._prepare_adapters(encoded)
        deliver_signals()
        return list(zip(encoded, params, strict=True))

    def _prepare_adapters(self, encoded: Sequence[Encoded]) -> None:
        lora = [each.lora_request for each in encoded if each.error is None and each.lora_request]
        prompt = [each.prompt_adapter for each in encoded if each.error is None and each.prompt_adapter]
        for adapters, requests in ((self._engine.adapters, lora), (self._engine.prompt_adapters, prompt)):
            if requests:
                adapters.prepare(requests)

    def _max_pixel_bytes(self, *, is_per_rank: bool) -> float:
        """Pixels of a call's images that this rank holds before they are needed: a leader needs them later, and the
        pixels of per-rank prompts are sent to the leaders that need them.
        """
        engine = self._engine
        if is_per_rank and engine.engine_channel.size > 1:
            return math.inf
        return half_window_bytes(engine.config.job.media_window_gib) if engine.is_leader else 0.0

    def _answer_per_rank(
        self, call: str, prepare: Callable[[], _Given], on_error: OnError | None
    ) -> list[RequestOutput]:
        """Answer prompts that only this rank has."""
        given: _Given = []
        outputs: dict[int, RequestOutput] = {}
        accepted: dict[int, CheckedPrompt] = {}

        def prepare_accepted() -> list[CheckedPrompt]:
            given.extend(prepare())
            outputs.update(self._rejected(call, given, on_error))
            self._load_adapters(given, outputs, is_per_rank=True)
            accepted.update(_accepted(given, outputs))
            return list(accepted.values())

        if self._turns.is_open:
            # An error of this rank's prompts is not reported to the others: it may call again.
            answered = self._turns.answer(prepare_accepted())
        else:
            answered = answer_per_rank(self._engine, self._replicas, f"{call}(gather=True)", prepare_accepted)
        for (index, prompt), output in zip(accepted.items(), answered, strict=True):
            output.request_id, output.prompt = str(index), prompt.content.text
            output.encoder_prompt = prompt.content.encoder_text
            outputs[index] = output
        return _in_order(given, outputs)

    def _load_adapters(self, given: _Given, rejected: Collection[int], *, is_per_rank: bool = False) -> None:
        """Set the digest of each prompt's adapter, which is loaded on all ranks if it is not yet. Per-rank prompts are
        known to this rank alone: ValueError for an adapter that is not loaded.
        """
        accepted = [each for index, (each, _) in enumerate(given) if index not in rejected]
        self._load_prompt_adapters(accepted, is_per_rank=is_per_rank)
        adapted = [each for each in accepted if each.lora_request]
        if not adapted:
            return
        requests = [each.lora_request for each in adapted]
        adapters = self._engine.adapters
        for request in requests if is_per_rank else ():
            assert request is not None, "filtered above"
            if request.load_inplace or request.lora_int_id not in adapters.list():
                raise ValueError(
                    f"lora_request={request} would be loaded, which all ranks do together, for prompts of this rank "
                    f"alone: call add_lora before, on every rank, and leave out load_inplace here"
                )
        for each, digest in zip(adapted, adapters.digests_of(requests, is_prepared=True), strict=True):
            each.adapter = digest

    def _load_prompt_adapters(self, accepted: Sequence[Encoded], *, is_per_rank: bool) -> None:
        requests = [each.prompt_adapter for each in accepted]
        if not any(requests):
            return
        loaded = self._engine.prompt_adapters.list()
        for request in requests if is_per_rank else ():
            if request is not None and request.prompt_adapter_id not in loaded:
                raise ValueError(
                    f"prompt_adapter_request={request} would be loaded, which all ranks do together, for prompts of "
                    f"this rank alone: call add_prompt_adapter before, on every rank"
                )
        found = self._engine.prompt_adapters.virtual_tokens(requests, is_prepared=True)
        for each, virtual in zip(accepted, found, strict=True):
            each.virtual = virtual

    def _rejected(self, call: str, given: _Given, on_error: OnError | None) -> dict[int, RequestOutput]:
        """Error outputs, by index, of invalid prompts. Raises PromptsRefusedError unless `on_error` is "row"."""
        outputs = {}
        for index, (each, sampling) in enumerate(given):
            try:
                if each.error is not None:
                    raise ValueError(each.error)
                each.token_ids = self._engine.limits.truncate(each, sampling)
                self._engine.requests.check(each, sampling)
            except ValueError as error:
                outputs[index] = RequestOutput(
                    str(index), each.text, list(each.token_ids), finished=True, error=str(error)
                )
        if outputs and on_error != "row":
            reasons = {index: str(each.error) for index, each in outputs.items()}
            raise PromptsRefusedError(call, len(given), reasons, has_on_error=on_error is not None)
        return outputs


def _accepted(given: _Given, rejected: Collection[int]) -> dict[int, CheckedPrompt]:
    return {
        index: CheckedPrompt(each, sampling) for index, (each, sampling) in enumerate(given) if index not in rejected
    }


def _in_order(given: _Given, outputs: dict[int, RequestOutput]) -> list[RequestOutput]:
    for index, (each, _) in enumerate(given):
        set_in_output(outputs[index], each.lora_request)
    return [outputs[index] for index in range(len(given))]


def without_error(output: RequestOutput) -> RequestOutput:
    """The output itself. Raises ValueError if it is an error."""
    if output.error is not None:
        raise ValueError(output.error)
    return output


def check_options(on_error: Any, gather: Any, use_tqdm: Any) -> None:
    """Raise TypeError or ValueError for invalid options of a call."""
    if not isinstance(on_error, str | None):
        raise TypeError(f"on_error is a {type(on_error).__name__}: give one of {', '.join(map(repr, _ON_ERROR))}")
    if on_error not in (None, *_ON_ERROR):
        raise ValueError(f"on_error={str(on_error)[:80]!r} must be one of {', '.join(map(repr, _ON_ERROR))}")
    required_bool("gather", gather)
    if plain_bool(use_tqdm) is None and not callable(use_tqdm):
        raise TypeError(f"use_tqdm is a {type(use_tqdm).__name__}: give True, False, or a function that makes the bar")
