"""One block of a cache: its number, how many tables list it, what it holds, and its place among the free blocks.

Knows nothing of the contents; they are tensors of the cache engine, at index `block_id`.
"""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one memory (device or host), from 0: the same number on every rank of a replica."""

BlockHash = NewType("BlockHash", bytes)
"""Names the contents of a full block: its tokens and everything before them (see `block_hash.py`)."""


class Block:
    """The record of one block. All fields belong to the pool but the two links, which belong to the free queue.

    Both links are set while the block is in the free queue and None while it is not. `block_hash` is set while the
    block can be found by its contents, in use or free.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.previous_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)
