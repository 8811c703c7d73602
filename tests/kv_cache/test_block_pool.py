"""BlockPool: which block comes next, who owns it, what can be found, and what check_integrity finds."""

import pytest

from kv_cache.block import BlockHash
from kv_cache.block_hash import NUM_HASH_BYTES
from kv_cache.block_pool import BlockPool

A, B, C, D = (BlockHash(bytes([number]) * NUM_HASH_BYTES) for number in range(4))


def test_new_pool_allocates_blocks_in_order():
    pool = BlockPool(4)
    assert list(pool._free) == [0, 1, 2, 3]
    assert pool.take(2) == [0, 1]
    assert list(pool._free) == [2, 3]
    assert (pool.num_blocks, pool.num_free_blocks) == (4, 2)
    assert [pool.ref_count(index) for index in range(4)] == [1, 1, 0, 0]


def test_unnamed_blocks_are_reused_first_latest_released_first():
    pool = BlockPool(4)
    pool.take(3)
    pool.release([2, 0, 1])
    assert list(pool._free) == [1, 0, 2, 3]
    assert pool.take(4) == [1, 0, 2, 3]


def test_hashed_blocks_are_reused_last_least_recent_first():
    pool = BlockPool(5)
    pool.take(4)
    assert [pool.set_hash(1, A), pool.set_hash(2, B), pool.set_hash(3, C)] == [True, True, True]
    pool.release([2, 0, 3])
    assert list(pool._free) == [0, 4, 2, 3]
    pool.release([1])
    assert list(pool._free) == [0, 4, 2, 3, 1]
    assert (pool.num_free_blocks, pool.num_cached_blocks, len(pool._index)) == (5, 3, 3)
    pool.check_integrity()


def test_shared_block_stays_until_its_last_release():
    pool = BlockPool(2)
    pool.take(1)
    pool.share([0])
    assert pool.ref_count(0) == 2
    pool.release([0])
    assert (pool.ref_count(0), list(pool._free)) == (1, [1])
    pool.release([0])
    assert (pool.ref_count(0), list(pool._free)) == (0, [0, 1])


def test_found_block_leaves_free_queue_and_returns_last():
    pool = named_pool()
    assert list(pool._free) == [3, 2, 1, 0]
    assert pool.find_chain([A, B, D]) == [0, 1]
    assert pool.num_free_among([0, 1, 3]) == 3
    pool.share([0, 1])
    assert (list(pool._free), pool.num_cached_blocks, pool.num_free_among([0, 1, 2])) == ([3, 2], 1, 1)
    pool.release([1, 0])
    assert list(pool._free) == [3, 2, 1, 0]
    pool.share([2])
    pool.release([2])
    assert list(pool._free) == [3, 1, 0, 2]
    pool.check_integrity()


def test_allocated_block_cannot_be_found():
    pool = named_pool()
    assert pool.take(2) == [3, 2]
    assert [pool.find(each) for each in (A, B, C)] == [0, 1, None]
    assert (len(pool._index), pool.num_cached_blocks) == (2, 2)
    assert pool.set_hash(3, C)
    assert pool.find(C) == 3
    pool.check_integrity()


def test_chain_ends_at_the_first_missing_hash():
    pool = named_pool()
    assert pool.find_chain([]) == []
    assert pool.find_chain([D, A]) == []
    assert pool.find_chain([A, D, B]) == [0]


def test_first_block_keeps_its_hash_and_duplicates_none():
    pool = BlockPool(3)
    pool.take(2)
    assert pool.set_hash(0, A)
    assert not pool.set_hash(1, A)
    assert pool.find(A) == 0
    pool.release([0])
    pool.release([1])
    assert list(pool._free) == [1, 2, 0]
    assert pool.find(A) == 0
    pool.check_integrity()


def test_block_accepts_only_its_own_hash_again():
    """Two tables that share a full block both name it."""
    pool = BlockPool(2)
    pool.take(1)
    assert pool.set_hash(0, A)
    assert not pool.set_hash(0, A)
    with pytest.raises(AssertionError, match=r"block 0 .*another hash"):
        pool.set_hash(0, B)
    assert pool.find(A) == 0
    assert pool.find(B) is None
    pool.check_integrity()


def test_free_block_gets_no_hash():
    with pytest.raises(AssertionError, match="block 1 is free"):
        BlockPool(2).set_hash(1, A)


def test_block_is_shared_when_owned_twice_or_hashed():
    pool = BlockPool(3)
    pool.take(3)
    pool.share([1])
    pool.set_hash(2, A)
    assert [pool.is_shared(block_id) for block_id in range(3)] == [False, True, True]


def test_forgotten_hashes_keep_the_free_order():
    pool = named_pool()
    pool.share([1])
    pool.clear_hashes()
    assert [pool.find(each) for each in (A, B, C)] == [None, None, None]
    assert (list(pool._free), pool.num_cached_blocks, len(pool._index)) == ([3, 2, 0], 0, 0)
    pool.release([1])
    assert list(pool._free) == [1, 3, 2, 0]
    pool.check_integrity()


def test_evictions_are_recorded_on_request_and_returned_once():
    pool = named_pool(records_evictions=True)
    pool.take(3)
    assert pool.take_evicted() == [(C, 2), (B, 1)]
    assert pool.take_evicted() == []
    silent = named_pool()
    silent.take(3)
    assert silent.take_evicted() == []


def test_forgotten_evictions_are_not_returned():
    pool = named_pool(records_evictions=True)
    pool.take(2)
    pool.clear_hashes()
    assert pool.take_evicted() == []


def test_empty_allocation_changes_nothing():
    pool = BlockPool(1)
    assert pool.take(0) == []
    assert list(pool._free) == [0]


def test_allocation_beyond_the_free_blocks_fails():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 3 "):
        pool.take(3)
    assert list(pool._free) == [1, 2]


def test_double_release_error_names_the_block():
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(AssertionError, match=r"block 1 .*released .*free"):
        pool.release([1, 1])


def test_empty_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="block 2 is free"):
        BlockPool(3).share([2])


@pytest.mark.parametrize("block_id", [-1, 3])
@pytest.mark.parametrize(
    "use",
    [
        lambda pool, block_id: pool.release([block_id]),
        lambda pool, block_id: pool.share([block_id]),
        lambda pool, block_id: pool.set_hash(block_id, A),
        lambda pool, block_id: pool.ref_count(block_id),
    ],
    ids=["release", "share", "name", "ref_count"],
)
def test_foreign_block_id_is_rejected(use, block_id):
    """-1 would be the last block's place in a list."""
    pool = BlockPool(3)
    pool.take(3)
    with pytest.raises(AssertionError, match=rf"block {block_id} .*not .*of 3$"):
        use(pool, block_id)


def named_pool(**keywords):
    """Four free blocks: 3 holds nothing, then C in 2, B in 1 and A in 0, as a chain that was released."""
    pool = BlockPool(4, **keywords)
    pool.take(3)
    for block_id, block_hash in enumerate((A, B, C)):
        pool.set_hash(block_id, block_hash)
    pool.release([2, 1, 0])
    return pool


def used_pool():
    pool = BlockPool(4)
    pool.take(2)
    pool.share([1])
    pool.check_integrity()
    return pool


def test_pool_check_detects_a_lost_owner():
    pool = used_pool()
    pool._ref_counts[0] = 0
    with pytest.raises(AssertionError, match=r"block 0 has 0 owners and is not in the free queue"):
        pool.check_integrity()


def test_pool_check_detects_an_owned_free_block():
    pool = used_pool()
    pool._ref_counts[3] = 1
    with pytest.raises(AssertionError, match=r"block 3 has 1 owners and is in the free queue"):
        pool.check_integrity()


def test_pool_check_detects_a_miscounting_queue():
    pool = used_pool()
    pool._free._num_queued = 3
    with pytest.raises(AssertionError, match="counts 3 blocks"):
        pool.check_integrity()


def test_pool_check_detects_a_negative_count():
    pool = used_pool()
    pool._ref_counts[2] = -1
    with pytest.raises(AssertionError, match=r"block 2 has a count of -1"):
        pool.check_integrity()


def test_pool_check_detects_miscounted_hashes():
    pool = named_pool()
    pool.num_cached_blocks = 2
    with pytest.raises(AssertionError, match="3 free blocks have a hash, 2 are"):
        pool.check_integrity()


def test_pool_check_detects_a_misdirected_hash():
    pool = named_pool()
    pool._index[A] = 3
    with pytest.raises(AssertionError, match=r"block 0 has a hash .* block 3"):
        pool.check_integrity()


def test_pool_check_detects_a_hash_without_a_block():
    pool = named_pool()
    pool._index[D] = 3
    with pytest.raises(AssertionError, match="the index has 4 hashes, 3 blocks"):
        pool.check_integrity()


def test_pool_check_detects_a_hash_missing_from_index():
    pool = named_pool()
    del pool._index[B]
    with pytest.raises(AssertionError, match=r"block 1 has a hash .* block None"):
        pool.check_integrity()


def test_block_without_its_hash_is_allocated_first():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.set_hashes((first, second), (A, B))
    pool.release((first, second))
    pool.remove_hash(B)
    pool.remove_hash(C)
    assert (pool.find(A), pool.find(B), pool.num_cached_blocks) == (first, None, 1)
    pool.check_integrity()
    assert pool.take(1) == [second]
    pool.share((first,))
    pool.remove_hash(A)
    assert (pool.find(A), pool.ref_count(first)) == (None, 1)
    pool.check_integrity()
