"""BlockTable and TableChange: a copy of a table kept up to date by changes."""

import pytest

from kv_cache.block_table import BlockTable, TableChange


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
    with pytest.raises(AssertionError, match="first_index=3"):
        BlockTable([5, 6]).apply(TableChange(3, (1,)))


def test_new_tables_have_lists_of_their_own():
    first, second = BlockTable(), BlockTable()
    first.block_ids.append(1)
    assert second.block_ids == []
