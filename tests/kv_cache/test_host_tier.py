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


def test_a_block_can_be_found_once_every_rank_has_stored_it():
    tier = HostTier(3)
    assert tier.store(A) == 0
    assert (tier.lookup([A]), tier._pool.num_named_blocks, tier.num_slots) == (0, 0, 3)
    tier.finish([(A, 0)], [])
    assert (tier.lookup([A]), tier._pool.num_named_blocks) == (1, 1)
    assert tier.load([A]) == [0]


def test_a_chain_is_found_up_to_the_first_gap():
    tier = tier_with(A, B, C)
    assert [tier.lookup(names) for names in ([A, B, C], [A, D, B], [D], [])] == [3, 1, 0, 0]


def test_what_is_here_or_on_its_way_is_not_stored_again():
    tier = HostTier(3)
    assert tier.store(A) == 0
    assert tier.store(A) is None
    tier.finish([(A, 0)], [])
    assert tier.store(A) is None
    tier.check_integrity()


def test_the_least_recently_stored_goes_first():
    tier = tier_with(A, B, C)
    assert store(tier, D) == 0
    assert [tier.lookup([name]) for name in (A, B, C, D)] == [0, 1, 1, 1]
    assert store(tier, E) == 1


def test_what_is_stored_again_is_the_most_recently_used():
    """A prefix that many prompts begin with is evicted again and again while it is here."""
    tier = tier_with(A, B, C)
    assert tier.store(A) is None
    assert [store(tier, name) for name in (D, E)] == [1, 2]
    assert [tier.lookup([name]) for name in (A, B, C)] == [1, 0, 0]
    tier.check_integrity()


def test_a_place_that_is_read_stays_reserved_when_its_block_is_stored_again():
    tier = tier_with(A, num_slots=1)
    assert tier.load([A]) == [0]
    assert tier.store(A) is None
    assert tier.store(B) is None
    tier.finish([], [0])
    assert tier.store(B) == 0


def test_what_was_loaded_stays_as_the_most_recently_used_tail_of_the_chain_before_its_head():
    tier = tier_with(A, B, C)
    assert tier.load([A, B]) == [0, 1]
    tier.finish([], [0, 1])
    assert [store(tier, name) for name in (D, E)] == [2, 1]
    assert [tier.lookup([name]) for name in (A, B, C)] == [1, 0, 0]


def test_of_blocks_stored_by_one_transfer_the_first_to_lose_its_place_goes_first():
    """The device evicts a chain's tail before its head, and so does the tier."""
    tier = HostTier(2)
    stored = [(name, tier.store(name)) for name in (B, A)]
    tier.finish(stored, [])
    store(tier, C)
    assert [tier.lookup([name]) for name in (A, B)] == [1, 0]


def test_a_place_that_is_read_is_not_given_away_before_the_transfer_ends():
    tier = tier_with(A, num_slots=1)
    places = tier.load([A])
    assert tier.store(B) is None
    assert tier.lookup([A]) == 1
    tier.finish([], places)
    assert tier.store(B) == 0


def test_a_place_that_is_stored_to_is_not_given_away_before_the_transfer_ends():
    tier = HostTier(1)
    tier.store(A)
    assert tier.store(B) is None
    tier.finish([(A, 0)], [])
    assert tier.store(B) == 0


def test_a_place_may_be_read_by_two_transfers_at_once():
    tier = tier_with(A, num_slots=1)
    assert (tier.load([A]), tier.load([A])) == ([0], [0])
    tier.finish([], [0])
    assert tier.store(B) is None
    tier.finish([], [0])
    assert tier.store(B) == 0


def test_a_tier_without_places_wants_nothing():
    tier = HostTier(0)
    assert tier.store(A) is None
    assert tier.lookup([A]) == 0


def test_what_is_not_here_cannot_be_loaded():
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 are here"):
        tier_with(A).load([A, B])


def test_nothing_that_was_stored_is_found_after_it_was_forgotten():
    tier = tier_with(A)
    tier.store(B)
    tier.forget()
    assert tier.lookup([A]) == 0
    tier.finish([(B, 1)], [])
    assert (tier.lookup([B]), tier._pool.num_named_blocks) == (0, 0)
    tier.check_integrity()


def test_what_is_stored_again_after_it_was_forgotten_is_the_new_one():
    """Two transfers of one name: the old one ends last, and its place is not the one that is found."""
    tier = HostTier(3)
    assert tier.store(A) == 0
    tier.forget()
    assert tier.store(A) == 1
    tier.finish([(A, 1)], [])
    tier.finish([(A, 0)], [])
    assert tier.load([A]) == [1]
    tier.check_integrity()


def test_forgotten_places_that_are_read_stay_reserved_until_the_transfer_ends():
    tier = tier_with(A, num_slots=1)
    places = tier.load([A])
    tier.forget()
    assert tier.store(B) is None
    tier.finish([], places)
    assert tier.store(B) == 0
    tier.check_integrity()


def test_a_block_on_its_way_to_a_free_place_is_found_by_the_check():
    tier = HostTier(2)
    tier._storing[A] = 1
    with pytest.raises(AssertionError, match="61 is stored in slot 1, which is free"):
        tier.check_integrity()


def test_damage_of_its_pool_is_found():
    tier = tier_with(A)
    tier._pool._num_free_named = 0
    with pytest.raises(AssertionError, match="1 free blocks carry a name, 0 are counted"):
        tier.check_integrity()
