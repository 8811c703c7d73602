"""Comparison of a prefix-cache hit with what a step computes again, as a plan carries it to the workers."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kv_cache.block import BlockHash
from spmd_worker.replica.sequence.record_checks import CheckedRecord
from spmd_worker.replica.sequence.sequence import SequenceKey

UNKNOWN_WRITER: Final = -1
"""Replaces the request that wrote something where it is not known any more: it came back from outside the device."""


class CachedCopy(NamedTuple):
    """Something in the cache with a name: block `number`, which holds what entry `block_index` of the sequence's table
    should; or the snapshot in slot `number`, the state after that block. `writer`: the request that computed it.
    """

    block_index: int
    number: int
    name: BlockHash
    writer: int


@dataclass(frozen=True, slots=True)
class HitComparison(CheckedRecord):
    """Found blocks and states that sequence `key` computes again by the end of the step: after its forward pass both
    copies have the same bytes, on every rank.
    """

    key: SequenceKey
    blocks: tuple[CachedCopy, ...]
    states: tuple[CachedCopy, ...] = ()
