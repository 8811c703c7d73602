"""To the host and back: literal pairs, what is not moved because it is there, and when the manager says no."""

import pytest
from cache_simulation import Memories, make_simulation

from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_ops import BlockOps
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager

NAMES = hash_blocks(root_hash(), [1, 2, 3, 4, 5, 6, 7, 8], 2)


def written(manager, num_tokens):
    """A table of `num_tokens` that an earlier step wrote, without names."""
    table = BlockTable()
    manager.extend(table, 0, num_tokens)
    manager.take_block_ops()
    return table


def free_ids(manager):
    return list(manager._pool._free)


def test_table_swaps_out_and_into_other_blocks():
    manager = CacheManager(4, 2, num_host_blocks=4)
    table = written(manager, 5)
    host_table = manager.swap_out(table, [])
    assert (table.block_ids, host_table.block_ids) == ([], [0, 1, 2])
    assert (manager.num_free_blocks, manager.num_used_host_blocks, manager.num_host_blocks) == (4, 3, 4)
    assert manager.take_block_ops() == BlockOps(swap_out=((0, 0), (1, 1), (2, 2)))
    other = written(manager, 1)
    manager.check_integrity([other], [host_table])
    assert manager.can_swap_in(host_table, [], 5)
    table = manager.swap_in(host_table, [])
    assert (table.block_ids, host_table.block_ids) == ([1, 2, 3], [])
    assert manager.take_block_ops() == BlockOps(swap_in=((0, 1), (1, 2), (2, 3)))
    assert manager.num_used_host_blocks == 0
    manager.check_integrity([table, other])


def test_full_host_changes_nothing():
    manager = CacheManager(4, 2, num_host_blocks=2)
    table = written(manager, 5)
    assert manager.swap_out(table, []) is None
    assert (table.block_ids, manager.num_used_host_blocks, free_ids(manager)) == ([0, 1, 2], 0, [3])
    assert manager.take_block_ops().is_empty
    manager.check_integrity([table])


def test_swap_out_is_none_without_host_blocks():
    manager = CacheManager(4, 2)
    table = written(manager, 1)
    assert manager.swap_out(table, []) is None
    assert manager.num_host_blocks == 0


def test_host_block_holds_one_block():
    manager = CacheManager(4, 2, num_host_blocks=1)
    first, second = written(manager, 2), written(manager, 1)
    assert manager.swap_out(first, []).block_ids == [0]
    assert manager.swap_out(second, []) is None
    assert manager.take_block_ops().swap_out == ((0, 0),)


def test_second_swap_out_copies_only_new_blocks():
    manager = CacheManager(6, 2, num_host_blocks=6)
    table = written(manager, 5)
    host_table = manager.swap_out(table, NAMES[:2])
    manager.take_block_ops()
    table = manager.swap_in(host_table, NAMES[:2])
    manager.take_block_ops()
    manager.extend(table, 5, 7)
    manager.take_block_ops()
    assert table.block_ids == [0, 1, 2, 3]
    host_table = manager.swap_out(table, NAMES[:3])
    assert host_table.block_ids == [0, 1, 2, 3]
    assert manager.take_block_ops().swap_out == ((2, 2), (3, 3))
    manager.check_integrity([], [host_table])


def test_common_prefix_is_kept_once_on_the_host():
    manager = CacheManager(8, 2, num_host_blocks=4)
    first, second = written(manager, 5), written(manager, 5)
    first_host = manager.swap_out(first, NAMES[:2])
    second_host = manager.swap_out(second, NAMES[:2])
    assert (first_host.block_ids, second_host.block_ids) == ([0, 1, 2], [0, 1, 3])
    assert manager.take_block_ops().swap_out == ((0, 0), (1, 1), (2, 2), (5, 3))
    assert manager.num_used_host_blocks == 4
    manager.check_integrity([], [first_host, second_host])


def test_blocks_still_on_the_device_are_not_moved():
    manager = CacheManager(6, 2, num_host_blocks=6)
    table = written(manager, 5)
    manager.set_hashes(table, NAMES[:2], 0, num_written_tokens=5)
    host_table = manager.swap_out(table, NAMES[:2])
    assert free_ids(manager) == [2, 3, 4, 5, 1, 0]
    manager.take_block_ops()
    assert manager.swap_in(host_table, NAMES[:2]).block_ids == [0, 1, 2]
    assert manager.take_block_ops() == BlockOps(swap_in=((2, 2),))


def test_swap_in_shares_device_blocks_of_other_tables():
    manager = CacheManager(5, 2, num_host_blocks=4)
    table = written(manager, 5)
    host_table = manager.swap_out(table, NAMES[:2])
    manager.take_block_ops()
    other = written(manager, 6)
    manager.set_hashes(other, NAMES[:3], 0, num_written_tokens=6)
    assert [manager.can_swap_in(host_table, NAMES[:2], num_tokens) for num_tokens in (5, 6, 8, 9)] == [
        True,
        True,
        True,
        False,
    ]
    assert not manager.can_swap_in(host_table, [], 5)
    table = manager.swap_in(host_table, NAMES[:2])
    assert (other.block_ids, table.block_ids) == ([0, 1, 2], [0, 1, 3])
    assert manager.take_block_ops() == BlockOps(swap_in=((2, 3),))
    manager.check_integrity([table, other])


def test_swap_in_admission_counts_free_hits_and_watermark():
    """Blocks to be written count too."""
    manager = CacheManager(4, 2, watermark_blocks=1, num_host_blocks=4)
    table = written(manager, 4)
    manager.set_hashes(table, NAMES[:2], 0, num_written_tokens=4)
    host_table = manager.swap_out(table, NAMES[:2])
    other = written(manager, 1)
    assert manager.can_swap_in(host_table, NAMES[:2], 4, keep_watermark=True)
    assert manager.can_swap_in(host_table, NAMES[:2], 6)
    assert not manager.can_swap_in(host_table, NAMES[:2], 6, keep_watermark=True)
    assert not manager.can_swap_in(host_table, NAMES[:2], 7)
    manager.check_integrity([other], [host_table])


def test_swapped_in_blocks_are_found_by_their_hashes():
    manager = CacheManager(6, 2, num_host_blocks=4)
    table = written(manager, 5)
    host_table = manager.swap_out(table, NAMES[:2])
    manager.take_block_ops()
    assert manager.find_prefix(NAMES) == []
    table = manager.swap_in(host_table, NAMES[:2])
    assert manager.find_prefix(NAMES) == [0, 1]
    assert free_ids(manager) == [3, 4, 5]


def test_table_swaps_out_and_in_within_one_step():
    """The swap-out is executed first, and the host block is read before anybody else may write to it."""
    manager = CacheManager(4, 2, num_host_blocks=3)
    table, other = written(manager, 3), written(manager, 3)
    host_table = manager.swap_out(table, [])
    table = manager.swap_in(host_table, [])
    assert manager.swap_out(other, []) is None
    assert manager.take_block_ops() == BlockOps(swap_out=((0, 0), (1, 1)), swap_in=((0, 0), (1, 1)))
    assert manager.swap_out(other, []).block_ids == [0, 1]
    manager.check_integrity([table], [BlockTable([0, 1])])


def test_arriving_blocks_are_not_swapped_out_yet():
    manager = CacheManager(6, 2, num_host_blocks=6)
    table = written(manager, 3)
    host_table = manager.swap_out(table, [])
    manager.take_block_ops()
    table = manager.swap_in(host_table, [])
    assert manager.swap_out(table, []) is None
    manager.take_block_ops()
    child = manager.fork(table)
    manager.extend(child, 3, 4)
    assert manager.swap_out(child, []) is None
    assert manager.swap_out(table, []) is not None


def test_fork_after_swap_in_copies_from_host():
    manager = CacheManager(6, 2, num_host_blocks=2)
    table = written(manager, 3)
    host_table = manager.swap_out(table, [])
    manager.take_block_ops()
    table = manager.swap_in(host_table, [])
    child = manager.fork(table)
    assert manager.extend(child, 3, 4) == TableChange(1, (2,))
    assert manager.take_block_ops() == BlockOps(swap_in=((0, 0), (1, 1), (1, 2)))


def test_table_extended_in_this_step_swaps_out_complete():
    """A scheduler that runs out of blocks takes back what it planned for the last in line."""
    manager = CacheManager(4, 2, num_host_blocks=4)
    table = written(manager, 3)
    manager.extend(table, 3, 5)
    host_table = manager.swap_out(table, NAMES[:1])
    assert host_table.num_blocks == 3
    assert manager.can_swap_in(host_table, NAMES[:1], 4)
    assert manager.swap_in(host_table, NAMES[:1]).num_blocks == 3


def test_abandoned_host_table_frees_its_blocks_at_once():
    manager = CacheManager(4, 2, num_host_blocks=2)
    first, second = written(manager, 3), written(manager, 3)
    host_table = manager.swap_out(first, [])
    assert manager.swap_out(second, []) is None
    manager.release_host(host_table)
    assert host_table.block_ids == []
    assert manager.swap_out(second, []).block_ids == [0, 1]
    # The first one's contents are wanted no more: each host block receives once.
    assert manager.take_block_ops().swap_out == ((2, 0), (3, 1))


def test_reset_keeps_swapped_tables_but_forgets_their_hashes():
    manager = CacheManager(6, 2, num_host_blocks=6)
    first = written(manager, 4)
    first_host = manager.swap_out(first, NAMES[:2])
    manager.take_block_ops()
    manager.reset_prefix_cache()
    second = written(manager, 4)
    second_host = manager.swap_out(second, NAMES[:2])
    assert (first_host.block_ids, second_host.block_ids) == ([0, 1], [2, 3])
    assert manager.swap_in(first_host, []).num_blocks == 2
    assert manager.find_prefix(NAMES) == []


def test_manager_check_detects_a_lost_host_table():
    manager = CacheManager(4, 2, num_host_blocks=2)
    manager.swap_out(written(manager, 3), [])
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        manager.check_integrity([])


# --- contents ------------------------------------------------------------------------------------------------------


def exchange(**keywords):
    """Two sequences of a cache that holds one: each goes out for the other to come in, in one step."""
    simulation = make_simulation(2, 2, num_host_blocks=4, **keywords)
    simulation.start("a")
    simulation.extend("a", 3)
    simulation.run_step()
    assert simulation.swap_out("a")
    simulation.start("b")
    simulation.extend("b", 3)
    simulation.run_step()
    assert simulation.swap_out("b")
    assert simulation.swap_in("a")
    return simulation


def test_sequences_exchange_blocks_in_one_step():
    simulation = exchange()
    simulation.run_step()
    assert simulation.swap_out("a")
    assert simulation.swap_in("b")
    simulation.run_step()
    simulation.check_integrity()


class SwapsInFirst(Memories):
    order = ("swap_in", "swap_out", "store", "copy", "load")


def test_content_check_detects_swap_in_before_swap_out():
    simulation = exchange(memories=SwapsInFirst)
    with pytest.raises(AssertionError, match="sequence b reads another's"):
        simulation.run_step()
