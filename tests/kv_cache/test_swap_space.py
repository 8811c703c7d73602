"""SwapSpace: which host blocks a table gets, which of them must be copied to, and when they are free again."""

import pytest

from kv_cache.block_table import BlockTable
from kv_cache.swap_space import SwapSpace

A, B, C, D = b"a", b"b", b"c", b"d"


def test_a_table_without_names_gets_a_host_block_for_each_of_its_blocks():
    swap = SwapSpace(4)
    assert swap.store(3, []) == (BlockTable([0, 1, 2]), [0, 1, 2])
    assert (swap.num_used_blocks, swap.num_blocks) == (3, 4)
    assert [swap.has_room(num_blocks, []) for num_blocks in range(4)] == [True, True, False, False]


def test_what_is_on_the_host_already_is_not_copied_again():
    swap = SwapSpace(5)
    first, _ = swap.store(3, [A, B])
    second, copied = swap.store(4, [A, B, C])
    assert (first.block_ids, second.block_ids, copied) == ([0, 1, 2], [0, 1, 3, 4], [2, 3])
    assert swap.num_used_blocks == 5
    swap.check_integrity([first, second])


def test_names_past_the_end_of_a_table_do_not_matter():
    swap = SwapSpace(2)
    assert swap.has_room(2, [A, B, C])
    table, copied = swap.store(2, [A, B, C])
    assert (table.block_ids, copied) == ([0, 1], [0, 1])
    swap.release(table, is_read=False)
    assert swap.store(2, [A, B, C]) == (BlockTable([0, 1]), [])


def test_a_table_that_was_swapped_in_leaves_its_named_blocks_for_the_next_time():
    swap = SwapSpace(4)
    table, _ = swap.store(3, [A, B])
    swap.release(table, is_read=True)
    swap.end_step()
    assert (table.block_ids, swap.num_used_blocks) == ([], 0)
    # The block without a name was free first and goes first.
    assert swap.store(4, [A, B, C]) == (BlockTable([0, 1, 2, 3]), [2, 3])


def test_blocks_that_the_step_reads_are_not_handed_out_before_its_end():
    swap = SwapSpace(3)
    table, _ = swap.store(3, [A])
    swap.release(table, is_read=True)
    assert (swap.num_used_blocks, swap.has_room(1, []), swap.has_room(1, [A])) == (3, False, True)
    swap.check_integrity([])
    swap.end_step()
    assert (swap.num_used_blocks, swap.has_room(3, [])) == (0, True)
    swap.end_step()
    swap.check_integrity([])


def test_blocks_of_a_table_that_is_wanted_no_more_are_free_at_once():
    swap = SwapSpace(3)
    table, _ = swap.store(3, [])
    swap.release(table, is_read=False)
    assert (swap.num_used_blocks, swap.has_room(3, [])) == (0, True)


def test_room_counts_blocks_that_are_held_and_free_only_once():
    """Of three blocks one is in use, and A and B are free and held: each serves as itself or as room for another."""
    swap = SwapSpace(3)
    table, _ = swap.store(2, [A, B])
    other, _ = swap.store(1, [D])
    swap.release(table, is_read=False)
    assert swap.has_room(2, [A, B])
    assert swap.has_room(2, [A, C])
    assert not swap.has_room(3, [A, B])
    assert swap.has_room(3, [A, B, D])
    assert not swap.has_room(3, [A, C, B])
    swap.check_integrity([other])


def test_the_block_that_was_released_first_is_driven_out_first():
    swap = SwapSpace(3)
    first, _ = swap.store(2, [A, B])
    second, _ = swap.store(1, [C])
    swap.release(second, is_read=False)
    swap.release(first, is_read=False)
    # C went first, then B, the tail of its chain, then A.
    assert swap.store(1, [D]) == (BlockTable([2]), [0])
    assert swap.store(2, [A, C]) == (BlockTable([0, 1]), [1])


def test_forgotten_names_are_found_by_nobody():
    swap = SwapSpace(4)
    table, _ = swap.store(2, [A, B])
    swap.forget_names()
    assert swap.store(2, [A, B]) == (BlockTable([2, 3]), [0, 1])
    swap.check_integrity([table, BlockTable([2, 3])])


def test_a_space_without_blocks_has_room_for_nothing():
    swap = SwapSpace(0)
    assert swap.has_room(0, [])
    assert not swap.has_room(1, [])
    assert swap.store(0, []) == (BlockTable(), [])
    swap.check_integrity([])


def test_a_host_table_that_was_lost_and_one_too_many_are_found():
    swap = SwapSpace(3)
    table, _ = swap.store(2, [])
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        swap.check_integrity([])
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 2 tables list it"):
        swap.check_integrity([table, table])
    with pytest.raises(AssertionError, match="a table lists host block 3 of 3"):
        swap.check_integrity([BlockTable([3])])


def test_a_read_that_is_forgotten_is_found():
    swap = SwapSpace(3)
    table, _ = swap.store(1, [])
    swap.release(table, is_read=True)
    swap._read_by_step.clear()
    with pytest.raises(AssertionError, match="host block 0 counts 1 owners, 0 tables list it"):
        swap.check_integrity([])


def test_damage_of_its_pool_is_found():
    swap = SwapSpace(3)
    swap._pool._num_free_named = 1
    with pytest.raises(AssertionError, match="0 free blocks carry a name, 1 are counted"):
        swap.check_integrity([])
