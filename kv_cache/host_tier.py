"""A connector that keeps evicted prefix blocks in host memory and brings them back: the half that decides.

Knows names and places. The bytes are moved by `host_tier_engine.py`.
"""

from collections.abc import Sequence
from typing import cast

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_pool import BlockPool
from kv_cache.connector import Place


class HostTier:
    """Implements `Connector` over `num_places` blocks of host memory; the least recently used goes first.

    A block that is stored can be found once every rank has it. A block that was loaded stays here too, as the most
    recently used.
    """

    def __init__(self, num_places: int) -> None:
        self._pool = BlockPool(num_places)
        self._storing: dict[BlockHash, BlockId] = {}

    @property
    def num_places(self) -> int:
        """Blocks it can keep."""
        return self._pool.num_blocks

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """See `Connector.lookup`."""
        return len(self._pool.find_chain(hashes))

    def store(self, block_hash: BlockHash) -> Place | None:
        """See `Connector.store`. None for what is here or on its way, and while every place is reserved."""
        if block_hash in self._storing or self._pool.find(block_hash) is not None:
            return None
        if self._pool.num_free_blocks == 0:
            return None
        (block_id,) = self._pool.take(1)
        self._storing[block_hash] = block_id
        return Place(block_id)

    def load(self, hashes: Sequence[BlockHash]) -> list[Place]:
        """See `Connector.load`."""
        block_ids = self._pool.find_chain(hashes)
        assert len(block_ids) == len(hashes), f"{len(hashes)} blocks wanted, {len(block_ids)} are here"
        self._pool.share(block_ids)
        return [Place(block_id) for block_id in block_ids]

    def finish(self, stored: Sequence[tuple[BlockHash, Place]], loaded: Sequence[Place]) -> None:
        """See `Connector.finish`."""
        for block_hash, place in stored:
            if self._storing.get(block_hash) == cast("BlockId", place):
                del self._storing[block_hash]
                self._pool.name(BlockId(place), block_hash)
        # In eviction order: heads of chains were stored after their tails, so the tails go first here too.
        self._pool.release(BlockId(place) for _, place in stored)
        self._pool.release(BlockId(place) for place in reversed(loaded))

    def forget(self) -> None:
        """See `Connector.forget`."""
        self._storing.clear()
        self._pool.forget_names()

    def check_integrity(self) -> None:
        """See `Connector.check_integrity`."""
        self._pool.check_integrity()
        for block_hash, block_id in self._storing.items():
            assert self._pool.ref_count(block_id) > 0, (
                f"{block_hash.hex()} is stored in place {block_id}, which is free"
            )
