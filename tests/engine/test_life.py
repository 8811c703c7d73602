"""The states of an engine: its transitions, and the error of each state."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.engine import life as life_module
from spmd_worker.engine.life import Life, State

ASLEEP = "this LLM is asleep (weights and kv_cache): call wake_up() before anything is computed"
FAILED = "an earlier step failed halfway: close this LLM and make a new one"
CLOSED = "this LLM was closed: make a new one"


class Parts:
    """An executor, and a lockstep, that note what is asked of them; and the life of their engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sleeping_tags: tuple[str, ...] = ()
        self.fail: Any = None
        lockstep = SimpleNamespace(close=lambda: self.calls.append("close"), diagnose=self.explain)
        self.life = Life(self, lockstep, (), None, Heartbeat())

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def register_failure_callback(self, callback: Any) -> None:
        self.fail = callback

    def check_health(self) -> None:
        raise RuntimeError("worker 1 has ended")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def explain(self, error: BaseException) -> BaseException:
        self.calls.append(f"explain {error}")
        return error


@pytest.fixture
def parts() -> Parts:
    return Parts()


def errors(life: Life) -> list[str]:
    """Of `check_open` and `check_awake`; "" where they raise nothing."""
    found = []
    for check in (life.check_open, life.check_awake):
        try:
            check()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def stepped(life: Life, after: State | None = None) -> None:
    life.begin_step()
    if after is not None:
        life.set_after_step(after)
    life.end_step()


def test_steps_lead_from_open_to_open(parts: Parts):
    life = parts.life
    assert life.state is State.OPEN
    life.begin_step()
    assert life.state is State.IN_STEP
    life.end_step()
    assert (life.state, errors(life)) == (State.OPEN, ["", ""])


def test_round_is_over_until_the_next_begins(parts: Parts):
    life = parts.life
    stepped(life, State.ROUND_OVER)
    assert (life.state, life.has_round_ended, errors(life)) == (State.ROUND_OVER, True, ["", ""])
    life.begin_round()
    assert (life.state, life.has_round_ended) == (State.OPEN, False)


def test_engine_closes_with_the_agreed_step(parts: Parts):
    life = parts.life
    life.begin_step()
    life.set_after_step(State.CLOSED)
    assert (life.is_closing, life.is_closed) == (True, False)
    life.end_step()
    assert (life.state, life.is_closed, life.has_round_ended, errors(life)) == (State.CLOSED, True, True, [CLOSED, ""])
    life.close()
    life.close()
    assert parts.calls == ["close", "shutdown"] * 2


def test_step_that_was_left_halfway_is_a_failure(parts: Parts):
    life = parts.life
    life.begin_step()
    assert errors(life) == [FAILED, ""]
    with pytest.raises(AssertionError):
        life.begin_step()
    assert life.diagnose(ValueError("x")).args == ("x",)
    assert (life.state, errors(life)) == (State.FAILED, [FAILED, ""])
    life.report(ValueError("y"))
    assert parts.calls == ["explain x"]
    life.close()
    assert (life.state, errors(life)) == (State.CLOSED, [CLOSED, ""])


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=["an error", "Ctrl-C"])
def test_exchange_that_failed_is_the_last(parts: Parts, error: BaseException):
    with pytest.raises(type(error)), parts.life.exchanging():
        raise error
    assert (parts.life.state, errors(parts.life)) == (State.FAILED, [FAILED, ""])


def test_sleep_is_open_of_an_executor_that_sleeps(parts: Parts):
    life = parts.life
    parts.sleeping_tags = ("weights", "kv_cache")
    assert (life.state, errors(life)) == (State.ASLEEP, ["", ASLEEP])
    # Workers wake up within a step.
    life.begin_step()
    parts.sleeping_tags = ()
    life.end_step()
    assert life.state is State.OPEN


def test_worker_that_ended_between_steps_is_named(parts: Parts):
    parts.fail()
    assert errors(parts.life) == ["worker 1 has ended", ""]
    assert parts.life.state is State.OPEN


def test_retired_engine_keeps_executor_until_closed(parts: Parts):
    life = parts.life
    life.retire()
    assert (life.state, errors(life), parts.calls) == (State.RETIRED, [CLOSED, ""], ["close"])
    life.close()
    assert (life.state, parts.calls) == (State.CLOSED, ["close", "close", "shutdown"])


def test_step_cannot_begin_in_final_states(parts: Parts):
    for state, following in life_module._NEXT.items():
        begins = state in (State.OPEN, State.ROUND_OVER)
        assert (State.IN_STEP in following) == begins, state
        assert (State.CLOSED in following) == (state is not State.CLOSED), state


def test_control_unordered_transitions_let_failed_engine_continue(parts: Parts, monkeypatch: pytest.MonkeyPatch):
    """Negative control of the transitions."""
    monkeypatch.setattr(life_module, "_NEXT", dict.fromkeys(State, tuple(State)))
    parts.life.begin_step()
    parts.life.begin_step()
    parts.life.end_step()
    assert errors(parts.life) == ["", ""]
