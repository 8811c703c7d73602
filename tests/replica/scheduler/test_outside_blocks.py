"""Blocks outside the engine: what is saved and when, who waits for a load, and what a failed one leaves.

Blocks hold 4 tokens, and a transfer ends two steps after the one that began it. Contents are checked in every step
(`visible_cache.py`): what a name stands for, too.
"""

import random
from itertools import count

import pytest
from scheduler_runs import Row, Run, tokens

from kv_cache.cache_manager import CacheManager
from kv_cache.outside_transfers import OutsideTransfers
from spmd_worker.replica.sequence.events import CommitWeights, FoundBlocks, ResetPrefixCache, SetWeightVersion

PROMPT = tokens(1, 13)
"""Three blocks of it can be found."""


def outside_run(saves: bool = True, num_blocks: int = 6, **limits: object) -> Run:
    return Run(num_blocks=num_blocks, caching=True, saves_outside=saves, **limits)


def second_run(first: Run, **limits: object) -> Run:
    """Another engine, which finds what the first one has saved."""
    second = outside_run(**limits)
    second.contents.join(first.contents)
    return second


@pytest.fixture
def first() -> Run:
    """One request has asked PROMPT and ended."""
    run = outside_run()
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    return run


def test_prompt_blocks_are_saved_in_their_step(first: Run):
    assert [block_id for block_id, _ in first.last_plan.block_ops.save] == [0, 1, 2]
    assert (first.last_plan.block_ops.transfer, len(first.contents.outside)) == (1, 3)
    first.settle()
    first.admit(0, PROMPT, max_tokens=8)
    first.finish()
    assert len(first.contents.outside) == 3, "outputs are not saved, nor what is outside already"


def test_second_engine_loads_the_blocks_of_the_first(first: Run):
    run = second_run(first)
    run.admit(0, PROMPT, max_tokens=2)
    assert run.step() == []
    assert [block_id for _, block_id in run.last_plan.block_ops.fetch] == [0, 1, 2]
    assert run.steps(3) == [[], [], [Row(0, 0, 12, 1, 1)]]
    run.finish()
    assert run.ended[0].num_cached_tokens == 12
    assert run.scheduler.counters.num_loaded_blocks == 3


def test_failed_load_is_computed_and_saved_again(first: Run):
    run = second_run(first, num_blocks=12)
    run.has_failed = lambda number: True
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, tokens(50, 3), max_tokens=5)
    assert run.steps(3) == [[Row(1, 0, 0, 3, 1)], [Row(1, 0, 3, 1, 1)], [Row(1, 0, 4, 1, 1)]]
    assert run.step() == [Row(0, 0, 0, 13, 1), Row(1, 0, 5, 1, 1)]
    assert len(run.last_plan.block_ops.save) == 3
    assert run.ended[0].num_cached_tokens == 0
    counters = run.scheduler.counters
    assert (counters.num_stored_blocks, counters.num_loaded_blocks) == (3, 0), "what was done, not planned"


def test_deleted_blocks_are_not_loaded_later(first: Run):
    """The size limit has evicted the second of three: a load of all three was planned, and failed."""
    first.settle()
    first.admit(0, tokens(100, 21), max_tokens=1)
    first.finish()
    first.settle()
    gone = list(first.contents.outside)[1]
    content = first.contents.outside.pop(gone)
    first.admit(0, PROMPT, max_tokens=1)
    assert not first.cache.is_outside(gone)
    first.step()
    assert len(first.last_plan.block_ops.fetch) == 1
    first.finish()
    assert first.ended[2].num_cached_tokens == 4
    assert first.scheduler.counters.num_loaded_blocks == 1
    assert first.contents.outside[gone] == content, "it is saved again"


def test_blocks_that_a_rank_left_out_are_not_loaded():
    run = outside_run()
    run.has_failed = lambda number: True
    for prompt in (PROMPT, tokens(100, 21), PROMPT):
        run.admit(0, prompt, max_tokens=1)
        run.finish()
        run.settle()
        run.contents.outside.clear()
    assert (run.scheduler.counters.num_stored_blocks, run.scheduler.counters.num_loaded_blocks) == (0, 0)
    assert len(run.ended) == 3


def test_row_loads_what_follows_a_load_in_flight(first: Run):
    """It waited for the other row's transfer, and then computed the blocks that were its own."""
    first.settle()
    first.admit(0, (*PROMPT[:8], *tokens(90, 5)), max_tokens=1)
    first.finish()
    run = second_run(first, num_blocks=20)
    run.admit(0, PROMPT, max_tokens=1)
    run.admit(0, (*PROMPT[:8], *tokens(90, 5)), max_tokens=1)
    assert run.step() == []
    assert len(run.last_plan.block_ops.fetch) == 4
    assert run.steps(3) == [[], [], [Row(0, 0, 12, 1, 1), Row(1, 0, 12, 1, 1)]]


def test_consumer_loads_and_saves_nothing(first: Run):
    run = second_run(first, saves=False)
    run.admit(0, tokens(100, 9), max_tokens=1)
    run.admit(0, PROMPT, max_tokens=1)
    run.finish()
    assert (run.scheduler.counters.num_stored_blocks, run.scheduler.counters.num_loaded_blocks) == (0, 3)


def test_evicted_prompt_comes_back_from_outside(first: Run):
    first.settle()
    first.admit(0, tokens(100, 21), max_tokens=1)
    first.finish()
    first.settle()
    first.admit(0, PROMPT, max_tokens=1)
    first.finish()
    assert first.ended[2].num_cached_tokens == 12


@pytest.mark.parametrize(
    ("event", "is_off"),
    [
        (ResetPrefixCache(), True),
        (ResetPrefixCache(keeps_names=True), False),
        (SetWeightVersion(7), True),
        (CommitWeights(7, 2), False),
    ],
)
def test_uncertain_weights_turn_the_connector_off(first: Run, event: object, is_off: bool):
    first.settle()
    first.scheduler.handle(event)
    first.contents.forget()
    assert first.cache.looks_outside is not is_off
    first.scheduler.handle(FoundBlocks((b"a name",)))
    first.admit(0, tokens(40, 13), max_tokens=1)
    first.step()
    assert len(first.last_plan.block_ops.save) == (0 if is_off else 3)


def test_reset_forgets_a_load_in_flight(first: Run):
    run = second_run(first)
    run.admit(0, PROMPT, max_tokens=1)
    run.step()
    run.scheduler.handle(ResetPrefixCache())
    run.contents.forget()
    assert run.steps(3)[-1] == [Row(0, 0, 0, 13, 1)]


def test_names_that_were_found_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kv_cache.outside_transfers._MAX_FOUND", 3)
    transfers = OutsideTransfers(saves=True)
    transfers.add_found([b"a", b"b"])
    transfers.add_found([b"c", b"d"])
    assert [transfers.lookup([name]) for name in (b"a", b"b", b"c", b"d")] == [0, 1, 1, 1]


def live_randomly(seed: int = 5, num_requests: int = 60) -> None:
    """Two engines over one outside: common prefixes, small caches, preemption of both kinds, chunks, failed loads."""
    chance = random.Random(seed)
    sizes = {"num_blocks": 9, "max_num_batched_tokens": 11, "max_num_seqs": 3, "preemption": "swap"}
    runs = [outside_run(num_host_blocks=4, **sizes)]
    runs.append(second_run(runs[0], virtual_engines=2, **{**sizes, "preemption": "recompute"}))
    numbers = count(1000)
    for run in runs:
        run.has_failed = lambda number: chance.random() < 0.2
    for _ in range(num_requests):
        run = chance.choice(runs)
        prefix = tokens(chance.choice((1, 100)), chance.randint(0, 16))
        prompt = (*prefix, *[next(numbers) for _ in range(chance.randint(1, 6))])
        run.admit(0, prompt, max_tokens=chance.randint(1, 9), n=chance.choice((1, 1, 2)))
        for _ in range(chance.randint(0, 4)):
            run.step()
    for run in runs:
        run.finish()
        run.scheduler.check_integrity()
    loaded = [run.scheduler.counters.num_loaded_blocks for run in runs]
    preempted = [run.scheduler.counters.num_preemptions for run in runs]
    assert min(*loaded, *preempted) > 0, (loaded, preempted)


@pytest.mark.guarantee("Blocks from outside have the bytes of their names")
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_find_right_contents_outside(seed: int):
    live_randomly(seed)


class BelievesFailedLoads(OutsideTransfers):
    def finish(self, number: int):
        return super().finish(abs(number))


class SavesWhatItHadBefore(OutsideTransfers):
    """The block that was current when the name was given, without a look at who has the name now."""

    def add_to(self, block_ops, holder):
        last = getattr(self, "last_holder", {})
        self.last_holder = {name: holder(name) for name in self._saves}
        return super().add_to(block_ops, lambda name: last.get(name, 0))


@pytest.mark.control("Blocks from outside have the bytes of their names")
@pytest.mark.parametrize("transfers", [BelievesFailedLoads, SavesWhatItHadBefore])
def test_contents_check_detects_broken_transfers(transfers: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scheduler_runs.OutsideTransfers", transfers)
    monkeypatch.setattr("kv_cache.cache_manager.OutsideTransfers", transfers)
    with pytest.raises(AssertionError, match=r"nothing is there|without contents|names two contents|follows"):
        live_randomly()


@pytest.mark.control("Blocks from outside have the bytes of their names")
def test_contents_check_detects_saves_ahead_of_writes(monkeypatch: pytest.MonkeyPatch):
    """Negative control: blocks are saved before the forward pass that completes them."""
    write = "visible_cache.VisibleCache._write"
    monkeypatch.setattr(write, lambda self, rows: None)
    run = outside_run()
    run.admit(0, PROMPT, max_tokens=1)
    with pytest.raises(AssertionError, match="saved without contents"):
        run.step()


def test_manager_takes_one_connector_at_most():
    with pytest.raises(AssertionError, match="one connector"):
        CacheManager(4, 4, connector=object(), outside=OutsideTransfers(saves=True))
