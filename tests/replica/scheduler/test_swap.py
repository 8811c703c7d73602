"""Sequences that are preempted to the host and come back: which blocks move when, and what happens when the host is
full.

A row of a step is (request, sample, first token, tokens, samples); moves are (from, to). Blocks hold 4 tokens. That
what comes back is what went out is checked in every step (`visible_cache.py`).
"""

import pytest
from scheduler_runs import Row, Run, tokens

from kv_cache.block_ops import BlockOps
from kv_cache.block_table import TableChange
from kv_cache.cache_manager import CacheManager
from kv_cache.swap_space import SwapSpace
from spmd_worker.replica.mirror.mirror import MirrorError
from spmd_worker.replica.scheduler import planner as planner_module
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.sequence.metadata import SequenceDataDelta, SequenceGroupMetadataDelta
from spmd_worker.replica.sequence.sequence import FinishReason
from spmd_worker.replica.sequence.step import StepResult


def swapping_run(num_blocks: int, num_host_blocks: int = 40, **limits: object) -> Run:
    given = {"max_model_len": 4 * num_blocks, "preemption": "swap", **limits}
    return Run(num_blocks=num_blocks, num_host_blocks=num_host_blocks, **given)


def full_run(num_host_blocks: int = 40, **limits: object) -> Run:
    """Five blocks are full in the second step, both requests need another, and request 0 gives its block."""
    run = swapping_run(5, num_host_blocks, **limits)
    run.admit(4)
    run.admit(16)
    assert run.step() == [Row(0, 0, 0, 4, 1), Row(1, 0, 0, 16, 1)]
    assert run.step() == [Row(1, 0, 16, 1, 1)]
    assert run.waiting() == [(0, 0)]
    return run


def test_uncomputed_sequence_is_not_copied_to_host():
    """Its prompt has one token, which gave it no id and is computed again."""
    run = swapping_run(2)
    run.admit(1)
    run.admit(4, max_tokens=2)
    plan = run.scheduler.schedule()
    run.mirror.apply(plan)
    run.scheduler.apply(StepResult(plan.step, (9,), num_token_ids=(0, 1)))
    plan = run.scheduler.schedule()
    assert (plan.block_ops, run.waiting(), run.swapped()) == (BlockOps(), [(0, 0)], [])
    run.scheduler.check_integrity()


def test_swapped_sequence_returns_as_delta_with_full_table():
    run = full_run()
    assert run.last_plan.block_ops == BlockOps(swap_out=((0, 0),))
    assert run.swapped() == [(0, 0)]
    assert (run.scheduler.num_swapped, run.cache.num_used_host_blocks) == (1, 1)
    assert run.cache.num_used_blocks == 5, "request 1 has taken the block"
    for position in (17, 18):
        assert run.step() == [Row(1, 0, position, 1, 1)]
        assert run.last_plan.block_ops == BlockOps()
    assert run.step() == [Row(0, 0, 4, 1, 1)], "nothing is computed again"
    assert run.last_plan.block_ops == BlockOps(swap_in=((0, 1),))
    # The one token that the mirrors do not have, none of the old blocks, all of the new.
    delta = SequenceDataDelta(0, (9,), 0, (1, 2), 4, 1, 1)
    assert run.last_plan.groups == (SequenceGroupMetadataDelta(0, (delta,)),)
    assert (run.scheduler.num_swapped, run.cache.num_used_host_blocks) == (0, 0)
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_swapped_out, counters.num_swapped_in) == (1, 1, 1)
    assert counters.num_recomputed_tokens == 0
    run.finish()
    assert run.tokens(0) == [[9] * 8]


def test_longer_known_sequence_returns_as_delta_too():
    run = swapping_run(7)
    run.admit(4, max_tokens=9)
    run.admit(16, max_tokens=7)
    assert [len(rows) for rows in run.steps(5)] == [2] * 5
    assert run.step() == [Row(1, 0, 20, 1, 1)], "request 0 has computed 8 tokens"
    assert run.last_plan.block_ops == BlockOps(swap_out=((0, 0), (5, 1)))
    assert run.steps(2) == [[Row(1, 0, 21, 1, 1)], [Row(0, 0, 8, 1, 1)]]
    delta = SequenceDataDelta(0, (9,), 0, (1, 2, 3), 8, 1, 1)
    assert run.last_plan.groups == (SequenceGroupMetadataDelta(0, (delta,)),)
    assert run.last_plan.block_ops == BlockOps(swap_in=((0, 1), (1, 2)))


def test_half_computed_prompt_continues_after_swap():
    run = swapping_run(8, max_num_batched_tokens=4)
    run.admit(12, max_tokens=6)
    run.steps(3)
    run.admit(15, max_tokens=2)
    run.steps(4)
    assert run.step() == [Row(0, 0, 16, 1, 1)]
    assert len(run.last_plan.block_ops.swap_out) == 3
    assert run.steps(2) == [[Row(1, 0, 12, 3, 1)], [Row(1, 0, 15, 1, 1)]]


def test_swapped_sequence_returns_when_it_fits_above_watermark():
    run = swapping_run(11, watermark=2)
    for length in (4, 16, 8, 8):
        run.admit(length)
    run.step()
    assert [row.request for row in run.step()] == [1, 2, 3]
    run.abort(2)
    assert run.cache.num_free_blocks == 3
    assert [row.request for row in run.step()] == [1, 3], "request 0 wants two blocks, and two must be left"
    run.abort(3)
    assert run.cache.num_free_blocks == 6
    assert run.step() == [Row(0, 0, 4, 1, 1), Row(1, 0, 18, 1, 1)]


def test_later_requests_never_overtake_swapped_sequence():
    run = full_run()
    run.admit(1, max_tokens=1)
    assert run.steps(2) == [[Row(1, 0, 17, 1, 1)], [Row(1, 0, 18, 1, 1)]]
    assert run.waiting() == [(0, 0), (2, 0)], "request 2 would not have found a block either"
    assert run.step() == [Row(0, 0, 4, 1, 1), Row(2, 0, 0, 1, 1)]


# The host has no room.


def crowd(num_host_blocks: int) -> Run:
    """Twelve blocks are full, each of three requests needs one more: request 0 is preempted, then request 1."""
    run = swapping_run(12, num_host_blocks)
    for length in (4, 20, 24):
        run.admit(length)
    run.step()
    assert run.step() == [Row(2, 0, 24, 1, 1)]
    assert run.waiting() == [(0, 0), (1, 0)]
    return run


@pytest.mark.parametrize(("num_host_blocks", "swapped"), [(0, []), (1, [(0, 0)]), (5, [(0, 0)]), (6, [(0, 0), (1, 0)])])
def test_sequence_is_recomputed_when_host_is_full(num_host_blocks: int, swapped: list[tuple[int, int]]):
    run = crowd(num_host_blocks)
    assert run.swapped() == swapped
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_swapped_out) == (2, len(swapped))
    rows = run.step()
    assert rows[0] == (Row(0, 0, 4, 1, 1) if swapped else Row(0, 0, 0, 5, 1))
    run.finish()
    assert counters.num_recomputed_tokens == {0: 24, 1: 20, 2: 0}[len(swapped)]
    assert run.cache.num_used_host_blocks == 0


@pytest.mark.gate("9-*", "40-auto-*", "1-swap-True")
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("num_host_blocks", [0, 1, 4, 9, 40])
def test_run_with_any_host_space_equals_uninterrupted_run(num_host_blocks: int, preemption: str, caching: bool):
    outputs, counters = [], []
    for num_blocks, mode in ((200, "recompute"), (9, preemption)):
        run = swapping_run(num_blocks, num_host_blocks, preemption=mode, max_model_len=36, caching=caching)
        for index in range(6):
            run.admit(0, tokens(1 + index % 2, 5 + 2 * index), n=(1, 4)[index % 2], max_tokens=10)
        run.finish(lambda key, position: 100 * position + key.sample_index)
        outputs.append([run.tokens(index) for index in range(6)])
        counters.append(run.scheduler.counters)
        run.settle()
        assert run.cache.num_used_blocks == run.cache.num_used_host_blocks == 0
    assert outputs[0] == outputs[1]
    assert counters[0].num_preemptions == 0
    assert counters[1].num_preemptions > 5
    assert bool(counters[1].num_swapped_out) == (preemption != "recompute" and num_host_blocks > 1)


# What is moved once need not be moved again.


def twice_swapped(caching: bool) -> list[BlockOps]:
    """The moves of request 0: out with two blocks, in, and out again with a third that has begun since."""
    run = swapping_run(7, caching=caching)
    run.admit(0, tokens(1, 8), max_tokens=12)
    run.admit(0, tokens(100, 20), max_tokens=2)
    run.step()
    assert run.step() == [Row(1, 0, 20, 1, 1)]
    moves = [run.last_plan.block_ops]
    run.admit(0, tokens(200, 16), max_tokens=2)
    assert run.step() == [Row(0, 0, 8, 1, 1), Row(2, 0, 0, 16, 1)]
    moves.append(run.last_plan.block_ops)
    assert run.step() == [Row(2, 0, 16, 1, 1)]
    return [*moves, run.last_plan.block_ops]


def test_every_block_is_copied_each_time_without_hashes():
    way_out, way_in, second_way_out = twice_swapped(caching=False)
    assert way_out == BlockOps(swap_out=((0, 0), (1, 1)))
    assert way_in == BlockOps(swap_in=((0, 2), (1, 3)))
    assert [source for source, _ in second_way_out.swap_out] == [2, 3, 4]


def test_second_swap_out_copies_only_new_blocks():
    way_out, way_in, second_way_out = twice_swapped(caching=True)
    assert way_out == BlockOps(swap_out=((0, 0), (1, 1)))
    # Request 1 has taken the tail of what was on the device; the head is there still.
    assert way_in == BlockOps(swap_in=((1, 1),))
    assert [host_block for _, host_block in second_way_out.swap_out] == [2]


def test_blocks_still_on_device_are_not_copied():
    run = swapping_run(7, caching=True)
    run.admit(0, tokens(1, 8))
    run.admit(0, tokens(100, 16), max_tokens=2)
    run.step()
    assert run.step() == [Row(1, 0, 16, 1, 1)]
    assert run.last_plan.block_ops == BlockOps(swap_out=((0, 0), (1, 1)))
    assert run.step() == [Row(0, 0, 8, 1, 1)], "request 1 took the block that had no name"
    assert run.last_plan.block_ops == BlockOps()
    assert run.last_plan.groups[0].sequences[0].appended_block_ids[:2] == (0, 1)


# Swap or compute again.


@pytest.mark.parametrize(
    ("mode", "block_copy_tokens", "prefers_swap"),
    [
        ("swap", 1e9, True),
        ("recompute", 0.0, False),
        ("auto", 0.0, True),
        ("auto", 2.9, True),
        ("auto", 3.0, False),
        ("auto", 1e9, False),
    ],
)
def test_auto_preemption_takes_the_cheaper_way(mode: str, block_copy_tokens: float, prefers_swap: bool):
    """Nine tokens in three blocks; of equals computing again is the way that needs no host."""
    assert PreemptionPolicy(mode, block_copy_tokens).prefers_swap(9, 3) is prefers_swap


def test_auto_preemption_swaps_and_recomputes_in_one_step():
    run = swapping_run(12, preemption="auto", block_copy_tokens=3.0)
    for length in (4, 5, 16, 20):
        run.admit(length)
    run.step()
    assert run.step() == [Row(2, 0, 16, 1, 1), Row(3, 0, 20, 1, 1)]
    assert run.waiting() == [(0, 0), (1, 0)]
    assert run.swapped() == [(0, 0)], "four tokens in one block, where the other has five in two"
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_swapped_out) == (2, 1)
    run.finish()
    assert counters.num_recomputed_tokens == 5


@pytest.mark.parametrize(("block_copy_tokens", "num_swapped"), [(0.5, 2), (4.1, 0)])
def test_copy_cost_decides_preemption_in_run(block_copy_tokens: float, num_swapped: int):
    run = swapping_run(12, preemption="auto", block_copy_tokens=block_copy_tokens)
    for length in (4, 20, 24):
        run.admit(length)
    run.steps(2)
    assert run.scheduler.counters.num_preemptions == 2
    assert len(run.swapped()) == num_swapped


# Groups.


def values(key, position):
    return 10 * position + key.sample_index


def test_swapped_sample_waits_for_space_and_returns_alone():
    run = swapping_run(5)
    run.admit(8, n=4, max_tokens=4)
    assert run.step(values) == [Row(0, 0, 0, 8, 4)]
    assert run.step(values) == [Row(0, sample, 8, 1, 1) for sample in range(3)], "three blocks for four samples"
    assert run.last_plan.block_ops == BlockOps(swap_out=((0, 0), (1, 1)))
    assert run.swapped() == [(0, 3)]
    assert run.cache.num_used_blocks == 5, "its siblings hold the prompt"
    for _ in range(2):
        assert len(run.step(values)) == 3
    assert run.step(values) == [Row(0, 3, 8, 1, 1)]
    assert run.last_plan.block_ops.swap_in == ((0, 0), (1, 1))
    run.finish(values)
    assert run.tokens(0) == [[10 * position + sample for position in range(8, 12)] for sample in range(4)]


def test_returning_samples_share_prompt_with_siblings_again():
    run = swapping_run(8, caching=True)
    run.admit(0, tokens(1, 8), n=4)
    run.admit(0, tokens(100, 12))
    run.step(values)
    assert run.step(values) == [Row(0, 0, 8, 1, 1), Row(0, 1, 8, 1, 1), Row(1, 0, 12, 1, 1)]
    assert run.last_plan.block_ops == BlockOps(swap_out=((0, 0), (1, 1))), "one copy of the prompt for two samples"
    assert run.swapped() == [(0, 2), (0, 3)]
    assert run.cache.num_used_host_blocks == 2
    run.abort(1)
    assert [row.sample for row in run.step(values)] == [0, 1, 2, 3]
    assert run.last_plan.block_ops == BlockOps()
    deltas = run.last_plan.groups[0].sequences
    assert [(data.num_kept_blocks, data.appended_block_ids[:2]) for data in deltas] == [(0, (0, 1))] * 2
    assert run.cache.num_used_blocks == 2 + 4
    assert run.cache.num_used_host_blocks == 0


# What ends or is forgotten while it is on the host.


def test_abort_of_swapped_sequence_frees_host_blocks():
    run = full_run()
    group = run.abort(0)
    assert group.sequences[0].finish_reason is FinishReason.ABORT
    assert (run.scheduler.num_swapped, run.cache.num_used_host_blocks) == (0, 0)
    assert run.tokens(0) == [[9]]
    run.finish()
    assert run.last_plan.block_ops == BlockOps()
    assert run.scheduler.counters.num_swapped_in == 0


def test_abort_of_group_frees_its_swapped_sample():
    run = swapping_run(5)
    run.admit(8, n=4)
    run.steps(2)
    assert run.swapped() == [(0, 3)]
    run.abort(0)
    assert run.cache.num_used_blocks == run.cache.num_used_host_blocks == run.scheduler.num_swapped == 0
    assert run.running() == run.waiting() == []


@pytest.mark.parametrize("forget", [Run.reset_prefix_cache, lambda run: run.set_weight_version(3)])
def test_sequence_swapped_across_reset_continues_but_is_unfindable(forget):
    run = swapping_run(7, caching=True)
    run.admit(0, tokens(1, 8), max_tokens=6)
    run.admit(0, tokens(100, 16), max_tokens=2)
    run.steps(2)
    assert run.swapped() == [(0, 0)]
    forget(run)
    assert run.step() == [Row(0, 0, 8, 1, 1)]
    assert [host_block for host_block, _ in run.last_plan.block_ops.swap_in] == [0, 1], "the device's are forgotten"
    run.finish()
    assert run.cache.num_cached_blocks == 0
    run.admit(0, tokens(1, 8), max_tokens=1)
    assert run.step() == [Row(2, 0, 0, 8, 1)]


@pytest.mark.parametrize("is_reset", [False, True])
def test_host_copy_is_forgotten_at_reset(is_reset: bool):
    """What came back leaves its copy on the host for the next preemption of the same; after a reset for nobody."""
    run = swapping_run(7, caching=True)
    for _ in range(2):
        run.admit(0, tokens(1, 8), max_tokens=2)
        run.admit(0, tokens(100, 16), max_tokens=2)
        run.step()
        assert len(run.step()) == 1
        swapped_out = run.last_plan.block_ops.swap_out
        run.finish()
        if is_reset:
            run.reset_prefix_cache()
    assert len(swapped_out) == (2 if is_reset else 0)


# Negative controls.


def test_integrity_check_detects_lost_host_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CacheManager, "release_host", lambda self, host_table: host_table.block_ids.clear())
    run = full_run()
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        run.abort(0)


def test_swap_check_detects_use_of_full_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SwapSpace, "can_store", lambda self, *args: True)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 of 0 "):
        crowd(0)


def test_swap_check_detects_sequence_keeping_old_blocks(monkeypatch: pytest.MonkeyPatch):
    """A delta that kept what the mirrors knew would name blocks that others have now."""
    monkeypatch.setattr(planner_module, "TableChange", lambda first, block_ids: TableChange(1, block_ids[1:]))
    with pytest.raises(MirrorError, match=r"field block_ids is others' by now, .* a new table"):
        test_swapped_sequence_returns_as_delta_with_full_table()
