"""A request with more samples than run at once: its parts compute the prompt once, with and without a prefix cache."""

from typing import Any

import pytest
from scheduler_runs import EOS, Row, Run

from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.scheduler.allocator import Allocator

NUM_PROMPT_TOKENS = 42


def values(key: Any, position: int) -> int:
    """Samples of different lengths."""
    return EOS if position == NUM_PROMPT_TOKENS + 2 + key.sample_index % 5 else 10 + key.sample_index


def prompt_rows(**settings: Any) -> list[Row]:
    """What is computed of the prompt of a request with three times as many samples as run at once."""
    run = Run(max_num_seqs=4, **settings)
    run.admit(NUM_PROMPT_TOKENS, n=12, max_tokens=12, ignore_eos=False)
    rows = []
    while run.scheduler.has_unfinished:
        rows += [row for row in run.step(values) if row.first < NUM_PROMPT_TOKENS]
    lengths = [len(tokens) for tokens in run.tokens(0)]
    assert lengths == [3 + sample % 5 for sample in range(12)]
    return rows


def is_computed_once(rows: list[Row]) -> bool:
    """But for the last block of four tokens, which each part computes to sample from."""
    return [row.first for row in rows] == [0] + [40] * (len(rows) - 1)


@pytest.mark.guarantee("Samples beyond scheduler.max_num_seqs share the prompt")
@pytest.mark.parametrize("settings", [{"caching": True}, {}, {"ahead": 1}, {"virtual_engines": 2}], ids=str)
def test_parts_compute_the_prompt_once(settings: dict[str, Any]):
    assert is_computed_once(prompt_rows(**settings))


@pytest.mark.control("Samples beyond scheduler.max_num_seqs share the prompt")
def test_count_detects_parts_that_share_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Allocator, "_blocks_of_sample", lambda *_: [])
    assert not is_computed_once(prompt_rows())


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_parts_share_beside_preemption(preemption: str):
    run = Run(num_blocks=14, max_num_seqs=4, preemption=preemption, num_host_blocks=40, max_model_len=80)
    run.admit(30, n=12, max_tokens=20)
    run.admit(9, max_tokens=30)
    run.finish(lambda key, position: 10 * position + key.sample_index)
    assert run.scheduler.counters.num_preemptions
    assert run.tokens(0) == [[10 * position + sample for position in range(30, 50)] for sample in range(12)]


def test_prompt_logprobs_are_computed_once():
    run = Run(max_num_seqs=4, caching=True)
    run.admit(NUM_PROMPT_TOKENS, n=12, max_tokens=12, ignore_eos=False, prompt_logprobs=1)
    rows = []
    while run.scheduler.has_unfinished:
        rows += [row for row in run.step(values) if row.first < NUM_PROMPT_TOKENS]
    assert is_computed_once(rows)


@pytest.mark.parametrize("change", ["weights", "reset"])
def test_part_shares_nothing_from_before_new_weights(change: str):
    run = Run(max_num_seqs=4)
    run.admit(NUM_PROMPT_TOKENS, n=12, max_tokens=12, ignore_eos=False)
    run.step(values)
    run.set_weight_version(1) if change == "weights" else run.reset_prefix_cache()
    rows = []
    while not rows:
        rows += [row for row in run.step(values) if row.first < NUM_PROMPT_TOKENS]
    assert rows[0].first == 0


def test_windows_share_through_the_prefix_cache_alone():
    groups = LayerGroups(1, 1, (5,), 100)
    assert not is_computed_once(prompt_rows(groups=groups))
    assert is_computed_once(prompt_rows(groups=groups, caching=True))
