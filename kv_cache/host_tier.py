"""Host tier, deciding half: a connector that keeps evicted prefix blocks in host memory and loads them again.

`host_tier_engine.py` moves the bytes.
"""

from collections.abc import Sequence
from typing import cast

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_pool import BlockPool
from kv_cache.connector import TierSlot


class HostTier:
    """Implements `Connector` over `num_slots` blocks of host memory; the least recently used is evicted first.

    A stored block can be found once every rank has it. A loaded block stays here too, as the most recently used.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pool = BlockPool(num_slots)
        self._storing: dict[BlockHash, BlockId] = {}

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        return len(self._pool.find_chain(hashes))

    def store(self, block_hash: BlockHash) -> TierSlot | None:
        """A slot (`Connector.store`). None if the block is here or being stored, and while every slot is reserved."""
        if block_hash in self._storing:
            return None
        held = self._pool.find(block_hash)
        if held is not None:
            # Evicted again, so it was used since it was stored: now the most recently used.
            self._pool.share([held])
            self._pool.release([held])
            return None
        if self._pool.num_free_blocks == 0:
            return None
        (block_id,) = self._pool.take(1)
        self._storing[block_hash] = block_id
        return TierSlot(block_id)

    def load(self, hashes: Sequence[BlockHash]) -> list[TierSlot]:
        block_ids = self._pool.find_chain(hashes)
        assert len(block_ids) == len(hashes), f"{len(hashes)} blocks wanted, {len(block_ids)} are here"
        self._pool.share(block_ids)
        return [TierSlot(block_id) for block_id in block_ids]

    def finish(self, stored: Sequence[tuple[BlockHash, TierSlot]], loaded: Sequence[TierSlot]) -> None:
        for block_hash, slot in stored:
            if self._storing.get(block_hash) == cast("BlockId", slot):
                del self._storing[block_hash]
                self._pool.set_hash(BlockId(slot), block_hash)
        # In eviction order: heads of chains were stored after their tails, so the tails go first here too.
        self._pool.release(BlockId(slot) for _, slot in stored)
        self._pool.release(BlockId(slot) for slot in reversed(loaded))

    def forget(self) -> None:
        self._storing.clear()
        self._pool.clear_hashes()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        for block_hash, block_id in self._storing.items():
            assert self._pool.ref_count(block_id) > 0, f"{block_hash.hex()} is stored in slot {block_id}, which is free"
