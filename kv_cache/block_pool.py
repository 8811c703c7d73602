"""Blocks of one memory: free queue, reference counts of the blocks in use, and prefix index."""

from collections.abc import Iterable, Sequence

from kv_cache.block import BlockHash, BlockId
from kv_cache.free_queue import FreeQueue


class BlockPool:
    """Blocks 0 .. num_blocks - 1, all free at first and allocated in that order.

    A block is free exactly when its reference count is zero. A free block that has a hash keeps its contents until it
    is allocated, and can be found by that hash until then.

    **Eviction order.** Blocks without a hash go first, the latest released first: their contents are worth nothing, and
    used memory is reused before untouched memory. Then those with a hash, the least recently released first. The order
    of the calls alone decides which block comes next, so replicas that make the same calls hold the same pool.
    """

    def __init__(self, num_blocks: int, *, records_evictions: bool = False) -> None:
        """`records_evictions`: evictions are recorded; the caller must call `take_evicted` in every step."""
        self.num_blocks = num_blocks
        self._records_evictions = records_evictions
        self._ref_counts = [0] * num_blocks
        # Set while the block can be found by its contents, in use or free.
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        # The same, one byte a block: reading a hash in the list would dereference a pointer to anywhere in memory.
        self._has_hash = bytearray(num_blocks)
        self._free = FreeQueue(num_blocks)
        # Of several blocks with the same contents, the first.
        self._index: dict[BlockHash, BlockId] = {}
        # Free blocks with a hash.
        self.num_cached_blocks = 0
        self._evicted: list[tuple[BlockHash, BlockId]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        """Number of owners of the block; 0 when it is free."""
        self._check(block_id)
        return self._ref_counts[block_id]

    def is_shared(self, block_id: BlockId) -> bool:
        """Whether a change of its contents would be visible elsewhere: to another owner, or to a lookup of its hash."""
        return self._ref_counts[block_id] > 1 or bool(self._has_hash[block_id])

    def take(self, count: int) -> list[BlockId]:
        """Allocate blocks in eviction order, with one owner each; at most `num_free_blocks`. Removes their hashes."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free"
        allocated = self._free.pop(count)
        ref_counts, has_hash = self._ref_counts, self._has_hash
        for block_id in allocated:
            ref_counts[block_id] = 1
            if has_hash[block_id]:
                self._evict(block_id)
        return allocated

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add an owner to each of the blocks; a free one must have a hash, and leaves the free queue."""
        for block_id in block_ids:
            self._check(block_id)
            if self._ref_counts[block_id] == 0:
                assert self._has_hash[block_id], f"block {block_id} is free and has no hash: it cannot be shared"
                self._free.remove(block_id)
                self.num_cached_blocks -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Remove an owner from each of the blocks, in order; blocks with a hash are evicted in that order."""
        ref_counts, has_hash, free = self._ref_counts, self._has_hash, self._free
        for block_id in block_ids:
            self._check(block_id)
            ref_count = ref_counts[block_id] - 1
            assert ref_count >= 0, f"block {block_id} is released but it is free already"
            ref_counts[block_id] = ref_count
            if ref_count:
                continue
            if has_hash[block_id]:
                free.append(block_id)
                self.num_cached_blocks += 1
            else:
                free.prepend(block_id)

    def set_hash(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Make a full block in use findable. False, without a change, where a block has that hash already."""
        return bool(self.set_hashes((block_id,), (block_hash,)))

    def set_hashes(self, block_ids: Sequence[BlockId], block_hashes: Iterable[BlockHash]) -> list[int]:
        """`set_hash` of several blocks, in order. Returns the places of those that it is true of."""
        places = []
        ref_counts, hashes, index = self._ref_counts, self._hashes, self._index
        for block_id in (min(block_ids), max(block_ids)) if block_ids else ():
            self._check(block_id)
        for place, (block_id, block_hash) in enumerate(zip(block_ids, block_hashes)):
            assert ref_counts[block_id] > 0, f"block {block_id} is free: it gets no hash"
            known = hashes[block_id]
            if known is not None:
                # Tables that share a full block may both set its hash.
                assert known == block_hash, f"block {block_id} has another hash already"
            elif index.setdefault(block_hash, block_id) == block_id:
                hashes[block_id] = block_hash
                self._has_hash[block_id] = True
                places.append(place)
        return places

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block with this hash, in use or free."""
        return self._index.get(block_hash)

    def find_chain(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the leading hashes, up to the first that is not found."""
        found: list[BlockId] = []
        get = self._index.get
        for block_hash in hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find_all(self, hashes: Sequence[BlockHash]) -> dict[int, BlockId]:
        """Index of each hash that is found -> its block."""
        found = ((index, self._index.get(block_hash)) for index, block_hash in enumerate(hashes))
        return {index: block_id for index, block_id in found if block_id is not None}

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """Number of the blocks that are free: sharing them lowers `num_free_blocks` by that many."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def clear_hashes(self) -> None:
        """Remove all hashes. Free blocks keep their position in the queue."""
        for block_id in self._index.values():
            self._hashes[block_id] = None
            self._has_hash[block_id] = False
        self._index.clear()
        self.num_cached_blocks = 0
        self._evicted.clear()

    def remove_hash(self, block_hash: BlockHash) -> None:
        """Make the block with this hash unfindable, if there is one. If it is free, it is the next to be allocated."""
        block_id = self._index.pop(block_hash, None)
        if block_id is None:
            return
        self._hashes[block_id] = None
        self._has_hash[block_id] = False
        if self._ref_counts[block_id] == 0:
            self._free.remove(block_id)
            self._free.prepend(block_id)
            self.num_cached_blocks -= 1

    def take_evicted(self) -> list[tuple[BlockHash, BlockId]]:
        """Hashes that `take` removed since the last call, with their blocks; empty unless evictions are recorded."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_integrity(self) -> None:
        """Raise AssertionError, with the values, where free queue, counts and hashes contradict each other."""
        self._free.check_integrity()
        num_cached = num_hashed = 0
        # One pass without calls: runs that check every step spend a good part of their time here.
        blocks = zip(self._ref_counts, self._hashes, self._has_hash, self._free.are_queued(), strict=True)
        for index, (ref_count, block_hash, has_hash, is_queued) in enumerate(blocks):
            assert ref_count >= 0, f"block {index} has a count of {ref_count}"
            assert is_queued == (ref_count == 0), (
                f"block {index} has {ref_count} owners and {'is' if is_queued else 'is not'} in the free queue"
            )
            assert has_hash == (block_hash is not None), f"block {index}: _has_hash, {block_hash!r}"
            if block_hash is not None:
                found = self._index.get(block_hash)
                assert found == index, f"block {index} has a hash that the index maps to block {found}"
                num_hashed += 1
                num_cached += is_queued
        assert num_hashed == len(self._index), f"the index has {len(self._index)} hashes, {num_hashed} blocks have one"
        assert num_cached == self.num_cached_blocks, (
            f"{num_cached} free blocks have a hash, {self.num_cached_blocks} are counted"
        )

    def check_owners(self, name: str, counts: Sequence[int]) -> None:
        """Raise AssertionError unless each block has as many owners as `counts` says; `name` is the blocks'."""
        for index, (ref_count, count) in enumerate(zip(self._ref_counts, counts, strict=True)):
            assert ref_count == count, f"{name} {index} counts {ref_count} owners, {count} tables list it"

    def _evict(self, block_id: BlockId) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None, block_id
        del self._index[block_hash]
        if self._records_evictions:
            self._evicted.append((block_hash, block_id))
        self._hashes[block_id] = None
        self._has_hash[block_id] = False
        self.num_cached_blocks -= 1

    def _check(self, block_id: BlockId) -> None:
        assert 0 <= block_id < len(self._ref_counts), f"block {block_id} is not one of {len(self._ref_counts)}"
