"""What a block is called: by its number, and by what it holds.

Knows nothing of contents; they are tensors of the cache engine, at index `BlockId`.
"""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one memory (device or host), from 0: the same number on every rank of a replica."""

BlockHash = NewType("BlockHash", bytes)
"""Names the contents of a full block: its tokens and everything before them (see `block_hash.py`)."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)
