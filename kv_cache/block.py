"""Block ids and block hashes. Contents are tensors of the cache engine, at index `BlockId`."""

from typing import Final, NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one memory (device or host), from 0: the same number on every rank of a replica."""

NO_BLOCK: Final = BlockId(-1)
"""Stands for each block of a found prefix in a cache without blocks."""

BlockHash = NewType("BlockHash", bytes)
"""Hash of a full block's tokens and of all tokens before them (see `block_hash.py`)."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks of `block_size` tokens that hold `num_tokens` tokens; the last one may be partly filled."""
    return -(-num_tokens // block_size)
