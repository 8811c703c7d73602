"""The blocks of one memory: which are free, and how many tables list each of the others.

Knows block numbers and counts. Knows nothing of tables, tokens or contents, nor whose memory it is.
"""

from collections.abc import Iterable

from kv_cache.block import Block, BlockId
from kv_cache.free_queue import FreeQueue


class BlockPool:
    """Blocks 0 .. num_blocks - 1, all free at first and handed out in that order.

    A block is free exactly when its count is zero. Which block comes next depends on the order of the calls alone, so
    replicas that make the same calls hold the same pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(BlockId(index)) for index in range(num_blocks)]
        self._free = FreeQueue(self._blocks)

    @property
    def num_blocks(self) -> int:
        """Free or not."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `take` can give."""
        return len(self._free)

    @property
    def free_block_ids(self) -> list[BlockId]:
        """The free blocks in the order in which `take` will give them. Costs a walk: for tests and messages."""
        return [block.block_id for block in self._free]

    def ref_count(self, block_id: BlockId) -> int:
        """How many owners the block has; 0 when it is free."""
        return self._block(block_id).ref_count

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks, longest free first, with one owner each. The caller has asked `num_free_blocks` before."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free"
        blocks = [self._free.pop_first() for _ in range(count)]
        for block in blocks:
            block.ref_count = 1
        return [block.block_id for block in blocks]

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """One more owner for each of the blocks, none of which may be free."""
        for block_id in block_ids:
            block = self._block(block_id)
            assert block.ref_count > 0, f"block {block_id} is free and cannot be shared"
            block.ref_count += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """One owner less for each of the blocks, in the order given.

        A block without owners is queued behind all free blocks, so the first one given is the first to be taken again.
        """
        for block_id in block_ids:
            block = self._block(block_id)
            assert block.ref_count > 0, f"block {block_id} is released but it is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the values, where the free queue and the counts contradict each other."""
        self._free.check_integrity()
        is_queued = [False] * self.num_blocks
        for block in self._free:
            assert self._block(block.block_id) is block, f"free queue holds {block}, which is not this pool's"
            assert not is_queued[block.block_id], f"free queue holds {block} twice"
            is_queued[block.block_id] = True
        for block in self._blocks:
            assert block.ref_count >= 0, f"{block} has a negative count"
            assert is_queued[block.block_id] == (block.ref_count == 0), (
                f"{block} {'is' if is_queued[block.block_id] else 'is not'} in the free queue"
            )

    def _block(self, block_id: BlockId) -> Block:
        assert 0 <= block_id < len(self._blocks), f"block {block_id} is not one of {len(self._blocks)}"
        return self._blocks[block_id]
