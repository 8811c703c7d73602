"""BlockOps: a plain value."""

from dataclasses import FrozenInstanceError

import pytest

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps

PAIR = ((BlockId(0), BlockId(1)),)


def test_block_ops_without_pairs_are_empty():
    assert BlockOps().is_empty


@pytest.mark.parametrize("kind", ["swap_in", "swap_out", "copy"])
def test_block_ops_with_any_pair_are_not_empty(kind):
    assert not BlockOps(**{kind: PAIR}).is_empty


def test_block_ops_are_frozen():
    with pytest.raises(FrozenInstanceError):
        BlockOps().copy = PAIR
