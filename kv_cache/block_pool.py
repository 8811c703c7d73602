"""The blocks of one memory: which are free, how many tables list each of the others, and what can be found in them."""

from collections.abc import Iterable, Sequence

from kv_cache.block import BlockHash, BlockId
from kv_cache.free_queue import FreeQueue
from kv_cache.prefix_index import PrefixIndex


class BlockPool:
    """Blocks 0 .. num_blocks - 1, all free at first and handed out in that order.

    A block is free exactly when its count is zero. A free block that carries a name keeps its contents until it is
    taken, and can be had back by that name.

    **Eviction order.** Blocks without a name go first, the latest released first: nothing of theirs is worth keeping,
    and memory that was used is used again before untouched memory is. Then those with a name, the least recently
    released first. Which block comes next depends on the order of the calls alone, so replicas that make the same calls
    hold the same pool.
    """

    def __init__(self, num_blocks: int, *, records_evictions: bool = False) -> None:
        """With `records_evictions` somebody calls `take_evicted` in every step."""
        self._records_evictions = records_evictions
        self._ref_counts = [0] * num_blocks
        # Set while the block can be found by its contents, in use or free.
        self._names: list[BlockHash | None] = [None] * num_blocks
        # The same as a byte a block: looking at a name in the list would fetch it from wherever it lies in memory.
        self._is_named = bytearray(num_blocks)
        self._free = FreeQueue(num_blocks)
        self._index = PrefixIndex()
        self._num_free_named = 0
        self._evicted: list[tuple[BlockHash, BlockId]] = []

    @property
    def num_blocks(self) -> int:
        """Free or not."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `take` can give, those that carry a name included."""
        return len(self._free)

    @property
    def num_free_named_blocks(self) -> int:
        """How many of the free blocks still hold what their name says."""
        return self._num_free_named

    @property
    def num_named_blocks(self) -> int:
        """Blocks that can be found, in use or free."""
        return len(self._index)

    @property
    def free_block_ids(self) -> list[BlockId]:
        """The free blocks in the order in which `take` will give them. Costs a walk: for tests and messages."""
        return list(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        """How many owners the block has; 0 when it is free."""
        self._check(block_id)
        return self._ref_counts[block_id]

    def is_shared(self, block_id: BlockId) -> bool:
        """Whether somebody would notice that its contents change: another owner, or a lookup of its name."""
        return self._ref_counts[block_id] > 1 or bool(self._is_named[block_id])

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks in eviction order, with one owner each. The caller has asked `num_free_blocks` before.

        A name that one of them carries is gone.
        """
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free"
        taken = [self._free.pop_first() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
            if self._is_named[block_id]:
                self._evict(block_id)
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """One more owner for each of the blocks; a free one must carry a name, and leaves the free blocks."""
        for block_id in block_ids:
            self._check(block_id)
            if self._ref_counts[block_id] == 0:
                assert self._is_named[block_id], f"block {block_id} is free and holds nothing that could be shared"
                self._free.remove(block_id)
                self._num_free_named -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """One owner less for each of the blocks, in the order given: of named ones the first given goes first."""
        ref_counts, is_named, free = self._ref_counts, self._is_named, self._free
        for block_id in block_ids:
            self._check(block_id)
            ref_count = ref_counts[block_id] - 1
            assert ref_count >= 0, f"block {block_id} is released but it is free already"
            ref_counts[block_id] = ref_count
            if ref_count:
                continue
            if is_named[block_id]:
                free.append(block_id)
                self._num_free_named += 1
            else:
                free.prepend(block_id)

    def name(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Make a full block in use findable. False, and nothing changes, where a block has that name already."""
        self._check(block_id)
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be named"
        # Tables that share a full block may both come to name it.
        assert self._names[block_id] in (None, block_hash), f"block {block_id} carries another name already"
        if self._names[block_id] is not None or not self._index.insert(block_hash, block_id):
            return False
        self._names[block_id] = block_hash
        self._is_named[block_id] = True
        return True

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block that holds these contents, in use or free."""
        return self._index.find(block_hash)

    def find_chain(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the leading names, up to the first that is not there."""
        return self._index.find_chain(hashes)

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """How many of the blocks are free: as many fewer will `take` find once they are shared."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def forget_names(self) -> None:
        """No block can be found any more. Free blocks stay where they are in the queue."""
        for block_id in self._index.clear():
            self._names[block_id] = None
            self._is_named[block_id] = False
        self._num_free_named = 0
        self._evicted.clear()

    def take_evicted(self) -> list[tuple[BlockHash, BlockId]]:
        """Names that `take` ended since the last call, with the blocks that carried them, where that is recorded."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_integrity(self) -> None:
        """Raise AssertionError, with the values, where free queue, counts and names contradict each other."""
        self._free.check_integrity()
        num_free_named = 0
        for index, (ref_count, name) in enumerate(zip(self._ref_counts, self._names, strict=True)):
            is_queued = BlockId(index) in self._free
            assert ref_count >= 0, f"block {index} has a count of {ref_count}"
            assert is_queued == (ref_count == 0), (
                f"block {index} has {ref_count} owners and {'is' if is_queued else 'is not'} in the free queue"
            )
            assert bool(self._is_named[index]) == (name is not None), f"block {index} is marked as named: {name!r}"
            num_free_named += is_queued and name is not None
        assert num_free_named == self._num_free_named, (
            f"{num_free_named} free blocks carry a name, {self._num_free_named} are counted"
        )
        named = [(name, BlockId(index)) for index, name in enumerate(self._names) if name is not None]
        self._index.check_integrity(named)

    def _evict(self, block_id: BlockId) -> None:
        block_hash = self._names[block_id]
        assert block_hash is not None, block_id
        self._index.remove(block_hash)
        if self._records_evictions:
            self._evicted.append((block_hash, block_id))
        self._names[block_id] = None
        self._is_named[block_id] = False
        self._num_free_named -= 1

    def _check(self, block_id: BlockId) -> None:
        assert 0 <= block_id < len(self._ref_counts), f"block {block_id} is not one of {len(self._ref_counts)}"
