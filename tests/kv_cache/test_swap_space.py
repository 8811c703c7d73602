"""SwapSpace: which host blocks a table gets, which of them must be copied to, and when they are free again."""

import pytest

from kv_cache.block_table import BlockTable
from kv_cache.swap_space import SwapSpace

A, B, C, D = b"a", b"b", b"c", b"d"


def test_unnamed_table_gets_one_host_block_per_block():
    swap = SwapSpace(4)
    assert swap.store(3, []) == (BlockTable([0, 1, 2]), [0, 1, 2])
    assert (swap.num_used_blocks, swap.num_blocks) == (3, 4)
    assert [swap.can_store(num_blocks, []) for num_blocks in range(4)] == [True, True, False, False]


def test_hashed_host_block_is_not_copied_again():
    swap = SwapSpace(5)
    first, _ = swap.store(3, [A, B])
    second, copied = swap.store(4, [A, B, C])
    assert (first.block_ids, second.block_ids, copied) == ([0, 1, 2], [0, 1, 3, 4], [2, 3])
    assert swap.num_used_blocks == 5
    swap.check_integrity([first, second])


def test_hashes_past_the_table_end_are_ignored():
    swap = SwapSpace(2)
    assert swap.can_store(2, [A, B, C])
    table, copied = swap.store(2, [A, B, C])
    assert (table.block_ids, copied) == ([0, 1], [0, 1])
    swap.release(table, is_read=False)
    assert swap.store(2, [A, B, C]) == (BlockTable([0, 1]), [])


def test_swapped_in_table_leaves_hashed_blocks_for_later():
    swap = SwapSpace(4)
    table, _ = swap.store(3, [A, B])
    swap.release(table, is_read=True)
    swap.end_step()
    assert (table.block_ids, swap.num_used_blocks) == ([], 0)
    # The block without a name was free first and goes first.
    assert swap.store(4, [A, B, C]) == (BlockTable([0, 1, 2, 3]), [2, 3])


def test_blocks_being_read_are_reserved_until_step_end():
    swap = SwapSpace(3)
    table, _ = swap.store(3, [A])
    swap.release(table, is_read=True)
    assert (swap.num_used_blocks, swap.can_store(1, []), swap.can_store(1, [A])) == (3, False, True)
    swap.check_integrity([])
    swap.end_step()
    assert (swap.num_used_blocks, swap.can_store(3, [])) == (0, True)
    swap.end_step()
    swap.check_integrity([])


def test_abandoned_table_frees_its_blocks_at_once():
    swap = SwapSpace(3)
    table, _ = swap.store(3, [])
    swap.release(table, is_read=False)
    assert (swap.num_used_blocks, swap.can_store(3, [])) == (0, True)


def test_capacity_counts_held_free_blocks_once():
    """Of three blocks one is in use, and A and B are free and held: each serves as itself or as room for another."""
    swap = SwapSpace(3)
    table, _ = swap.store(2, [A, B])
    other, _ = swap.store(1, [D])
    swap.release(table, is_read=False)
    assert swap.can_store(2, [A, B])
    assert swap.can_store(2, [A, C])
    assert not swap.can_store(3, [A, B])
    assert swap.can_store(3, [A, B, D])
    assert not swap.can_store(3, [A, C, B])
    swap.check_integrity([other])


def test_host_block_released_first_is_evicted_first():
    swap = SwapSpace(3)
    first, _ = swap.store(2, [A, B])
    second, _ = swap.store(1, [C])
    swap.release(second, is_read=False)
    swap.release(first, is_read=False)
    # C went first, then B, the tail of its chain, then A.
    assert swap.store(1, [D]) == (BlockTable([2]), [0])
    assert swap.store(2, [A, C]) == (BlockTable([0, 1]), [1])


def test_forgotten_hashes_are_not_found():
    swap = SwapSpace(4)
    table, _ = swap.store(2, [A, B])
    swap.clear_hashes()
    assert swap.store(2, [A, B]) == (BlockTable([2, 3]), [0, 1])
    swap.check_integrity([table, BlockTable([2, 3])])


def test_swap_space_without_blocks_stores_nothing():
    swap = SwapSpace(0)
    assert swap.can_store(0, [])
    assert not swap.can_store(1, [])
    assert swap.store(0, []) == (BlockTable(), [])
    swap.check_integrity([])


def test_swap_check_detects_lost_and_surplus_tables():
    swap = SwapSpace(3)
    table, _ = swap.store(2, [])
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        swap.check_integrity([])
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 2 tables list it"):
        swap.check_integrity([table, table])
    with pytest.raises(AssertionError, match="a table lists host block 3 of 3"):
        swap.check_integrity([BlockTable([3])])


def test_swap_check_detects_a_forgotten_read():
    swap = SwapSpace(3)
    table, _ = swap.store(1, [])
    swap.release(table, is_read=True)
    swap._read_by_step.clear()
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        swap.check_integrity([])


def test_swap_check_detects_damage_of_its_pool():
    swap = SwapSpace(3)
    swap._pool.num_cached_blocks = 1
    with pytest.raises(AssertionError, match="0 free blocks have a hash, 1 are"):
        swap.check_integrity([])
