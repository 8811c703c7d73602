"""Groups of layers: how layers are dealt out, what a row has at once, and tables that drop what is behind a window."""

import pytest
import torch

from kv_cache.block import BlockId
from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_ops import BlockOps
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_manager import CacheManager
from kv_cache.cache_spec import BlockLayer, CacheSpec
from kv_cache.layer_groups import ONE_GROUP, LayerGroups, group_layers, wasted_share

GEMMA3 = LayerGroups(1, 2, (5,), 8)


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "expected"),
    [
        (4, 22, (1, 6)),
        (8, 40, (1, 5)),
        (10, 52, (1, 4)),
        (12, 12, (1, 1)),
        (3, 1, (3, 1)),
        (0, 32, (0, 1)),
        (16, 48, (1, 3)),
        (6, 0, (1, 0)),
    ],
)
def test_layers_are_dealt_to_even_groups(num_full: int, num_windowed: int, expected: tuple[int, int]):
    windows = [1024] * num_windowed + [0] * num_full
    groups, group_of = group_layers([1] * len(windows), windows, 2048)
    assert (groups.num_full, groups.num_windows) == expected
    assert all((group >= groups.num_full) == bool(window) for group, window in zip(group_of, windows))
    sizes = [group_of.count(group) for group in range(groups.num_groups)]
    assert max(sizes[: groups.num_full] or [1]) - min(sizes[: groups.num_full] or [1]) <= 1
    assert wasted_share([1] * len(windows), group_layers([1] * len(windows), windows, 2048)) < 0.08


def test_layers_without_keys_count_for_nothing():
    groups, group_of = group_layers([0, 1, 0, 1], [0, 0, 7, 7], 16)
    assert (groups.num_full, groups.num_windows, group_of) == (1, 1, (0, 0, 0, 1))


@pytest.mark.parametrize(
    ("windows", "position", "expected"),
    [((5,), 3, 0), ((5,), 4, 0), ((5,), 5, 1), ((5, 9), 20, 12), ((-8,), 15, 8), ((-8,), 16, 16), ((-8, 3), 16, 14)],
)
def test_first_visible_position(windows: tuple[int, ...], position: int, expected: int):
    groups = LayerGroups(1, 1, windows, 8)
    assert groups.first_visible(position) == expected
    assert groups.num_unseen(position, 4) == expected // 4
    assert ONE_GROUP.num_unseen(position, 4) == 0
    # The scheduler asks only where as much is behind a row's last computed token.
    assert groups.num_unseen(position, 4) <= max(position + 1 - groups.lookback, 0) // 4


def written(manager: CacheManager, num_tokens: int, step: int = 4) -> BlockTable:
    """The table of a row that computed `num_tokens`, `step` at a time; as a scheduler does."""
    table = BlockTable()
    for first in range(0, num_tokens, step):
        manager.drop_unseen(table, first)
        manager.extend(table, first, min(first + step, num_tokens))
        manager.take_block_ops()
    return table


def test_row_never_has_more_than_counted():
    manager = CacheManager(200, 4, groups=GEMMA3)
    table, most = BlockTable(), 0
    for first in range(0, 96, 8):
        manager.drop_unseen(table, first)
        manager.extend(table, first, first + 8)
        most = max(most, manager.num_used_blocks)
        manager.check_integrity([table])
    assert most <= GEMMA3.num_blocks(96, 4) == 24 + 2 * 5
    assert len(table.block_ids) == 3 * 24
    # Token 87 may be computed again: it sees from 83 on, in block 20.
    assert table.num_dropped == 20
    manager.release(table)
    assert manager.num_free_blocks == 200


def test_dropped_blocks_are_found_until_they_are_taken():
    manager = CacheManager(60, 4, groups=GEMMA3)
    tokens = list(range(33))
    hashes = hash_blocks(root_hash(), tokens, 4)
    table = BlockTable()
    for first in range(0, 32, 4):
        manager.drop_unseen(table, first)
        manager.extend(table, first, first + 4)
        manager.set_hashes(table, hashes[: first // 4 + 1], first // 4, first)
        manager.take_block_ops()
    assert table.num_dropped == 5
    # Each group's block has its name, also those that were dropped.
    found = manager.find_prefix(hashes)
    assert len(found) == 3 * 8
    assert manager.num_prefix_tokens(found) == 32
    other = BlockTable()
    manager.adopt(other, found)
    assert other.num_dropped == 7
    manager.check_integrity([table, other])
    # A hit needs the window before it: without one block of one group it ends before that.
    manager._pool.remove_hash(manager.groups.names(hashes[7])[2])
    assert manager.num_prefix_tokens(manager.find_prefix(hashes)) == 28
    manager._pool.remove_hash(hashes[3])
    assert manager.num_prefix_tokens(manager.find_prefix(hashes)) == 12


@pytest.mark.parametrize("is_held", [True, False])
def test_row_behind_a_prefix_needs_its_own_window(is_held: bool):
    """Blocks of a prefix that another row holds are not free when they are dropped."""
    manager = CacheManager(60, 4, groups=LayerGroups(1, 1, (8,), 8))
    first, second, hashes = BlockTable(), BlockTable(), hash_blocks(root_hash(), list(range(24)), 4)
    manager.extend(first, 0, 24)
    manager.set_hashes(first, hashes, 0, 0)
    manager.take_block_ops()
    if not is_held:
        manager.release(first)
    prefix, num_free = manager.find_prefix(hashes), manager.num_free_blocks

    def can_start(num_blocks: int) -> bool:
        manager.watermark_blocks = num_free - num_blocks
        return manager.can_start(prefix, 64, keep_watermark=True)

    num_needed = next(each for each in range(60) if can_start(each))
    manager.adopt(second, prefix)
    most = 0
    for computed in range(24, 64, 8):
        manager.drop_unseen(second, computed)
        manager.extend(second, computed, computed + 8)
        most = max(most, num_free - manager.num_free_blocks)
        manager.check_integrity([first, second])
    assert most <= num_needed == (15 if is_held else 21)


def test_swapped_row_leaves_out_what_it_dropped():
    manager = CacheManager(60, 4, num_host_blocks=30, groups=GEMMA3)
    table = written(manager, 32)
    owned = manager.owned(table)
    assert len(owned) == 8 + 2 * 3
    host_table = manager.swap_out(table, [])
    assert host_table is not None
    assert (host_table.num_dropped, len(host_table.block_ids)) == (5, len(owned))
    assert [source for source, _ in manager.take_block_ops().swap_out] == owned
    assert manager.can_swap_in(host_table, [], 33)
    back = manager.swap_in(host_table, [])
    assert (back.num_dropped, len(back.block_ids)) == (5, 3 * 8)
    assert [block_id for _, block_id in manager.take_block_ops().swap_in] == manager.owned(back)
    manager.check_integrity([back])


def test_fork_copies_the_block_it_writes_in_each_group():
    manager = CacheManager(60, 4, groups=GEMMA3)
    table = written(manager, 30)
    fork = manager.fork(table)
    assert fork == table
    assert fork.block_ids is not table.block_ids
    manager.check_integrity([table, fork])
    change = manager.extend(fork, 30, 31)
    assert change == TableChange(21, tuple(fork.block_ids[21:]))
    assert manager.take_block_ops().copy == tuple(zip(table.block_ids[21:], fork.block_ids[21:]))
    # The parent drops its share; the fork keeps its own.
    manager.extend(table, 30, 32)
    manager.drop_unseen(table, 44)
    manager.check_integrity([table, fork])


def test_engine_has_groups_side_by_side():
    narrow, wide = BlockLayer(1, 16, 16), BlockLayer(2, 16, 16)
    spec = CacheSpec((narrow, wide, None, narrow), 4, 4, groups=LayerGroups(1, 1, (5,), 8), group_of=(1, 0, 0, 1))
    assert spec.block_bytes == 2 * spec.layer_block_bytes(narrow) == spec.layer_block_bytes(wide)
    assert spec.layers_bytes == spec.row_block_bytes
    shapes = [(2, 4, 1, 16), (2, 4, 2, 16)]
    engine = CacheEngine(spec, shapes, 3, 2, torch.float32, torch.device("cpu"))
    engine.allocate()
    first, second, third, fourth = engine.layer_caches
    assert first is not None
    assert second is not None
    assert third is None
    assert fourth is not None
    assert [tuple(each.shape) for each in (first, second, fourth)] == [
        (3, *shapes[0]),
        (3, *shapes[1]),
        (3, *shapes[0]),
    ]
    first[0], fourth[0], second[1] = 1.0, 2.0, 3.0
    # A block of one group is no block of the other: layers of one share no memory, and every layer's part moves.
    assert (first[0] == 1.0).all()
    engine.execute(BlockOps(copy=((BlockId(0), BlockId(2)),), swap_out=((BlockId(1), BlockId(0)),)))
    assert (first[2] == 1.0).all()
    assert (fourth[2] == 2.0).all()
    engine.execute(BlockOps(swap_in=((BlockId(0), BlockId(2)),)))
    assert (second[2] == 3.0).all()
