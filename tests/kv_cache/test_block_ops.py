"""BlockOps: a plain value."""

from dataclasses import FrozenInstanceError

import pytest

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps

PAIR = ((BlockId(0), BlockId(1)),)


def test_operations_without_pairs_are_empty():
    assert BlockOps().is_empty


@pytest.mark.parametrize("kind", ["swap_in", "swap_out", "copy"])
def test_operations_with_one_pair_of_any_kind_are_not_empty(kind):
    assert not BlockOps(**{kind: PAIR}).is_empty


def test_operations_cannot_be_changed_after_they_were_decided():
    with pytest.raises(FrozenInstanceError):
        BlockOps().copy = PAIR
