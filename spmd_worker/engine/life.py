"""Lifecycle of an engine on this rank: states, transitions, their errors, and shutdown."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

from spmd_worker.base.errors import AbortedError, RankFailedError
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, CLOSING, Heartbeat
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.engine.kv_connector import OutsideBlocks
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.lockstep import Lockstep


class State(Enum):
    """States of an engine. CLOSED is the last one; RETIRED and FAILED lead only there."""

    OPEN = "between two steps"
    ASLEEP = "between two steps, with weights or cache asleep: OPEN with a sleeping executor"
    ROUND_OVER = "between two steps: the leader has ended the round that this rank follows"
    IN_STEP = "in a step; an exception that leaves one here has failed the engine"
    FAILED = "failed in a step or in an exchange: scheduler and devices of the ranks differ for good"
    RETIRED = "closed; executor and watchdog belong to the engine that continues with them"
    CLOSED = "closed"


_BETWEEN_STEPS: Final = (State.IN_STEP, State.FAILED, State.RETIRED, State.CLOSED)
_NEXT: Final = {
    State.OPEN: _BETWEEN_STEPS,
    State.ROUND_OVER: (State.OPEN, *_BETWEEN_STEPS),
    State.IN_STEP: (State.OPEN, State.ROUND_OVER, State.FAILED, State.CLOSED),
    State.FAILED: (State.CLOSED,),
    State.RETIRED: (State.CLOSED,),
    State.CLOSED: (),
}
"""Transitions. ASLEEP is derived: workers fall asleep and wake up within a step."""

_ERRORS: Final = {
    State.ASLEEP: "this LLM is asleep ({tags}): call wake_up() before anything is computed",
    State.FAILED: "an earlier step failed halfway: close this LLM and make a new one",
    State.CLOSED: "this LLM was closed: make a new one",
}


class Life:
    """State of one engine, and the release of its resources. Holds no reference to the engine: a finalizer uses it."""

    def __init__(
        self,
        executor: Executor,
        lockstep: Lockstep,
        channels: Iterable[ControlChannel | OutsideBlocks],
        watchdog: Watchdog | None,
        heartbeat: Heartbeat,
    ) -> None:
        self._executor, self._lockstep = executor, lockstep
        self._channels: tuple[Lockstep | ControlChannel | OutsideBlocks, ...] = (lockstep, *channels)
        self._watchdog, self._heartbeat = watchdog, heartbeat
        self._state = self._after_step = State.OPEN
        self._owner = os.getpid()
        # The executor must not reference the engine, whose memory is to be freed with its last reference.
        self._executor_has_failed = threading.Event()
        executor.register_failure_callback(self._executor_has_failed.set)

    @property
    def state(self) -> State:
        return State.ASLEEP if self._state is State.OPEN and self._executor.is_sleeping else self._state

    @property
    def is_closed(self) -> bool:
        return self._state in (State.CLOSED, State.RETIRED)

    @property
    def is_closing(self) -> bool:
        """Whether the current step closes the engine."""
        return self._after_step is State.CLOSED

    @property
    def has_round_ended(self) -> bool:
        """Whether the `follow` loop of this rank ends."""
        return self.is_closed or self._state is State.ROUND_OVER

    @property
    def is_of_this_process(self) -> bool:
        """Whether the engine was made in this process, not in the parent that forked it."""
        return os.getpid() == self._owner

    def check_not_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError(_ERRORS[State.CLOSED])

    def check_not_failed(self) -> None:
        """Raise RuntimeError after a failed step or exchange, or the executor's error after a worker has ended."""
        has_failed = self._state in (State.IN_STEP, State.FAILED)
        if self._executor_has_failed.is_set() and not has_failed:
            self._executor.check_health()
        if has_failed:
            raise RuntimeError(_ERRORS[State.FAILED])

    def check_open(self) -> None:
        self.check_not_closed()
        self.check_not_failed()

    def check_awake(self) -> None:
        """Raise RuntimeError while weights or cache are asleep."""
        if self._executor.is_sleeping:
            raise RuntimeError(_ERRORS[State.ASLEEP].format(tags=" and ".join(self._executor.sleeping_tags)))

    def begin_step(self) -> None:
        """Enter a step. Call `check_not_failed` first."""
        self._enter(State.IN_STEP)
        self._after_step = State.OPEN

    def set_after_step(self, state: State) -> None:
        """Set the state after the current step: CLOSED or ROUND_OVER."""
        self._after_step = state

    def end_step(self) -> None:
        """Leave a step that succeeded."""
        # A callback that the step calls may close the engine.
        if not self.is_closed:
            self._enter(self._after_step)
        self._heartbeat.enter(BETWEEN_STEPS)

    def begin_round(self) -> None:
        """Leave ROUND_OVER: after a round, or a `follow` that was interrupted in its last step."""
        if self._state is State.ROUND_OVER:
            self._enter(State.OPEN)

    def diagnose(self, error: Exception) -> BaseException:
        """Report an error in a step or an exchange of all ranks to the other ranks; the engine has failed. Returns the
        error to raise, which names another rank if that is the cause.
        """
        self._fail()
        known: Exception = error
        if self._watchdog is not None and not isinstance(error, AbortedError):
            self._watchdog.fail(error)
            cause = self._watchdog.find_cause(error)
            known = RankFailedError(cause) if cause is not None else error
        return self._lockstep.diagnose(known)

    @contextmanager
    def exchanging(self, earlier: BaseException | None = None) -> Iterator[None]:
        """Block of an exchange between all ranks outside a step. An error in it is raised as `diagnose` returns it,
        from an `earlier` one of this rank if given. After an error, Ctrl-C included, the engine has failed: the next
        message of the others is not the one that this rank's next call would wait for.
        """
        try:
            yield
        except Exception as error:
            raise self.diagnose(error) from (earlier or error)
        except BaseException:
            self._fail()
            raise

    def report(self, error: BaseException) -> None:
        """Report an error outside a step to the ranks of this replica, which wait for the next step."""
        if self._state not in (State.IN_STEP, State.FAILED):
            self._lockstep.diagnose(error)

    def retire(self) -> None:
        """Close, and leave executor and watchdog to the engine that continues with them."""
        self._enter(State.RETIRED)
        self._close_channels()

    def close(self) -> None:
        """Close and release all resources. Idempotent."""
        if self._state is not State.CLOSED:
            self._enter(State.CLOSED)
        self.release()

    def release(self, *, is_closed: bool = True) -> None:
        """Release memory and process groups. Idempotent. `is_closed` is False if the interpreter ends, or the engine
        was garbage collected. No effect in a forked process, whose resources are its parent's.
        """
        if not self.is_of_this_process:
            return
        self._heartbeat.enter(CLOSING)
        if self._watchdog is not None and not is_closed:
            self._watchdog.leave_unclosed()
        self._close_channels()
        try:
            self._executor.shutdown()
        finally:
            if self._watchdog is not None and not self._watchdog.watched.exits:
                self._watchdog.stop()

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self._state], (self._state, state)
        self._state = state

    def _fail(self) -> None:
        if not self.is_closed and self._state is not State.FAILED:
            self._enter(State.FAILED)

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()
