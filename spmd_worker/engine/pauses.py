"""Pauses of generation and sleep: what happens to unanswered requests while weights or memory change hands."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes, RunStep
from spmd_worker.engine.interruption import Interruption
from spmd_worker.engine.life import Life
from spmd_worker.engine.requests import Requests
from spmd_worker.executor.executor import Executor
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import Abort, PauseGeneration, ResetPrefixCache, ResumeGeneration
from spmd_worker.replica.sequence.sleep_tags import (
    ABORT,
    KEEP,
    SLEEP,
    WAIT,
    WAKE_UP,
    checked_level,
    checked_mode,
    checked_tags,
)

logger = logging.getLogger(__name__)

Interruptible = Callable[[], AbstractContextManager[Interruption]]
"""`Engine.interruptible`: a pause may wait for many steps."""


class Pauses:
    """Pauses of one engine. Every rank of a replica makes the same calls, in the same order.

    `is_by_sleep`: the pause is part of a sleep, so `wake_up` ends it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        calls: CallGuard,
        life: Life,
        requests: Requests,
        changes: Changes,
    ) -> None:
        self.is_by_sleep = False
        self._executor, self._scheduler, self._calls, self._life = executor, scheduler, calls, life
        self._requests, self._changes = requests, changes
        self._has_warned = False

    @property
    def is_paused(self) -> bool:
        return self._scheduler.pause.is_paused

    def pause(self, mode: str, clear_cache: bool, run_step: RunStep, interruptible: Interruptible) -> None:
        """`LLM.pause_generation`: takes one step in mode "keep" and "abort", another where recurrent states lag behind
        drafts, and in mode "wait" as many as the requests that have begun need.
        """
        with self._calls.inside("pause_generation"):
            self._life.check_open()
            waits = checked_mode(mode) == WAIT
            if waits:
                # The steps of requests that were kept need complete weights.
                self._changes.complete_weights()
            with self._calls.lock:
                for request_id in self._requests.open_ids if mode == ABORT else ():
                    self._calls.queue(Abort(request_id))
                self._calls.queue(PauseGeneration(mode, clear_cache and not waits))
            self._changes.ended += run_step()
            if not self.is_paused:
                raise RuntimeError("rank 0 has not called pause_generation: every rank must make the same calls")
            with interruptible() as interruption:
                # The memory of blocks that are being loaded may go with a sleep.
                while self._scheduler.queues.loading or self._scheduler.has_unfinished:
                    self._changes.ended += run_step()
            interruption.check()
            if waits and clear_cache:
                self._calls.queue(PauseGeneration(mode, clear_cache))
                self._changes.ended += run_step()
            self._has_warned = False

    def resume(self, run_step: RunStep) -> None:
        """`LLM.resume_generation`: takes one step; nothing happens without a pause."""
        with self._calls.inside("resume_generation"):
            self._life.check_open()
            self._life.check_awake()
            self._changes.complete_weights()
            self._end(run_step)

    def warn_of_idle_steps(self) -> None:
        """Warn, once in a pause, that a step computed nothing for requests that wait for its end."""
        if self._scheduler.pause.is_frozen and self._requests.has_unfinished and not self._has_warned:
            self._has_warned = True
            logger.warning("generation is paused: steps compute nothing until resume_generation() is called")

    def sleep(self, level: int, mode: str | None, run_step: RunStep, interruptible: Interruptible) -> None:
        """`LLM.sleep`."""
        with self._calls.inside("sleep", is_alone=True):
            number, was_paused = checked_level(level, least=0), self.is_paused
            if number and not (was_paused or mode):
                self._requests.check_idle_or_asleep()
            else:
                # What is kept loses its cached tokens.
                self.pause(mode or KEEP, number > 0, run_step, interruptible)
                self.is_by_sleep = self.is_by_sleep or not was_paused
            if number:
                if number == 1:
                    self._changes.commit_weights()
                # Cached blocks are lost with their memory, as are their unfinished transfers.
                then = [ResetPrefixCache(keeps_names=True)]
                self._changes.run_worker_event(SLEEP, number, then, run_step)

    def wake_up(self, tags: Sequence[str] | None, run_step: RunStep) -> None:
        """`LLM.wake_up`."""
        with self._calls.inside("wake_up", is_alone=True):
            if not self.is_paused:
                self._requests.check_idle_or_asleep()
            waking = [tag for tag in checked_tags(tags) if tag in self._executor.sleeping_tags]
            if not self._changes.weights.has_missing:
                self._changes.commit_weights()
            if waking:
                self._changes.run_worker_event(WAKE_UP, waking, (), run_step)
            # Weights that are missing could not be loaded while requests are computed.
            must_stay = bool(self._scheduler.queues.groups) and self._changes.weights.has_missing
            if self.is_by_sleep and not (self._executor.is_sleeping or must_stay):
                self._end(run_step)

    def _end(self, run_step: RunStep) -> None:
        if self.is_paused:
            self._calls.queue(ResumeGeneration())
            self._changes.ended += run_step()
            self.is_by_sleep = False
