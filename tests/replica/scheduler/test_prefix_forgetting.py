"""What nobody finds in the cache: prompts whose log-probabilities are wanted, and everything from before a reset or of
other weights, also what is computed later by those who ran through it.

A row of a step is (request, sample, first token, tokens, samples). Blocks hold 4 tokens.
"""

import pytest
from scheduler_runs import Row, Run, asked_once, cached_run, tokens

from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler import allocator as residency_module
from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.step import StepResult


def test_prompt_logprobs_request_computes_its_prompt():
    run = asked_once(tokens(1, 9))
    run.admit(0, tokens(1, 9), max_tokens=1, prompt_logprobs=0)
    run.admit(0, tokens(1, 9), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 9, 1), Row(2, 0, 8, 1, 1)]
    assert [run.ended[index].num_cached_tokens for index in range(3)] == [0, 0, 8]


def test_blocks_of_prompt_logprobs_request_are_found():
    run = cached_run()
    run.admit(0, tokens(1, 9), max_tokens=1, prompt_logprobs=0)
    run.admit(0, tokens(1, 9), max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 9, 1), Row(1, 0, 8, 1, 1)]


def test_prompt_logprobs_come_again_after_preemption():
    run = cached_run(num_blocks=7, max_model_len=28)
    run.admit(0, tokens(1, 12), prompt_logprobs=0, max_tokens=3)
    run.admit(0, tokens(100, 16), max_tokens=2)
    entries = tuple({token: Logprob(-1.0, 1)} for token in range(12))
    plan = run.scheduler.schedule()
    run.scheduler.apply(StepResult(plan.step, (9, 9), (), ((0, 0, entries),)))
    plan = run.scheduler.schedule()
    run.scheduler.apply(StepResult(plan.step, (9,)))
    assert run.waiting() == [(0, 0)]
    plan = run.scheduler.schedule()
    (row,) = plan.groups[0].sequences
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (0, 13)


def test_old_blocks_are_not_found_after_reset():
    run = asked_once(tokens(1, 13))
    run.reset_prefix_cache()
    assert run.cache.num_cached_blocks == 0
    run.admit(0, tokens(1, 13), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 13, 1)]
    run.admit(0, tokens(1, 13), max_tokens=1)
    assert run.step() == [Row(2, 0, 12, 1, 1)], "what came after the reset is found"


def reset(run: Run) -> None:
    run.reset_prefix_cache()


def new_weights(run: Run) -> None:
    run.set_weight_version(7)


FORGETTING = pytest.mark.parametrize("forget", [reset, new_weights])


@FORGETTING
def test_running_sequence_is_not_found_after_reset(forget):
    run = cached_run()
    run.admit(0, tokens(1, 6), max_tokens=13)
    run.steps(4)
    forget(run)
    assert run.step() == [Row(0, 0, 9, 1, 1)]
    run.admit(0, (*tokens(1, 6), *[9] * 10), max_tokens=1)
    assert run.step() == [Row(0, 0, 10, 1, 1), Row(1, 0, 0, 16, 1)]
    run.finish()
    assert run.tokens(0) == [[9] * 13]
    # Request 1 has named four blocks; what request 0 computed beyond them, after the reset, has no name.
    run.admit(0, (*tokens(1, 6), *[9] * 13), max_tokens=1)
    assert run.step() == [Row(2, 0, 16, 3, 1)]


@FORGETTING
def test_prompt_chunked_across_reset_is_not_found(forget):
    run = cached_run(max_num_batched_tokens=8)
    run.admit(0, tokens(1, 16), max_tokens=3)
    run.step()
    forget(run)
    run.finish()
    assert run.cache.num_cached_blocks == 0
    run.admit(0, tokens(1, 16), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 8, 0)]


@FORGETTING
def test_samples_forked_after_reset_are_not_found(forget):
    run = cached_run(max_num_batched_tokens=8)
    run.admit(0, tokens(1, 16), n=2, max_tokens=9)
    run.step()
    forget(run)
    run.finish()
    assert run.cache.num_cached_blocks == 0


@FORGETTING
def test_request_waiting_during_reset_is_found_afterwards(forget):
    run = cached_run(max_num_seqs=1)
    run.admit(0, tokens(1, 9), max_tokens=2)
    run.admit(0, tokens(1, 9), max_tokens=1)
    run.admit(0, tokens(1, 9), max_tokens=1)
    run.step()
    forget(run)
    assert run.steps(3) == [[Row(0, 0, 9, 1, 1)], [Row(1, 0, 0, 9, 1)], [Row(2, 0, 8, 1, 1)]]


@FORGETTING
def test_sequence_preempted_before_reset_recomputes_everything(forget):
    """The recomputed sequence is found afterwards."""
    run = cached_run(num_blocks=7, max_model_len=28)
    run.admit(0, tokens(1, 12), max_tokens=3)
    run.admit(0, tokens(100, 16), max_tokens=2)
    run.steps(2)
    assert run.waiting() == [(0, 0)]
    forget(run)
    assert run.step() == [Row(0, 0, 0, 13, 1)]
    assert run.scheduler.counters.num_recomputed_tokens == 12
    run.finish()
    run.admit(0, tokens(1, 12), max_tokens=1)
    assert run.step() == [Row(2, 0, 8, 4, 1)]


def test_restored_weight_version_finds_no_old_blocks():
    run = asked_once(tokens(1, 13))
    for version in (1, 0):
        run.set_weight_version(version)
        run.admit(0, tokens(1, 13), max_tokens=1)
        assert [row.first for row in run.step()] == [0]


def test_weight_version_changes_block_hashes_without_reset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CacheManager, "reset_prefix_cache", lambda self: None)
    run = asked_once(tokens(1, 13))
    run.set_weight_version(1)
    run.admit(0, tokens(1, 13), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 13, 1)]


# Negative controls: the contents that the tests run on would see what is found wrongly.


@pytest.mark.control("Nothing computed with old weights is found")
def test_contents_check_detects_found_old_weights(monkeypatch: pytest.MonkeyPatch, control):
    monkeypatch.setattr(residency_module, "root_hash", lambda *_, **__: bytes(16))
    monkeypatch.setattr(CacheManager, "reset_prefix_cache", lambda self: None)
    run = asked_once(tokens(1, 13))
    run.set_weight_version(1)
    run.admit(0, tokens(1, 13), max_tokens=1)
    with control("found, but forgotten"):
        run.step()


def test_contents_check_detects_sequence_found_across_reset(monkeypatch: pytest.MonkeyPatch):
    def keeps_names(self, groups):
        self._cache.reset_prefix_cache()
        for group in groups:
            group.sequences[0].num_hashed_blocks = 0

    monkeypatch.setattr(Allocator, "reset_prefix_cache", keeps_names)
    run = cached_run(max_num_batched_tokens=6)
    run.admit(0, tokens(1, 12), max_tokens=3)
    run.step()
    run.reset_prefix_cache()
    run.finish()
    run.admit(0, tokens(1, 16), max_tokens=1)
    with pytest.raises(AssertionError, match=r"found, .*forgotten before"):
        run.step()
