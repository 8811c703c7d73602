"""Who passes a message to whom, and how the answers of a group are packed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.ranks.transport.relay_tree import (
    MIN_RELAYED_RANKS,
    BundleError,
    RelayTree,
    pack_answers,
    tree_of,
    unpack_answers,
)


def test_nine_ranks_in_groups_of_three():
    tree = tree_of(9, 2)
    assert tree == RelayTree(9, 3)
    assert [tree.children(rank) for rank in range(9)] == [[1, 2, 3, 6], [], [], [4, 5], [], [], [7, 8], [], []]
    assert [tree.parent(rank) for rank in range(1, 9)] == [0, 0, 0, 3, 3, 0, 6, 6]


def test_few_ranks_are_a_star():
    tree = tree_of(MIN_RELAYED_RANKS - 1)
    assert not tree.has_relays
    assert tree.children(0) == list(range(1, MIN_RELAYED_RANKS - 1))
    assert tree_of(MIN_RELAYED_RANKS).has_relays


@given(st.integers(1, 3000), st.integers(1, 80))
def test_every_rank_has_one_parent(size: int, group_size: int):
    tree = RelayTree(size, group_size)
    parents = {child: rank for rank in range(size) for child in tree.children(rank)}
    assert sorted(parents) == list(range(1, size))
    assert all(tree.parent(child) == rank for child, rank in parents.items())
    # Answers of the children and below them come in rank order.
    order = [each for child in tree.children(0) for each in (child, *tree.children(child))]
    assert order == list(range(1, size))


def test_no_rank_of_1024_has_more_than_62_children():
    tree = tree_of(1024)
    assert len(tree.children(0)) == 62
    assert max(len(tree.children(rank)) for rank in range(1, 1024)) == 31


@given(st.lists(st.sampled_from([b"", b"same", b"other"]), min_size=1))
def test_packed_answers_are_read_back(answers):
    assert unpack_answers(pack_answers(answers), len(answers)) == answers


def test_equal_answers_are_packed_once():
    assert pack_answers([b"digest"] * 32) == b"\1digest"


@pytest.mark.parametrize(
    "payload", [b"", b"\0", b"\2ab", pack_answers([b"a", b"b"])[:-1], pack_answers([b"a", b"b", b"c"])]
)
def test_other_bytes_are_no_answers(payload: bytes):
    with pytest.raises(BundleError):
        unpack_answers(payload, 2)
