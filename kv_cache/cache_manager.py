"""What the scheduler asks of the cache: is there room, give it to this table, share it, take it back.

Knows tables and positions. Knows nothing of requests, queues, policy or tensors, and never reads a token: it answers
from counts, so a step can be planned before the values of the one before it are known.
"""

from collections.abc import Iterable

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.block_ops import BlockOps
from kv_cache.block_pool import BlockPool
from kv_cache.block_table import BlockTable, TableChange


class CacheManager:
    """Gives the device's blocks to tables and collects the copies that the step must make first.

    A step is everything between two calls of `take_block_ops`. Within one, tables may be extended, forked and released
    in any order; the blocks' contents change only when the step runs: first the copies, then the writes.

    **Written tokens.** `first_token` always counts the tokens of a sequence whose keys and values an earlier step has
    written (or will have written when this one runs). What the step being planned writes does not count: a copy would
    not see it.

    **Copies of one step.** A pair's source may lose its last owner later in the same step and be taken again, as room
    for writes or as the destination of another copy; a destination may be shared and copied again. So a pair's source
    always stands for what that block *holds when the step begins*: a copy of a block that is itself a pending
    destination is recorded from that pair's source. Then all sources can be read before any destination is written,
    which is the contract of `BlockOps`; no order of the pairs can be wrong; and a pair whose destination is freed again
    is dropped without harm to the copies made from it. (Running unresolved pairs one after the other in recorded order
    would serve chains too, but not after such a drop.)
    """

    def __init__(self, num_blocks: int, block_size: int, watermark_blocks: int = 0) -> None:
        """`watermark_blocks`: free blocks that `can_extend(keep_watermark=True)` leaves for those who run already."""
        assert block_size >= 1, f"block_size={block_size}"
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._watermark_blocks = watermark_blocks
        # Destination -> the block that holds its contents when the step begins.
        self._copy_sources: dict[BlockId, BlockId] = {}

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return self._pool.num_blocks

    @property
    def watermark_blocks(self) -> int:
        """Free blocks that `can_extend(keep_watermark=True)` leaves."""
        return self._watermark_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table lists."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table lists; one that is shared counts once."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    def max_tokens(self) -> int:
        """Tokens that fit when every block is full and none is shared."""
        return self._pool.num_blocks * self._block_size

    def num_new_blocks(self, table: BlockTable, first_token: int, num_tokens: int) -> int:
        """Free blocks that `extend` with the same arguments takes.

        One for each block past the table's end, and one for each shared block that positions first_token up to
        num_tokens fall into. Tables that share a block need fewer once one of them has its own: ask for each before it
        is extended, not for all in advance.
        """
        num_shared = len(self._shared_indices(table, first_token, num_tokens))
        return num_shared + self._num_appended(table, num_tokens)

    def can_extend(self, table: BlockTable, first_token: int, num_tokens: int, *, keep_watermark: bool = False) -> bool:
        """Whether `extend` with the same arguments finds enough free blocks, if asked with the watermark to spare."""
        num_spared = self._watermark_blocks if keep_watermark else 0
        return self.num_new_blocks(table, first_token, num_tokens) + num_spared <= self._pool.num_free_blocks

    def extend(self, table: BlockTable, first_token: int, num_tokens: int) -> TableChange:
        """Make positions first_token up to num_tokens writable by this table alone; returns what changed in it.

        Blocks that others list are replaced. The one that first_token falls into is copied if it holds tokens below
        first_token; those after it hold nothing of this sequence that the step does not write. `can_extend` must hold.
        """
        shared_indices = self._shared_indices(table, first_token, num_tokens)
        num_shared = len(shared_indices)
        taken = self._pool.take(num_shared + self._num_appended(table, num_tokens))
        first_changed = shared_indices[0] if shared_indices else table.num_blocks
        suffix = table.block_ids[first_changed:]
        for index, block_id in zip(shared_indices, taken[:num_shared]):
            self._replace_shared(table.block_ids[index], block_id, must_copy=index * self._block_size < first_token)
            suffix[index - first_changed] = block_id
        change = TableChange(first_changed, (*suffix, *taken[num_shared:]))
        table.apply(change)
        return change

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks. Takes no block; the first of the two to write to one pays for it.

        The new sequence has those tokens that earlier steps wrote, even if the old table is extended already.
        """
        self._pool.share(table.block_ids)
        return BlockTable(list(table.block_ids))

    def release(self, table: BlockTable) -> None:
        """Give all blocks of a table back and empty it. The tail goes first, so the head of a chain is evicted last."""
        self._pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        self._drop_copies_to_free_blocks()

    def take_block_ops(self) -> BlockOps:
        """The moves of this step, once: the next call answers for the next step."""
        copies = tuple((source, destination) for destination, source in self._copy_sources.items())
        self._copy_sources.clear()
        return BlockOps(copy=copies)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError, with values, unless `tables` (all there are) account for every owner of every block.

        Costs a walk over all blocks and tables: for tests and for the end of a run.
        """
        self._pool.check_integrity()
        for block_id, num_listed in enumerate(self._count_listings(tables)):
            ref_count = self._pool.ref_count(BlockId(block_id))
            assert ref_count == num_listed, f"block {block_id} counts {ref_count} owners, {num_listed} tables list it"
        for destination, source in self._copy_sources.items():
            assert source != destination, f"block {source} is to be copied to itself"
            assert self._pool.ref_count(destination) > 0, f"copy {source} to {destination}: the destination is free"
            assert 0 <= source < self.num_blocks, f"copy {source} to {destination}: there are {self.num_blocks} blocks"

    def _count_listings(self, tables: Iterable[BlockTable]) -> list[int]:
        counts = [0] * self.num_blocks
        last_table = [-1] * self.num_blocks
        for table_index, table in enumerate(tables):
            for block_id in table.block_ids:
                assert 0 <= block_id < self.num_blocks, f"a table lists block {block_id} of {self.num_blocks}"
                assert last_table[block_id] != table_index, f"a table lists block {block_id} twice: {table.block_ids}"
                last_table[block_id] = table_index
                counts[block_id] += 1
        return counts

    def _num_appended(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, num_blocks_for(num_tokens, self._block_size) - table.num_blocks)

    def _shared_indices(self, table: BlockTable, first_token: int, num_tokens: int) -> list[int]:
        assert 0 <= first_token <= num_tokens, f"positions {first_token} up to {num_tokens}"
        assert first_token <= table.num_blocks * self._block_size, (
            f"{first_token} tokens are said to be written, the table has {table.num_blocks} blocks"
        )
        if first_token == num_tokens:
            return []
        end = min(table.num_blocks, num_blocks_for(num_tokens, self._block_size))
        touched = range(first_token // self._block_size, end)
        return [index for index in touched if self._pool.ref_count(table.block_ids[index]) > 1]

    def _replace_shared(self, source: BlockId, destination: BlockId, *, must_copy: bool) -> None:
        if must_copy:
            origin = self._copy_sources.get(source, source)
            # Equal when the origin was freed in this step and is now handed out for its own contents: nothing to move.
            if origin != destination:
                self._copy_sources[destination] = origin
        self._pool.release((source,))

    def _drop_copies_to_free_blocks(self) -> None:
        freed = [destination for destination in self._copy_sources if self._pool.ref_count(destination) == 0]
        for destination in freed:
            del self._copy_sources[destination]
