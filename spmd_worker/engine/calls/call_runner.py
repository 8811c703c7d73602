"""Runs a call: encoded prompts -> outputs in the caller's order.

The ranks of the engine compare what each was given, prompts that can never be answered are refused, and the rest is
answered by this replica or by all of them. With `gather` and in turns the prompts of a call are this rank's own, and so
are its outputs.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, get_args

from spmd_worker.base.config.plain_values import plain_bool
from spmd_worker.base.errors import PromptsRefusedError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.calls.progress_bar import CallBar, UseTqdm
from spmd_worker.engine.calls.prompt_encoding import Params, PromptEncoder
from spmd_worker.engine.data_parallel.agreement import agree_on_prompts
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankPrompt, PerRankCalls, answer_own
from spmd_worker.engine.data_parallel.prompts import RoundPrompt, answer_alone, answer_together
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.sampling_params import SamplingParams

OnError = Literal["raise", "row"]

_ON_ERROR: Final = get_args(OnError)
_Given = list[tuple[Encoded, SamplingParams]]
"""Prompts of one call with their parameters."""


class CallRunner:
    """Runs the calls of one engine, one at a time. `replicas` None: it has no other replica."""

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
        """`call` is what the user called; where `on_error` is None it has no such argument, and raises. What `encode`
        raises is this rank's error, and the others hear of it.
        """
        with self._engine.calls.inside(call, is_alone=True):
            return self._run(call, encode, sampling_params, on_error, gather, use_tqdm)

    def _run(
        self,
        call: str,
        encode: Callable[[], list[Encoded]],
        sampling_params: Params,
        on_error: OnError | None,
        gather: bool,
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        engine, replicas = self._engine, self._replicas
        # Without asking the others: a rank that cannot go on has no channel, or was the cause of their errors already.
        engine.life.check_open()
        if replicas is not None:
            replicas.check_whole()

        def prepare() -> _Given:
            # Here, where the other ranks hear of it: even whether a value is true may raise, as of a tensor.
            check_options(on_error, gather, use_tqdm)
            engine.requests.check_idle()
            engine.changes.complete_weights()
            encoded, pooling = encode(), engine.limits.pooling
            params = self._encoder.params(sampling_params, len(encoded))
            for index, each in enumerate(encoded):
                if each.pooling is not None and pooling is not None:
                    params[index] = pooled_sampling(each.pooling, pooling)
                elif each.form is not None and params[index].structured_outputs is not None:
                    each.error = "structured_outputs and tool_choice both say the answer's form: leave one out"
                elif each.form is not None:
                    params[index] = replace(params[index], structured_outputs=each.form).frozen()
                try:
                    params[index] = each.salted(params[index])
                except ValueError as error:
                    each.error = each.error or str(error)
            deliver_signals()
            return list(zip(encoded, params, strict=True))

        if plain_bool(gather) or self._turns.is_open:
            return self._answer_own(call, prepare, on_error)
        given = agree_on_prompts(engine, call, prepare, {"on_error": "raise" if on_error is None else on_error})
        number = engine.requests.num_calls
        outputs = self._refused(call, given, on_error)
        prompts = [
            RoundPrompt(number, index, each.text, each.token_ids, sampling, each.rope_regime, each.pooling)
            for index, (each, sampling) in enumerate(given)
            if index not in outputs
        ]
        engine.requests.num_calls += 1
        answer = partial(answer_alone, engine) if replicas is None else partial(answer_together, replicas)
        with contextlib.closing(CallBar(use_tqdm, len(prompts), is_shown=engine.is_first_rank)) as bar:
            outputs |= answer(prompts, bar.update)
        return [outputs[index] for index in range(len(given))]

    def _answer_own(self, call: str, prepare: Callable[[], _Given], on_error: OnError | None) -> list[RequestOutput]:
        """Of prompts that only this rank has."""
        given: _Given = []
        outputs: dict[int, RequestOutput] = {}
        accepted: list[int] = []

        def prepare_own() -> list[PerRankPrompt]:
            given.extend(prepare())
            outputs.update(self._refused(call, given, on_error))
            accepted.extend(index for index in range(len(given)) if index not in outputs)
            return [
                PerRankPrompt(each.token_ids, sampling, each.rope_regime, each.pooling)
                for each, sampling in map(given.__getitem__, accepted)
            ]

        if self._turns.is_open:
            # What this rank raises here is nobody else's business: it may ask again.
            answered = self._turns.ask(prepare_own())
        else:
            answered = answer_own(self._engine, self._replicas, f"{call}(gather=True)", prepare_own)
        for index, output in zip(accepted, answered, strict=True):
            output.request_id, output.prompt = str(index), given[index][0].text
            outputs[index] = output
        return [outputs[index] for index in range(len(given))]

    def _refused(self, call: str, given: _Given, on_error: OnError | None) -> dict[int, RequestOutput]:
        """Outputs with errors, by index, of the prompts that can never be answered. Raises PromptsRefusedError where
        `on_error` says so.
        """
        outputs = {}
        for index, (each, sampling) in enumerate(given):
            try:
                if each.error is not None:
                    raise ValueError(each.error)
                each.token_ids = tuple(self._engine.limits.truncate(each.token_ids, sampling))
                self._engine.requests.check(each.token_ids, sampling, each.pooling)
            except ValueError as error:
                outputs[index] = RequestOutput(
                    str(index), each.text, list(each.token_ids), finished=True, error=str(error)
                )
        if outputs and on_error != "row":
            reasons = {index: str(each.error) for index, each in outputs.items()}
            raise PromptsRefusedError(call, len(given), reasons, has_on_error=on_error is not None)
        return outputs


def without_error(output: RequestOutput) -> RequestOutput:
    """The output. Raises ValueError where it is an error."""
    if output.error is not None:
        raise ValueError(output.error)
    return output


def check_options(on_error: Any, gather: Any, use_tqdm: Any) -> None:
    """Raises TypeError or ValueError for what they cannot be."""
    if not isinstance(on_error, str | None):
        raise TypeError(f"on_error is a {type(on_error).__name__}: give one of {', '.join(map(repr, _ON_ERROR))}")
    if on_error not in (None, *_ON_ERROR):
        raise ValueError(f"on_error={str(on_error)[:80]!r} must be one of {', '.join(map(repr, _ON_ERROR))}")
    if plain_bool(gather) is None:
        raise TypeError(f"gather is a {type(gather).__name__}: give True or False")
    if plain_bool(use_tqdm) is None and not callable(use_tqdm):
        raise TypeError(f"use_tqdm is a {type(use_tqdm).__name__}: give True, False, or what makes the bar")
