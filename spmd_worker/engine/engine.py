"""The engine, tokens in and tokens out, of which every rank runs a replica.

One step is three calls, all in one direction: `schedule`, `agree`, `execute_model`; then the sampled ids go back into
the scheduler. Rank 0's requests and aborts become events of the next message; those of other ranks are ignored, because
only rank 0 talks to the outside world.

A pipeline of d stages has d steps in flight: the ranks agree on a step at the same time, and stage s executes it s
steps later, so that all stages compute at once. The sampled ids and the events of a step are applied d - 1 steps later,
on all ranks between the same two steps; at once if no request waits for a step in flight, or if workers change after a
step (`changes.py`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod, ref

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.base.numerical_policy import DEVICE, NumericalPolicy, Region
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes
from spmd_worker.engine.interruption import Interruption
from spmd_worker.engine.kv_connector import OutsideBlocks
from spmd_worker.engine.life import Life, State
from spmd_worker.engine.lora_adapters import LoRAAdapters
from spmd_worker.engine.pauses import Pauses
from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.engine.prompt_adapters import PromptAdapters
from spmd_worker.engine.requests import Requests
from spmd_worker.engine.step_recorder import StepRecorder
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.difference import check_requests
from spmd_worker.replica.lockstep.lockstep import NO_IDS, AgreedStep, Lockstep, StepReport
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.step_order import end_step, must_end_oldest
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    EndRound,
    EndWorkerEvent,
    Event,
    FinishTransfers,
    Interrupt,
    WorkerEvent,
)
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.sleep_tags import ABORT
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import CHECK_VARIABLE, ResolvedRun
from spmd_worker.tokenizer.tokenizer import Tokenizer


@with_keyword_hints()
class Engine:
    """Use `start_engine`, which starts the parts. Every rank of a replica calls `step` in the same order.

    One thread at a time is in a call that drives the engine; any thread may add and abort requests while another one
    steps. Anything else is a RuntimeError that names both threads and calls (`CallGuard`).
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        executor: Executor,
        channel: ControlChannel,
        engine_channel: ControlChannel,
        lockstep: Lockstep,
        scheduler: Scheduler,
        watchdog: Watchdog | None,
        outside: OutsideBlocks | None = None,
    ) -> None:
        self.resolved, self.executor, self.watchdog = resolved, executor, watchdog
        self.config, self.tokenizer = resolved.config, resolved.tokenizer
        self.default_sampling, self.max_model_len = resolved.default_sampling, resolved.max_model_len
        self.channel, self.engine_channel = channel, engine_channel
        self.lockstep, self.scheduler = lockstep, scheduler
        self.times = StepTimes() if watchdog is None else StepTimes(watchdog.heartbeat)
        self.calls = CallGuard()
        self.outside = outside
        channels = (channel, engine_channel) if outside is None else (channel, engine_channel, outside)
        self.life = Life(executor, lockstep, channels, watchdog, self.times.heartbeat)
        # Only the leader's rows are computed with, and its worker adds them to the embeddings.
        hold_rows = (lambda *rows: executor.hold_rows(*rows)) if channel.rank == 0 else (lambda *rows: None)
        hold_media = (lambda *image: executor.hold_media(*image)) if channel.rank == 0 else (lambda *image: None)
        adapters = (scheduler.adapters, scheduler.prompt_adapters)
        self.requests = Requests(resolved, self.calls, self.life, *adapters, hold_rows, hold_media, scheduler.pause)
        self.limits = self.requests.limits
        weights = WeightUpdates(executor, channel.rank, scheduler.num_computing)
        self.changes = Changes(
            executor, lockstep, channel, engine_channel, self.calls, self.life, self.requests, weights
        )
        self.pauses = Pauses(executor, scheduler, self.calls, self.life, self.requests, self.changes)
        of_changes = (self.changes, self.calls, self.life, self.requests, (channel, engine_channel))
        limits = resolved.config.model.adapter_limits
        # Weak: an engine without references is freed at once.
        run_step = WeakMethod(self.run_step)
        self.adapters = LoRAAdapters(executor.adapters, *of_changes, scheduler.adapters, run_step, limits=limits)
        self.prompt_adapters = PromptAdapters(
            executor.prompt_adapters, *of_changes, scheduler.prompt_adapters, run_step
        )
        executor.adapters.watch(ref(self.adapters))
        executor.prompt_adapters.watch(ref(self.prompt_adapters))
        executor.attach_engine(self)
        executor.watch_layers(self.times.heartbeat.tick)
        parallel = resolved.config.parallel
        stages = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._in_flight = StepPipeline(executor, channel, *stages)
        self._sampled = NO_IDS
        self._mask_checksums: tuple[int, ...] = ()
        self._finished_transfers: tuple[int, ...] = ()
        self._on_step: Callable[[StepPlan], None] | None = None
        self._interruption: Interruption | None = None
        self._checks_integrity = os.environ.get(CHECK_VARIABLE) == "1"

    @property
    def is_leader(self) -> bool:
        """Whether this rank's requests are answered: true on one rank of each replica."""
        return self.channel.rank == 0

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first of all replicas."""
        return self.engine_channel.rank == 0

    @property
    def max_num_seqs(self) -> int:
        """Number of sequences that may be in a step, `scheduler.max_num_seqs` or its default."""
        return self.scheduler.limits.max_num_seqs

    @property
    def is_closed(self) -> bool:
        return self.life.is_closed

    @property
    def counters(self) -> SchedulerCounters:
        return self.scheduler.counters

    def need_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model folder without one."""
        if self.tokenizer is None:
            raise ConfigError(
                "the model folder has no tokenizer.json, which text and media need: give prompt_token_ids alone"
            )
        return self.tokenizer

    def watch_steps(self, write: Callable[[StepStats], None]) -> None:
        """Call `write` with the statistics of every step from now on."""
        if not callable(write):
            raise TypeError(f"watch_steps({write!r}): give a function of StepStats")
        recorder = StepRecorder(self.scheduler, self.times)
        self._on_step = lambda plan: write(recorder.record(plan))

    def has_unfinished_requests(self) -> bool:
        """Whether this rank has requests whose last output `step` has not returned."""
        return self.requests.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that ended in it. Raises RuntimeError while asleep."""
        requests, changes = self.requests, self.changes
        with self.calls.inside("step"):
            self.life.check_not_closed()
            if requests.kept_outputs is None:
                self.life.check_awake()
                changes.ended += self._complete_and_run_step()
                ended, changes.ended = changes.ended, []
                if self.is_leader and not ended:
                    self.pauses.warn_of_idle_steps()
                requests.kept_outputs = self._outputs_of(ended)
            if self._interruption is None:
                deliver_signals()
            outputs, requests.kept_outputs = requests.kept_outputs, None
            return outputs

    def _outputs_of(self, ended: list[SequenceGroup]) -> list[Any]:
        return [self.requests.finish(group) for group in ended]

    def run_step(self) -> list[SequenceGroup]:
        """Run one step of any call; returns the requests that ended in it, in plan order. Raises ReplicaDivergedError
        or RankFailedError, naming the rank, if another rank is the cause of an error.
        """
        self.life.check_not_failed()
        if self._interruption is not None:
            self._interruption.check_signals()
        self.life.begin_step()
        try:
            ended = self._run_step()
        except Exception as error:  # reported to the other ranks, which may be waiting for this one, then raised again
            diagnosed = self.life.diagnose(error)
            if diagnosed is error:
                raise
            raise diagnosed from error
        self.life.end_step()
        return ended

    def _run_step(self) -> list[SequenceGroup]:
        self.times.begin()
        plan = self.scheduler.schedule()
        finished_transfers = self.lockstep.take_finished_transfers()
        with self.calls.lock:
            events: tuple[Event, ...] = (*self.calls.take(), *self._interrupt_events())
        if self.outside is not None:
            events = self.outside.with_found(events, self.scheduler)
        if finished_transfers:
            events = (FinishTransfers(finished_transfers), *events)
        self.times.end("schedule")
        report = StepReport(
            self._sampled,
            self._mask_checksums,
            self._finished_transfers,
            self.changes.event_problem,
            "" if self._interruption is None else self._interruption.error_text,
            events,
        )
        agreed = self.lockstep.agree(plan, report)
        self._sampled, self._mask_checksums, self._finished_transfers = NO_IDS, (), ()
        if not self.is_leader:
            check_requests(agreed.events, events, self.channel.rank)
        self.changes.weights.check_agreed(agreed.events)
        self.times.end("lockstep")
        in_flight = self._in_flight
        # Before the step is executed, which some executors do at once.
        self.requests.times.begin(agreed.plan)
        in_flight.add(agreed)
        ended: list[SequenceGroup] = []
        while must_end_oldest(len(in_flight), in_flight.is_full, agreed.events, self.scheduler, self.life.is_closing):
            ended += self._settle(*in_flight.take_oldest())
        self.times.end("execute")
        return ended

    def _interrupt_events(self) -> list[Event]:
        """Events that end the current call, once, on rank 0, after a signal handler raised on any rank."""
        call = self._interruption
        if call is None or call.is_sent or not self.is_leader:
            return []
        raised = (self.channel.rank, call.error_text) if call.error is not None else call.requested_error
        raised = self.lockstep.take_interrupt() or raised
        if raised is None:
            return []
        call.is_sent = True
        return [*map(Abort, self.requests.open_ids), Interrupt(*raised)]

    def _settle(self, step: AgreedStep, result: StepResult) -> list[SequenceGroup]:
        """Apply the sampled ids of the oldest step in flight, which has ended, then its events."""
        self.times.end("execute")
        self._sampled = self._sampled.joined(SampledIds(result.token_ids, result.num_token_ids))
        self._mask_checksums += result.mask_checksums
        self._finished_transfers += result.finished_transfers
        self.requests.times.end(step.plan)
        ended = end_step(self.scheduler, step.plan, result, step.events, self._apply_event)
        if self._checks_integrity:
            self.scheduler.check_integrity()
        self.times.end("apply")
        if self._on_step is not None:
            self._on_step(step.plan)
        return ended

    def _apply_event(self, event: Event) -> SequenceGroup | None:
        if isinstance(event, Close):
            self.life.set_after_step(State.CLOSED)
        elif isinstance(event, EndRound):
            self.life.set_after_step(State.ROUND_OVER)
        elif isinstance(event, Interrupt):
            if self._interruption is not None:
                self._interruption.agreed_error = (event.rank, event.error)
        elif isinstance(event, Admit):
            self.requests.count(event.request)
        elif isinstance(event, WorkerEvent | EndWorkerEvent):
            self.times.heartbeat.enter("worker event")
            self.changes.apply(event)
        return self.scheduler.handle(event)

    def _complete_and_run_step(self) -> list[SequenceGroup]:
        """Run a step that may compute, with complete weights."""
        self.life.check_not_failed()
        self.changes.complete_weights()
        return self.run_step()

    @contextmanager
    def interruptible(self) -> Iterator[Interruption]:
        """Block of steps that answer one call. An exception of a signal handler on any rank of the replica aborts all
        open requests, on all ranks in the same step. The caller then calls `Interruption.check`, after the exchange
        with the other replicas if there are any.
        """
        self._interruption = Interruption()
        # Discard the error of a rank that reported it with the last step of the previous call, and raised it there.
        self.lockstep.take_interrupt()
        try:
            yield self._interruption
        finally:
            self._interruption = None

    def numerical_policy(self) -> NumericalPolicy:
        """`LLM.numerical_policy`; the ranks have compared it when they started."""
        report = self.executor.reports()[0]
        if not report.numerical_policy:
            # A worker class that states nothing else.
            return NumericalPolicy({DEVICE: Region(report.arithmetic, "")})
        return NumericalPolicy.from_dict(report.numerical_policy)

    def worker_event(self, name: str, payload: Any = None, then: Sequence[Event] = ()) -> list[Any]:
        """Same as `Changes.worker_event`."""
        return self.changes.worker_event(name, payload, then, self.run_step)

    def pause_generation(self, mode: str = ABORT, clear_cache: bool = True) -> None:
        """Same as `LLM.pause_generation`; every rank of a replica calls this, or one while the others `follow`."""
        self.pauses.pause(mode, clear_cache, self.run_step, self.interruptible)

    def resume_generation(self) -> None:
        """Same as `LLM.resume_generation`, called as `pause_generation` is."""
        self.pauses.resume(self.run_step)

    @property
    def weight_version(self) -> int:
        """Same as `LLM.weight_version`."""
        return self.calls.next_weight_version(self.scheduler.weight_version)

    def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Same as `LLM.sleep`."""
        self.pauses.sleep(level, mode, self.run_step, self.interruptible)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Same as `LLM.wake_up`."""
        self.pauses.wake_up(tags, self.run_step)

    def reset_mm_cache(self) -> None:
        """Same as `LLM.reset_mm_cache`."""
        self.changes.reset_media_rows()

    def follow(self) -> None:
        """Run steps until rank 0 calls `close_followers`: the loop of a rank without requests of its own. Call it again
        after Ctrl-C has ended it; it returns at once if that was its last step.
        """
        with self.calls.inside("follow", is_alone=True):
            while not self.life.has_round_ended:
                self._complete_and_run_step()
                deliver_signals()
            self.life.begin_round()

    def close_followers(self) -> None:
        """Rank 0 only: end the `follow` loops. The engine takes no more requests, and its log ends."""
        with self.calls.inside("close_followers", is_alone=True):
            self.calls.queue(Close())
            while not self.is_closed:
                self._complete_and_run_step()

    def follow_round(self) -> None:
        """Run steps until the leader ends the round or closes, on a rank that does not know its replica's requests."""
        self.life.begin_round()
        while not self.life.has_round_ended:
            self._complete_and_run_step()
        self.life.begin_round()

    def end_round(self) -> None:
        """The leader only: end the `follow_round` loops. The engine takes more requests afterwards."""
        self.calls.queue(EndRound())
        self.follow_round()

    def shutdown(self) -> None:
        """Release memory and process groups. Idempotent; every rank calls it. No effect in a forked process."""
        # Calls of the parent's threads, and the lock that one of them may hold, never end in a forked process.
        is_own = self.life.is_of_this_process
        with self.calls.inside("close", is_alone=True) if is_own else nullcontext():
            if is_own:
                self.limits.close()
            self.life.close()
