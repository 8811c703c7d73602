"""Requests of an engine on this rank: their numbers, limits, prompts and times, from admission to output."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spmd_worker.base.config.plain_values import plain_text
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.life import Life
from spmd_worker.engine.outputs import request_output
from spmd_worker.engine.validation import RequestLimits, as_request_ids
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.sequence.events import Abort, Admit
from spmd_worker.replica.sequence.outputs import RequestMetrics, RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream, unnamed_stream, whole_number
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.replica.sequence.taken_params import taken_params
from spmd_worker.resolved import ResolvedRun


class Requests:
    """Requests that were added here. Only rank 0's are answered: other ranks count the requests of its events.

    `add`, `admit` and `abort` may be called in any thread while another one steps.
    """

    def __init__(self, resolved: ResolvedRun, calls: CallGuard, life: Life) -> None:
        model_config, tokenizer = resolved.model_config, resolved.tokenizer
        self.limits = RequestLimits(
            model_config.vocab_size,
            resolved.max_model_len,
            has_tokenizer=tokenizer is not None,
            grammars=GrammarCompiler(lambda: tokenizer, model_config.vocab_size, model_config.eos_token_ids),
            pooling=model_config.pooling,
        )
        self.num_requests = 0
        self.num_calls = 0
        """Lists of prompts that were given to the engine: the same on every rank."""
        self.num_unnamed = 0
        """Requests with neither custom id nor index."""
        self.times = RequestTimes()
        self.kept_outputs: list[Any] | None = None
        """Outputs of a step after which a signal's handler raised: the next call of `step` gives them, without a step,
        because the other ranks have got theirs.
        """
        self._resolved, self._tokenizer, self._calls, self._life = resolved, tokenizer, calls, life
        self._prompts: dict[RequestId, str | None] = {}
        self._last_taken = (resolved.default_sampling, resolved.default_sampling)

    @property
    def open_ids(self) -> tuple[RequestId, ...]:
        """Requests that have not ended, in the order in which they were added."""
        return tuple(self._prompts)

    @property
    def num_unfinished(self) -> int:
        """Requests added here and not answered yet."""
        kept = self.kept_outputs or []
        return len(self._prompts) + len([output for output in kept if output.finished])

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do or to hand out here."""
        return bool(self._prompts or self.kept_outputs)

    def check_idle(self) -> None:
        """Raise RuntimeError unless new prompts would have the engine to themselves: open, whole, awake, nothing
        waiting.
        """
        self.check_idle_or_asleep()
        self._life.check_awake()

    def check_idle_or_asleep(self) -> None:
        """As `check_idle`; something may sleep."""
        self._life.check_open()
        if self.has_unfinished:
            raise RuntimeError(
                f"{self.num_unfinished} requests of llm_engine.add_request are not answered yet: call llm_engine.step "
                f"until they are"
            )

    def check(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, pooling: PoolingParams | None = None
    ) -> None:
        """Raise ValueError for a request that could never be answered, TypeError for what is none. Needs no other
        rank.
        """
        self.limits.check(prompt_token_ids, sampling, pooling)
        self._taken(sampling)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        custom_id: str | None = None,
        index: int | None = None,
    ) -> RequestId:
        """Check a request, raising ValueError or TypeError as `check` does, and queue it (`admit`)."""
        for name, text in (("prompt", prompt), ("custom_id", custom_id)):
            if not isinstance(text, str | None):
                raise TypeError(f"{name} is a {type(text).__name__}: give text")
        prompt, custom_id = plain_text(prompt), plain_text(custom_id)
        prompt_token_ids = self.limits.truncate(prompt_token_ids, sampling)
        self.check(prompt_token_ids, sampling)
        return self.admit(prompt_token_ids, sampling, prompt=prompt, custom_id=custom_id, index=index)

    def admit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        custom_id: str | None = None,
        index: int | None = None,
        call: int = 0,
        rope_regime: int | None = None,
        pooling: PoolingParams | None = None,
    ) -> RequestId:
        """Queue a request that `check` let pass for the next step. `custom_id`, else `index` in call number `call`,
        else the order of requests that have neither names its randomness. `rope_regime` None is its own. `pooling` is
        as `taken_pooling` leaves it, with the `sampling` of `pooled_sampling`.
        """
        with self._calls.queueing("add_request"):
            self._life.check_not_closed()
            self._life.check_awake()
            seed, request_id = self._resolved.config.seed, RequestId(self.num_requests)
            if custom_id is None and index is None:
                stream = unnamed_stream(seed, sampling.seed, self.num_unnamed)
                self.num_unnamed += 1
            else:
                row = 0 if index is None else whole_number("index", index)
                stream = random_stream(seed, sampling.seed, custom_id, row, call)
            regime = self.rope_regime(len(prompt_token_ids), sampling) if rope_regime is None else rope_regime
            request = Request(request_id, tuple(prompt_token_ids), self._taken(sampling), stream, regime, pooling)
            self.num_requests += 1
            self._prompts[request_id] = prompt
            self.times.add(request_id)
            self._calls.queue(Admit(request))
            return request_id

    def rope_regime(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        """`ModelConfig.rope_regime` of a row with these parameters."""
        max_model_len = self._resolved.max_model_len
        most = min(num_prompt_tokens + (sampling.max_tokens or max_model_len), max_model_len)
        # Nothing is computed with the last token that is sampled.
        return self._resolved.model_config.rope_regime(num_prompt_tokens, max(most - 1, num_prompt_tokens))

    def abort(self, request_ids: str | int | Iterable[str | int]) -> None:
        """End one request or several at the next step; each output so far comes back with finish reason "abort".

        Ids are what `add` returned or what outputs have; one of no unfinished request is not an error. Raises
        TypeError for what is no id, and none is ended then.
        """
        numbers = as_request_ids(request_ids)
        with self._calls.queueing("abort_request"):
            for number in numbers:
                if number in self._prompts:
                    self._calls.queue(Abort(number))

    def count(self, request: Request) -> None:
        """Requests that this rank did not add itself have their numbers too."""
        with self._calls.lock:
            self.num_requests = max(self.num_requests, request.request_id + 1)

    def continue_from(self, num_requests: int, num_calls: int, num_unnamed: int) -> None:
        """Go on counting where the engine ended in whose place this one stands, the same on every rank: no number names
        two things.
        """
        self.num_requests, self.num_calls, self.num_unnamed = num_requests, num_calls, num_unnamed

    def metrics(self, group: SequenceGroup) -> RequestMetrics | None:
        """Times of a request; None for one that was not added here."""
        num_output_tokens = sum([len(each.output_token_ids) for each in group.sequences])
        return self.times.read(group.request.request_id, num_output_tokens)

    def finish(self, group: SequenceGroup) -> RequestOutput:
        """The output of a request that has ended."""
        request_id, metrics = group.request.request_id, self.metrics(group)
        self.times.forget(request_id)
        return request_output(group, self._prompts.pop(request_id, None), self._tokenizer, metrics)

    def _taken(self, sampling: SamplingParams) -> SamplingParams:
        """Rows often share their parameters: the last ones are remembered."""
        # Read and set once each: `check` may be called in several threads.
        last = self._last_taken
        if sampling is not last[0]:
            frozen = sampling.frozen()
            last = self._last_taken = (frozen, taken_params(frozen, self._tokenizer, self.limits.vocab_size))
        return last[1]


class RequestTimes:
    """Arrival, beginning and end of each request on this rank, for `RequestOutput.metrics`. Decides nothing."""

    def __init__(self) -> None:
        self._metrics: dict[RequestId, RequestMetrics] = {}

    def add(self, request_id: RequestId) -> None:
        """A request was queued now."""
        self._metrics[request_id] = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())

    def arrived(self, request_id: RequestId, arrival_time: float) -> None:
        """A request that was added had come before: at `arrival_time`, in seconds since the epoch."""
        metrics = self._metrics.get(request_id)
        if metrics is not None:
            metrics.arrival_time = arrival_time

    def begin(self, plan: StepPlan) -> None:
        """A step was planned now. What is new in it is in `groups`: a step that only decodes costs nothing here."""
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is not None and not metrics.scheduled_ts:
                metrics.scheduled_ts = time.monotonic()

    def end(self, plan: StepPlan) -> None:
        """The step has sampled now."""
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is None or metrics.first_token_ts:
                continue
            if any(sequence.num_samples for sequence in group.sequences):
                metrics.first_token_ts = metrics.last_token_ts = time.monotonic()
                metrics.first_token_latency = time.time() - metrics.arrival_time

    def read(self, request_id: RequestId, num_output_tokens: int) -> RequestMetrics | None:
        """What is known of a request whose last tokens have come now; None for one that was not added here."""
        metrics = self._metrics.get(request_id)
        if metrics is None:
            return None
        last_token_ts = time.monotonic() if num_output_tokens else metrics.last_token_ts
        return replace(metrics, num_generation_tokens=num_output_tokens, last_token_ts=last_token_ts)

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        self._metrics.pop(request_id, None)
