"""Swap space: host blocks of preempted sequences."""

from collections.abc import Sequence

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_pool import BlockPool
from kv_cache.block_table import BlockTable


class SwapSpace:
    """A pool of host blocks. A full block with a hash is kept once for all sequences, and also after it was swapped in
    again, until its memory is needed: a sequence that is preempted a second time copies only its new blocks.

    Host blocks of a table that is swapped in are read when the step runs, so they are not reused before `end_step`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._read_by_step: list[BlockId] = []

    @property
    def num_used_blocks(self) -> int:
        """Blocks of swapped-out sequences."""
        return self.num_blocks - self._pool.num_free_blocks

    def can_store(self, num_blocks: int, hashes: Sequence[BlockHash]) -> bool:
        """Whether enough blocks are free for a table of `num_blocks` that begins with blocks of these `hashes`."""
        held = self._pool.find_all(hashes[:num_blocks])
        num_missing = num_blocks - len(held)
        return num_missing <= self._pool.num_free_blocks - self._pool.num_free_among(dict.fromkeys(held.values()))

    def store(self, num_blocks: int, hashes: Sequence[BlockHash]) -> tuple[BlockTable, list[int]]:
        """A host table of `num_blocks`, and the indices of the blocks to copy to it now."""
        held = self._pool.find_all(hashes[:num_blocks])
        self._pool.share(held.values())
        missing = [index for index in range(num_blocks) if index not in held]
        allocated = dict(zip(missing, self._pool.take(len(missing)), strict=True))
        for index, block_id in allocated.items():
            if index < len(hashes):
                self._pool.set_hash(block_id, hashes[index])
        return BlockTable([held[index] if index in held else allocated[index] for index in range(num_blocks)]), missing

    def release(self, table: BlockTable, *, is_read: bool) -> None:
        """Free a host table and empty it; `is_read`: the step being planned still reads its blocks."""
        if is_read:
            self._read_by_step += reversed(table.block_ids)
        else:
            self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.num_dropped = 0

    def end_step(self) -> None:
        """End the planning of a step: the next one may overwrite what this one reads."""
        self._pool.release(self._read_by_step)
        self._read_by_step.clear()

    def clear_hashes(self) -> None:
        self._pool.clear_hashes()

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Raise AssertionError unless `tables` (all there are) and this step's reads account for every owner."""
        self._pool.check_integrity()
        counts = [0] * self.num_blocks
        for block_ids in (*[table.block_ids for table in tables], self._read_by_step):
            for block_id in block_ids:
                assert 0 <= block_id < self.num_blocks, f"a table lists host block {block_id} of {self.num_blocks}"
                counts[block_id] += 1
        self._pool.check_owners("host block", counts)
