"""CacheManager: literal tables, copy pairs and free lists first, then what a step does to the contents."""

import pytest
from cache_simulation import Memories, make_simulation, move

from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier


def free_ids(manager):
    return list(manager._pool._free)


def test_table_grows_by_the_blocks_its_tokens_need():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    assert manager.num_new_blocks(table, 0, 5) == 2
    assert manager.extend(table, 0, 5) == TableChange(0, (0, 1))
    assert manager.extend(table, 5, 8) == TableChange(2, ())
    assert manager.extend(table, 8, 9) == TableChange(2, (2,))
    assert table.block_ids == [0, 1, 2]
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_blocks) == (1, 3, 4)
    assert (manager.num_cached_blocks, manager.num_host_blocks, manager.num_used_host_blocks) == (0, 0, 0)
    assert manager.take_block_ops().is_empty


def test_begin_block_equals_extending_by_one_token():
    found = []
    for begins in (True, False):
        manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
        manager.extend(table, 0, 8)
        manager.set_hashes(table, hash_blocks(root_hash(), range(8), 4), 0, 8)
        # Full blocks may be another's too: they are not written to.
        other = manager.fork(table)
        block_ids = tuple(manager.begin_blocks((table,), (8,))) if begins else manager.extend(table, 8, 9).block_ids
        manager.check_integrity([table, other])
        found.append((block_ids, table.block_ids, other.block_ids, free_ids(manager), manager.take_block_ops()))
    assert found[0] == found[1]
    with pytest.raises(AssertionError, match=r"11 tokens .*not .*3 blocks"):
        manager.begin_blocks((table,), (11,))


def test_released_unnamed_blocks_are_reused_before_untouched_ones():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 12)
    manager.release(table)
    assert table.block_ids == []
    assert free_ids(manager) == [0, 1, 2, 3]


def test_fork_allocates_on_first_write_only():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    manager.take_block_ops()
    child = manager.fork(parent)
    assert child.block_ids == [0, 1]
    assert manager.num_free_blocks == 2
    assert manager.num_new_blocks(parent, 6, 7) == manager.num_new_blocks(child, 6, 7) == 1
    assert manager.extend(parent, 6, 7) == TableChange(1, (2,))
    assert manager.num_new_blocks(child, 6, 7) == 0
    assert manager.extend(child, 6, 7) == TableChange(2, ())
    assert (parent.block_ids, child.block_ids) == ([0, 2], [0, 1])
    assert manager.take_block_ops().copy == ((1, 2),)
    assert manager.take_block_ops().is_empty
    manager.check_integrity([parent, child])


def test_shared_block_is_replaced_without_copy_when_overwritten():
    """Nothing is written below the range that is written."""
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 12)
    child = manager.fork(parent)
    assert manager.extend(child, 4, 10) == TableChange(1, (3, 4))
    assert child.block_ids == [0, 3, 4]
    assert manager.take_block_ops().is_empty


def test_only_the_partly_written_shared_block_is_copied():
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 12)
    child = manager.fork(parent)
    assert manager.extend(child, 5, 9) == TableChange(1, (3, 4))
    assert manager.take_block_ops().copy == ((1, 3),)


def test_table_change_lists_blocks_after_the_first_replacement():
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    child = manager.fork(parent)
    manager.extend(child, 6, 10)
    assert child.block_ids == [0, 2, 3]
    grandchild = manager.fork(child)
    manager.release(child)
    assert manager.extend(grandchild, 1, 2) == TableChange(0, (4, 2, 3))


def test_blocks_past_the_write_range_stay_shared():
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 12)
    child = manager.fork(parent)
    assert manager.extend(child, 1, 3) == TableChange(0, (3, 1, 2))
    manager.check_integrity([parent, child])


def test_empty_write_range_needs_no_block():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    child = manager.fork(parent)
    assert manager.num_new_blocks(child, 6, 6) == 0
    assert manager.extend(child, 6, 6) == TableChange(2, ())
    assert child.block_ids == parent.block_ids


def test_watermark_is_kept_free_only_on_request():
    manager, table = CacheManager(num_blocks=4, block_size=4, watermark_blocks=1), BlockTable()
    assert manager.can_start([], 12, keep_watermark=True)
    assert not manager.can_start([], 13, keep_watermark=True)
    assert manager.can_extend(table, 0, 16)
    assert not manager.can_extend(table, 0, 17)


def test_extending_beyond_free_blocks_fails_and_changes_nothing():
    manager, table = CacheManager(num_blocks=2, block_size=4), BlockTable()
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 2 "):
        manager.extend(table, 0, 9)
    assert table.block_ids == []
    assert free_ids(manager) == [0, 1]


@pytest.mark.parametrize(("first_token", "num_tokens"), [(5, 4), (-1, 4), (9, 12)])
def test_impossible_positions_are_rejected(first_token, num_tokens):
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 8)
    with pytest.raises(AssertionError, match=str(first_token)):
        manager.num_new_blocks(table, first_token, num_tokens)


def test_hashed_block_is_replaced_before_it_is_written():
    """The fork of a table that is extended and named already is shorter than what its blocks are known for. When it
    outlived its parent, it wrote over contents that others could find.
    """
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 2)
    manager.take_block_ops()
    names = hash_blocks(root_hash(), [1, 2, 3, 4], 4)
    manager.extend(parent, 2, 4)
    manager.set_hashes(parent, names, 0, num_written_tokens=2)
    child = manager.fork(parent)
    manager.take_block_ops()
    manager.release(parent)
    assert manager.num_new_blocks(child, 2, 3) == 1
    assert manager.extend(child, 2, 3) == TableChange(0, (1,))
    assert manager.take_block_ops().copy == ((0, 1),)
    assert manager.find_prefix(names) == [0]
    assert free_ids(manager) == [2, 3, 0]
    assert manager.num_new_blocks(child, 3, 4) == 0
    manager.check_integrity([child])


def test_shared_full_block_accepts_its_hash_twice():
    """Each of the tables that share it names it."""
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 5)
    manager.take_block_ops()
    child = manager.fork(parent)
    names = hash_blocks(root_hash(), [1, 2, 3, 4], 4)
    manager.set_hashes(parent, names, 0, num_written_tokens=5)
    manager.set_hashes(child, names, 0, num_written_tokens=5)
    assert manager.find_prefix(names) == [0]
    manager.release(parent)
    manager.release(child)
    manager.check_integrity([])


# --- copies of one step -------------------------------------------------------------------------------------------


def simulate(num_blocks, **keywords):
    """Sequence a with 6 tokens in blocks 0 and 1 of 4 tokens, b forked from it; nothing planned."""
    simulation = make_simulation(num_blocks, 4, **keywords)
    simulation.start("a")
    simulation.extend("a", 6)
    simulation.run_step()
    simulation.fork("a", "b")
    return simulation


def pairs(simulation):
    """Pending (source, destination) pairs, without taking them."""
    return [(source, destination) for destination, source in simulation.manager._moves._copies.items()]


def test_copy_of_pending_destination_reads_first_source():
    """Chain in one step: b copies block 1 to 2, c forks from b and copies 2, which holds nothing yet."""
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.fork("b", "c")
    simulation.extend("c", 1)
    assert pairs(simulation) == [(1, 2), (1, 3)]
    simulation.run_step()
    simulation.check_integrity()


def test_copy_into_a_reallocated_block_is_dropped():
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.release("b")
    assert pairs(simulation) == [(1, 2)]
    assert free_ids(simulation.manager) == [2, 3]
    simulation.start("c")
    simulation.extend("c", 1)
    assert simulation.sequences["c"].table.block_ids == [2]
    assert pairs(simulation) == []
    simulation.run_step()
    simulation.check_integrity()


def test_copy_into_a_free_block_is_harmless():
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.release("b")
    simulation.run_step()
    simulation.check_integrity()
    simulation.start("c")
    simulation.extend("c", 3)
    assert simulation.sequences["c"].table.block_ids == [2]
    simulation.run_step()


def test_dropped_copy_keeps_its_dependent_copies_right():
    """Executed in recorded order, (1, 2) dropped and (2, 3) kept would copy what block 2 held before the step."""
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.fork("b", "c")
    simulation.extend("c", 1)
    simulation.release("b")
    simulation.start("d")
    simulation.extend("d", 1)
    assert simulation.sequences["d"].table.block_ids == [2]
    assert pairs(simulation) == [(1, 3)]
    simulation.run_step()
    simulation.check_integrity()


def build_reused_source(**keywords):
    """Block 1 is the source of b's copy, loses its last owner, and becomes the destination of d's copy from block 2."""
    simulation = simulate(5, **keywords)
    simulation.start("c")
    simulation.extend("c", 2)
    simulation.run_step()
    assert simulation.sequences["c"].table.block_ids == [2]
    simulation.extend("b", 1)
    simulation.release("a")
    simulation.fork("c", "d")
    simulation.extend("d", 1)
    assert simulation.sequences["b"].table.block_ids == [0, 3]
    assert simulation.sequences["d"].table.block_ids == [1]
    assert pairs(simulation) == [(1, 3), (2, 1)]
    return simulation


def test_source_overwritten_by_another_copy_is_read_first():
    simulation = build_reused_source()
    simulation.run_step()
    simulation.check_integrity()


class CopiesNothing(Memories):
    def copy(self, block_ops):
        pass


class CopiesOneAfterTheOther(Memories):
    def copy(self, block_ops):
        for pair in block_ops.copy:
            move(self.device, self.device, [pair])


class CopiesInReverse(Memories):
    def copy(self, block_ops):
        for pair in reversed(block_ops.copy):
            move(self.device, self.device, [pair])


@pytest.mark.parametrize("memories", [CopiesNothing, CopiesInReverse])
def test_content_check_detects_missing_or_overtaken_copies(memories):
    simulation = build_reused_source(memories=memories)
    with pytest.raises(AssertionError, match=r"sequence . reads another's"):
        simulation.run_step()


def test_content_check_detects_sequential_copies():
    """The contract of BlockOps is needed: two pairs can exchange blocks, and then no sequential order is right."""
    simulation = make_simulation(4, 2, memories=CopiesOneAfterTheOther)
    for name in ("a", "b"):
        simulation.start(name)
        simulation.extend(name, 1)
    simulation.run_step()
    for name in ("a", "b"):
        simulation.fork(name, name + "2")
        simulation.extend(name + "2", 1)  # pairs (0, 2) and (1, 3)
    simulation.fork("a2", "a3")
    simulation.fork("b2", "b3")
    simulation.release("a")
    simulation.release("b")
    assert free_ids(simulation.manager) == [1, 0]
    simulation.extend("a3", 1)  # (0, 1)
    simulation.extend("b3", 1)  # (1, 0)
    assert pairs(simulation) == [(0, 2), (1, 3), (0, 1), (1, 0)]
    with pytest.raises(AssertionError, match="reads another's tokens"):
        simulation.run_step()


def test_copy_to_its_own_source_is_dropped():
    simulation = simulate(3)
    simulation.extend("b", 1)  # (1, 2)
    simulation.fork("b", "c")
    simulation.release("a")
    assert free_ids(simulation.manager) == [1]
    simulation.extend("c", 1)  # would be (1, 1)
    assert simulation.sequences["c"].table.block_ids == [0, 1]
    assert pairs(simulation) == [(1, 2)]
    simulation.run_step()
    simulation.check_integrity()


# --- what check_integrity finds ----------------------------------------------------------------------------------


def test_manager_check_detects_an_unshared_fork():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    child = BlockTable(list(parent.block_ids))
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 2 tables list it"):
        manager.check_integrity([parent, child])


def test_manager_check_detects_a_lost_table():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 6)
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 0 tables list it"):
        manager.check_integrity([])


def test_manager_check_detects_a_block_listed_twice():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 4)
    manager._pool.share([0])
    table.block_ids.append(0)
    with pytest.raises(AssertionError, match="lists block 0 twice"):
        manager.check_integrity([table])


def test_manager_check_detects_block_of_table_and_transfer():
    manager, table = CacheManager(num_blocks=4, block_size=4, connector=HostTier(2)), BlockTable()
    manager.extend(table, 0, 4)
    manager._transfers._loads.append((root_hash(), 0, 0))
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 2 tables list it"):
        manager.check_integrity([table])


def damage_pool(manager):
    manager._pool.num_cached_blocks = 1


def damage_swap_space(manager):
    manager._swap._pool.num_cached_blocks = 1


def damage_connector(manager):
    manager._transfers.connector._pool.num_cached_blocks = 1


@pytest.mark.parametrize("damage", [damage_pool, damage_swap_space, damage_connector])
def test_manager_check_detects_damage_of_any_pool(damage):
    manager = CacheManager(num_blocks=4, block_size=4, num_host_blocks=2, connector=HostTier(2))
    manager.check_integrity([])
    damage(manager)
    with pytest.raises(AssertionError, match="0 free blocks have a hash, 1 are"):
        manager.check_integrity([])


def test_manager_check_detects_a_copy_to_itself():
    manager = CacheManager(num_blocks=4, block_size=4)
    manager._moves._copies[2] = 2
    with pytest.raises(AssertionError, match=r"block 2 .*copied .*itself"):
        manager.check_integrity([])
