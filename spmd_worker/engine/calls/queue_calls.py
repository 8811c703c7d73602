"""Calls that queue prompts and fetch their answers later: `LLM.enqueue` and `wait_for_completion`."""

import contextlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.compat.adapter_requests import LoRARequests, PromptAdapterRequests, set_adapters
from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.prompts import Encoded, Prompt
from spmd_worker.engine.calls.call_runner import CallRunner
from spmd_worker.engine.calls.progress_bar import CallBar, UseTqdm
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.data_parallel.agreement import exchange
from spmd_worker.engine.data_parallel.output_coding import decode_outputs, encode_outputs
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.lockstep.agreement import canonical, check_equal
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams


class RequestNames(Protocol):
    """Names of an engine's open requests (`NamedRequests`)."""

    def has(self, name: str) -> bool: ...

    def add(self, name: str, request_id: RequestId, lora_request: LoRARequest | None) -> None: ...


class QueueCalls:
    """Methods of `LLM` for queued prompts, which are divided among the replicas, in turn."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        runner: CallRunner,
        replicas: Replicas | None,
        turns: PerRankCalls,
        names: RequestNames,
    ) -> None:
        self._engine, self._encoder, self._runner = engine, encoder, runner
        self._replicas, self._turns, self._names = replicas, turns, names
        self._num_enqueued = 0
        self._open: dict[str, bool] = {}
        """Ids whose output was not returned; true for those that this replica answers."""
        self._answered: dict[str, RequestOutput] = {}

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[str]:
        """Queue prompts and return their ids, for `wait_for_completion` and `llm_engine.abort_request`; nothing is
        computed yet. Arguments, checks, errors and random numbers are those of `generate`: every rank passes the same
        prompts. While generation is paused, or weights are loaded, prompts can be queued too. `use_tqdm` has no effect.

        `llm_engine.step` computes them as well, and returns the outputs of those that end in it.
        """

        def encode() -> list[Encoded]:
            encoded = self._encoder.encode(prompts, sampling_params)
            check_extras(tokenization_kwargs, mm_processor_kwargs)
            self._encoder.set_priorities(encoded, priority)
            set_adapters(encoded, lora_request, prompt_adapter_request)
            return encoded

        engine = self._engine
        with engine.calls.inside("enqueue", is_alone=True):
            given = self._runner.prepare_queued("enqueue", encode, sampling_params)
            first = self._num_enqueued
            ids = [str(first + index) for index in range(len(given))]
            for name in ids:
                if self._names.has(name):
                    raise ValueError(
                        f"request_id={name!r} is the name of an open request of llm_engine.add_request, and of the "
                        f"next prompt of enqueue: give add_request names that are not numbers"
                    )
            call, replica = engine.requests.num_calls, engine.engine_channel.rank // engine.channel.size
            engine.requests.num_calls += 1
            self._num_enqueued += len(given)
            for index, (name, (prompt, adapter)) in enumerate(zip(ids, given, strict=True)):
                # Not each call's first for the first replica: a call may have a single prompt.
                is_own = (first + index) % engine.config.parallel.data_parallel_size == replica
                self._open[name] = is_own
                if is_own:
                    number = engine.requests.admit(prompt.content, prompt.sampling, index=index, call=call)
                    self._names.add(name, number, adapter)
            return ids

    def wait_for_completion(
        self, request_ids: Sequence[str] | None = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Outputs of prompts of `enqueue`, by their ids and in their order; without ids, of all that were not returned
        yet, in the order in which they were queued. Every rank calls this with the same ids, and gets every output.

        Requests of `llm_engine.add_request` are computed meanwhile; the next `llm_engine.step` returns their outputs.
        Raises ValueError for an id without a prompt whose output was not returned; RuntimeError while weights or cache
        are asleep, and in a pause that keeps some of the prompts, which can be fetched later. An exception of a signal
        handler aborts all requests; what they have is returned by the next call.
        """
        engine = self._engine
        with engine.calls.inside("wait_for_completion", is_alone=True):
            engine.life.check_open()
            self._turns.check_outside("wait_for_completion")
            wanted = self._wanted(request_ids)
            missing = [name for name in wanted if self._open[name] and name not in self._answered]
            with contextlib.closing(CallBar(use_tqdm, len(missing), is_shown=engine.is_first_rank)) as bar:
                if self._replicas is None:
                    self._answer(missing, bar, None)
                else:
                    with self._replicas.taking_steps() as round_:
                        self._answer(missing, bar, round_)
                    self._share(self._replicas, wanted)
            num_kept = sum(name not in self._answered for name in wanted)
            if num_kept:
                raise RuntimeError(
                    f"generation is paused, and {num_kept} of {len(wanted)} enqueued prompts wait for its end: call "
                    f"resume_generation() before wait_for_completion"
                )
            # An exception after this would lose what is returned.
            deliver_signals()
            for name in wanted:
                del self._open[name]
            return [self._answered.pop(name) for name in wanted]

    def _wanted(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ids to return, the same on every rank. Those that `llm_engine.step` returned, on any rank, are forgotten."""

        def prepare() -> list[str] | None:
            self._engine.life.check_awake()
            self._engine.changes.complete_weights()
            return None if request_ids is None else _checked_ids(request_ids)

        arguments = (self._engine, "wait_for_completion", prepare)
        given, answers = exchange(*arguments, lambda own: [own, self._returned()])
        if self._engine.config.executor.digest_every:
            check_equal("calls", [canonical({"request_ids": each}) for each, _ in answers])
        for name in chain(self._returned(), *[returned for _, returned in answers]):
            self._open.pop(name, None)
        for name in given or ():
            if name not in self._open:
                raise ValueError(f"request_ids has {name!r}: give ids of enqueue whose output was not returned yet")
        return list(self._open) if given is None else list(dict.fromkeys(given))

    def _returned(self) -> list[str]:
        """Ids of this replica's prompts whose outputs `llm_engine.step` returned."""
        own = [name for name, is_own in self._open.items() if is_own and name not in self._answered]
        return [name for name in own if not self._names.has(name)]

    def _answer(self, names: Sequence[str], bar: CallBar, round_: ReplicaRound | None) -> None:
        """Run steps until the prompts are answered, or none is computed because of a pause."""
        engine, missing = self._engine, dict.fromkeys(names)
        others: list[RequestOutput] = []
        try:
            with engine.interruptible() as interruption:
                while missing:
                    if round_ is not None:
                        round_.send_heartbeat()
                    outputs = engine.step()
                    for output in outputs:
                        if output.finished and output.request_id in self._open:
                            self._answered[output.request_id] = output
                            bar.update(output.request_id in missing)
                            missing.pop(output.request_id, None)
                        else:
                            others.append(output)
                    if not outputs and engine.pauses.is_paused and not engine.scheduler.has_unfinished:
                        break
            interruption.check()
        finally:
            if others:
                engine.requests.kept_outputs = others

    def _share(self, replicas: Replicas, wanted: Sequence[str]) -> None:
        """Exchange the outputs of the replicas' prompts."""
        own: dict[int, RequestOutput] = {}
        if self._engine.is_leader:
            own = {
                index: self._answered[name]
                for index, name in enumerate(wanted)
                if self._open[name] and name in self._answered
            }
        for payload in replicas.end_steps(encode_outputs(own) if own else b""):
            for index, output in (decode_outputs(payload) if payload else {}).items():
                self._answered.setdefault(wanted[index], output)


def _checked_ids(request_ids: Any) -> list[str]:
    if isinstance(request_ids, str) or not all(isinstance(each, str) for each in request_ids):
        raise TypeError(f"request_ids is {request_ids!r}: give a list of ids that enqueue returned")
    return list(request_ids)
