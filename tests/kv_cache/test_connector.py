"""Transfers: the numbers of a step's stores and loads, what counts when, and the manager's calls on a connector."""

import pytest

from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_ops import BlockOps
from kv_cache.block_table import BlockTable
from kv_cache.cache_manager import CacheManager
from kv_cache.connector import Transfers
from kv_cache.host_tier import HostTier

A, B, C, D = b"a", b"b", b"c", b"d"


class EndlessShelf:
    """A connector that keeps everything, for as long as it is asked to."""

    def __init__(self, *names):
        self.places = {name: index for index, name in enumerate(names)}
        self.num_given = len(names)
        self.calls = []

    num_slots = 100

    def lookup(self, hashes):
        num_found = 0
        while num_found < len(hashes) and hashes[num_found] in self.places:
            num_found += 1
        return num_found

    def store(self, block_hash):
        self.num_given += 1
        return self.num_given - 1

    def load(self, hashes):
        return [self.places[each] for each in hashes]

    def finish(self, stored, loaded):
        self.calls.append((stored, loaded))
        self.places |= dict(stored)

    def forget(self):
        self.places.clear()

    def check_integrity(self):
        pass


def load(transfers, names, block_ids):
    return transfers.load(names, transfers.connector.load(names), block_ids)


def test_step_without_stores_and_loads_has_no_transfer():
    transfers = Transfers(EndlessShelf())
    assert transfers.take() == (0, (), ())
    assert transfers.take() == (0, (), ())


def test_step_is_one_transfer_with_consecutive_number():
    transfers = Transfers(EndlessShelf(A, B))
    transfers.store(C, 5)
    assert load(transfers, [A, B], [7, 8]) == 1
    assert transfers.owned_block_ids() == [7, 8]
    assert transfers.take() == (1, ((5, 2),), ((0, 7), (1, 8)))
    assert transfers.take() == (0, (), ())
    transfers.store(D, 6)
    assert transfers.take() == (2, ((6, 3),), ())
    assert transfers.owned_block_ids() == [7, 8]


def test_finished_transfer_returns_blocks_and_informs_the_connector():
    shelf = EndlessShelf(A, B)
    transfers = Transfers(shelf)
    transfers.store(C, 5)
    load(transfers, [A, B], [7, 8])
    transfers.take()
    assert [transfers.number_loading(name) for name in (A, B, C)] == [1, 1, None]
    assert transfers.finish(1) == [(A, 7), (B, 8)]
    assert shelf.calls == [([(C, 2)], [0, 1])]
    assert transfers.number_loading(A) is None
    assert transfers.owned_block_ids() == []
    transfers.check_integrity()


def test_transfers_can_finish_in_any_order():
    transfers = Transfers(EndlessShelf(A, B))
    assert load(transfers, [A], [7]) == 1
    transfers.take()
    assert load(transfers, [B], [8]) == 2
    transfers.take()
    assert transfers.finish(2) == [(B, 8)]
    assert transfers.finish(1) == [(A, 7)]


def test_transfer_finishes_once_and_after_its_step():
    transfers = Transfers(EndlessShelf(A))
    load(transfers, [A], [7])
    with pytest.raises(AssertionError, match=r"transfer 1 .*not .*flight: \[\]"):
        transfers.finish(1)
    transfers.take()
    transfers.finish(1)
    with pytest.raises(AssertionError, match=r"transfer 1 .*not .*flight: \[\]"):
        transfers.finish(1)


def test_forgotten_load_finishes_without_a_hash():
    transfers = Transfers(EndlessShelf(A, B))
    load(transfers, [A], [7])
    transfers.take()
    load(transfers, [B], [8])
    transfers.forget()
    assert [transfers.number_loading(name) for name in (A, B)] == [None, None]
    transfers.take()
    assert (transfers.finish(1), transfers.finish(2)) == ([(None, 7)], [(None, 8)])
    transfers.check_integrity()


def test_block_gets_its_hash_from_last_load():
    transfers = Transfers(EndlessShelf(A, B))
    load(transfers, [B], [7])
    transfers.take()
    load(transfers, [A, B], [8, 9])
    transfers.take()
    assert transfers.number_loading(B) == 2
    assert transfers.finish(1) == [(None, 7)]
    assert transfers.finish(2) == [(A, 8), (B, 9)]


def test_transfer_check_detects_load_of_unknown_transfer():
    transfers = Transfers(EndlessShelf())
    transfers._loading[A] = 3
    with pytest.raises(AssertionError, match=r"61.*3"):
        transfers.check_integrity()


# --- through the manager -------------------------------------------------------------------------------------------


NAMES = hash_blocks(root_hash(), [1, 2, 3, 4, 5, 6, 7, 8], 2)


def manager_with_stored_chain(num_blocks=4, num_slots=4):
    """Blocks of 2 tokens. The first three blocks of a chain are in places 2, 1 and 0, and nothing is on the device."""
    manager, table = CacheManager(num_blocks, 2, connector=HostTier(num_slots)), BlockTable()
    manager.extend(table, 0, 6)
    manager.set_hashes(table, NAMES[:3], 0, 0)
    manager.take_block_ops()
    manager.release(table)
    evict(manager)
    manager.finish_transfer(1)
    assert manager.find_prefix(NAMES) == []
    return manager


def evict(manager):
    """Somebody needs every block for a step."""
    table = BlockTable()
    manager.extend(table, 0, 2 * manager.num_blocks)
    block_ops = manager.take_block_ops()
    manager.release(table)
    return block_ops


def test_evicted_blocks_are_stored_from_the_chain_tail():
    manager, table = CacheManager(4, 2, connector=HostTier(4)), BlockTable()
    manager.extend(table, 0, 6)
    manager.set_hashes(table, NAMES[:3], 0, 0)
    assert manager.take_block_ops() == BlockOps()
    manager.release(table)
    assert evict(manager) == BlockOps(store=((2, 0), (1, 1), (0, 2)), transfer=1)


def test_unnamed_blocks_are_not_stored():
    manager, table = CacheManager(4, 2, connector=HostTier(4)), BlockTable()
    manager.extend(table, 0, 6)
    manager.set_hashes(table, NAMES[:1], 0, 0)
    manager.take_block_ops()
    manager.release(table)
    assert evict(manager).store == ((0, 0),)


def test_loaded_prefix_is_found_after_the_transfer():
    manager = manager_with_stored_chain()
    assert manager.load_prefix([], NAMES, 8) == 2
    assert manager.take_block_ops() == BlockOps(load=((2, 3), (1, 2), (0, 1)), transfer=2)
    assert (manager.num_used_blocks, manager.find_prefix(NAMES)) == (3, [])
    manager.check_integrity([])
    manager.finish_transfer(2)
    assert manager.find_prefix(NAMES) == [3, 2, 1]
    assert (manager.num_used_blocks, manager.num_cached_blocks) == (0, 3)
    assert list(manager._pool._free) == [0, 1, 2, 3]
    manager.check_integrity([])


def test_equal_prefixes_wait_for_the_same_transfer():
    manager = manager_with_stored_chain()
    assert manager.load_prefix([], NAMES, 8) == 2
    assert manager.load_prefix([], NAMES[:2], 5) == 2
    manager.take_block_ops()
    assert manager.load_prefix([], NAMES, 8) == 2
    assert manager.take_block_ops().is_empty


def test_load_covers_only_the_missing_middle_blocks():
    """The blocks lie after the prefix, and before those on the device."""
    manager, table = manager_with_stored_chain(num_blocks=8), BlockTable()
    manager.load_prefix([], NAMES[:1], 8)
    manager.take_block_ops()
    manager.finish_transfer(2)
    manager.extend(table, 0, 6)
    manager.set_hashes(table, NAMES[:3], 2, 0)
    manager.take_block_ops()
    prefix = manager.find_prefix(NAMES)
    assert len(prefix) == 1
    assert manager.load_prefix(prefix, NAMES, 8) == 3
    assert [place for place, _ in manager.take_block_ops().load] == [1]
    manager.finish_transfer(3)
    assert len(manager.find_prefix(NAMES)) == 3
    manager.check_integrity([table])


def test_load_requires_blocks_for_the_complete_sequence():
    manager, table = manager_with_stored_chain(), BlockTable()
    manager.extend(table, 0, 2)
    assert manager.load_prefix([], NAMES, 7) is None
    assert manager.load_prefix([], NAMES, 6) == 2


def test_load_leaves_the_watermark():
    manager = manager_with_stored_chain()
    manager.watermark_blocks = 1
    assert manager.load_prefix([], NAMES, 7) is None
    assert manager.load_prefix([], NAMES, 6) == 2


def test_load_is_none_without_stores_or_connector():
    manager = manager_with_stored_chain()
    assert (manager.num_tier_blocks, CacheManager(4, 2).num_tier_blocks) == (4, 0)
    assert manager.load_prefix([], [], 1) is None
    assert manager.load_prefix([], hash_blocks(root_hash(), [9] * 8, 2), 8) is None
    assert CacheManager(4, 2).load_prefix([], NAMES, 8) is None


def test_load_does_not_evict_its_own_source():
    """The device blocks that a load takes evict others, which are stored. They took the very places that the load was
    about to read, when these were reserved only afterwards.
    """
    manager, table = manager_with_stored_chain(num_slots=3), BlockTable()
    manager.extend(table, 0, 8)
    manager.set_hashes(table, hash_blocks(root_hash(), [9] * 8, 2), 0, 0)
    manager.take_block_ops()
    manager.release(table)
    assert manager.load_prefix([], NAMES, 8) == 2
    assert manager.take_block_ops() == BlockOps(load=((2, 0), (1, 1), (0, 2)), transfer=2)


def test_load_does_not_evict_the_prefix_it_extends():
    """The head is the least recently used block of the device: without care it would be taken for its own tail."""
    manager, table = manager_with_stored_chain(), BlockTable()
    manager.load_prefix([], NAMES[:1], 8)
    manager.take_block_ops()
    manager.finish_transfer(2)
    manager.extend(table, 0, 6)
    manager.set_hashes(table, hash_blocks(root_hash(), [9] * 6, 2), 0, 0)
    manager.take_block_ops()
    manager.release(table)
    prefix = manager.find_prefix(NAMES)
    assert prefix == list(manager._pool._free)[:1]
    assert manager.load_prefix(prefix, NAMES[:3], 6) == 3
    manager.take_block_ops()
    manager.finish_transfer(3)
    assert len(manager.find_prefix(NAMES)) == 3


def test_loaded_duplicate_is_released_without_a_hash():
    manager, table = manager_with_stored_chain(), BlockTable()
    manager.load_prefix([], NAMES[:1], 2)
    manager.take_block_ops()
    manager.extend(table, 0, 2)
    manager.set_hashes(table, NAMES[:1], 0, 0)
    manager.take_block_ops()
    manager.finish_transfer(2)
    assert manager.find_prefix(NAMES) == table.block_ids == [2]
    assert list(manager._pool._free) == [3, 1, 0]
    manager.check_integrity([table])


def test_reset_covers_stored_and_in_flight_blocks():
    manager = manager_with_stored_chain()
    manager.load_prefix([], NAMES[:1], 2)
    manager.take_block_ops()
    manager.reset_prefix_cache()
    assert manager.load_prefix([], NAMES, 8) is None
    manager.finish_transfer(2)
    assert (manager.find_prefix(NAMES), manager.num_used_blocks) == ([], 0)
    manager.check_integrity([])


def test_block_arriving_in_this_step_is_not_stored():
    """Its place on the host is where it would be read from; on the device there is nothing of it yet."""
    manager = CacheManager(3, 2, num_host_blocks=2, connector=HostTier(4))
    table, other = BlockTable(), BlockTable()
    manager.extend(table, 0, 4)
    manager.take_block_ops()
    host_table = manager.swap_out(table, NAMES[:2])
    manager.take_block_ops()
    table = manager.swap_in(host_table, NAMES[:2])
    assert manager.find_prefix(NAMES) == table.block_ids
    manager.release(table)
    manager.extend(other, 0, 6)
    assert manager.take_block_ops() == BlockOps()
    manager.check_integrity([other])


def test_transfer_cannot_finish_without_a_connector():
    with pytest.raises(AssertionError, match="transfer 1 without a connector"):
        CacheManager(4, 2).finish_transfer(1)
