"""HostTier: which place a block gets, when it can be found, and what goes when there is no place left."""

import pytest

from kv_cache.host_tier import HostTier

A, B, C, D, E = b"a", b"b", b"c", b"d", b"e"


def tier_with(*names, num_slots=3):
    """`names` are stored one after the other, and every rank has them."""
    tier = HostTier(num_slots)
    for name in names:
        store(tier, name)
    tier.check_integrity()
    return tier


def store(tier, name):
    place = tier.store(name)
    tier.finish([(name, place)], [])
    return place


def test_stored_block_is_found_when_every_rank_finished():
    tier = HostTier(3)
    assert tier.store(A) == 0
    assert (tier.lookup([A]), len(tier._pool._index), tier.num_slots) == (0, 0, 3)
    tier.finish([(A, 0)], [])
    assert (tier.lookup([A]), len(tier._pool._index)) == (1, 1)
    assert tier.load([A]) == [0]


def test_chain_is_found_up_to_the_first_gap():
    tier = tier_with(A, B, C)
    assert [tier.lookup(names) for names in ([A, B, C], [A, D, B], [D], [])] == [3, 1, 0, 0]


def test_stored_or_pending_block_is_not_stored_again():
    tier = HostTier(3)
    assert tier.store(A) == 0
    assert tier.store(A) is None
    tier.finish([(A, 0)], [])
    assert tier.store(A) is None
    tier.check_integrity()


def test_least_recently_stored_block_is_evicted_first():
    tier = tier_with(A, B, C)
    assert store(tier, D) == 0
    assert [tier.lookup([name]) for name in (A, B, C, D)] == [0, 1, 1, 1]
    assert store(tier, E) == 1


def test_restored_block_becomes_most_recently_used():
    """A prefix that many prompts begin with is evicted again and again while it is here."""
    tier = tier_with(A, B, C)
    assert tier.store(A) is None
    assert [store(tier, name) for name in (D, E)] == [1, 2]
    assert [tier.lookup([name]) for name in (A, B, C)] == [1, 0, 0]
    tier.check_integrity()


def test_slot_being_read_survives_a_repeated_store():
    tier = tier_with(A, num_slots=1)
    assert tier.load([A]) == [0]
    assert tier.store(A) is None
    assert tier.store(B) is None
    tier.finish([], [0])
    assert tier.store(B) == 0


def test_loaded_chain_becomes_most_recent_tail_evicted_first():
    tier = tier_with(A, B, C)
    assert tier.load([A, B]) == [0, 1]
    tier.finish([], [0, 1])
    assert [store(tier, name) for name in (D, E)] == [2, 1]
    assert [tier.lookup([name]) for name in (A, B, C)] == [1, 0, 0]


def test_chain_of_one_transfer_is_evicted_tail_first():
    """The device evicts a chain's tail before its head, and so does the tier."""
    tier = HostTier(2)
    stored = [(name, tier.store(name)) for name in (B, A)]
    tier.finish(stored, [])
    store(tier, C)
    assert [tier.lookup([name]) for name in (A, B)] == [1, 0]


def test_slot_being_read_is_not_reused_during_transfer():
    tier = tier_with(A, num_slots=1)
    places = tier.load([A])
    assert tier.store(B) is None
    assert tier.lookup([A]) == 1
    tier.finish([], places)
    assert tier.store(B) == 0


def test_slot_being_written_is_not_reused_during_transfer():
    tier = HostTier(1)
    tier.store(A)
    assert tier.store(B) is None
    tier.finish([(A, 0)], [])
    assert tier.store(B) == 0


def test_slot_can_be_read_by_two_transfers():
    tier = tier_with(A, num_slots=1)
    assert (tier.load([A]), tier.load([A])) == ([0], [0])
    tier.finish([], [0])
    assert tier.store(B) is None
    tier.finish([], [0])
    assert tier.store(B) == 0


def test_tier_without_slots_stores_nothing():
    tier = HostTier(0)
    assert tier.store(A) is None
    assert tier.lookup([A]) == 0


def test_missing_block_cannot_be_loaded():
    with pytest.raises(AssertionError, match=r"2 blocks wanted, 1 .*here"):
        tier_with(A).load([A, B])


def test_forgotten_blocks_are_not_found():
    tier = tier_with(A)
    tier.store(B)
    tier.forget()
    assert tier.lookup([A]) == 0
    tier.finish([(B, 1)], [])
    assert (tier.lookup([B]), len(tier._pool._index)) == (0, 0)
    tier.check_integrity()


def test_block_stored_after_forgetting_is_the_new_one():
    """Two transfers of one name: the old one ends last, and its place is not the one that is found."""
    tier = HostTier(3)
    assert tier.store(A) == 0
    tier.forget()
    assert tier.store(A) == 1
    tier.finish([(A, 1)], [])
    tier.finish([(A, 0)], [])
    assert tier.load([A]) == [1]
    tier.check_integrity()


def test_forgotten_slot_being_read_stays_reserved():
    tier = tier_with(A, num_slots=1)
    places = tier.load([A])
    tier.forget()
    assert tier.store(B) is None
    tier.finish([], places)
    assert tier.store(B) == 0
    tier.check_integrity()


def test_tier_check_detects_a_store_to_free_slot():
    tier = HostTier(2)
    tier._storing[A] = 1
    with pytest.raises(AssertionError, match=r"61 .*stored .*slot 1, .*free"):
        tier.check_integrity()


def test_tier_check_detects_damage_of_its_pool():
    tier = tier_with(A)
    tier._pool.num_cached_blocks = 0
    with pytest.raises(AssertionError, match="1 free blocks have a hash, 0 are"):
        tier.check_integrity()
