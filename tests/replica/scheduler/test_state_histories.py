"""Random histories of a model with recurrent states: a slot always holds exactly the tokens before its row's next."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from histories import MAX_MODEL_LEN, Operation, limits, new_run, operations, play, random_history, state_limits
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import Run
from test_scheduler_property import by_position, check_answers

from kv_cache.pending_moves import PendingMoves
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.mirror.contents import Moved
from spmd_worker.replica.mirror.mirror import MirroredSequence, MirrorError
from spmd_worker.replica.mirror.state_check import StateCheck
from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.sequence_states import SequenceStates
from spmd_worker.replica.sequence.sequence import Sequence


def keeps_states_and_ends(
    limits: dict[str, Any], operations: list[Operation], nums_of_ids: tuple[int, ...] = (1,)
) -> None:
    run, chance = new_run(limits), random.Random(0)
    if not limits["ahead"]:
        run.num_ids = lambda: chance.choice(nums_of_ids)
    check_answers(run, play(run, operations))
    run.settle()
    assert run.slots.num_used_slots == run.slots.num_used_host_slots == 0


@settings(max_examples=15)
@given(limits, state_limits, operations)
def test_any_history_keeps_states(limits: dict[str, Any], states: dict[str, Any], operations: list[Operation]):
    keeps_states_and_ends({**limits, **states}, operations)


@settings(max_examples=15)
@given(limits, state_limits, operations)
def test_any_history_without_blocks_keeps_states(
    limits: dict[str, Any], states: dict[str, Any], operations: list[Operation]
):
    keeps_states_and_ends({**limits, **states, "is_attention_free": True}, operations)


@pytest.mark.stress
@settings(max_examples=3_000)
@given(limits, state_limits, operations, st.sampled_from([(1,), (0, 1, 1, 2)]), st.booleans())
def test_many_more_histories_keep_states(
    limits: dict[str, Any],
    states: dict[str, Any],
    operations: list[Operation],
    nums_of_ids: tuple[int, ...],
    is_attention_free: bool,
):
    keeps_states_and_ends({**limits, **states, "is_attention_free": is_attention_free}, operations, nums_of_ids)


CROWDED = {
    "num_blocks": 9,
    "max_num_batched_tokens": 16,
    "max_model_len": MAX_MODEL_LEN,
    "snapshot_slots": 3,
    "grid": 4,
}
CACHED = {**CROWDED, "caching": True, "preemption": "auto", "num_host_blocks": 6, "host_slots": 2}
SWAPPED = {**CACHED, "preemption": "swap"}
FLOWS = [{}, {"ahead": 1}, {"virtual_engines": 2}]


@pytest.mark.parametrize("flow", FLOWS)
def test_random_histories_reach_critical_states(flow: dict[str, int]):
    runs = [Run(**limits, **flow) for limits in (CROWDED, CACHED, SWAPPED)]
    plain, *cached = [run.scheduler.counters for run in runs]
    for run in runs:
        random_history(1, run, by_position)
    assert plain.num_preemptions > 5
    assert plain.num_snapshots == plain.num_snapshot_hits == 0
    for counters in cached:
        assert min(counters.num_snapshots, counters.num_snapshot_hits) > 10
    assert cached[1].num_swapped_out > 5
    assert cached[0].num_preemptions > cached[0].num_swapped_out > 5


@pytest.mark.parametrize("flow", FLOWS)
def test_decisions_ignore_token_values(flow: dict[str, int]):
    first, second = Run(**CACHED, **flow), Run(**CACHED, **flow)
    history = random_history(0, first, by_position)
    assert history == random_history(0, second, by_position, lambda token: 1000 - token)
    assert first.scheduler.counters == second.scheduler.counters


@pytest.mark.parametrize("flow", [{}, {"virtual_engines": 2}])
@pytest.mark.parametrize("limits", [CROWDED, CACHED])
def test_rows_get_no_and_several_ids(limits: dict[str, Any], flow: dict[str, int]):
    """A sequence without an id would apply its last token a second time."""
    run, chance = Run(**limits, **flow), random.Random(0)
    run.num_ids = lambda: chance.choice([0, 1, 1, 3])
    random_history(2, run, by_position)
    assert run.scheduler.counters.num_preemptions > 20


def test_repeated_token_is_detected(monkeypatch: pytest.MonkeyPatch):
    """Negative control: as where keys and values are written again."""

    def repeat(self: Scheduler, sequence: Sequence) -> None:
        sequence.num_computed_tokens -= 1
        sequence.repeats_last = True

    monkeypatch.setattr(Scheduler, "_recompute", repeat)
    without_check(monkeypatch)
    run = Run(**CROWDED)
    run.num_ids = iter([1, 1, 0, *[1] * 100]).__next__
    run.admit(5)
    with pytest.raises(AssertionError, match="state in slot"):
        run.finish()


def without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors let wrong plans through."""

    def follow(self: StateCheck, known: Iterable[MirroredSequence]) -> Moved:
        return self._slots.moved(self._plan.state_ops)

    monkeypatch.setattr(StateCheck, "check", follow)
    monkeypatch.setattr(StateCheck, "check_state_ops", follow)


def in_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of what the step being planned computes."""
    make, decide = SequenceStates.make_snapshots, Planner.decide
    monkeypatch.setattr(SequenceStates, "make_snapshots", lambda self, running, hashes: None)

    def decide_and_make(self: Planner):
        decisions = decide(self)
        make(self._allocator.states, self._queues.running, self._allocator._hashes)
        return decisions

    monkeypatch.setattr(Planner, "decide", decide_and_make)


def without_copy_of_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "fork", lambda self, slot: self.take())


def with_kept_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is recomputed goes on after the blocks it finds, with whatever its slot holds."""
    monkeypatch.setattr(SequenceStates, "num_usable", lambda self, hashes, num_blocks: num_blocks)
    monkeypatch.setattr(StateSlots, "take_from", lambda self, name: self.take())


def without_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is made and taken in one step, as two copies of which one reads what the other has not written yet."""

    def copy(self: PendingMoves, source: int, destination: int) -> None:
        self._copies[destination] = source

    monkeypatch.setattr(PendingMoves, "copy", copy)


def without(kind: str):
    take = StateSlots.take_state_ops
    return lambda monkeypatch: monkeypatch.setattr(
        StateSlots, "take_state_ops", lambda self: dataclasses.replace(take(self), **{kind: ()})
    )


FAULTS = [
    in_its_own_step,
    without_copy_of_fork,
    with_kept_state,
    without_chain,
    without("copy"),
    without("swap_in"),
    without("swap_out"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_histories_detect_wrong_state(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]):
    """Negative control of the slots that hold the tokens before a row's next one."""
    fault(monkeypatch)
    without_check(monkeypatch)
    with pytest.raises(AssertionError, match="state in slot"):
        [random_history(seed, Run(**SWAPPED), by_position) for seed in range(20)]


@pytest.mark.parametrize("fault", FAULTS)
def test_mirror_rejects_wrong_state_in_histories(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
):
    """No row reads it."""
    fault(monkeypatch)
    with pytest.raises(MirrorError, match=r"field (state_slot|state_ops|num_computed_tokens) is "):
        [random_history(seed, Run(**SWAPPED), by_position) for seed in range(20)]
