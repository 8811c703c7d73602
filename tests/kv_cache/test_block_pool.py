"""BlockPool: which block comes next, who owns it, what can be found, and what check_integrity finds."""

import pytest

from kv_cache.block import BlockHash
from kv_cache.block_hash import NUM_HASH_BYTES
from kv_cache.block_pool import BlockPool

A, B, C, D = (BlockHash(bytes([number]) * NUM_HASH_BYTES) for number in range(4))


def test_a_new_pool_hands_out_its_blocks_in_the_order_of_their_numbers():
    pool = BlockPool(4)
    assert pool.free_block_ids == [0, 1, 2, 3]
    assert pool.take(2) == [0, 1]
    assert pool.free_block_ids == [2, 3]
    assert (pool.num_blocks, pool.num_free_blocks) == (4, 2)
    assert [pool.ref_count(index) for index in range(4)] == [1, 1, 0, 0]


def test_blocks_without_a_name_are_used_again_before_all_others_latest_released_first():
    pool = BlockPool(4)
    pool.take(3)
    pool.release([2, 0, 1])
    assert pool.free_block_ids == [1, 0, 2, 3]
    assert pool.take(4) == [1, 0, 2, 3]


def test_blocks_with_a_name_go_after_all_others_least_recently_released_first():
    pool = BlockPool(5)
    pool.take(4)
    assert [pool.name(1, A), pool.name(2, B), pool.name(3, C)] == [True, True, True]
    pool.release([2, 0, 3])
    assert pool.free_block_ids == [0, 4, 2, 3]
    pool.release([1])
    assert pool.free_block_ids == [0, 4, 2, 3, 1]
    assert (pool.num_free_blocks, pool.num_free_named_blocks, pool.num_named_blocks) == (5, 3, 3)
    pool.check_integrity()


def test_a_shared_block_stays_until_its_last_owner_goes():
    pool = BlockPool(2)
    pool.take(1)
    pool.share([0])
    assert pool.ref_count(0) == 2
    pool.release([0])
    assert (pool.ref_count(0), pool.free_block_ids) == (1, [1])
    pool.release([0])
    assert (pool.ref_count(0), pool.free_block_ids) == (0, [0, 1])


def test_a_block_that_is_found_leaves_the_free_blocks_and_comes_back_as_the_most_recent():
    pool = named_pool()
    assert pool.free_block_ids == [3, 2, 1, 0]
    assert pool.find_chain([A, B, D]) == [0, 1]
    assert pool.num_free_among([0, 1, 3]) == 3
    pool.share([0, 1])
    assert (pool.free_block_ids, pool.num_free_named_blocks, pool.num_free_among([0, 1, 2])) == ([3, 2], 1, 1)
    pool.release([1, 0])
    assert pool.free_block_ids == [3, 2, 1, 0]
    pool.share([2])
    pool.release([2])
    assert pool.free_block_ids == [3, 1, 0, 2]
    pool.check_integrity()


def test_a_block_that_is_taken_cannot_be_found_any_more():
    pool = named_pool()
    assert pool.take(2) == [3, 2]
    assert [pool.find(each) for each in (A, B, C)] == [0, 1, None]
    assert (pool.num_named_blocks, pool.num_free_named_blocks) == (2, 2)
    assert pool.name(3, C)
    assert pool.find(C) == 3
    pool.check_integrity()


def test_a_chain_ends_at_the_first_name_that_is_not_there():
    pool = named_pool()
    assert pool.find_chain([]) == []
    assert pool.find_chain([D, A]) == []
    assert pool.find_chain([A, D, B]) == [0]


def test_the_first_block_keeps_its_name_and_a_second_with_the_same_contents_has_none():
    pool = BlockPool(3)
    pool.take(2)
    assert pool.name(0, A)
    assert not pool.name(1, A)
    assert pool.find(A) == 0
    pool.release([0])
    pool.release([1])
    assert pool.free_block_ids == [1, 2, 0]
    assert pool.find(A) == 0
    pool.check_integrity()


def test_a_block_may_be_given_its_own_name_again_and_no_other():
    """Two tables that share a full block both name it."""
    pool = BlockPool(2)
    pool.take(1)
    assert pool.name(0, A)
    assert not pool.name(0, A)
    with pytest.raises(AssertionError, match="block 0 carries another name already"):
        pool.name(0, B)
    assert pool.find(A) == 0
    assert pool.find(B) is None
    pool.check_integrity()


def test_a_free_block_cannot_be_named():
    with pytest.raises(AssertionError, match="block 1 is free and cannot be named"):
        BlockPool(2).name(1, A)


def test_a_block_is_shared_when_another_owns_it_or_can_find_it():
    pool = BlockPool(3)
    pool.take(3)
    pool.share([1])
    pool.name(2, A)
    assert [pool.is_shared(block_id) for block_id in range(3)] == [False, True, True]


def test_forgotten_names_leave_the_order_of_the_free_blocks_as_it_is():
    pool = named_pool()
    pool.share([1])
    pool.forget_names()
    assert [pool.find(each) for each in (A, B, C)] == [None, None, None]
    assert (pool.free_block_ids, pool.num_free_named_blocks, pool.num_named_blocks) == ([3, 2, 0], 0, 0)
    pool.release([1])
    assert pool.free_block_ids == [1, 3, 2, 0]
    pool.check_integrity()


def test_evictions_are_recorded_for_whoever_asked_for_it_and_told_once():
    pool = named_pool(records_evictions=True)
    pool.take(3)
    assert pool.take_evicted() == [(C, 2), (B, 1)]
    assert pool.take_evicted() == []
    silent = named_pool()
    silent.take(3)
    assert silent.take_evicted() == []


def test_what_was_evicted_before_names_were_forgotten_is_not_told():
    pool = named_pool(records_evictions=True)
    pool.take(2)
    pool.forget_names()
    assert pool.take_evicted() == []


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


def test_a_free_block_that_holds_nothing_cannot_be_shared():
    with pytest.raises(AssertionError, match="block 2 is free and holds nothing that could be shared"):
        BlockPool(3).share([2])


@pytest.mark.parametrize("block_id", [-1, 3])
@pytest.mark.parametrize(
    "use",
    [
        lambda pool, block_id: pool.release([block_id]),
        lambda pool, block_id: pool.share([block_id]),
        lambda pool, block_id: pool.name(block_id, A),
        lambda pool, block_id: pool.ref_count(block_id),
    ],
    ids=["release", "share", "name", "ref_count"],
)
def test_a_block_of_another_memory_is_refused(use, block_id):
    """-1 would be the last block's place in a list."""
    pool = BlockPool(3)
    pool.take(3)
    with pytest.raises(AssertionError, match=f"block {block_id} is not one of 3"):
        use(pool, block_id)


def named_pool(**keywords):
    """Four free blocks: 3 holds nothing, then C in 2, B in 1 and A in 0, as a chain that was released."""
    pool = BlockPool(4, **keywords)
    pool.take(3)
    for block_id, block_hash in enumerate((A, B, C)):
        pool.name(block_id, block_hash)
    pool.release([2, 1, 0])
    return pool


def used_pool():
    pool = BlockPool(4)
    pool.take(2)
    pool.share([1])
    pool.check_integrity()
    return pool


def test_a_count_that_fell_without_a_release_is_found():
    pool = used_pool()
    pool._ref_counts[0] = 0
    with pytest.raises(AssertionError, match=r"block 0 has 0 owners and is not in the free queue"):
        pool.check_integrity()


def test_a_free_block_with_an_owner_is_found():
    pool = used_pool()
    pool._ref_counts[3] = 1
    with pytest.raises(AssertionError, match=r"block 3 has 1 owners and is in the free queue"):
        pool.check_integrity()


def test_a_queue_that_miscounts_is_found():
    pool = used_pool()
    pool._free._num_queued = 3
    with pytest.raises(AssertionError, match="counts 3 blocks"):
        pool.check_integrity()


def test_a_negative_count_is_found():
    pool = used_pool()
    pool._ref_counts[2] = -1
    with pytest.raises(AssertionError, match=r"block 2 has a count of -1"):
        pool.check_integrity()


def test_names_that_are_miscounted_are_found():
    pool = named_pool()
    pool._num_free_named = 2
    with pytest.raises(AssertionError, match="3 free blocks carry a name, 2 are counted"):
        pool.check_integrity()


def test_a_name_that_leads_to_another_block_is_found():
    pool = named_pool()
    pool._index._blocks[A] = 3
    with pytest.raises(AssertionError, match="block 0 carries a name that the index gives to block 3"):
        pool.check_integrity()


def test_a_name_that_no_block_carries_is_found():
    pool = named_pool()
    pool._index._blocks[D] = 3
    with pytest.raises(AssertionError, match="the index holds 4 names, 3 blocks carry one"):
        pool.check_integrity()


def test_a_name_that_the_index_lost_is_found():
    pool = named_pool()
    pool._index.remove(B)
    with pytest.raises(AssertionError, match="block 1 carries a name that the index gives to block None"):
        pool.check_integrity()
