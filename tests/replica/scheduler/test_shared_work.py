"""Prompts that begin alike compute what they share once, also those of one step and those that take several steps: no
rule makes a sequence wait for another that computes the same blocks.

Prompts are branches of a tree, admitted in random order; nothing is evicted, so only their steps could make them
compute a block twice. The least counts each full block once, and what is behind a prompt's last one that may be found.
"""

import random
from typing import Any

import pytest
from scheduler_runs import Run

from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.scheduler.allocator import Allocator

BLOCK_SIZE = 4
STEPS: dict[str, dict[str, Any]] = {
    "one step": {},
    "several steps": {"max_num_batched_tokens": 9},
    "few sequences": {"max_num_batched_tokens": 13, "max_num_seqs": 2},
    "steps ahead": {"max_num_batched_tokens": 13, "ahead": 1},
    "pipeline": {"max_num_batched_tokens": 17, "virtual_engines": 3},
    "windows": {"max_num_batched_tokens": 13, "groups": LayerGroups(1, 2, (9,), 13)},
}


def branches(source: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts that share beginnings of two levels, of any length."""

    def tokens(*lengths: int) -> tuple[int, ...]:
        return tuple(source.randrange(1, 900) for _ in range(source.choice(lengths)))

    roots = [tokens(6, 17, 40) for _ in range(3)]
    inner = [source.choice(roots) + tokens(3, 9, 21) for _ in range(5)]
    return [source.choice(inner + roots) + tokens(*range(1, 12)) for _ in range(count)]


def least_tokens(prompts: list[tuple[int, ...]]) -> int:
    known, num_tokens = set(), 0
    for prompt in prompts:
        end = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        known |= {prompt[:stop] for stop in range(BLOCK_SIZE, end + 1, BLOCK_SIZE)}
        num_tokens += len(prompt) - end
    return num_tokens + BLOCK_SIZE * len(known)


def play(seed: int, limits: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens that were computed, and the least."""
    source = random.Random(seed)
    prompts = branches(source, 25)
    run = Run(**{"caching": True, "num_blocks": 3000, "max_model_len": 120, **limits})
    for prompt in prompts:
        run.admit(0, prompt, max_tokens=1 + seed, priority=source.randrange(3) if seed % 2 else 0)
    run.finish()
    counters = run.scheduler.counters
    assert counters.num_preemptions == 0
    return counters.num_prompt_tokens - counters.num_cached_prompt_tokens, least_tokens(prompts)


@pytest.mark.parametrize("steps", STEPS)
def test_prompts_compute_their_common_beginning_once(steps: str):
    for seed in range(2):
        num_computed, least = play(seed, STEPS[steps])
        assert num_computed <= least, (seed, steps)


@pytest.mark.parametrize("steps", ["one step", "steps ahead"])
def test_work_is_doubled_if_blocks_are_named_late(monkeypatch: pytest.MonkeyPatch, steps: str):
    """The control: blocks that can be found only once their step has run."""
    set_hashes = Allocator._set_full_block_hashes

    def set_late(self: Allocator, sequence: Any, *, num_written_tokens: int) -> None:
        num_computed, sequence.num_computed_tokens = sequence.num_computed_tokens, num_written_tokens
        set_hashes(self, sequence, num_written_tokens=num_written_tokens)
        sequence.num_computed_tokens = num_computed

    monkeypatch.setattr(Allocator, "_set_full_block_hashes", set_late)
    num_computed, least = play(0, STEPS[steps])
    assert num_computed > least
