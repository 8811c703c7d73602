"""Evicted blocks go to the host tier and come back by a transfer: who waits for it, who goes by, and what becomes of
both when the wish or the cache's contents are gone meanwhile.

A row of a step is (request, sample, first token, tokens, samples); moves are (from, to). Blocks hold 4 tokens, and a
transfer ends two steps after the one that began it. That what comes back is what was evicted is checked in every step
(`visible_cache.py`).
"""

import pytest
from scheduler_runs import Row, Run, tokens

from kv_cache.block_ops import BlockOps
from kv_cache.cache_manager import CacheManager
from kv_cache.connector import Transfers
from spmd_worker.replica.scheduler.policy import WaitingQueue
from spmd_worker.replica.sequence.sequence import Sequence

PROMPT = tokens(1, 13)
"""Three blocks of it can be found."""


def tiered_run(num_blocks: int = 6, num_tier_blocks: int = 9, **limits: object) -> Run:
    return Run(num_blocks=num_blocks, num_tier_blocks=num_tier_blocks, caching=True, **limits)


def evicted_run(**limits: object) -> Run:
    """Request 0 asked PROMPT; request 1 has driven its three blocks out; both have ended, and the transfer too."""
    run = tiered_run(**limits)
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    run.admit(0, tokens(100, 4 * run.cache.num_blocks - 3), max_tokens=1)
    run.step()
    assert run.last_plan.block_ops == BlockOps(store=((2, 0), (1, 1), (0, 2)), transfer=1)
    run.settle()
    return run


def test_request_waits_for_its_transfer_and_computes_rest():
    run = evicted_run()
    run.admit(0, PROMPT, max_tokens=2)
    assert run.step() == []
    # What has to go for it is kept in turn.
    assert run.last_plan.block_ops == BlockOps(store=((1, 3), (2, 4)), load=((2, 0), (1, 1), (0, 2)), transfer=2)
    assert (run.loading(), run.waiting(), run.running()) == ([(2, 0)], [], [])
    assert run.cache.num_used_blocks == 3, "the transfer's own"
    assert run.steps(2) == [[], []]
    assert (run.loading(), run.waiting()) == ([], [(2, 0)])
    assert (run.cache.num_used_blocks, run.cache.num_cached_blocks) == (0, 6)
    assert run.steps(2) == [[Row(2, 0, 12, 1, 1)], [Row(2, 0, 13, 1, 1)]]
    assert run.last_plan.block_ops.load == ()
    assert run.ended[2].num_cached_tokens == run.scheduler.counters.num_cached_prompt_tokens == 12
    assert run.scheduler.counters.num_preemptions == 0


def test_blocks_not_yet_in_tier_are_not_found():
    run = tiered_run(transfer_steps=3)
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, tokens(100, 21), max_tokens=1)
    run.admit(0, PROMPT, max_tokens=1)
    assert [[row.first for row in rows] for rows in run.steps(3)] == [[0], [0], [0]]
    run.settle()
    assert run.scheduler.counters.num_cached_prompt_tokens == 0


def test_only_blocks_missing_on_device_are_loaded():
    run = tiered_run()
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    run.admit(0, tokens(100, 13), max_tokens=1)
    run.step()
    assert run.last_plan.block_ops.store == ((2, 0),), "of six blocks two were never used, and one has no name"
    run.settle()
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    assert run.last_plan.block_ops.load == ((0, 2),)
    assert run.steps(3) == [[], [], [Row(2, 0, 12, 1, 1)]]


def test_blocks_evicted_from_tier_are_computed():
    run = evicted_run(num_tier_blocks=3)
    # The tail was stored first, so it is lost first.
    run.admit(0, tokens(200, 5), max_tokens=1)
    run.step()
    assert run.last_plan.block_ops.store == ((1, 0),)
    run.settle()
    run.admit(0, PROMPT, max_tokens=1)
    assert run.steps(4) == [[], [], [], [Row(3, 0, 8, 5, 1)]]


def test_follow_up_loads_the_previous_answer():
    run = tiered_run()
    run.admit(0, tokens(1, 6), max_tokens=7)
    run.finish(lambda key, position: 40 + position)
    (answer,) = run.tokens(0)
    run.admit(0, tokens(100, 21), max_tokens=1)
    run.finish()
    run.settle()
    run.admit(0, (*tokens(1, 6), *answer, 7), max_tokens=1)
    assert run.steps(4) == [[], [], [], [Row(2, 0, 12, 2, 1)]]


# The others.


def test_others_run_while_request_waits_for_transfer():
    run = evicted_run(num_blocks=12)
    run.admit(0, PROMPT, max_tokens=2)
    run.admit(3, max_tokens=5)
    assert run.steps(3) == [[Row(3, 0, 0, 3, 1)], [Row(3, 0, 3, 1, 1)], [Row(3, 0, 4, 1, 1)]]
    assert run.step() == [Row(2, 0, 12, 1, 1), Row(3, 0, 5, 1, 1)]


def test_request_keeps_its_queue_position_after_transfer():
    run = evicted_run(num_blocks=12, max_num_seqs=1)
    run.admit(0, PROMPT, max_tokens=2)
    run.admit(3, max_tokens=4)
    run.admit(3, max_tokens=4)
    assert run.steps(3) == [[Row(3, 0, 0, 3, 1)], [Row(3, 0, 3, 1, 1)], [Row(3, 0, 4, 1, 1)]]
    assert run.waiting() == [(2, 0), (4, 0)]
    assert run.steps(2) == [[Row(3, 0, 5, 1, 1)], [Row(2, 0, 12, 1, 1)]]


def overtaken(
    num_blocks: int, transfer_steps: int, num_tier_blocks: int, num_tokens: int, num_output_tokens: int, **limits: int
) -> tuple[int, int]:
    """Of a request whose beginning is in the tier, in front of 40 others: how often it waits for a transfer, and how
    many of the others end before it.
    """
    run = tiered_run(num_blocks, num_tier_blocks, transfer_steps=transfer_steps, max_model_len=40, **limits)
    run.admit(0, tokens(1, 9), max_tokens=1)
    run.step()
    run.admit(0, tokens(100, 4 * num_blocks - 3), max_tokens=1)
    run.finish()
    run.settle()
    run.admit(0, tokens(1, 9), max_tokens=1)
    for index in range(40):
        run.admit(0, tokens(1000 + 40 * index, num_tokens), max_tokens=num_output_tokens)
    num_waits = 0
    while 2 not in run.ended:
        was_loading = run.loading()
        run.step(lambda key, position: 9000 + 100 * key.request_id + position)
        num_waits += (2, 0) in run.loading() and (2, 0) not in was_loading
    return num_waits, len(run.ended) - 3


@pytest.mark.parametrize("transfer_steps", [1, 2, 3, 4])
def test_later_requests_do_not_overtake_repeatedly(transfer_steps: int):
    """They took its room, drove out what was brought when they grew, and went by again while it was brought anew."""
    num_waits, num_others = overtaken(10, transfer_steps, 10, num_tokens=12, num_output_tokens=9)
    assert num_waits == 1
    assert num_others <= 3


@pytest.mark.parametrize(
    ("num_blocks", "transfer_steps", "num_tier_blocks", "num_tokens", "num_output_tokens"),
    [(12, 2, 2, 12, 13), (10, 3, 4, 7, 13), (8, 6, 40, 11, 17)],
)
def test_request_waits_for_its_blocks_only_once(
    num_blocks: int, transfer_steps: int, num_tier_blocks: int, num_tokens: int, num_output_tokens: int
):
    num_waits, num_others = overtaken(
        num_blocks, transfer_steps, num_tier_blocks, num_tokens, num_output_tokens, watermark_per_sequence=1
    )
    assert num_waits == 1, f"{num_others} of the 40 behind it ended before it"


def test_requests_for_same_blocks_share_one_transfer():
    run = evicted_run(num_blocks=24, max_model_len=96)
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    assert len(run.last_plan.block_ops.load) == 3
    run.admit(0, (*PROMPT, 55), max_tokens=1)
    assert run.step() == []
    assert run.last_plan.block_ops == BlockOps()
    assert run.loading() == [(2, 0), (3, 0), (4, 0)]
    assert run.steps(2) == [[], [Row(2, 0, 12, 1, 1), Row(3, 0, 12, 1, 1), Row(4, 0, 12, 2, 1)]]


def test_prompt_logprobs_request_waits_for_no_transfer():
    run = evicted_run()
    run.admit(0, PROMPT, max_tokens=1, prompt_logprobs=0)
    assert run.step() == [Row(2, 0, 0, 13, 1)]


def test_request_without_free_blocks_waits_in_queue():
    """What the transfer brings will be shared, but it is not there yet, so all of it is counted."""
    run = evicted_run()
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == []
    assert (run.loading(), run.waiting()) == ([(2, 0)], [(3, 0)])
    assert run.steps(3) == [[], [], [Row(2, 0, 12, 1, 1), Row(3, 0, 12, 1, 1)]]


def test_load_keeps_the_watermark():
    run = evicted_run(watermark=2)
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == []
    assert run.loading() == [(2, 0)]
    run = evicted_run(watermark=3)
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [Row(2, 0, 0, 13, 1)], "alone it may run all the same"


def test_running_request_waits_for_blocks_of_transfer():
    """The request runs alone and is not preempted."""
    run = evicted_run(num_blocks=8, transfer_steps=9)
    run.admit(11, max_tokens=12)
    run.step()
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [Row(2, 0, 11, 1, 1)]
    assert run.loading() == [(3, 0)]
    assert [rows[0].first for rows in run.steps(8)] == list(range(12, 20))
    assert run.cache.num_free_blocks == 0
    assert run.step() == [], "position 20 needs a block"
    assert (run.running(), run.loading()) == ([(2, 0)], [])
    assert [row.request for row in run.step()] == [2]
    run.finish()
    assert run.scheduler.counters.num_preemptions == 0


def test_preempted_sequence_may_return_by_transfer():
    run = tiered_run(num_blocks=7, max_model_len=28)
    run.admit(0, tokens(1, 12), max_tokens=3)
    run.admit(0, tokens(100, 16), max_tokens=4)
    run.steps(2)
    assert run.waiting() == [(0, 0)]
    assert run.last_plan.block_ops == BlockOps(store=((2, 0),), transfer=1)
    assert [len(rows) for rows in run.steps(5)] == [1, 1, 0, 0, 0]
    assert run.step() == [Row(0, 0, 12, 1, 1)]
    assert run.scheduler.counters.num_recomputed_tokens == 0
    run.finish()
    assert run.ended[0].num_cached_tokens == 0


# What ends or is forgotten meanwhile.


def test_abort_during_transfer_leaves_blocks_findable():
    run = evicted_run()
    run.admit(0, PROMPT)
    run.step()
    assert run.abort(2).sequences[0].output_token_ids == []
    assert run.loading() == run.waiting() == []
    assert not run.scheduler.has_unfinished
    assert run.cache.num_used_blocks == 3, "the transfer ends as it would"
    run.settle()
    assert run.cache.num_used_blocks == 0
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [Row(3, 0, 12, 1, 1)]


def test_abort_of_one_waiter_leaves_other_waiting():
    run = evicted_run(num_blocks=24, max_model_len=96)
    for _ in range(2):
        run.admit(0, PROMPT, max_tokens=1)
    run.step()
    run.abort(2)
    assert run.loading() == [(3, 0)]
    assert run.steps(3) == [[], [], [Row(3, 0, 12, 1, 1)]]


FORGETTING = pytest.mark.parametrize("forget", [Run.reset_prefix_cache, lambda run: run.set_weight_version(5)])


@FORGETTING
def test_blocks_loading_during_reset_are_not_found(forget):
    run = evicted_run()
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    forget(run)
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [], "request 3 finds too little room while the transfer holds three blocks"
    assert (run.loading(), run.waiting()) == ([(2, 0)], [(3, 0)])
    assert run.step() == []
    assert run.waiting() == [(2, 0), (3, 0)]
    assert run.cache.num_cached_blocks == 0
    assert run.step() == [Row(2, 0, 0, 13, 1), Row(3, 0, 12, 1, 1)]
    assert run.ended[2].num_cached_tokens == 0


@FORGETTING
def test_tier_blocks_are_not_found_after_reset(forget):
    """Blocks on their way to the tier are not found either."""
    run = evicted_run()
    forget(run)
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [Row(2, 0, 0, 13, 1)]
    run.admit(0, tokens(100, 21), max_tokens=1)
    run.step()
    assert len(run.last_plan.block_ops.store) == 3
    forget(run)
    run.settle()
    run.admit(0, PROMPT, max_tokens=1)
    assert run.step() == [Row(4, 0, 0, 13, 1)]


# A tier that is full.


def test_fully_reserved_tier_stores_nothing_and_never_hangs():
    run = evicted_run(num_blocks=12, num_tier_blocks=3, transfer_steps=6)
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, tokens(200, 5), max_tokens=1)
    assert run.step() == [Row(3, 0, 0, 5, 1)]
    operations = run.last_plan.block_ops
    assert (operations.store, len(operations.load)) == ((), 3), "all three places are read"
    run.admit(0, tokens(300, 9), max_tokens=1)
    assert run.step() == [Row(4, 0, 0, 9, 1)]
    assert run.last_plan.block_ops == BlockOps(), "two names were lost"
    run.finish()
    assert run.ended[2].num_cached_tokens == 12


@pytest.mark.gate("5-*", "1-1", "30-0")
@pytest.mark.parametrize("transfer_steps", [0, 1, 7])
@pytest.mark.parametrize("num_tier_blocks", [1, 2, 5, 30])
def test_run_with_any_tier_equals_uninterrupted_run(num_tier_blocks: int, transfer_steps: int):
    outputs = []
    for limits in ({"num_blocks": 200}, {"num_blocks": 9, "num_tier_blocks": num_tier_blocks}):
        run = Run(caching=True, max_model_len=36, transfer_steps=transfer_steps, **limits)
        for index in range(12):
            run.admit(0, (*tokens(100 * (index % 4), 9), index), n=(1, 3)[index % 2], max_tokens=8)
        run.finish(lambda key, position: 100 * position + key.sample_index)
        outputs.append([run.tokens(index) for index in range(12)])
        run.settle()
        assert run.cache.num_used_blocks == 0
    assert outputs[0] == outputs[1]
    assert run.scheduler.counters.num_stored_blocks > 0
    if num_tier_blocks >= 5:
        assert run.scheduler.counters.num_loaded_blocks > 0


# Negative controls.


def test_content_check_detects_use_before_transfer_finished(monkeypatch: pytest.MonkeyPatch):
    finish, take = Transfers.finish, CacheManager.take_block_ops

    def finishes_at_once(self):
        block_ops = take(self)
        if block_ops.transfer:
            self.finish_transfer(block_ops.transfer)
        return block_ops

    monkeypatch.setattr(CacheManager, "take_block_ops", finishes_at_once)
    monkeypatch.setattr(Transfers, "finish", lambda self, n: finish(self, n) if n in self._in_flight else [])
    run = tiered_run(num_blocks=12)
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, tokens(100, 45), max_tokens=1)
    run.admit(0, PROMPT, max_tokens=1)
    run.steps(3)
    run.admit(0, PROMPT, max_tokens=1)
    with pytest.raises(AssertionError, match="nothing is there"):
        run.step()


def test_queue_check_detects_lost_queue_position(monkeypatch: pytest.MonkeyPatch):
    reinsert = WaitingQueue.reinsert

    def reinsert_last(self: WaitingQueue, sequence: Sequence) -> None:
        arrived = self._lane_of(sequence).arrived
        if arrived:
            arrived.append(sequence)
            self._num_sequences += 1
        else:
            reinsert(self, sequence)

    monkeypatch.setattr(WaitingQueue, "reinsert", reinsert_last)
    with pytest.raises(AssertionError):
        test_request_keeps_its_queue_position_after_transfer()
