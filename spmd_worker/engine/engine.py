"""Tokens in, tokens out: the engine that every rank runs a replica of.

One step is three calls, all in one direction: `schedule`, `agree`, `execute_model`; then what was sampled goes back
into the scheduler. Rank 0's requests and aborts become events of the next message; what other ranks ask for is ignored,
because only rank 0 touches the outside world.

A pipeline of d stages has d steps in flight: the ranks agree on a step at the same time, and stage s executes it s
steps later, so that all stages compute at once. What a step sampled, and its events, are applied d - 1 steps later, on
all ranks between the same two steps; at once where no request waits for what is in flight, and where workers change
after a step (`changes.py`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.base.names import explain_keywords
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes
from spmd_worker.engine.interruption import Interruption
from spmd_worker.engine.life import Life, State
from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.engine.requests import Requests
from spmd_worker.engine.step_recorder import StepRecorder
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
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
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.tokenizer.tokenizer import Tokenizer

CHECK_VARIABLE: Final = "SPMD_WORKER_CHECK"
"""Environment: 1 checks queues, tables, pools and index against each other after every step. Slow; changes nothing."""


@explain_keywords()
class Engine:
    """Use `start_engine`, which makes the parts. Every rank of a replica makes the same calls of `step`, in the same
    order.

    One thread at a time is in a call that drives the engine; requests may be added and aborted in any thread while
    another one steps. Anything else is a RuntimeError that names both threads and calls (`CallGuard`).
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        executor: Executor,
        channel: ControlChannel,
        engine_channel: ControlChannel,
        lockstep: Lockstep,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        watchdog: Watchdog | None,
        times: StepTimes,
        calls: CallGuard,
        life: Life,
        requests: Requests,
        changes: Changes,
    ) -> None:
        self.resolved, self.executor, self.watchdog = resolved, executor, watchdog
        self.config, self.tokenizer, self.limits = resolved.config, resolved.tokenizer, requests.limits
        self.default_sampling, self.max_model_len = resolved.default_sampling, resolved.max_model_len
        self.channel, self.engine_channel = channel, engine_channel
        self.lockstep, self.scheduler, self.times = lockstep, scheduler, times
        self.calls, self.life, self.requests, self.changes = calls, life, requests, changes
        self._in_flight = pipeline
        self._sampled = NO_IDS
        self._mask_checksums: tuple[int, ...] = ()
        self._finished_transfers: tuple[int, ...] = ()
        self._on_step: Callable[[StepPlan, StepResult], None] | None = None
        self._interruption: Interruption | None = None
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
    def is_closed(self) -> bool:
        """Whether the engine takes no more calls."""
        return self.life.is_closed

    @property
    def counters(self) -> SchedulerCounters:
        """Counts of this replica's work so far."""
        return self.scheduler.counters

    def need_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model folder without one."""
        if self.tokenizer is None:
            raise ConfigError("the model folder has no tokenizer.json: give prompt_token_ids instead of text")
        return self.tokenizer

    def watch_steps(self, write: Callable[[StepStats], None]) -> None:
        """Have every step from now on described to `write`."""
        if not callable(write):
            raise TypeError(f"{write!r} cannot be called: give a function of StepStats")
        recorder = StepRecorder(self.scheduler, self.times)
        self._on_step = lambda plan, result: write(recorder.record(plan, result))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do here."""
        return self.requests.has_unfinished

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that ended in it, in plan order. Raises RuntimeError while anything sleeps."""
        requests, changes = self.requests, self.changes
        with self.calls.inside("step"):
            self.life.check_not_closed()
            if requests.kept_outputs is None:
                self.life.check_awake()
                self._commit_before_step()
                changes.ended += self.run_step()
                ended, changes.ended = changes.ended, []
                requests.kept_outputs = self._outputs_of(ended)
            if self._interruption is None:
                deliver_signals()
            outputs, requests.kept_outputs = requests.kept_outputs, None
            return outputs

    def _outputs_of(self, ended: list[SequenceGroup]) -> list[Any]:
        """Outputs that `step` returns for the requests that ended in it."""
        return [self.requests.finish(group) for group in ended]

    def run_step(self) -> list[SequenceGroup]:
        """One step, of any call; returns the requests that ended in it, in plan order. Raises ReplicaDivergedError or
        RankFailedError, naming the culprit, where another rank is the cause of an error.
        """
        self.life.check_not_failed()
        if self._interruption is not None:
            self._interruption.look()
        self.life.begin_step()
        try:
            ended = self._run_step()
        except Exception as error:  # reported to the other ranks, which may be waiting for this one, then raised again
            explained = self.life.explain(error)
            if explained is error:
                raise
            raise explained from error
        self.life.end_step()
        return ended

    def _run_step(self) -> list[SequenceGroup]:
        self.times.begin()
        plan = self.scheduler.schedule()
        finished_transfers = self.lockstep.take_finished_transfers()
        with self.calls.lock:
            events: tuple[Event, ...] = (*self.calls.take(), *self._interrupt_events())
        if finished_transfers:
            events = (FinishTransfers(finished_transfers), *events)
        self.times.end("schedule")
        report = StepReport(
            self._sampled,
            self._mask_checksums,
            self._finished_transfers,
            self.changes.event_problem,
            "" if self._interruption is None else self._interruption.own_text,
            events,
        )
        agreed = self.lockstep.agree(plan, report)
        self._sampled, self._mask_checksums, self._finished_transfers = NO_IDS, (), ()
        self.changes.weights.check_agreed(agreed.events)
        self.times.end("lockstep")
        in_flight = self._in_flight
        in_flight.add(agreed)
        self.requests.times.begin(agreed.plan)
        ended: list[SequenceGroup] = []
        while must_end_oldest(len(in_flight), in_flight.is_full, agreed.events, self.scheduler, self.life.is_closing):
            ended += self._settle(*in_flight.take_oldest())
        self.times.end("execute")
        return ended

    def _interrupt_events(self) -> list[Event]:
        """On rank 0, once: the end of the call that it is in, because a signal's handler raised here or elsewhere."""
        call = self._interruption
        if call is None or call.has_begun or not self.is_leader:
            return []
        raised = (self.channel.rank, call.own_text) if call.own is not None else call.wanted
        raised = self.lockstep.take_interrupt() or raised
        if raised is None:
            return []
        call.has_begun = True
        return [*map(Abort, self.requests.open_ids), Interrupt(*raised)]

    def _settle(self, step: AgreedStep, result: StepResult) -> list[SequenceGroup]:
        """The oldest step in flight has ended: apply what it sampled, then its events."""
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
            self._on_step(step.plan, result)
        return ended

    def _apply_event(self, event: Event) -> SequenceGroup | None:
        if isinstance(event, Close):
            self.life.set_after_step(State.CLOSED)
        elif isinstance(event, EndRound):
            self.life.set_after_step(State.ROUND_OVER)
        elif isinstance(event, Interrupt):
            if self._interruption is not None:
                self._interruption.agreed = (event.rank, event.error)
        elif isinstance(event, Admit):
            self.requests.count(event.request)
        elif isinstance(event, WorkerEvent | EndWorkerEvent):
            self.times.heartbeat.enter("worker event")
            self.changes.apply(event)
        return self.scheduler.handle(event)

    def _commit_before_step(self) -> None:
        """Before a step that may compute."""
        self.life.check_not_failed()
        self.changes.complete_weights()

    @contextmanager
    def interruptible(self) -> Iterator[Interruption]:
        """A block of steps that answer one call. What a signal's handler raises in it, on any rank of the replica,
        aborts what is open, on all of them in the same step. The caller then calls `Interruption.check`, or has more
        replicas to agree with.
        """
        self._interruption = Interruption()
        # Of a rank that reported it with the last step of the call before, and raised it there.
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
            while not self.life.has_round_ended:
                self._commit_before_step()
                self.run_step()
                deliver_signals()
            self.life.begin_round()

    def close_followers(self) -> None:
        """Rank 0 only: end the `follow` loops. The engine takes no more requests, and its log ends."""
        with self.calls.inside("close_followers", is_alone=True):
            self.calls.queue(Close())
            while not self.is_closed:
                self._commit_before_step()
                self.run_step()

    def follow_round(self) -> None:
        """Run steps until the leader ends the round, or closes: for ranks that do not know which requests their replica
        has.
        """
        self.life.begin_round()
        while not self.life.has_round_ended:
            self._commit_before_step()
            self.run_step()
        self.life.begin_round()

    def end_round(self) -> None:
        """The leader only: end the `follow_round` loops. The engine takes more requests afterwards."""
        self.calls.queue(EndRound())
        self.follow_round()

    def shutdown(self) -> None:
        """Give back memory and groups. Idempotent; every rank calls it. A forked process gives back nothing."""
        # Calls of the parent's threads, and the lock that one of them may hold, have no end in a forked process.
        is_own = self.life.is_of_this_process
        with self.calls.inside("close", is_alone=True) if is_own else nullcontext():
            self.life.close()
