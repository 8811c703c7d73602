"""Free blocks of one memory in eviction order. The pool counts references and decides which block is free."""

from array import array
from collections.abc import Iterator
from typing import Final

from kv_cache.block import BlockId

_NOT_QUEUED: Final = -1


class FreeQueue:
    """A doubly linked list of block ids: first in the queue, first to be allocated again.

    Why not a `deque`: a free block whose contents are still wanted leaves from the middle, which costs a deque a search
    of the full queue. Why not an ordered dict: it allocates when a block comes and goes. Why two arrays and not linked
    records: a million records are a hundred bytes each, scattered in memory, which the garbage collector walks; the
    links of neighbouring blocks, which is what tables mostly hold, share a cache line. The idea is vLLM's
    FreeKVCacheBlockQueue.

    Contract:

    1. `append`, `prepend`, `remove`, `len`, and `pop` for each block, take constant time, whatever the size.
    2. Iteration is in eviction order: prepended blocks, latest first, then appended blocks, latest last.
    3. A block is in the queue at most once. Appending a queued block or removing one that is not queued is an assertion
       that names the block.

    One sentinel, numbered after all blocks, closes the list into a ring, so no operation has a special case at either
    end:

        sentinel <-> first to go <-> ... <-> last to go <-> sentinel
    """

    __slots__ = ("_next", "_num_queued", "_previous", "_sentinel")

    def __init__(self, num_blocks: int) -> None:
        """Queue all blocks 0 .. num_blocks - 1, in this order."""
        self._sentinel = num_blocks
        self._num_queued = num_blocks
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])

    def append(self, block_id: BlockId) -> None:
        """Queue a block at the end: the last to be allocated."""
        following, sentinel = self._next, self._sentinel
        assert following[block_id] == _NOT_QUEUED, f"block {block_id} is in the free queue already"
        last = self._previous[sentinel]
        following[last] = self._previous[sentinel] = block_id
        self._previous[block_id], following[block_id] = last, sentinel
        self._num_queued += 1

    def prepend(self, block_id: BlockId) -> None:
        """Queue a block at the front: the next to be allocated."""
        following, sentinel = self._next, self._sentinel
        assert following[block_id] == _NOT_QUEUED, f"block {block_id} is in the free queue already"
        first = following[sentinel]
        self._previous[first] = following[sentinel] = block_id
        self._previous[block_id], following[block_id] = sentinel, first
        self._num_queued += 1

    def pop(self, count: int) -> list[BlockId]:
        """Remove and return the first `count` blocks, in order."""
        assert 0 <= count <= self._num_queued, f"{count} blocks wanted, of which {self._num_queued} are free"
        following, first = self._next, self._next[self._sentinel]
        popped = []
        for _ in range(count):
            popped.append(BlockId(first))
            following[first], first = _NOT_QUEUED, following[first]
        following[self._sentinel], self._previous[first] = first, self._sentinel
        self._num_queued -= count
        return popped

    def remove(self, block_id: BlockId) -> None:
        """Remove a block from any position."""
        following = self._next[block_id]
        assert following != _NOT_QUEUED, f"block {block_id} is not in the free queue"
        previous = self._previous[block_id]
        self._next[previous], self._previous[following] = following, previous
        self._next[block_id] = _NOT_QUEUED
        self._num_queued -= 1

    def __len__(self) -> int:
        return self._num_queued

    def __contains__(self, block_id: BlockId) -> bool:
        return bool(self._next[block_id] != _NOT_QUEUED)

    def are_queued(self) -> list[bool]:
        """True for each block that is in the queue, by its id."""
        return [following != _NOT_QUEUED for following in self._next[:-1]]

    def __iter__(self) -> Iterator[BlockId]:
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            yield BlockId(block_id)
            block_id = self._next[block_id]

    def check_integrity(self) -> None:
        """Walk the ring once. Raises AssertionError where a link is open, one-sided or leads past the counted length.

        The walk is bounded by the length, so a short-circuited ring ends in a message and not in a hang.
        """
        links, previous, block_id = self._next, self._previous, self._sentinel
        for index in range(self._num_queued + 1):
            following = links[block_id]
            assert following != _NOT_QUEUED, f"free queue is open after {block_id} at position {index} of {len(self)}"
            assert previous[following] == block_id, (
                f"free queue: {block_id} is followed by {following}, which names {previous[following]} before it"
            )
            is_end, is_sentinel = index == self._num_queued, following == self._sentinel
            assert is_end == is_sentinel, f"free queue counts {len(self)} blocks but position {index} is {following}"
            block_id = following
        num_linked = len(links) - links.count(_NOT_QUEUED) - 1
        assert num_linked == self._num_queued, f"{num_linked} blocks have links, the free queue counts {len(self)}"
