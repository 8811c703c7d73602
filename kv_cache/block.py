"""One block of a cache: its number, how many tables list it, and its place among the free blocks.

Knows nothing of what a block contains; the contents are tensors of the cache engine, at index `block_id`.
"""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one memory (device or host), from 0: the same number on every rank of a replica."""


class Block:
    """The record of one block. `ref_count` belongs to the pool, the two links to the free queue and to nobody else.

    Both links are set while the block is in the free queue and None while it is not.
    """

    __slots__ = ("block_id", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.previous_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)
