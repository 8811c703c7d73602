"""CacheManager: literal tables, copy pairs and free lists first, then what a step does to the contents."""

import pytest
from cache_simulation import Memories, make_simulation, move

from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier


def free_ids(manager):
    return manager._pool.free_block_ids


def test_a_table_grows_by_the_blocks_its_tokens_need():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    assert manager.num_new_blocks(table, 0, 5) == 2
    assert manager.extend(table, 0, 5) == TableChange(0, (0, 1))
    assert manager.extend(table, 5, 8) == TableChange(2, ())
    assert manager.extend(table, 8, 9) == TableChange(2, (2,))
    assert table.block_ids == [0, 1, 2]
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_blocks) == (1, 3, 4)
    assert (manager.num_cached_blocks, manager.num_host_blocks, manager.num_used_host_blocks) == (0, 0, 0)
    assert manager.take_block_ops().is_empty


def test_a_block_behind_full_ones_is_what_extending_by_its_first_token_gives():
    found = []
    for begins in (True, False):
        manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
        manager.extend(table, 0, 8)
        manager.name_blocks(table, hash_blocks(root_hash(), range(8), 4), 0, 8)
        # Full blocks may be another's too: they are not written to.
        other = manager.fork(table)
        block_ids = (manager.begin_block(table, 8),) if begins else manager.extend(table, 8, 9).block_ids
        manager.check_integrity([table, other])
        found.append((block_ids, table.block_ids, other.block_ids, free_ids(manager), manager.take_block_ops()))
    assert found[0] == found[1]
    with pytest.raises(AssertionError, match="11 tokens do not fill the 3 blocks"):
        manager.begin_block(table, 11)


def test_a_released_table_without_names_is_used_again_before_untouched_blocks():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 12)
    manager.release(table)
    assert table.block_ids == []
    assert free_ids(manager) == [0, 1, 2, 3]


def test_a_fork_takes_no_block_and_the_first_to_write_copies():
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


def test_a_shared_block_with_nothing_written_below_is_replaced_without_a_copy():
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 12)
    child = manager.fork(parent)
    assert manager.extend(child, 4, 10) == TableChange(1, (3, 4))
    assert child.block_ids == [0, 3, 4]
    assert manager.take_block_ops().is_empty


def test_only_the_block_with_written_tokens_is_copied_when_several_are_shared():
    manager, parent = CacheManager(num_blocks=6, block_size=4), BlockTable()
    manager.extend(parent, 0, 12)
    child = manager.fork(parent)
    assert manager.extend(child, 5, 9) == TableChange(1, (3, 4))
    assert manager.take_block_ops().copy == ((1, 3),)


def test_a_change_lists_every_block_after_the_first_replaced_one():
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


def test_an_empty_write_range_needs_nothing():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    child = manager.fork(parent)
    assert manager.num_new_blocks(child, 6, 6) == 0
    assert manager.extend(child, 6, 6) == TableChange(2, ())
    assert child.block_ids == parent.block_ids


def test_the_watermark_is_kept_free_only_when_asked():
    manager, table = CacheManager(num_blocks=4, block_size=4, watermark_blocks=1), BlockTable()
    assert manager.can_extend(table, 0, 12, keep_watermark=True)
    assert not manager.can_extend(table, 0, 13, keep_watermark=True)
    assert manager.can_extend(table, 0, 16)
    assert not manager.can_extend(table, 0, 17)


def test_extending_beyond_the_free_blocks_is_an_assertion_that_changes_nothing():
    manager, table = CacheManager(num_blocks=2, block_size=4), BlockTable()
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 2 are free"):
        manager.extend(table, 0, 9)
    assert table.block_ids == []
    assert free_ids(manager) == [0, 1]


@pytest.mark.parametrize(("first_token", "num_tokens"), [(5, 4), (-1, 4), (9, 12)])
def test_impossible_positions_are_refused(first_token, num_tokens):
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 8)
    with pytest.raises(AssertionError, match=str(first_token)):
        manager.num_new_blocks(table, first_token, num_tokens)


def test_a_block_that_can_be_found_is_replaced_before_it_is_written_to():
    """The fork of a table that is extended and named already is shorter than what its blocks are known for. When it
    outlived its parent, it wrote over contents that others could find.
    """
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 2)
    manager.take_block_ops()
    names = hash_blocks(root_hash(), [1, 2, 3, 4], 4)
    manager.extend(parent, 2, 4)
    manager.name_blocks(parent, names, 0, num_written_tokens=2)
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


def test_tables_that_share_a_full_block_may_both_name_it():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 5)
    manager.take_block_ops()
    child = manager.fork(parent)
    names = hash_blocks(root_hash(), [1, 2, 3, 4], 4)
    manager.name_blocks(parent, names, 0, num_written_tokens=5)
    manager.name_blocks(child, names, 0, num_written_tokens=5)
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


def test_a_copy_of_a_pending_destination_is_made_from_the_first_source():
    """Chain in one step: b copies block 1 to 2, c forks from b and copies 2, which holds nothing yet."""
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.fork("b", "c")
    simulation.extend("c", 1)
    assert pairs(simulation) == [(1, 2), (1, 3)]
    simulation.run_step()
    simulation.check_integrity()


def test_a_copy_into_a_block_that_is_freed_is_dropped_when_the_block_is_handed_out_again():
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


def test_a_copy_into_a_block_that_stays_free_does_no_harm():
    simulation = simulate(4)
    simulation.extend("b", 1)
    simulation.release("b")
    simulation.run_step()
    simulation.check_integrity()
    simulation.start("c")
    simulation.extend("c", 3)
    assert simulation.sequences["c"].table.block_ids == [2]
    simulation.run_step()


def test_dropping_a_pair_leaves_the_copies_made_from_it_right():
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


def test_a_source_that_becomes_the_destination_of_another_copy_is_read_first():
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
def test_copies_left_out_or_overtaken_are_seen_in_the_contents(memories):
    simulation = build_reused_source(memories=memories)
    with pytest.raises(AssertionError, match=r"sequence . reads another's tokens"):
        simulation.run_step()


def test_copies_one_after_the_other_break_a_step_that_swaps_two_blocks():
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


def test_a_source_freed_and_handed_out_for_its_own_contents_is_not_moved():
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


def test_a_fork_that_forgets_to_share_is_found():
    manager, parent = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(parent, 0, 6)
    child = BlockTable(list(parent.block_ids))
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 2 tables list it"):
        manager.check_integrity([parent, child])


def test_a_table_that_was_lost_is_found():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 6)
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 0 tables list it"):
        manager.check_integrity([])


def test_a_table_that_lists_a_block_twice_is_found():
    manager, table = CacheManager(num_blocks=4, block_size=4), BlockTable()
    manager.extend(table, 0, 4)
    manager._pool.share([0])
    table.block_ids.append(0)
    with pytest.raises(AssertionError, match="lists block 0 twice"):
        manager.check_integrity([table])


def test_a_block_that_a_transfer_owns_and_a_table_lists_is_found():
    manager, table = CacheManager(num_blocks=4, block_size=4, connector=HostTier(2)), BlockTable()
    manager.extend(table, 0, 4)
    manager._transfers._loads.append((root_hash(), 0, 0))
    with pytest.raises(AssertionError, match="block 0 counts 1 owners, 2 tables list it"):
        manager.check_integrity([table])


def damage_pool(manager):
    manager._pool._num_free_named = 1


def damage_swap_space(manager):
    manager._swap._pool._num_free_named = 1


def damage_connector(manager):
    manager._transfers._connector._pool._num_free_named = 1


@pytest.mark.parametrize("damage", [damage_pool, damage_swap_space, damage_connector])
def test_damage_of_any_of_its_memories_is_found(damage):
    manager = CacheManager(num_blocks=4, block_size=4, num_host_blocks=2, connector=HostTier(2))
    manager.check_integrity([])
    damage(manager)
    with pytest.raises(AssertionError, match="0 free blocks carry a name, 1 are counted"):
        manager.check_integrity([])


def test_a_copy_of_a_block_to_itself_is_found():
    manager = CacheManager(num_blocks=4, block_size=4)
    manager._moves._copies[2] = 2
    with pytest.raises(AssertionError, match="block 2 is to be copied to itself"):
        manager.check_integrity([])
