"""PrefixIndex: literal finds, who keeps a name, and what check_integrity finds."""

import pytest

from kv_cache.prefix_index import PrefixIndex


def abc():
    index = PrefixIndex()
    for name, block_id in ((b"a", 5), (b"b", 2), (b"c", 7)):
        assert index.insert(name, block_id)
    return index


def test_name_finds_its_block_and_unknown_name_none():
    index = abc()
    assert [index.find(name) for name in (b"a", b"b", b"c", b"d")] == [5, 2, 7, None]
    assert len(index) == 3


def test_chain_is_found_up_to_the_first_gap():
    index = abc()
    assert index.find_chain([b"a", b"b", b"c"]) == [5, 2, 7]
    assert index.find_chain([b"a", b"d", b"c"]) == [5]
    assert index.find_chain([b"d", b"a"]) == []
    assert index.find_chain([]) == []


def test_name_stays_with_its_first_block():
    index = abc()
    assert not index.insert(b"b", 9)
    assert index.find(b"b") == 2
    assert index.insert(b"b", 2)
    assert len(index) == 3


def test_removed_name_is_free_for_another_block():
    index = abc()
    index.remove(b"b")
    assert index.find_chain([b"a", b"b"]) == [5]
    assert index.insert(b"b", 9)
    assert index.find(b"b") == 9


def test_missing_name_cannot_be_removed():
    with pytest.raises(KeyError):
        abc().remove(b"d")


def test_cleared_index_returns_its_blocks():
    index = abc()
    assert index.clear() == [5, 2, 7]
    assert index.clear() == []
    assert (len(index), index.find(b"a")) == (0, None)


def test_index_check_detects_wrong_and_surplus_names():
    index = abc()
    index.check_integrity([(b"c", 7), (b"a", 5), (b"b", 2)])
    with pytest.raises(AssertionError, match="block 6 carries a name that the index gives to block 5"):
        index.check_integrity([(b"a", 6)])
    with pytest.raises(AssertionError, match="the index holds 3 names, 2 blocks carry one"):
        index.check_integrity([(b"a", 5), (b"b", 2)])
