"""Changes between two steps: new weights, worker events, and resets of the prefix cache.

A worker event changes the workers between two steps, prepared on every rank before it is committed on any. It takes
three steps: with the first every worker prepares, the second sends the answers to rank 0, and with the third all
commit, or all undo if one could not prepare. No later step is in flight on any stage when workers prepare, commit or
undo, so all of them change between the same two steps.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from spmd_worker.base.errors import WorkerEventError
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.life import Life
from spmd_worker.engine.requests import Requests
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.executor.executor import Executor
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.lockstep import Lockstep
from spmd_worker.replica.sequence.events import (
    CommittedWith,
    EndWorkerEvent,
    Event,
    ResetMediaRows,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.sequence import SequenceGroup

logger = logging.getLogger(__name__)

RunStep = Callable[[], list[SequenceGroup]]
"""`Engine.run_step`: a change of workers takes steps."""


class Changes:
    """Changes of one engine's workers. Every rank of a replica makes the same calls, in the same order."""

    def __init__(
        self,
        executor: Executor,
        lockstep: Lockstep,
        channel: ControlChannel,
        engine_channel: ControlChannel,
        calls: CallGuard,
        life: Life,
        requests: Requests,
        weights: WeightUpdates,
    ) -> None:
        self.weights = weights
        self.ended: list[SequenceGroup] = []
        """Requests that ended in the steps of a change: the next `step` of the engine returns them."""
        self._executor, self._calls, self._life = executor, calls, life
        self._requests, self._lockstep = requests, lockstep
        self._channel, self._engine_channel = channel, engine_channel
        self.event_problem = ""
        """Answer of this rank to the open worker event: why it could not prepare, or ""."""
        self._open_event: WorkerEvent | None = None
        self._num_events = 0
        self._event_error: WorkerEventError | None = None
        self._event_results: list[Any] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Invalidate the prefix cache from the next step on. Running requests continue. Weights that were loaded since
        the last commit are committed (`commit_weights`, which may raise).

        Raises ValueError for `reset_running_requests` while requests are unanswered.
        """
        with self._calls.inside("reset_prefix_cache"):
            self._life.check_not_closed()
            if reset_running_requests and self._requests.has_unfinished:
                raise ValueError(
                    f"reset_running_requests={reset_running_requests!r} is rejected: {self._requests.num_unfinished} "
                    f"requests of llm_engine.add_request are unanswered and keep their cached blocks; call "
                    f"llm_engine.step until they are answered, or leave it out"
                )
            if not self.weights.is_held:
                self.commit_weights()
            self._calls.queue(ResetPrefixCache())

    def reset_media_rows(self) -> None:
        """Drop the rows of all images, on every rank, with the next step but one. Requests make what they need again;
        no effect in a model that takes no images.
        """
        with self._calls.inside("reset_mm_cache"):
            self._life.check_not_closed()
            if self._requests.limits.media.num_rows:
                self._calls.queue(ResetMediaRows())

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`LLM.apply_model` on this executor. Invalidates the prefix cache, even if `func` raises."""
        with self._calls.inside("apply_model"):
            self._life.check_not_closed()
            try:
                return self._executor.collective_rpc("apply_model", args=(func,))
            finally:
                self._calls.queue_reset()

    def set_weight_version(self, version: int) -> None:
        """Set the version of the weights, from the next step on: cached blocks of another version are not used. During
        an update it is that of the new weights; a later commit has its own.

        Raises TypeError unless it is an integer, ValueError unless it fits 64 bits.
        """
        with self._calls.inside("set_weight_version"):
            self._life.check_not_closed()
            self._calls.queue_version(SetWeightVersion(version), is_of_next_commit=self.weights.is_open)

    def commit_weights(self, *, is_partial: bool = False) -> None:
        """Commit the loaded weights, all of them unless `is_partial`: the prefix cache is invalidated, and the next
        step compares them with the other ranks. Does nothing if none were loaded.

        Every rank calls this, directly or by `step` or `reset_prefix_cache`. Raises MissingWeightsError that lists
        missing weights, and CheckpointError for a head that differs from the embedding it is tied to; nothing can
        be computed until they are loaded.
        """
        event = self.weights.commit(is_partial=is_partial)
        if event is not None:
            self._calls.queue_commit(event)
            if event.num_tensors:
                logger.info("%d new weights are committed as version %d", event.num_tensors, event.version)

    def complete_weights(self) -> None:
        """`commit_weights` for a call that computes. Raises RuntimeError during an update (`WeightUpdates.hold`)."""
        self.weights.check_not_held()
        self.commit_weights()

    def worker_event(self, name: str, payload: Any, then: Sequence[Event], run_step: RunStep) -> list[Any]:
        """Change every worker between the same two steps, or none: all call `prepare_NAME(payload)`, and if all of them
        could, `commit_NAME` (`WorkerBase` says what these may do). Takes three steps, in which requests continue.
        `then` are scheduler events that take effect with the commit: no step runs between the two.

        Returns the results of the commits of this rank's executor, in rank order. Raises WorkerEventError, on every
        rank that calls this, with the text of the lowest rank that could not prepare. Ranks in `follow` take part
        without a call; with several replicas every rank of each calls this.
        """
        self._life.check_open()
        given = tuple(then)
        for event in given:
            if not isinstance(event, CommittedWith):
                raise TypeError(
                    f"then contains {event!r}: give ResetPrefixCache, SetWeightVersion or CommitWeights events"
                )
        with self._calls.inside("worker_event"):
            self.complete_weights()
            return self.run_worker_event(name, payload, given, run_step)

    def run_worker_event(self, name: str, payload: Any, then: Sequence[Event], run_step: RunStep) -> list[Any]:
        """`worker_event` after its checks. Raises ValueError for an invalid name, TypeError for an invalid payload."""
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(
                f"worker event {name!r}: give the NAME of the workers' methods prepare_NAME and commit_NAME"
            )
        if self._open_event is not None:
            open_name = self._open_event.name
            raise RuntimeError(f"worker event {open_name!r} was interrupted: close this LLM and make a new one")
        event = WorkerEvent(self._num_events + 1, name, encode_value(payload))
        self._calls.queue(event)
        self.ended += run_step()
        if self._open_event is None:
            raise RuntimeError(f"rank 0 has not called worker_event({name!r}): every rank must make the same calls")
        # This step's answers are those to the event.
        self.ended += run_step()
        problem = self._lockstep.event_problem
        if self._engine_channel.size > self._channel.size:
            with self._life.exchanging():
                problems = self._engine_channel.gather(problem.encode())
            problem = next(filter(None, problems), b"").decode()
        for each in (EndWorkerEvent(event.number, problem), *(() if problem else then)):
            self._calls.queue(each)
        self.ended += run_step()
        error, self._event_error = self._event_error, None
        if error is not None:
            raise error
        return self._event_results

    def apply(self, event: WorkerEvent | EndWorkerEvent) -> None:
        """Apply an agreed event to the workers of this rank's executor. An exception of a commit is fatal."""
        if isinstance(event, WorkerEvent):
            assert self._open_event is None, (self._open_event, event)
            # Counted on ranks that did not raise it, too.
            self._open_event, self._num_events = event, event.number
            problem = self._executor.prepare_event(event.name, decode_value(event.payload))
            # It is sent as UTF-8, which cannot encode a lone surrogate.
            self.event_problem = problem.encode("utf-8", "replace").decode()
            return
        before = self._open_event
        assert before is not None, event
        assert before.number == event.number, (before, event)
        self._event_results = self._executor.end_event(is_committed=not event.problem)
        undone = f"worker event {before.name!r} was undone on every rank: {event.problem}"
        self._event_error = WorkerEventError(undone, event.problem) if event.problem else None
        self._open_event, self.event_problem = None, ""
