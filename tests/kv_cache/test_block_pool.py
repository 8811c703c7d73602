"""BlockPool: which block comes next, who owns it, and what check_integrity finds."""

import pytest

from kv_cache.block_pool import BlockPool


def test_blocks_are_taken_longest_free_first():
    pool = BlockPool(4)
    assert pool.free_block_ids == [0, 1, 2, 3]
    assert pool.take(2) == [0, 1]
    assert pool.free_block_ids == [2, 3]
    assert (pool.num_blocks, pool.num_free_blocks) == (4, 2)
    assert [pool.ref_count(index) for index in range(4)] == [1, 1, 0, 0]


def test_blocks_are_freed_in_the_order_of_release():
    pool = BlockPool(4)
    pool.take(3)
    pool.release([2, 0, 1])
    assert pool.free_block_ids == [3, 2, 0, 1]
    assert pool.take(4) == [3, 2, 0, 1]


def test_a_shared_block_stays_until_its_last_owner_goes():
    pool = BlockPool(2)
    pool.take(1)
    pool.share([0])
    assert pool.ref_count(0) == 2
    pool.release([0])
    assert (pool.ref_count(0), pool.free_block_ids) == (1, [1])
    pool.release([0])
    assert (pool.ref_count(0), pool.free_block_ids) == (0, [1, 0])


def test_taking_no_block_changes_nothing():
    pool = BlockPool(1)
    assert pool.take(0) == []
    assert pool.free_block_ids == [0]


def test_more_blocks_than_are_free_are_not_taken():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 3 are free"):
        pool.take(3)
    assert pool.free_block_ids == [1, 2]


def test_a_double_release_names_the_block():
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(AssertionError, match="block 1 is released but it is free already"):
        pool.release([1, 1])


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="block 2 is free and cannot be shared"):
        BlockPool(3).share([2])


@pytest.mark.parametrize("block_id", [-1, 3])
def test_a_block_of_another_memory_is_refused(block_id):
    with pytest.raises(AssertionError, match=f"block {block_id} is not one of 3"):
        BlockPool(3).release([block_id])


def used_pool():
    pool = BlockPool(4)
    pool.take(2)
    pool.share([1])
    pool.check_integrity()
    return pool


def test_a_count_that_fell_without_a_release_is_found():
    pool = used_pool()
    pool._blocks[0].ref_count = 0
    with pytest.raises(AssertionError, match=r"Block\(0, ref_count=0\) is not in the free queue"):
        pool.check_integrity()


def test_a_free_block_with_an_owner_is_found():
    pool = used_pool()
    pool._blocks[3].ref_count = 1
    with pytest.raises(AssertionError, match=r"Block\(3, ref_count=1\) is in the free queue"):
        pool.check_integrity()


def test_a_queue_that_miscounts_is_found():
    pool = used_pool()
    pool._free._num_blocks = 3
    with pytest.raises(AssertionError, match="counts 3 blocks"):
        pool.check_integrity()


def test_a_negative_count_is_found():
    pool = used_pool()
    pool._blocks[2].ref_count = -1
    with pytest.raises(AssertionError, match=r"Block\(2, ref_count=-1\) has a negative count"):
        pool.check_integrity()
