"""Rows whose window groups give blocks back: random histories, in which each group's rows find what they see."""

from itertools import cycle
from typing import Any

import pytest
from histories import limits as any_limits
from histories import new_run, operations, play, random_history, state_limits, window_limits
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import Run, tokens, without_block_check
from test_scheduler_property import by_position, check_answers, check_counters

from kv_cache.block_table import BlockTable
from kv_cache.cache_manager import CacheManager
from kv_cache.device_tables import DeviceTables
from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence, new_group

GROUPS = LayerGroups(1, 2, (5,), 16)
CROWDED: dict[str, Any] = {
    "num_blocks": 30,
    "max_num_batched_tokens": 16,
    "max_model_len": 24,
    "groups": GROUPS,
    "caching": True,
    "preemption": "auto",
    "block_copy_tokens": 0.6,
    "num_host_blocks": 24,
}


with_or_without_states = st.tuples(any_limits, st.just({}) | state_limits).map(lambda drawn: {**drawn[0], **drawn[1]})


def keeps_the_books_and_ends(limits: dict[str, Any], groups: tuple[Any, ...], operations: list[Any]) -> None:
    run = new_run({**limits, "groups": groups, "num_tier_blocks": 0})
    asked = play(run, operations)
    check_answers(run, asked)
    if run.slots is None:
        check_counters(run, asked)
    run.settle()
    assert run.cache.num_used_blocks == run.cache.num_used_host_blocks == run.scheduler.num_swapped == 0


@settings(max_examples=15)
@given(with_or_without_states, window_limits, operations)
def test_any_history_with_windows_ends(limits: dict[str, Any], groups: tuple[Any, ...], operations: list[Any]):
    keeps_the_books_and_ends(limits, groups, operations)


@pytest.mark.stress
@settings(max_examples=3_000)
@given(with_or_without_states, window_limits, operations)
def test_many_histories_with_windows_end(limits: dict[str, Any], groups: tuple[Any, ...], operations: list[Any]):
    keeps_the_books_and_ends(limits, groups, operations)


@pytest.mark.parametrize("groups", [{}, {"groups": LayerGroups(1, 1, (3,), 1)}], ids=["full", "window"])
def test_block_is_found_in_the_step_that_fills_it(groups: dict[str, Any]):
    """A row that decodes fills a block of one token, which another row's prompt has."""
    run = Run(num_blocks=40, block_size=1, max_model_len=16, caching=True, **groups)
    run.admit(3, (1, 1, 1), max_tokens=4, ignore_eos=True)
    run.step(1)
    run.admit(5, (1, 1, 1, 1, 1), max_tokens=2, ignore_eos=True)
    run.finish(1)
    assert run.scheduler.counters.num_cached_prompt_tokens == 4


def crowded_histories(**changed: Any) -> list[Run]:
    runs = [Run(**{**CROWDED, **changed}) for _ in range(6)]
    for seed, run in enumerate(runs):
        random_history(seed, run, by_position)
    return runs


def test_histories_with_windows_reach_critical_states():
    counters = [run.scheduler.counters for run in crowded_histories()]
    assert sum(each.num_swapped_out for each in counters) > 10
    assert sum(each.num_preemptions - each.num_swapped_out for each in counters) > 0
    assert sum(each.num_cached_prompt_tokens for each in counters) > 100


def test_long_row_keeps_its_window_alone():
    run = Run(num_blocks=100, max_num_batched_tokens=16, max_model_len=200, groups=LayerGroups(1, 1, (5,), 16))
    run.admit(100, max_tokens=60)
    run.step()
    used = []
    while run.scheduler.has_unfinished:
        used.append(run.cache.num_used_blocks)
        run.step()
    # 160 tokens in blocks of 4: 40 of the full group, and those of 5 tokens and the one that may be computed again.
    assert used[-1] == 40 + 2
    assert max(used) <= run.cache.groups.num_blocks(160, 4) == 40 + (16 + 5 - 1) // 4 + 2


def test_row_begins_where_its_window_is_found():
    run = Run(num_blocks=60, caching=True, max_model_len=200, groups=LayerGroups(1, 1, (5,), 100))
    prompt = tokens(10, 41)
    run.admit(0, prompt, max_tokens=1)
    run.finish()
    pool = run.cache._pool
    hashes = [each for each in pool._hashes if each is not None and len(each) == 16]
    run.admit(0, prompt, max_tokens=1)
    assert run.step()[0].first == 40
    # Without the window before it, a prefix is of no use: the one before that is.
    names = [run.cache.groups.names(each)[1] for each in hashes]
    pool.remove_hash(names[9])
    run.admit(0, prompt, max_tokens=1)
    assert run.step()[0].first == 36


def test_row_without_an_id_keeps_its_window():
    """Its last token is computed again, after a step in flight at once has seen it as computed."""
    run = Run(virtual_engines=2, max_model_len=200, groups=LayerGroups(1, 1, (5,), 100))
    nums_of_ids = cycle([1, 0, 0, 1, 1, 0, 1])
    run.num_ids = lambda: next(nums_of_ids)
    for _ in range(3):
        run.admit(10, max_tokens=20)
    run.finish()
    assert len(run.tokens(2)[0]) == 20


def test_found_prefix_looks_only_at_its_window(monkeypatch: pytest.MonkeyPatch):
    run = Run(num_blocks=100, caching=True, max_model_len=200, groups=LayerGroups(1, 1, (5,), 100))
    prompt, names, looked_up = tokens(10, 101), LayerGroups.names, []
    run.admit(0, prompt, max_tokens=1)
    run.finish()
    monkeypatch.setattr(LayerGroups, "names", lambda *given: looked_up.append(given) or names(*given))
    group = new_group(Request(RequestId(9), prompt, SamplingParams(), stream=9))
    prefix = run.scheduler._allocator.find_prefix(group.sequences[0], group)
    assert run.cache.num_prefix_tokens(prefix) == 100
    assert len(looked_up) == 2


def too_early(drop_unseen: Any) -> Any:
    """Blocks go back while the next token, or one that is computed again, still sees their last position."""

    def dropped(self: Allocator, running: list[Sequence]) -> None:
        for sequence in running:
            self._cache.drop_unseen(sequence.table, sequence.num_computed_tokens + 2)

    return dropped


def without_the_window(last_complete: Any) -> Any:
    """A prefix is found without the blocks of window groups."""
    return lambda self, found: len(found)


def uncounted(fork: Any) -> Any:
    """A fork's blocks of window groups have no second owner."""

    def forked(self: DeviceTables, table: BlockTable) -> BlockTable:
        num_groups, num_full = self.num_groups, self.groups.num_full
        self._pool.share([each for index, each in enumerate(table.block_ids) if index % num_groups < num_full])
        return BlockTable(list(table.block_ids), table.num_dropped)

    return forked


def not_counted_as_dropped(drop_unseen: Any) -> Any:
    """Blocks are released again when the row ends."""

    def dropped(self: DeviceTables, table: BlockTable, num_tokens: int) -> None:
        drop_unseen(self, table, num_tokens)
        table.num_dropped = 0

    return dropped


def names_of_others(names: Any) -> Any:
    """One name for the blocks of all groups."""
    return lambda self, block_hash: [block_hash] * self.num_groups


FAULTS = [
    (Allocator, "drop_unseen", too_early),
    (DeviceTables, "_last_complete", without_the_window),
    (DeviceTables, "fork", uncounted),
    (DeviceTables, "drop_unseen", not_counted_as_dropped),
    (LayerGroups, "names", names_of_others),
    (CacheManager, "_with_left_over", lambda _: lambda self, block_ids, num_dropped: block_ids),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS)
def test_histories_detect_fault_of_windows(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Any):
    """Negative control: each breaks a row, a count or the promise that the longest row fits."""
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    without_block_check(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        crowded_histories()
