"""What requests find in the cache, step by step: blocks of the same beginning, of the same step, of earlier answers,
and of their own from before they were preempted.

A row of a step is (request, sample, first token, tokens, samples): what was found is what a row does not begin with.
Blocks hold 4 tokens. That what was found holds the right contents is checked in every step (`visible_cache.py`).
"""

import pytest
from scheduler_runs import Row, Run, asked_once, cached_run, tokens

from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceGroupMetadata
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan

# How much is found.


@pytest.mark.parametrize("length", range(1, 14))
def test_repeated_prompt_finds_full_blocks_before_last_token(length: int):
    run = asked_once(tokens(1, length))
    run.admit(0, tokens(1, length), max_tokens=1)
    num_found = (length - 1) // 4 * 4
    assert run.step() == [Row(1, 0, num_found, length - num_found, 1)]
    assert run.ended[0].num_cached_tokens == 0
    assert run.ended[1].num_cached_tokens == num_found
    counters = run.scheduler.counters
    assert counters.num_cached_prompt_tokens == num_found
    assert counters.num_prompt_tokens == 2 * length
    assert counters.num_computed_tokens == 2 * length - num_found


@pytest.mark.parametrize(("num_same", "num_found"), [(1, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)])
def test_prompt_finds_full_blocks_up_to_difference(num_same: int, num_found: int):
    run = asked_once(tokens(1, 16))
    run.admit(0, tokens(1, num_same) + tokens(100, 16 - num_same), max_tokens=1)
    assert run.step() == [Row(1, 0, num_found, 16 - num_found, 1)]


def test_prompt_with_other_beginning_finds_nothing():
    run = asked_once(tokens(1, 16))
    run.admit(0, (99, *tokens(2, 15)), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 16, 1)]


def test_fully_cached_prompt_computes_its_last_block():
    run = asked_once(tokens(1, 8), max_tokens=6)
    run.admit(0, tokens(1, 8), max_tokens=2)
    assert run.steps(2) == [[Row(1, 0, 4, 4, 1)], [Row(1, 0, 8, 1, 1)]]
    assert run.cache.num_used_blocks == 0


def test_copy_is_found_once_the_first_block_is_evicted():
    """The second request computed tokens 4 to 7 again, beside their block in the cache, and then evicted that."""
    run = asked_once(tokens(1, 8), max_tokens=5, num_blocks=4)
    for length in (8, 9):
        run.admit(0, tokens(1, 9)[:length], max_tokens=9 if length == 8 else 1)
        run.finish()
    assert [group.num_cached_tokens for group in run.ended.values()] == [0, 4, 8]


def test_prompt_finds_nothing_without_the_cache():
    run = Run(caching=False)
    for _ in range(3):
        run.admit(0, tokens(1, 9), max_tokens=1)
        run.admit(0, tokens(1, 9), max_tokens=1)
        assert [row.first for row in run.step()] == [0, 0]
    assert run.scheduler.counters.num_cached_prompt_tokens == 0
    assert [group.num_cached_tokens for group in run.ended.values()] == [0] * 6
    assert run.cache.num_cached_blocks == 0


def test_cached_token_count_is_known_once_request_starts():
    run = cached_run(max_num_seqs=1)
    run.admit(0, tokens(1, 9))
    run.admit(0, tokens(1, 9))
    assert [group.num_cached_tokens for group in run.scheduler.queues.groups.values()] == [None, None]
    run.step()
    assert [group.num_cached_tokens for group in run.scheduler.queues.groups.values()] == [0, None]
    assert run.abort(1).num_cached_tokens is None


def test_request_with_several_samples_finds_prompt_once():
    run = asked_once(tokens(1, 10))
    run.admit(0, tokens(1, 10), n=3, max_tokens=2)
    assert run.steps(2) == [[Row(1, 0, 8, 2, 3)], [Row(1, sample, 10, 1, 1) for sample in range(3)]]
    assert run.ended[1].num_cached_tokens == run.scheduler.counters.num_cached_prompt_tokens == 8


# Within one step.


def test_requests_of_one_step_share_first_ones_blocks():
    run = cached_run()
    run.admit(0, tokens(1, 10), max_tokens=3)
    run.admit(0, tokens(1, 10), max_tokens=3)
    plan = run.scheduler.schedule()
    prompt, sampling = tokens(1, 10), SamplingParams(max_tokens=3, ignore_eos=True)
    assert plan == StepPlan(
        step=1,
        groups=(
            SequenceGroupMetadata(Request(0, prompt, sampling, 0), (SequenceData(0, (), (0, 1, 2), 0, 10, 1),)),
            SequenceGroupMetadata(Request(1, prompt, sampling, 1), (SequenceData(0, (), (0, 1, 3), 8, 2, 1),)),
        ),
        num_tokens=12,
    )
    assert run.cache.num_used_blocks == 4


def test_requests_of_one_step_share_prefix_then_diverge():
    run = cached_run()
    for _ in range(3):
        run.admit(0, tokens(1, 10), max_tokens=3)
    assert run.steps(2) == [
        [Row(0, 0, 0, 10, 1), Row(1, 0, 8, 2, 1), Row(2, 0, 8, 2, 1)],
        [Row(request, 0, 10, 1, 1) for request in range(3)],
    ]
    run.finish(lambda key, position: 50 + key.request_id)
    assert [run.tokens(request)[0][2:] for request in range(3)] == [[50], [51], [52]]


def test_budget_counts_only_computed_tokens():
    run = cached_run(max_num_batched_tokens=14)
    for _ in range(3):
        run.admit(0, tokens(1, 10), max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 10, 1), Row(1, 0, 8, 2, 1), Row(2, 0, 8, 2, 1)]


def test_next_request_finds_chunk_computed_so_far():
    run = cached_run(max_num_batched_tokens=10)
    run.admit(0, tokens(1, 16), max_tokens=2)
    run.admit(0, tokens(1, 16), max_tokens=1)
    assert run.steps(3) == [
        [Row(0, 0, 0, 10, 0)],
        [Row(0, 0, 10, 6, 1), Row(1, 0, 12, 4, 1)],
        [Row(0, 0, 16, 1, 1)],
    ]


def test_chunks_continue_from_cached_prefix():
    run = asked_once(tokens(1, 9), max_num_batched_tokens=8)
    run.admit(0, tokens(1, 28), max_tokens=1)
    assert run.steps(3) == [[Row(1, 0, 8, 8, 0)], [Row(1, 0, 16, 8, 0)], [Row(1, 0, 24, 4, 1)]]


def test_unchunked_prompt_fits_by_its_uncached_tokens():
    run = asked_once(tokens(1, 17), max_num_batched_tokens=20, chunked=False)
    run.admit(0, tokens(200, 14), max_tokens=1)
    run.admit(0, tokens(1, 20), max_tokens=1)
    run.admit(0, tokens(1, 23), max_tokens=1)
    assert run.steps(2) == [[Row(1, 0, 0, 14, 1), Row(2, 0, 16, 4, 1)], [Row(3, 0, 20, 3, 1)]]


def test_rows_find_blocks_of_later_group_in_step():
    """Sample 1 of request 0 comes back behind request 1, whose prompt it shares, and is told before it."""
    run = cached_run(num_blocks=8, max_model_len=32)
    run.admit(0, tokens(1, 8), n=2)
    run.admit(0, tokens(100, 16))
    run.step()
    assert [row[:2] for row in run.step()] == [(0, 0), (1, 0)]
    assert run.waiting() == [(0, 1)]
    run.abort(1)
    run.admit(0, (*tokens(1, 8), 9, *tokens(60, 3)), max_tokens=1)
    assert run.step() == [Row(0, 0, 9, 1, 1), Row(0, 1, 8, 1, 1), Row(2, 0, 8, 4, 1)]


# What was sampled is found too.


def test_follow_up_finds_the_previous_answer():
    run = cached_run()
    run.admit(0, tokens(1, 6), max_tokens=7)
    run.finish(lambda key, position: 40 + position)
    (answer,) = run.tokens(0)
    run.admit(0, (*tokens(1, 6), *answer, 7, 8, 9), max_tokens=1)
    assert run.step() == [Row(1, 0, 12, 4, 1)], "12 of 13 tokens were computed: nobody asked what follows the last"


def test_follow_up_to_one_sample_finds_that_sample():
    run = cached_run()
    run.admit(0, tokens(1, 6), max_tokens=8, n=2)
    run.finish(lambda key, position: 40 + position + 100 * key.sample_index)
    for answer in run.tokens(0):
        run.admit(0, (*tokens(1, 6), *answer), max_tokens=1)
    assert run.step() == [Row(1, 0, 12, 2, 1), Row(2, 0, 12, 2, 1)]


def test_running_request_is_found_up_to_computed_tokens():
    run = cached_run()
    run.admit(0, tokens(1, 6), max_tokens=20)
    run.steps(4)
    run.admit(0, (*tokens(1, 6), *[9] * 10), max_tokens=1)
    assert run.step() == [Row(0, 0, 9, 1, 1), Row(1, 0, 8, 8, 1)]


# Room.


def test_shared_cached_blocks_need_no_free_blocks():
    run = cached_run(num_blocks=5)
    run.admit(0, tokens(1, 13), max_tokens=3)
    run.step()
    run.admit(0, tokens(1, 13), max_tokens=1)
    assert run.step() == [Row(0, 0, 13, 1, 1), Row(1, 0, 12, 1, 1)], "one block is free and one is needed"


def test_cached_free_blocks_do_not_count_as_free():
    run = asked_once(tokens(1, 13), num_blocks=6)
    run.admit(0, tokens(100, 9), max_tokens=2)
    run.admit(0, tokens(1, 13), max_tokens=1)
    assert run.cache.num_free_blocks == 6
    assert run.step() == [Row(1, 0, 0, 9, 1)], "three blocks are free and found, a fourth is not there"
    assert run.steps(2) == [[Row(1, 0, 9, 1, 1)], [Row(2, 0, 12, 1, 1)]]


def test_prefix_tail_is_evicted_before_its_head():
    run = asked_once(tokens(1, 21), num_blocks=6)
    run.admit(0, tokens(100, 9), max_tokens=1)
    run.step()
    run.admit(0, tokens(1, 21), max_tokens=1)
    assert run.step() == [Row(2, 0, 12, 9, 1)], "of six blocks five had names, and three were taken"


# What was preempted is found again.


def test_preempted_sequence_reuses_its_cached_blocks():
    run = cached_run(num_blocks=7, max_model_len=28)
    run.admit(0, tokens(1, 12), max_tokens=3)
    run.admit(0, tokens(100, 16), max_tokens=2)
    run.step()
    assert run.step() == [Row(1, 0, 16, 1, 1)], "both need a block, and request 0 has less to lose"
    assert run.cache.num_cached_blocks == 6, "one of its three went to request 1, which has ended"
    assert run.step() == [Row(0, 0, 8, 5, 1)]
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_recomputed_tokens, counters.num_cached_prompt_tokens) == (1, 4, 0)
    run.finish()
    assert run.ended[0].num_cached_tokens == 0, "what it found was its own"


def test_preempted_sequence_loses_nothing_when_fully_cached():
    run = cached_run(num_blocks=8, max_model_len=28)
    run.admit(0, tokens(1, 12), max_tokens=3)
    run.admit(0, tokens(100, 16), max_tokens=2)
    run.step()
    assert run.step() == [Row(1, 0, 16, 1, 1)], "it took the one block that was free and had no name"
    assert run.step() == [Row(0, 0, 12, 1, 1)]
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_recomputed_tokens) == (1, 0)


def test_block_check_detects_prompt_cached_to_last_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Allocator, "_prefix_hashes", lambda self, sequence: self._hashes(sequence, 2))
    with pytest.raises(AssertionError):
        test_fully_cached_prompt_computes_its_last_block()
