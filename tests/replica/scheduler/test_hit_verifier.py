"""Verification of prefix-cache hits: which hits are computed again, when what is compared, and what ends it."""

import random

import pytest
from histories import MAX_MODEL_LEN, random_history
from scheduler_runs import Row, Run, asked_once, cached_run, tokens
from test_scheduler_property import by_position

from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.scheduler.hit_verifier import HitVerifier, Writers
from spmd_worker.replica.sequence.hit_comparison import UNKNOWN_WRITER, HitComparison

PROMPT = tokens(1, 13)
"""Three full blocks and a token."""


def comparisons(run: Run) -> tuple[HitComparison, ...]:
    return run.last_plan.hit_comparisons


def counts(run: Run) -> tuple[int, int]:
    return run.scheduler.counters.num_verified_hits, run.scheduler.counters.num_unverified_hits


def compared(run: Run) -> list[tuple[int, int, int]]:
    """Index, block and writer of each compared block of a single sequence."""
    (comparison,) = comparisons(run)
    return [(copy.block_index, copy.number, copy.writer) for copy in comparison.blocks]


def test_hit_is_computed_again_and_compared():
    run = asked_once(PROMPT, verify_hits=1)
    second = run.admit(0, PROMPT)
    assert run.step() == [Row(second, 0, 0, 13, 1)]
    assert compared(run) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert run.mirror.held((second, 0)).block_ids[:3] not in ([0, 1, 2], [])
    assert counts(run) == (1, 0)
    run.finish()
    assert run.ended[second].num_cached_tokens == 0


def test_no_hit_is_verified_by_default():
    run = asked_once(PROMPT)
    second = run.admit(0, PROMPT)
    assert run.step() == [Row(second, 0, 12, 1, 1)]
    assert comparisons(run) == ()


def test_every_third_hit_is_verified():
    run = asked_once(PROMPT, verify_hits=3)
    for index in range(7):
        request = run.admit(0, PROMPT, max_tokens=1)
        run.finish()
        assert run.ended[request].num_cached_tokens == (0 if index % 3 == 2 else 12)
    assert counts(run) == (2, 0)


def test_long_prompt_is_compared_chunk_by_chunk():
    run = asked_once(PROMPT, verify_hits=1, max_num_batched_tokens=6, max_num_seqs=4)
    run.admit(0, PROMPT, max_tokens=1)
    found = []
    while run.scheduler.has_unfinished:
        run.step()
        found.append([copy.block_index for each in comparisons(run) for copy in each.blocks])
    assert found == [[0], [1, 2], []]
    assert counts(run) == (1, 0)


def test_rows_of_one_step_are_compared():
    """The second finds what the first is about to write."""
    run = cached_run(verify_hits=1)
    run.admit(0, PROMPT)
    run.admit(0, PROMPT)
    run.step()
    assert compared(run) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]


def test_forks_begin_after_the_comparison():
    run = asked_once(PROMPT, verify_hits=1)
    run.admit(0, PROMPT, n=3)
    run.step()
    assert len(compared(run)) == 3
    run.finish()
    assert counts(run) == (1, 0)


def test_aborted_sequence_ends_its_verification():
    run = asked_once(PROMPT, verify_hits=1, max_num_batched_tokens=6, max_num_seqs=4)
    run.abort(run.admit(0, PROMPT))
    aborted = run.admit(0, PROMPT)
    run.step()
    run.abort(aborted)
    assert counts(run) == (0, 1)
    run.step()
    assert comparisons(run) == ()


@pytest.mark.parametrize("forget", [Run.reset_prefix_cache, lambda run: run.set_weight_version(2)])
def test_forgotten_blocks_are_not_compared(forget):
    run = asked_once(PROMPT, verify_hits=1, max_num_batched_tokens=6, max_num_seqs=4)
    run.admit(0, PROMPT)
    run.step()
    forget(run)
    run.finish()
    assert counts(run) == (0, 1)


@pytest.mark.parametrize("preemption", [{}, {"preemption": "swap", "num_host_blocks": 20, "block_copy_tokens": 0.0}])
def test_preempted_sequence_ends_its_verification(preemption: dict[str, object]):
    """The older row's growth takes the blocks of the one that is verified."""
    run = cached_run(num_blocks=11, max_num_batched_tokens=4, max_num_seqs=4, verify_hits=1, **preemption)
    run.admit(0, PROMPT, max_tokens=1)
    run.finish()
    run.admit(0, tokens(50, 6), max_tokens=18)
    run.steps(3)
    run.admit(0, (*PROMPT, *tokens(80, 15)), max_tokens=4)
    while not run.scheduler.counters.num_preemptions:
        run.step()
    assert run.scheduler.counters.num_unverified_hits == counts(run)[1]
    run.finish()
    run.settle()
    assert run.cache.num_used_blocks == 0


def test_full_cache_gives_turn_to_next_hit():
    """Both copies need eight blocks."""
    run = asked_once(PROMPT, verify_hits=1, num_blocks=6)
    request = run.admit(0, PROMPT, max_tokens=1)
    run.finish()
    assert run.ended[request].num_cached_tokens == 12
    assert counts(run) == (0, 0)


def test_evicted_block_is_left_out():
    """A row that joins in the same step takes the oldest block."""
    run = asked_once(PROMPT, verify_hits=1, num_blocks=8, max_num_batched_tokens=6, max_num_seqs=4)
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    run.cache._pool.remove_hash(run.scheduler._allocator._verifier._active[(1, 0)].hashes[1])
    run.step()
    assert [copy.block_index for copy in comparisons(run)[0].blocks] == [2]
    run.finish()
    assert counts(run) == (0, 1)


@pytest.mark.parametrize(("group", "expected"), [(None, (1, 0)), (0, (0, 1)), (1, (1, 0))])
def test_evicted_full_block_is_no_window_block(group: int | None, expected: tuple[int, int]):
    """Window groups' copies of a long hit's first block may be gone: the hit has none of them."""
    given = {"verify_hits": 1, "max_num_batched_tokens": 3, "max_num_seqs": 3, "groups": LayerGroups(1, 2, (5,), 3)}
    run = asked_once(PROMPT, **given)
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    if group is not None:
        (hashes,) = [each.hashes for each in run.scheduler._allocator._verifier._active.values()]
        run.cache._pool.remove_hash(run.cache.groups.names(hashes[0])[group])
    run.finish()
    assert counts(run) == expected


def test_snapshot_is_compared_where_a_chunk_ends():
    run = cached_run(verify_hits=1, snapshot_slots=4, grid=8)
    run.admit(0, tokens(1, 20), max_tokens=1)
    run.finish()
    second = run.admit(0, tokens(1, 20), max_tokens=1)
    assert run.step() == [Row(second, 0, 0, 16, 0)]
    (comparison,) = comparisons(run)
    assert [copy.block_index for copy in comparison.blocks] == [0, 1, 2, 3]
    (state,) = comparison.states
    assert (state.block_index, state.writer) == (3, 0)
    assert state.number != run.mirror.held((second, 0)).state_slot
    run.finish()
    assert counts(run) == (1, 0)
    assert run.scheduler.counters.num_snapshot_hits == 0


def test_states_need_chunks_to_be_verified():
    run = cached_run(verify_hits=1, snapshot_slots=4, grid=8, chunked=False)
    for _ in range(2):
        run.admit(0, tokens(1, 20), max_tokens=12)
        run.finish()
    assert counts(run) == (0, 0)


def test_check_detects_a_verification_that_is_not_ended(monkeypatch: pytest.MonkeyPatch):
    """Negative control of `check_integrity`."""
    monkeypatch.setattr(HitVerifier, "drop", lambda self, sequence: None)
    run = asked_once(PROMPT, verify_hits=1, max_num_batched_tokens=6, max_num_seqs=4)
    aborted = run.admit(0, PROMPT)
    run.step()
    with pytest.raises(AssertionError, match="is verified and does not run"):
        run.abort(aborted)


def test_writers_forget_what_nothing_finds():
    writers = Writers(2, lambda name: name != b"b")
    for number, name in enumerate((b"a", b"b", b"c", b"d", b"e")):
        writers.note(name, number)
    assert [writers.of(name) for name in (b"a", b"b", b"c", b"d", b"e")] == [0, UNKNOWN_WRITER, 2, 3, 4]


CROWDED = {
    "caching": True,
    "num_blocks": 12,
    "max_num_batched_tokens": 16,
    "max_model_len": MAX_MODEL_LEN,
    "preemption": "auto",
    "block_copy_tokens": 2.0,
    "num_host_blocks": 6,
    "num_tier_blocks": 12,
}
STATES = {"snapshot_slots": 4, "host_slots": 2, "grid": 4}


@pytest.mark.gate("{'ahead': 1}-states", "{'virtual_engines': 2}-blocks")
@pytest.mark.parametrize("states", [{}, STATES], ids=["blocks", "states"])
@pytest.mark.parametrize("flow", [{}, {"ahead": 1}, {"virtual_engines": 2}], ids=str)
def test_crowded_histories_verify_many_hits(states: dict[str, int], flow: dict[str, int]):
    run = Run(**CROWDED, **states, **flow, verify_hits=1)
    random_history(2, run, by_position, num_requests=60)
    num_verified, num_unverified = counts(run)
    assert num_verified > 15
    assert run.scheduler.counters.num_preemptions > 0
    assert num_verified > 2 * num_unverified


def test_history_sees_a_wrong_comparison(monkeypatch: pytest.MonkeyPatch):
    """Negative control: blocks are compared that do not hold the same tokens."""
    blocks_of = HitVerifier._cached_blocks

    def next_blocks(self: HitVerifier, sequence, hashes, index):
        copies = blocks_of(self, sequence, hashes, index)
        return [each._replace(number=random.Random(index).randrange(12)) for each in copies]

    monkeypatch.setattr(HitVerifier, "_cached_blocks", next_blocks)
    with pytest.raises(AssertionError, match=r"^block \d+ (has|is compared with itself)"):
        random_history(2, Run(**CROWDED, verify_hits=1), by_position)
