"""Tokens in, tokens out: the engine that every rank runs a replica of.

One step is three calls, all in one direction: `schedule`, `agree`, `execute_model`; then what was sampled goes back
into the scheduler. Rank 0's requests and aborts become events of the next message; what other ranks ask for is ignored,
because only rank 0 touches the outside world.

A pipeline of d stages has d steps in flight: the ranks agree on a step at the same time, and stage s executes it s
steps later, so that all stages compute at once. What a step sampled, and its events, are taken in d - 1 steps later, on
all ranks at the same place between the same steps; at once where no request waits for what is in flight, and where
workers change after a step (`worker_events.py`).
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Final

import torch

from spmd_worker.base.config.plain_values import plain_text
from spmd_worker.base.errors import AbortedError, ConfigError, RankFailedError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, CLOSING, Heartbeat
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.base.names import explain_keywords
from spmd_worker.compat.engine_model_config import EngineModelConfig
from spmd_worker.compat.metrics import Metric, engine_metrics
from spmd_worker.compat.script_tokenizer import script_tokenizer
from spmd_worker.engine.interruption import Interruption
from spmd_worker.engine.one_caller import OneCaller
from spmd_worker.engine.outputs import request_output
from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.engine.request_times import RequestTimes
from spmd_worker.engine.step_recorder import StepRecorder
from spmd_worker.engine.validation import RequestLimits, as_request_ids
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.engine.worker_events import WorkerEvents
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.lockstep.lockstep import AgreedStep, Lockstep, StepReport
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.step_order import end_step, must_end_oldest
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    CommittedWith,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    Event,
    FinishTransfers,
    Interrupt,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.outputs import RequestMetrics, RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream, unnamed_stream, whole_number
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.sleep_tags import SLEEP, WAKE_UP, check_mode, checked_level, checked_tags
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.replica.sequence.taken_params import taken_params
from spmd_worker.resolved import ResolvedRun
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHECK_VARIABLE: Final = "SPMD_WORKER_CHECK"
"""Environment: 1 checks queues, tables, pools and index against each other after every step. Slow; changes nothing."""


def _release(
    heartbeat: Heartbeat,
    channels: tuple[Lockstep | ControlChannel, ...],
    executor: Executor,
    watchdog: Watchdog | None,
    owner: int,
    *,
    is_closed: bool = True,
) -> None:
    """What `Engine.shutdown` gives back. Idempotent. `is_closed` false: the interpreter ends, or nobody holds the
    engine any more. Does nothing in a process other than `owner`: one that was forked has a copy of all this, and what
    it gave back would be its parent's.
    """
    if os.getpid() != owner:
        return
    heartbeat.enter(CLOSING)
    if watchdog is not None and not is_closed:
        watchdog.leave_unclosed()
    for channel in channels:
        channel.close()
    try:
        executor.shutdown()
    finally:
        if watchdog is not None and not watchdog.watched.exits:
            watchdog.stop()


@explain_keywords()
class Engine:
    """Use `start_engine`. Every rank of a replica makes the same calls of `step`, in the same order.

    One thread at a time is in a call that drives the engine; `add_request` and `abort_request` may come from any thread
    while another steps. What breaks this is a RuntimeError that names both threads and calls (`OneCaller`).
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        tokenizer: Tokenizer | None,
        executor: Executor,
        channel: ControlChannel,
        lockstep: Lockstep,
        scheduler: Scheduler,
        engine_channel: ControlChannel | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.resolved, self.tokenizer, self.executor = resolved, tokenizer, executor
        self.config = resolved.config
        self.default_sampling, self.max_model_len = resolved.default_sampling, resolved.max_model_len
        self.limits = RequestLimits(
            resolved.model_config.vocab_size,
            resolved.max_model_len,
            has_tokenizer=tokenizer is not None,
            grammars=GrammarCompiler(
                lambda: tokenizer, resolved.model_config.vocab_size, resolved.model_config.eos_token_ids
            ),
            pooling=resolved.model_config.pooling,
        )
        self.channel, self.lockstep, self.scheduler = channel, lockstep, scheduler
        self.engine_channel = engine_channel or channel
        self.is_closed = self._is_round_over = False
        self._is_mid_step = False
        self.watchdog = watchdog
        self.times = StepTimes() if watchdog is None else StepTimes(watchdog.heartbeat)
        # Without a reference to the engine, for the finalizer that releases what a forgotten engine had.
        channels = (lockstep, channel, self.engine_channel)
        self._owner = os.getpid()
        self.release = partial(_release, self.times.heartbeat, channels, executor, watchdog, self._owner)
        self.calls = OneCaller()
        self._events: list[Event] = []
        self._prompts: dict[RequestId, str | None] = {}
        self._request_times = RequestTimes()
        self.num_requests = 0
        self.num_calls = 0
        """Lists of prompts that were given to this engine: the same on every rank."""
        self.num_unnamed = 0
        """Requests with neither custom id nor index."""
        self._script_tokenizer: Any = None
        self._last_taken = (self.default_sampling, self.default_sampling)
        self._sampled = SampledIds()
        self._mask_checksums: tuple[int, ...] = ()
        self._finished_transfers: tuple[int, ...] = ()
        self._worker_events = WorkerEvents(executor)
        self.weight_updates = WeightUpdates(executor, channel.rank, partial(len, scheduler.queues.groups))
        # What the steps of a worker event ended: the next `step` hands it out.
        self._ended: list[SequenceGroup] = []
        parallel = resolved.config.parallel
        self._in_flight = StepPipeline(
            executor, channel, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        # The executor must not hold the engine: the memory of a forgotten engine is free at once.
        self._executor_has_failed = threading.Event()
        executor.register_failure_callback(self._executor_has_failed.set)
        self._on_step: Callable[[StepPlan, StepResult], None] | None = None
        self._interruption: Interruption | None = None
        self._kept_outputs: list[Any] | None = None
        """Of a step after which a signal's handler raised: the next call of `step` gives them, without a step, because
        the other ranks have got theirs.
        """
        self._checks_integrity = os.environ.get(CHECK_VARIABLE) == "1"

    @property
    def is_leader(self) -> bool:
        """Whether this rank's requests count: each replica has one such rank."""
        return self.channel.rank == 0

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for all replicas."""
        return self.engine_channel.rank == 0

    @property
    def model_executor(self) -> Executor:
        """The executor, by vLLM's name. Where its worker is in this process,
        `model_executor.driver_worker.model_runner.model.load_weights(pairs)` takes new weights.
        """
        return self.executor

    @cached_property
    def model_config(self) -> EngineModelConfig:
        """What this engine runs, by vLLM's names."""
        return EngineModelConfig(self.resolved, getattr(torch, self.resolved.dtype))

    @property
    def counters(self) -> SchedulerCounters:
        """What happened so far."""
        return self.scheduler.counters

    def need_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model folder without one."""
        if self.tokenizer is None:
            raise ConfigError("the model folder has no tokenizer.json: give prompt_token_ids instead of text")
        return self.tokenizer

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        own = self.need_tokenizer()
        if self._script_tokenizer is None:
            self._script_tokenizer = script_tokenizer(own, self.resolved.model_folder)
        return self._script_tokenizer

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        num_running, num_waiting = len(scheduler.running), scheduler.queues.num_waiting
        return engine_metrics(self.counters, num_running, num_waiting, cache.num_used_blocks, cache.num_blocks)

    def request_metrics(self, group: SequenceGroup) -> RequestMetrics | None:
        """When things happened to a request; None for one that was not added here."""
        num_output_tokens = sum([len(each.output_token_ids) for each in group.sequences])
        return self._request_times.read(group.request.request_id, num_output_tokens)

    @property
    def num_unfinished(self) -> int:
        """Requests added here and not answered yet."""
        kept = self._kept_outputs or []
        return len(self._prompts) + len([output for output in kept if output.finished])

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What rows can ask for: "generate", or what a model that pools does (`PoolingConfig.tasks`)."""
        pooling = self.resolved.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def check_request(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, pooling: PoolingParams | None = None
    ) -> None:
        """Raise ValueError for a request that could never be answered, TypeError for what is none. Needs no other
        rank.
        """
        self.limits.check(prompt_token_ids, sampling, pooling)
        self._taken(sampling)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        custom_id: str | None = None,
        index: int | None = None,
    ) -> RequestId:
        """Check a request, raising ValueError or TypeError as `check_request` does, and queue it (`admit_request`)."""
        for name, text in (("prompt", prompt), ("custom_id", custom_id)):
            if not isinstance(text, str | None):
                raise TypeError(f"{name} is a {type(text).__name__}: give text")
        prompt, custom_id = plain_text(prompt), plain_text(custom_id)
        prompt_token_ids = self.limits.truncate(prompt_token_ids, sampling)
        self.check_request(prompt_token_ids, sampling)
        return self.admit_request(prompt_token_ids, sampling, prompt=prompt, custom_id=custom_id, index=index)

    def admit_request(
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
        """Queue a request that `check_request` let pass for the next step. `custom_id`, else `index` in call number
        `call`, else the order of requests that have neither names its randomness. `rope_regime` None is its own.
        `pooling` is as `taken_pooling` leaves it, with the `sampling` of `pooled_sampling`.
        """
        with self.calls.queueing("add_request"):
            return self._admit(prompt_token_ids, sampling, prompt, custom_id, index, call, rope_regime, pooling)

    def _admit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        prompt: str | None,
        custom_id: str | None,
        index: int | None,
        call: int,
        rope_regime: int | None,
        pooling: PoolingParams | None,
    ) -> RequestId:
        self.check_not_closed()
        self.check_awake()
        request_id = RequestId(self.num_requests)
        if custom_id is None and index is None:
            stream = unnamed_stream(self.config.seed, sampling.seed, self.num_unnamed)
            self.num_unnamed += 1
        else:
            row = 0 if index is None else whole_number("index", index)
            stream = random_stream(self.config.seed, sampling.seed, custom_id, row, call)
        regime = self.rope_regime(len(prompt_token_ids), sampling) if rope_regime is None else rope_regime
        request = Request(request_id, tuple(prompt_token_ids), self._taken(sampling), stream, regime, pooling)
        self.num_requests += 1
        self._prompts[request_id] = prompt
        self._request_times.add(request_id)
        self._events.append(Admit(request))
        return request_id

    def rope_regime(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        """See `ModelConfig.rope_regime`, of a row with these parameters."""
        most = min(num_prompt_tokens + (sampling.max_tokens or self.max_model_len), self.max_model_len)
        # Nothing is computed with the last token that is sampled.
        return self.resolved.model_config.rope_regime(num_prompt_tokens, max(most - 1, num_prompt_tokens))

    def _taken(self, sampling: SamplingParams) -> SamplingParams:
        """Rows often share their parameters: the last ones are remembered."""
        # Read and set once each: `check_request` may be called in several threads.
        last = self._last_taken
        if sampling is not last[0]:
            frozen = sampling.frozen()
            last = self._last_taken = (frozen, taken_params(frozen, self.tokenizer, self.limits.vocab_size))
        return last[1]

    def abort_request(self, request_ids: str | int | Iterable[str | int]) -> None:
        """End one request or several at the next step; each output so far comes back with finish reason "abort".

        Ids are what `add_request` returned or what outputs have; one of no unfinished request is not an error. Raises
        TypeError for what is no id, and none is ended then.
        """
        numbers = as_request_ids(request_ids)
        with self.calls.queueing("abort_request"):
            self._events += [Abort(each) for each in numbers if each in self._prompts]

    def watch_steps(self, write: Callable[[StepStats], None]) -> None:
        """Have every step from now on described to `write`."""
        if not callable(write):
            raise TypeError(f"{write!r} cannot be called: give a function of StepStats")
        recorder = StepRecorder(self.scheduler, self.times)
        self._on_step = lambda plan, result: write(recorder.record(plan, result))

    def stage_times(self) -> list[dict[str, Any]]:
        """What the workers of this rank's executor noted of a pipeline (`StageClock.report`); empty without one."""
        has_pipeline = self.config.parallel.pipeline_parallel_size > 1
        return self.executor.collective_rpc("get_stage_times") if has_pipeline else []

    def thread_waits(self) -> list[dict[str, float]]:
        """What the workers of this rank's executor waited for threads (`WorkerBase.get_thread_waits`)."""
        return self.executor.collective_rpc("get_thread_waits")

    def expert_loads(self) -> list[dict[int, list[int]]]:
        """What the workers of this rank's executor counted (`WorkerBase.get_expert_loads`); empty without experts."""
        has_experts = any(layer.experts is not None for layer in self.resolved.model_config.layers)
        return self.executor.collective_rpc("get_expert_loads") if has_experts else []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """From the next step on no request finds what is in the cache now; returns True. Running requests go on.
        Weights that were loaded since the last commit are committed: see `commit_weights`, also for what it raises.

        Raises ValueError for `reset_running_requests` while requests are unanswered. What the host tier holds
        goes with or without `reset_connector`.
        """
        with self.calls.inside("reset_prefix_cache"):
            self.check_not_closed()
            if reset_running_requests and self.has_unfinished_requests():
                raise ValueError(
                    f"reset_running_requests={reset_running_requests!r} is refused: {self.num_unfinished} requests of "
                    f"llm_engine.add_request are not answered yet and go on with what they have; call llm_engine.step "
                    f"until they are, or leave it out"
                )
            if not self.weight_updates.is_held:
                self.commit_weights()
            self._events.append(ResetPrefixCache())
            return True

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """What `func` returns for the model of each worker of this executor: see `LLM.apply_model`. It may have
        changed weights, also where it raises: from the next step on no request finds what is in the cache now.
        """
        with self.calls.inside("apply_model"):
            self.check_not_closed()
            try:
                return self.executor.collective_rpc("apply_model", args=(func,))
            finally:
                if not (self._events and isinstance(self._events[-1], ResetPrefixCache)):
                    self._events.append(ResetPrefixCache())

    def commit_weights(self, *, is_partial: bool = False) -> None:
        """What was loaded into the model is complete, or meant to be part of it where `is_partial`: nothing that was
        cached before is found, and the next step compares with the other ranks. Does nothing where nothing was loaded.

        Every rank calls this, or what calls it: `step`, `reset_prefix_cache`. Raises MissingWeightsError that lists
        what was not loaded, and CheckpointError for a head that differs from the embedding it is tied to; nothing can
        be computed until it is loaded.
        """
        event = self.weight_updates.commit(is_partial=is_partial)
        if event is not None:
            # Before the requests that wait to be admitted.
            with self.calls.lock:
                for earlier in [each for each in self._events if isinstance(each, CommitWeights)]:
                    self._events.remove(earlier)
                self._events.insert(0, event)
            if event.num_tensors:
                logger.info("%d new weights are committed as version %d", event.num_tensors, event.version)

    def complete_weights(self) -> None:
        """As `commit_weights`, before something that needs weights that are complete. Raises RuntimeError, too, while
        an update that was begun has not ended (`WeightUpdates.hold`).
        """
        self.weight_updates.check_not_held()
        self.commit_weights()

    def set_weight_version(self, version: int) -> None:
        """The weights are others than before: from the next step on nothing computed with the old ones is found.

        Raises TypeError for what is no whole number, ValueError for one that does not fit 64 bits.
        """
        with self.calls.inside("set_weight_version"):
            self.check_not_closed()
            self._events.append(SetWeightVersion(version))

    def worker_event(self, name: str, payload: Any = None, then: Sequence[Event] = ()) -> list[Any]:
        """Change every worker between the same two steps, or none: all call their `prepare_NAME(payload)`, and when all
        of them could, `commit_NAME` (`WorkerBase` says what these may do). Takes three steps, in which requests go on.
        `then` are events of the scheduler that take effect with the commit: no step runs between the two.

        Returns what the commits of this rank's executor returned, in rank order. Raises WorkerEventError, on every rank
        that calls this, with the words of the lowest rank that refused. Ranks in `follow` take part unasked; with
        several replicas every rank of each calls this.
        """
        self.check_open()
        given = tuple(then)
        for event in given:
            if not isinstance(event, CommittedWith):
                raise TypeError(f"then has {event!r}: give ResetPrefixCache, SetWeightVersion or CommitWeights events")
        with self.calls.inside("worker_event"):
            self.complete_weights()
            return self._run_worker_event(name, payload, given)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As `LLM.sleep`."""
        with self.calls.inside("sleep", is_alone=True):
            check_mode(mode)
            self.check_idle_or_asleep()
            if checked_level(level) == 1:
                self.commit_weights()
            # Cached blocks go with their memory, and so do transfers of theirs that have not ended.
            self._run_worker_event(SLEEP, level, [ResetPrefixCache()])

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        with self.calls.inside("wake_up", is_alone=True):
            self.check_idle_or_asleep()
            waking = [tag for tag in checked_tags(tags) if tag in self.executor.sleeping_tags]
            if not self.weight_updates.has_missing:
                self.commit_weights()
            if waking:
                self._run_worker_event(WAKE_UP, waking)

    def _run_worker_event(self, name: str, payload: Any, then: Sequence[Event] = ()) -> list[Any]:
        event = self._worker_events.new(name, payload)
        self._events.append(event)
        self._ended += self._step()
        if self._worker_events.open is None:
            raise RuntimeError(f"rank 0 has not called worker_event({name!r}): every rank makes the same calls")
        # Its answers are those to the event.
        self._ended += self._step()
        problem = self.lockstep.event_problem
        if self.engine_channel.size > self.channel.size:
            with self.exchanging():
                problems = self.engine_channel.gather(problem.encode())
            problem = next(filter(None, problems), b"").decode()
        self._events += [EndWorkerEvent(event.number, problem), *(() if problem else then)]
        self._ended += self._step()
        return self._worker_events.take_results()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do here."""
        return bool(self._prompts or self._kept_outputs)

    def check_open(self) -> None:
        """Raise RuntimeError for an engine that was closed, or failed in a step or between two."""
        self.check_not_closed()
        self._check_whole()

    def check_not_closed(self) -> None:
        """Raise RuntimeError for an engine that was closed."""
        if self.is_closed:
            raise RuntimeError("this LLM was closed: make a new one")

    def check_awake(self) -> None:
        """Raise RuntimeError for an engine of which something sleeps."""
        if self.executor.is_sleeping:
            tags = " and ".join(self.executor.sleeping_tags)
            raise RuntimeError(f"this LLM is asleep ({tags}): call wake_up() before anything is computed")

    def check_idle(self) -> None:
        """Raise RuntimeError unless new prompts would have the engine to themselves: open, whole, awake, nothing
        waiting.
        """
        self.check_idle_or_asleep()
        self.check_awake()

    def check_idle_or_asleep(self) -> None:
        """As `check_idle`; something may sleep."""
        self.check_open()
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"{self.num_unfinished} requests of llm_engine.add_request are not answered yet: call llm_engine.step "
                f"until they are"
            )

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that ended in it, in plan order. Raises RuntimeError while anything sleeps."""
        with self.calls.inside("step"):
            self.check_not_closed()
            if self._kept_outputs is None:
                self.check_awake()
                self._commit_before_step()
                self._ended += self._step()
                ended, self._ended = self._ended, []
                self._kept_outputs = self._outputs_of(ended)
            if self._interruption is None:
                deliver_signals()
            outputs, self._kept_outputs = self._kept_outputs, None
            return outputs

    def _outputs_of(self, ended: list[SequenceGroup]) -> list[Any]:
        """What `step` returns for the requests that ended in it."""
        return [self._output(group) for group in ended]

    @contextmanager
    def interruptible(self) -> Iterator[Interruption]:
        """A block of steps that answer one call. What a signal's handler raises in it, on any rank of the replica,
        aborts what is open, on all of them in the same step. The caller then calls `Interruption.check`, or has more
        replicas to agree with.
        """
        self._interruption = Interruption()
        # Of a rank that heard of it with the last step of the call before, and raised it there.
        self.lockstep.take_interrupt()
        try:
            yield self._interruption
        finally:
            self._interruption = None

    def follow(self) -> None:
        """Run steps until rank 0 calls `close_followers`: the loop of a rank that has no requests of its own. Where
        Ctrl-C has ended it, call it again: then it returns at once if that was its last step.
        """
        with self.calls.inside("follow", is_alone=True):
            while not (self._is_round_over or self.is_closed):
                self._commit_before_step()
                self._step()
                deliver_signals()
            self._is_round_over = False

    def close_followers(self) -> None:
        """Rank 0 only: end the `follow` loops. The engine takes no more requests, and its log ends."""
        with self.calls.inside("close_followers", is_alone=True):
            self._events.append(Close())
            while not self.is_closed:
                self._commit_before_step()
                self._step()

    def follow_round(self) -> None:
        """Run steps until the leader ends the round, or closes: for ranks that do not know which requests their replica
        has.
        """
        # Of a `follow` that was interrupted in its last step and not called again.
        self._is_round_over = False
        while not (self._is_round_over or self.is_closed):
            self._commit_before_step()
            self._step()
        self._is_round_over = False

    def end_round(self) -> None:
        """The leader only: end the `follow_round` loops. The engine takes more requests afterwards."""
        self._events.append(EndRound())
        self.follow_round()

    def shutdown(self) -> None:
        """Give back memory and groups. Idempotent; every rank calls it. A forked process gives back nothing."""
        if os.getpid() != self._owner:
            # Calls of the parent's threads, and the lock that one of them may hold, have no end here.
            self.is_closed = True
            return
        with self.calls.inside("close", is_alone=True):
            self.is_closed = True
            self.release()

    def continue_from(self, num_requests: int, num_calls: int, num_unnamed: int) -> None:
        """Go on counting where the engine ended in whose place this one stands, the same on every rank: no number names
        two things.
        """
        self.num_requests, self.num_calls, self.num_unnamed = num_requests, num_calls, num_unnamed

    def retire(self) -> None:
        """Close, and leave executor and watchdog to the engine that goes on with them."""
        self.is_closed = True
        for channel in (self.lockstep, self.channel, self.engine_channel):
            channel.close()

    def explain(self, error: Exception) -> BaseException:
        """Tell the other ranks of an error in a step, or in an exchange with them. Returns what to raise: where another
        rank is the cause, an error that names it. This engine can answer nothing afterwards.
        """
        self._is_mid_step = True
        known: Exception = error
        if self.watchdog is not None and not isinstance(error, AbortedError):
            self.watchdog.fail(error)
            cause = self.watchdog.find_cause(error)
            known = RankFailedError(cause) if cause is not None else error
        return self.lockstep.explain(known)

    @contextmanager
    def exchanging(self, earlier: BaseException | None = None) -> Iterator[None]:
        """Around what all ranks send each other outside a step. An error there is raised as `explain` has it, from an
        `earlier` one of this rank where there is one; after it, and after Ctrl-C, nothing can be answered any more:
        what comes next from the others is not what this rank's next call would wait for.
        """
        try:
            yield
        except Exception as error:
            raise self.explain(error) from (earlier or error)
        except BaseException:
            self._is_mid_step = True
            raise

    def tell(self, error: BaseException) -> None:
        """An error outside `step`: let the ranks of this replica hear of it that wait for the next one."""
        if not self._is_mid_step:
            self.lockstep.explain(error)

    def _step(self) -> list[SequenceGroup]:
        """Raises ReplicaDivergedError or RankFailedError, naming the culprit, where another rank is the cause."""
        self._check_whole()
        if self._interruption is not None:
            self._interruption.look()
        self._is_mid_step = True
        try:
            ended = self._run_step()
        except Exception as error:  # told to the other ranks, which may be waiting for this one, then raised again
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        self._is_mid_step = False
        self.times.heartbeat.enter(BETWEEN_STEPS)
        return ended

    def _commit_before_step(self) -> None:
        """Before a step that may compute."""
        self._check_whole()
        self.complete_weights()

    def _check_whole(self) -> None:
        """An exception in a step, Ctrl-C too, leaves scheduler and devices in different states for good, and a worker
        that ended between two steps is missed in the next: its executor says which and how.
        """
        if self._executor_has_failed.is_set() and not self._is_mid_step:
            self.executor.check_health()
        if self._is_mid_step:
            raise RuntimeError("an earlier step failed halfway: close this LLM and make a new one")

    def _run_step(self) -> list[SequenceGroup]:
        self.times.begin()
        plan = self.scheduler.schedule()
        finished_transfers = self.lockstep.take_finished_transfers()
        with self.calls.lock:
            if finished_transfers:
                self._events.insert(0, FinishTransfers(finished_transfers))
            # What a finalizer or a signal's handler adds in this thread meanwhile is in one of the two.
            taken, self._events = self._events, []
            events = (*taken, *self._interrupt_events())
        self.times.end("schedule")
        report = StepReport(
            self._sampled,
            self._mask_checksums,
            self._finished_transfers,
            self._worker_events.problem,
            "" if self._interruption is None else self._interruption.own_text,
            events,
        )
        agreed = self.lockstep.agree(plan, report)
        self._sampled, self._mask_checksums, self._finished_transfers = SampledIds(), (), ()
        self.weight_updates.check_agreed(agreed.events)
        self.times.end("lockstep")
        self._in_flight.add(agreed)
        self._request_times.begin(agreed.plan)
        ended: list[SequenceGroup] = []
        in_flight = self._in_flight
        while must_end_oldest(len(in_flight), in_flight.is_full, agreed.events, self.scheduler, self.is_closed):
            ended += self._settle(*self._in_flight.take_oldest())
        self.times.end("execute")
        return ended

    def _interrupt_events(self) -> list[Event]:
        """On rank 0, once: what ends the call that it is in, because a signal's handler raised here or elsewhere."""
        call = self._interruption
        if call is None or call.has_begun or not self.is_leader:
            return []
        told = (self.channel.rank, call.own_text) if call.own is not None else call.wanted
        told = self.lockstep.take_interrupt() or told
        if told is None:
            return []
        call.has_begun = True
        return [*map(Abort, self._prompts), Interrupt(*told)]

    def _settle(self, step: AgreedStep, result: StepResult) -> list[SequenceGroup]:
        """The oldest step in flight has ended: take in what it sampled, then its events."""
        self.times.end("execute")
        self._sampled = self._sampled.joined(SampledIds(result.token_ids, result.num_token_ids))
        self._mask_checksums += result.mask_checksums
        self._finished_transfers += result.finished_transfers
        self._request_times.end(step.plan)
        ended = end_step(self.scheduler, step.plan, result, step.events, self._apply_event)
        if self._checks_integrity:
            self.scheduler.check_integrity()
        self.times.end("apply")
        if self._on_step is not None:
            self._on_step(step.plan, result)
        return ended

    def _apply_event(self, event: Event) -> SequenceGroup | None:
        if isinstance(event, Close):
            self.is_closed = True
        elif isinstance(event, EndRound):
            self._is_round_over = True
        elif isinstance(event, Interrupt):
            if self._interruption is not None:
                self._interruption.agreed = (event.rank, event.error)
        elif isinstance(event, Admit):
            # Requests that this rank did not add itself have taken their numbers too.
            with self.calls.lock:
                self.num_requests = max(self.num_requests, event.request.request_id + 1)
        elif isinstance(event, WorkerEvent | EndWorkerEvent):
            self.times.heartbeat.enter("worker event")
            self._worker_events.apply(event)
        return self.scheduler.handle(event)

    def _output(self, group: SequenceGroup) -> RequestOutput:
        request_id, metrics = group.request.request_id, self.request_metrics(group)
        self._request_times.forget(request_id)
        return request_output(group, self._prompts.pop(request_id, None), self.tokenizer, metrics)
