"""Contents found again: literal hits, partial hits, who is evicted first, and what must never be found."""

import pytest
from cache_simulation import make_simulation

from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def names(token_ids, block_size=2, **root):
    return hash_blocks(root_hash(**root), token_ids, block_size)


def compute(manager, token_ids, **root):
    """A sequence whose prompt is computed in one step and named; returns its table."""
    table, hashes = BlockTable(), names(token_ids, manager.block_size, **root)
    prefix = manager.find_prefix(hashes)
    assert manager.can_start(prefix, len(token_ids))
    manager.adopt(table, prefix)
    manager.extend(table, len(prefix) * manager.block_size, len(token_ids))
    manager.set_hashes(table, hashes, len(prefix), len(prefix) * manager.block_size)
    manager.take_block_ops()
    manager._pool.check_integrity()
    return table


def free_ids(manager):
    return list(manager._pool._free)


def test_computed_prompt_is_found_before_and_after_release():
    manager = CacheManager(6, 2)
    table = compute(manager, TOKENS[:5])
    assert table.block_ids == [0, 1, 2]
    assert manager.find_prefix(names(TOKENS)) == [0, 1]
    manager.release(table)
    assert manager.find_prefix(names(TOKENS)) == [0, 1]
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_cached_blocks) == (6, 0, 2)


def test_prefix_hit_shares_blocks_that_are_in_use():
    manager = CacheManager(6, 2)
    first, second = compute(manager, TOKENS[:5]), BlockTable()
    prefix = manager.find_prefix(names(TOKENS))
    manager.adopt(second, prefix)
    assert second.block_ids == [0, 1]
    assert manager.num_free_blocks == 3
    assert manager.extend(second, 4, 7) == TableChange(2, (3, 4))
    assert manager.num_used_blocks == 5
    manager.check_integrity([first, second])


def test_prefix_hit_ends_at_the_first_difference():
    """Only full blocks count."""
    manager = CacheManager(8, 2)
    compute(manager, TOKENS)
    assert manager.find_prefix(names([1, 2, 3, 4, 5, 9, 7, 8])) == [0, 1]
    assert manager.find_prefix(names([1, 2, 3])) == [0]
    assert manager.find_prefix(names([1])) == []
    assert manager.find_prefix(names([9, 2, 3, 4])) == []
    # The same tokens later in a sequence are other contents.
    assert manager.find_prefix(names([9, 9, 1, 2, 3, 4])) == []


def test_prefix_hit_admission_counts_only_its_free_blocks():
    manager, other = CacheManager(4, 2), BlockTable()
    table = compute(manager, TOKENS[:4])
    prefix = manager.find_prefix(names(TOKENS))
    assert manager.can_start(prefix, 8)
    manager.release(table)
    assert manager.can_start(prefix, 8)
    assert not manager.can_start(prefix, 9)
    manager.extend(other, 0, 1)
    assert manager.can_start(prefix, 6)
    assert not manager.can_start(prefix, 7)
    manager.adopt(table, prefix)
    manager.extend(table, 4, 6)
    assert manager.num_free_blocks == 0


def test_watermark_is_reserved_for_running_sequences():
    manager = CacheManager(4, 2, watermark_blocks=1)
    assert manager.can_start([], 6, keep_watermark=True)
    assert not manager.can_start([], 7, keep_watermark=True)
    assert manager.can_start([], 8)


def test_nonempty_table_cannot_adopt_blocks():
    manager = CacheManager(4, 2)
    table = compute(manager, TOKENS[:4])
    with pytest.raises(AssertionError, match="BlockTable"):
        manager.adopt(table, [0])


def test_sequences_of_one_step_share_computed_blocks():
    manager, second = CacheManager(6, 2), BlockTable()
    first = BlockTable()
    manager.extend(first, 0, 5)
    manager.set_hashes(first, names(TOKENS[:5]), 0, 0)
    prefix = manager.find_prefix(names(TOKENS))
    assert prefix == [0, 1]
    manager.adopt(second, prefix)
    assert manager.extend(second, 4, 7) == TableChange(2, (3, 4))
    assert manager.take_block_ops().is_empty
    manager.check_integrity([first, second])


def test_table_with_unwritten_hashed_blocks_cannot_be_released():
    manager, first, second = CacheManager(6, 2), BlockTable(), BlockTable()
    manager.extend(first, 0, 4)
    manager.set_hashes(first, names(TOKENS[:4]), 0, 0)
    manager.adopt(second, manager.find_prefix(names(TOKENS)))
    for table in (first, second):
        with pytest.raises(AssertionError, match=r"released before .*: \[0, 1\]$"):
            manager.release(table)
    manager.take_block_ops()
    manager.release(first)
    manager.release(second)


def test_written_blocks_get_hashes_late_and_are_released():
    manager, table = CacheManager(6, 2), BlockTable()
    manager.extend(table, 0, 4)
    manager.take_block_ops()
    manager.extend(table, 4, 5)
    manager.set_hashes(table, names(TOKENS[:4]), 0, num_written_tokens=4)
    manager.release(table)
    assert manager.find_prefix(names(TOKENS)) == [0, 1]
    assert free_ids(manager) == [2, 3, 4, 5, 1, 0]


def test_only_unwritten_hashed_blocks_wait_for_the_step():
    manager, table = CacheManager(6, 2, num_host_blocks=4), BlockTable()
    manager.extend(table, 0, 3)
    manager.take_block_ops()
    manager.extend(table, 3, 4)
    manager.set_hashes(table, names(TOKENS[:4]), 0, num_written_tokens=3)
    assert list(manager._fresh) == [1]
    assert manager.swap_out(table, names(TOKENS[:2])) is None
    manager.take_block_ops()
    assert manager.swap_out(table, names(TOKENS[:4])) is not None


def test_duplicate_block_stays_unnamed():
    manager, first, second = CacheManager(6, 2), BlockTable(), BlockTable()
    for table in (first, second):
        manager.extend(table, 0, 4)
    for table in (first, second):
        manager.set_hashes(table, names(TOKENS[:4]), 0, 0)
    manager.take_block_ops()
    assert (first.block_ids, second.block_ids) == ([0, 1], [2, 3])
    assert manager.find_prefix(names(TOKENS)) == [0, 1]
    manager.release(first)
    manager.release(second)
    assert free_ids(manager) == [2, 3, 4, 5, 1, 0]
    assert manager.find_prefix(names(TOKENS)) == [0, 1]


# --- who goes first ------------------------------------------------------------------------------------------------


def test_eviction_prefers_unnamed_blocks_then_chain_tails():
    manager, other = CacheManager(6, 2), BlockTable()
    manager.release(compute(manager, TOKENS[:7]))
    assert free_ids(manager) == [3, 4, 5, 2, 1, 0]
    manager.extend(other, 0, 8)
    assert other.block_ids == [3, 4, 5, 2]
    assert manager.find_prefix(names(TOKENS)) == [0, 1]


def test_chain_released_first_is_evicted_first():
    manager = CacheManager(6, 2)
    first, second = compute(manager, TOKENS[:4]), compute(manager, [9, 9, 9, 9])
    assert (first.block_ids, second.block_ids) == ([0, 1], [2, 3])
    manager.release(second)
    manager.release(first)
    assert free_ids(manager) == [4, 5, 3, 2, 1, 0]


def test_reused_chain_is_evicted_last():
    manager = CacheManager(6, 2)
    first, second = compute(manager, TOKENS[:4]), compute(manager, [9, 9, 9, 9])
    manager.release(first)
    manager.release(second)
    assert free_ids(manager) == [4, 5, 1, 0, 3, 2]
    manager.release(compute(manager, TOKENS[:4]))
    assert free_ids(manager) == [4, 5, 3, 2, 1, 0]


def test_shared_head_is_evicted_after_both_tails():
    manager = CacheManager(6, 2)
    first, second = compute(manager, [1, 2, 3, 4]), compute(manager, [1, 2, 8, 8])
    assert (first.block_ids, second.block_ids) == ([0, 1], [0, 2])
    manager.release(first)
    manager.release(second)
    assert free_ids(manager) == [3, 4, 5, 1, 2, 0]


def test_chain_without_tail_is_found_and_extended():
    manager, other = CacheManager(4, 2), BlockTable()
    manager.release(compute(manager, TOKENS[:6]))
    manager.extend(other, 0, 4)
    manager.take_block_ops()
    manager.release(other)
    assert other.block_ids == []
    assert manager.find_prefix(names(TOKENS)) == [0, 1]
    table = compute(manager, TOKENS[:8])
    assert table.block_ids[:2] == [0, 1]
    assert manager.find_prefix(names(TOKENS)) == table.block_ids


def test_chain_without_head_is_lost_until_head_recomputed():
    manager, other = CacheManager(4, 2), BlockTable()
    table = compute(manager, TOKENS[:4])
    head = BlockTable([table.block_ids.pop(0)])
    manager.release(head)
    manager.extend(other, 0, 6)
    assert manager.find_prefix(names(TOKENS)) == []
    assert manager.find_prefix(names(TOKENS)[1:2]) == [1]
    manager.take_block_ops()
    manager.release(other)
    again = compute(manager, TOKENS[:2])
    assert manager.find_prefix(names(TOKENS)) == [*again.block_ids, 1]


class HeadGoesFirst(CacheManager):
    def release(self, table):
        self._pool.release(table.block_ids)
        table.block_ids.clear()


def test_eviction_check_detects_head_first_release():
    """The control of the order above."""
    manager, other = HeadGoesFirst(4, 2), BlockTable()
    manager.release(compute(manager, TOKENS[:6]))
    manager.extend(other, 0, 4)
    assert manager.find_prefix(names(TOKENS)) == []


# --- what must not be found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [{"weight_version": 1}, {"adapter_id": 3}])
def test_prefix_is_not_shared_across_weights_or_adapters(root):
    manager = CacheManager(8, 2)
    manager.release(compute(manager, TOKENS))
    assert manager.find_prefix(names(TOKENS, **root)) == []
    manager.release(compute(manager, TOKENS, **root))
    assert manager.find_prefix(names(TOKENS)) == [0, 1, 2, 3]
    assert manager.find_prefix(names(TOKENS, **root)) == [4, 5, 6, 7]


def test_reset_forgets_prefixes_and_frees_no_block():
    manager = CacheManager(8, 2)
    running = compute(manager, TOKENS[:4])
    manager.release(compute(manager, [9, 9]))
    manager.reset_prefix_cache()
    assert manager.find_prefix(names(TOKENS)) == manager.find_prefix(names([9, 9])) == []
    assert (manager.num_used_blocks, manager.num_free_blocks, manager.num_cached_blocks) == (2, 6, 0)
    assert free_ids(manager) == [3, 4, 5, 6, 7, 2]
    manager.release(running)
    assert free_ids(manager) == [0, 1, 3, 4, 5, 6, 7, 2]
    again = compute(manager, TOKENS[:4])
    assert manager.find_prefix(names(TOKENS)) == again.block_ids == [0, 1]


def test_reset_forgets_hashes_of_the_step_being_planned():
    """Then the table may be released: nobody can find what is not written."""
    manager, table = CacheManager(4, 2), BlockTable()
    manager.extend(table, 0, 4)
    manager.set_hashes(table, names(TOKENS[:4]), 0, 0)
    manager.reset_prefix_cache()
    manager.release(table)
    assert manager.find_prefix(names(TOKENS)) == []
    manager.check_integrity([])


def test_reallocated_block_is_not_found_with_equal_contents():
    manager, other = CacheManager(2, 2), BlockTable()
    manager.release(compute(manager, TOKENS[:4]))
    manager.extend(other, 0, 4)
    assert manager.find_prefix(names(TOKENS)) == []
    assert manager.num_cached_blocks == 0


# --- contents ------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("Prefix hits change no answer")
def test_prefix_hit_reads_the_computed_contents():
    simulation = make_simulation(8, 2)
    simulation.start("a", TOKENS)
    simulation.extend("a", 7, is_named=True)
    assert simulation.start_from_cache("b", [1, 2, 3, 4, 9, 9])
    assert simulation.sequences["b"].table.block_ids == [0, 1]
    simulation.extend("b", 2)
    simulation.run_step()
    assert simulation.read("b")[:4] == simulation.read("a")[:4]
    assert simulation.read("b")[4:] != simulation.read("a")[4:6]
    simulation.check_integrity()


@pytest.mark.control("Prefix hits change no answer")
def test_content_check_detects_a_wrong_prefix_hit(control):
    """The control: a name that leads to a block of another sequence."""
    simulation = make_simulation(8, 2)
    for name, tokens in (("a", TOKENS), ("b", [9, 9, 9])):
        simulation.start(name, tokens)
        simulation.extend(name, 3, is_named=True)
    simulation.run_step()
    index = simulation.manager._pool._index
    index[names(TOKENS)[0]] = simulation.sequences["b"].table.block_ids[0]
    simulation.start_from_cache("c", TOKENS[:4])
    with control("sequence c reads another's"):
        simulation.run_step()
