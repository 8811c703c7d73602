"""BlockTable and TableChange: positions to slots, and a copy of a table kept up to date by changes."""

import pytest

from kv_cache.block_table import BlockTable, TableChange


def test_slot_is_first_block_slot_plus_offset():
    table = BlockTable([7, 2])
    assert [table.slot(position, 4) for position in (0, 3, 4, 7)] == [28, 31, 8, 11]


@pytest.mark.parametrize("position", [-1, 8])
def test_position_outside_the_table_has_no_slot(position):
    with pytest.raises(AssertionError, match=f"position {position} lies outside a table of 2 blocks of 4 tokens"):
        BlockTable([7, 2]).slot(position, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (TableChange(2, ()), [5, 6]),
        (TableChange(2, (8, 9)), [5, 6, 8, 9]),
        (TableChange(1, (7,)), [5, 7]),
        (TableChange(0, (1, 2, 3)), [1, 2, 3]),
    ],
)
def test_table_change_keeps_head_and_replaces_tail(change, expected):
    table = BlockTable([5, 6])
    table.apply(change)
    assert table.block_ids == expected
    assert table.num_blocks == len(expected)


def test_table_change_of_a_longer_table_is_rejected():
    with pytest.raises(AssertionError, match="keeps 3 blocks of a table of 2"):
        BlockTable([5, 6]).apply(TableChange(3, (1,)))


def test_new_tables_have_lists_of_their_own():
    first, second = BlockTable(), BlockTable()
    first.block_ids.append(1)
    assert second.block_ids == []
