"""Random histories (`step_histories.py`): after every step the mirror holds what the scheduler holds."""

import copy
import dataclasses
import random
from collections.abc import Callable

import pytest
from step_histories import GROUPED_WAYS, History, run_history

from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.sequence.metadata import SequenceDataDelta, SequenceGroupMetadataDelta
from spmd_worker.replica.sequence.sequence import Sequence, SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan


@pytest.mark.parametrize(
    ("num_histories", "num_least"),
    [pytest.param(20, 5, marks=pytest.mark.matrix), pytest.param(96, 29, marks=pytest.mark.stress)],
)
def test_mirror_equals_scheduler_in_random_histories(num_histories: int, num_least: int):
    seen = seen_in_histories(num_histories, nums_of_ids=(1,))
    assert seen.pop("continuing by none") == seen.pop("continuing by several") == 0
    # Negative control: the histories reach the states in which a mirror could go wrong.
    assert min(seen.values()) >= num_least, seen


@pytest.mark.parametrize(
    ("num_histories", "num_least"),
    [pytest.param(16, 1, marks=pytest.mark.matrix), pytest.param(96, 11, marks=pytest.mark.stress)],
)
def test_mirror_equals_scheduler_for_uneven_id_counts(num_histories: int, num_least: int):
    """Ids are made up, so a stop id, or the most tokens, is found in the middle of several."""
    seen = seen_in_histories(num_histories, nums_of_ids=(0, 1, 1, 3))
    assert min(seen.values()) >= num_least, seen


def seen_in_histories(num_histories: int, nums_of_ids: tuple[int, ...]) -> dict[str, int]:
    seen: dict[str, int] = {}
    for seed in range(num_histories):
        history = run_history(seed, num_steps=25, nums_of_ids=nums_of_ids)
        counters = history.schedulers[0].counters
        history.seen["recomputed"] = counters.num_preemptions - counters.num_swapped_out
        history.seen["found tokens"] = counters.num_cached_prompt_tokens
        seen = {name: seen.get(name, 0) + number for name, number in history.seen.items()}
    return seen


def test_mirror_equals_scheduler_in_short_random_histories():
    for seed in range(120):
        run_history(seed, num_steps=4, max_output_tokens=8)


@pytest.mark.parametrize("nums_of_ids", [(1,), (0, 1, 1, 3)])
def test_mirror_equals_scheduler_with_window_groups(nums_of_ids: tuple[int, ...]):
    histories = [run_history(seed, num_steps=12, nums_of_ids=nums_of_ids, all_ways=GROUPED_WAYS) for seed in range(12)]
    counters = [history.schedulers[0].counters for history in histories]
    assert sum(each.num_swapped_out for each in counters) > 0
    assert sum(each.num_cached_prompt_tokens for each in counters) > 0


@pytest.mark.stress
def test_mirror_equals_scheduler_in_ten_thousand_histories():
    """20 s of processor time."""
    for seed in range(10_000):
        run_history(seed, num_steps=4, max_output_tokens=8)


@pytest.mark.parametrize("num_steps", [3, 8, 20])
def test_lost_message_is_noticed_at_next_one(num_steps):
    history = History(random.Random(1), chunked=True)
    for _ in range(num_steps):
        history.step(history.random_events())
    before = copy.deepcopy(history.mirror)
    history.step(())
    history.mirror = before
    with pytest.raises(MirrorError, match=rf"step is {num_steps + 2}, .*expects {num_steps + 1}$"):
        history.step(())


FORGETFUL = {
    "blocks": lambda plan: dataclasses.replace(plan, continuing_blocks=()),
    "a place of a block": lambda plan: dataclasses.replace(
        plan, continuing_blocks=tuple((max(place - 1, 0), block) for place, block in plan.continuing_blocks)
    ),
    "tokens": lambda plan: dataclasses.replace(plan, continuing_token_ids=plan.continuing_token_ids[::-1]),
    "order": lambda plan: dataclasses.replace(plan, continuing=plan.continuing[::-1]),
    "kept blocks": lambda plan: without_kept_blocks(plan),
    "new tables": lambda plan: without_new_tables(plan),
}


@pytest.mark.parametrize("forgotten", ["finished", *FORGETFUL])
def test_comparison_detects_forgetful_mirror(monkeypatch, forgotten):
    """Negative control of the comparison above."""
    if forgotten == "finished":
        monkeypatch.setattr(Mirror, "_forget", lambda self, plan: None)
    else:
        apply, change = Mirror.apply, FORGETFUL[forgotten]
        monkeypatch.setattr(Mirror, "apply", lambda self, plan: apply(self, change(plan)))
    with pytest.raises((AssertionError, MirrorError)):
        [run_history(seed, num_steps=25) for seed in range(20)]


def test_comparison_detects_recomputed_sequence_marked_as_known(monkeypatch):
    """Negative control: its new blocks would be told as if the mirror held what it computed."""
    preempt = Allocator.preempt

    def put_out_as_known(self: Allocator, sequence: Sequence, group: SequenceGroup) -> None:
        preempt(self, sequence, group)
        sequence.is_known = True

    monkeypatch.setattr(Allocator, "preempt", put_out_as_known)
    with pytest.raises((AssertionError, MirrorError)):
        [run_history(seed, num_steps=25) for seed in range(20)]


def without_kept_blocks(plan: StepPlan) -> StepPlan:
    """The plan as it was if copy-on-write never replaced a block."""
    return with_deltas(plan, lambda data: dataclasses.replace(data, num_kept_blocks=0))


def without_new_tables(plan: StepPlan) -> StepPlan:
    """The plan as it was if who came back were in its old blocks; one block longer at most, which is what it took."""

    def keep_blocks(data: SequenceDataDelta) -> SequenceDataDelta:
        if data.num_kept_blocks or data.sample_index or len(data.appended_block_ids) < 2:
            return data
        kept = len(data.appended_block_ids) - 1
        return dataclasses.replace(data, num_kept_blocks=kept, appended_block_ids=data.appended_block_ids[kept:])

    return with_deltas(plan, keep_blocks)


def with_deltas(plan: StepPlan, change: Callable[[SequenceDataDelta], SequenceDataDelta]) -> StepPlan:
    groups = tuple(
        dataclasses.replace(group, sequences=tuple(map(change, group.sequences)))
        if isinstance(group, SequenceGroupMetadataDelta)
        else group
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)
