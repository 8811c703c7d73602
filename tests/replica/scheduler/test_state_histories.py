"""Random histories of a model with recurrent states: a row's slot always holds exactly the tokens before its next one."""

from typing import Any

import pytest
from histories import Operation, limits, new_run, operations, play, random_history, state_limits
from hypothesis import given, settings
from scheduler_runs import Run
from test_scheduler_property import check_answers


def keeps_states_and_ends(limits: dict[str, Any], operations: list[Operation]) -> Run:
    run = new_run(limits)
    check_answers(run, play(run, operations))
    run.settle()
    assert run.slots.num_used_slots == run.slots.num_used_host_slots == 0
    return run


@settings(max_examples=100)
@given(limits, state_limits, operations)
def test_any_history_keeps_states(limits: dict[str, Any], states: dict[str, Any], operations: list[Operation]):
    keeps_states_and_ends({**limits, **states}, operations)


@pytest.mark.stress
@settings(max_examples=3_000)
@given(limits, state_limits, operations)
def test_many_more_histories_keep_states(limits: dict[str, Any], states: dict[str, Any], operations: list[Operation]):
    keeps_states_and_ends({**limits, **states}, operations)
