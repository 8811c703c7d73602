"""The free blocks of one memory in eviction order.

Knows how blocks are linked. Knows nothing of reference counts: the pool decides which block is free.
"""

from collections.abc import Iterable, Iterator

from kv_cache.block import Block, BlockId


class FreeQueue:
    """A doubly linked list through the blocks themselves: first in the queue, first to be taken again.

    Why not a `deque`: a free block whose contents are still wanted leaves from the middle, which costs a deque a search
    of the whole queue. Why not an ordered dict: the links cost no allocation when a block comes and goes, and a block
    knows by itself whether it is queued. The idea is vLLM's FreeKVCacheBlockQueue.

    Contract:

    1. `append`, `prepend`, `pop_first`, `remove` and `len` take constant time, whatever the number of blocks.
    2. Iteration is in eviction order: what was prepended, latest first, then what was appended, latest last.
    3. A block is in at most one queue, at most once. Appending a queued block or removing one that is not queued is an
       assertion that names the block.
    4. The queue sets both links of a block when it enters and clears both when it leaves; nobody else writes them.

    One sentinel closes the list into a ring, so no operation has a special case at either end:

        sentinel <-> first to go <-> ... <-> last to go <-> sentinel
    """

    __slots__ = ("_num_blocks", "_sentinel")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._sentinel = Block(BlockId(-1))
        self._sentinel.previous_free = self._sentinel.next_free = self._sentinel
        self._num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        """Queue a block behind all others: it will be the last to go."""
        assert block.next_free is None, f"block {block.block_id} is in the free queue already"
        last = self._sentinel.previous_free
        assert last is not None, "the ring of free blocks is open"
        last.next_free = self._sentinel.previous_free = block
        block.previous_free, block.next_free = last, self._sentinel
        self._num_blocks += 1

    def prepend(self, block: Block) -> None:
        """Queue a block before all others: it will be the next to go."""
        assert block.next_free is None, f"block {block.block_id} is in the free queue already"
        first = self._sentinel.next_free
        assert first is not None, "the ring of free blocks is open"
        first.previous_free = self._sentinel.next_free = block
        block.previous_free, block.next_free = self._sentinel, first
        self._num_blocks += 1

    def pop_first(self) -> Block:
        """Take out the block that has been free for longest."""
        assert self._num_blocks > 0, "no block is free"
        first = self._sentinel.next_free
        assert first is not None, "the ring of free blocks is open"
        self.remove(first)
        return first

    def remove(self, block: Block) -> None:
        """Take out a block from wherever it stands."""
        previous, following = block.previous_free, block.next_free
        assert previous is not None, f"block {block.block_id} is not in the free queue"
        assert following is not None, f"block {block.block_id} has only one of its two links"
        previous.next_free, following.previous_free = following, previous
        block.previous_free = block.next_free = None
        self._num_blocks -= 1

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next_free
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next_free

    def check_integrity(self) -> None:
        """Walk the ring once. Raises AssertionError where a link is open, one-sided or leads past the counted length.

        The walk is bounded by the length, so a ring that was short-circuited ends in a message and not in a hang.
        """
        block = self._sentinel
        for index in range(self._num_blocks + 1):
            following = block.next_free
            assert following is not None, f"free queue is open after {block} at place {index} of {self._num_blocks}"
            assert following.previous_free is block, (
                f"free queue: {block} is followed by {following}, which names {following.previous_free} before it"
            )
            is_end, is_sentinel = index == self._num_blocks, following is self._sentinel
            assert is_end == is_sentinel, (
                f"free queue counts {self._num_blocks} blocks but place {index} is {following}"
            )
            block = following
