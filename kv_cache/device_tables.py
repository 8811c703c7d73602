"""Block tables of sequences in device memory: capacity, growth, sharing, copy-on-write, prefix reuse.

Knows nothing of requests, queues, policy or tensors, and never reads a token: it answers from counts and hashes, so a
step can be planned before the previous step's values are known.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kv_cache.block import BlockHash, BlockId, num_blocks_for
from kv_cache.block_pool import BlockPool
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from kv_cache.pending_moves import PendingMoves


class DeviceTables(ABC):
    """Allocates device blocks to tables and collects the copies that must precede the step.

    A step is everything between two calls of `CacheManager.take_block_ops`. Within one, tables may be extended, forked
    and released in any order; the blocks' contents change only when the step runs: first the moves, then the writes.

    **Written tokens.** `first_token` always counts the tokens of a sequence whose keys and values an earlier step has
    written (or will have written when this one runs). Tokens that the step being planned writes do not count: a copy
    would not see them.

    **Hashes.** A full block may get its hash as soon as the step that fills it is planned (`set_hashes`): rows of the
    same step that find it may read it, because a layer writes every row's keys and values before any row attends. So
    the tables of that step are not released before it is handed out: the blocks would be found and never written.

    **No blocks.** In a cache without any, of a model without attention, tables stay empty and any sequence fits.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, watermark_blocks: int, groups: LayerGroups = ONE_GROUP
    ) -> None:
        """`watermark_blocks`: free blocks that `keep_watermark=True` leaves; may be set again at any time."""
        assert block_size >= 1, f"block_size={block_size}"
        self._pool = pool
        self.groups, self.num_groups = groups, groups.num_groups
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self._moves = PendingMoves()
        # Blocks whose hash was set in the step being planned: without contents until it runs.
        self._fresh: dict[BlockId, None] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table, cached ones included."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks in some table; a shared one counts once."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that a hash still finds."""
        return self._pool.num_cached_blocks

    def num_new_blocks(self, table: BlockTable, first_token: int, num_tokens: int) -> int:
        """Number of free blocks that `extend` with the same arguments allocates.

        One for each block past the table's end, and one for each block that holds positions first_token up to
        num_tokens and that others list or can find. Tables that share a block need fewer once one of them has its own:
        ask for each before it is extended, not for all in advance.
        """
        if not self._pool.num_blocks:
            return 0
        num_shared = len(self._shared_indices(table, first_token, num_tokens))
        return num_shared + self._num_appended(table, num_tokens)

    def can_extend(self, table: BlockTable, first_token: int, num_tokens: int) -> bool:
        """Whether `extend` with the same arguments finds enough free blocks."""
        return self.num_new_blocks(table, first_token, num_tokens) <= self._pool.num_free_blocks

    def extend(self, table: BlockTable, first_token: int, num_tokens: int) -> TableChange:
        """Make positions first_token up to num_tokens writable by this table alone; returns the change of the table.

        Blocks that others list or can find are replaced. The block of first_token is copied if it holds tokens below
        first_token; the step overwrites everything that this sequence has in the later ones. `can_extend` must hold.
        """
        shared_indices = self._shared_indices(table, first_token, num_tokens)
        num_shared = len(shared_indices)
        allocated = self._take(num_shared + self._num_appended(table, num_tokens))
        first_changed = shared_indices[0] if shared_indices else table.num_blocks
        suffix = table.block_ids[first_changed:]
        for index, block_id in zip(shared_indices, allocated[:num_shared]):
            if index // self.num_groups * self.block_size < first_token:
                self._moves.copy(table.block_ids[index], block_id)
            self._pool.release((table.block_ids[index],))
            suffix[index - first_changed] = block_id
        change = TableChange(first_changed, (*suffix, *allocated[num_shared:]))
        table.apply(change)
        return change

    def begin_blocks(self, tables: Sequence[BlockTable], nums_tokens: Sequence[int]) -> list[BlockId]:
        """`extend` each table by one token if its number of tokens fills its blocks: no shared one is written. Returns
        the new blocks of the first one's groups, then of the next's.
        """
        num_groups = self.num_groups
        allocated = self._take(len(tables) * num_groups)
        for index, (table, num_tokens) in enumerate(zip(tables, nums_tokens, strict=True)):
            assert num_tokens * num_groups == len(table.block_ids) * self.block_size, (
                f"{num_tokens} tokens do not fill the {table.num_blocks} blocks of the table"
            )
            table.block_ids += allocated[index * num_groups : (index + 1) * num_groups]
        return allocated

    def drop_unseen(self, table: BlockTable, num_tokens: int) -> None:
        """Release the window groups' blocks that no token after `num_tokens` sees, nor the last of them: it may be
        computed again.
        """
        end = self.groups.num_unseen(max(num_tokens - 1, 0), self.block_size)
        if end > table.num_dropped:
            first, num_groups = table.num_dropped, self.num_groups
            entries = table.block_ids[first * num_groups : end * num_groups]
            self._pool.release(
                [block_id for index, block_id in enumerate(entries) if index % num_groups >= self.groups.num_full]
            )
            table.num_dropped = end

    def truncate(self, table: BlockTable, num_tokens: int) -> bool:
        """Free the blocks behind those of the first `num_tokens`: they hold nothing. Whether there were any."""
        num_kept = num_blocks_for(num_tokens, self.block_size) * self.num_groups
        unused = table.block_ids[num_kept:]
        if not unused:
            return False
        assert not any(block_id in self._fresh for block_id in unused), unused
        self._pool.release(reversed(unused))
        del table.block_ids[num_kept:]
        return True

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks. Allocates no block: the first of the two to write to a block copies it.

        The new sequence has the tokens that earlier steps wrote, even if the old table is extended already.
        """
        self._pool.share(self.owned(table))
        return BlockTable(list(table.block_ids), table.num_dropped)

    def release(self, table: BlockTable) -> None:
        """Free all blocks of a table and empty it. The tail goes first, so the head of a chain is evicted last."""
        block_ids = self.owned(table)
        if self._fresh:
            assert not any(block_id in self._fresh for block_id in block_ids), (
                f"a table is released before the step that fills its blocks is handed out: {block_ids}"
            )
        self._pool.release(reversed(block_ids))
        table.block_ids.clear()
        table.num_dropped = 0

    def owned(self, table: BlockTable) -> list[BlockId]:
        """The blocks of a table, in its order, without entries that are left over."""
        if not table.num_dropped:
            return table.block_ids
        num_groups, num_full = self.num_groups, self.groups.num_full
        end = table.num_dropped * num_groups
        kept = [block_id for index, block_id in enumerate(table.block_ids[:end]) if index % num_groups < num_full]
        return kept + table.block_ids[end:]

    def set_hashes(
        self, table: BlockTable, hashes: Sequence[BlockHash], first_index: int, num_written_tokens: int
    ) -> None:
        """Set the hashes of the blocks from `first_index` on; `hashes` begin with the table's first block.

        Blocks past `num_written_tokens` are filled by the step being planned, the others were by earlier ones. If
        another block has the hash already, a block stays without one.
        """
        if self.groups.num_windows:
            self._set_group_hashes(table, hashes, first_index, num_written_tokens)
            return
        block_ids = table.block_ids[first_index : len(hashes)]
        num_written = num_written_tokens // self.block_size - first_index
        for place in self._pool.set_hashes(block_ids, hashes[first_index:]):
            if place >= num_written:
                self._fresh[block_ids[place]] = None

    def _set_group_hashes(
        self, table: BlockTable, hashes: Sequence[BlockHash], first_index: int, num_written_tokens: int
    ) -> None:
        num_groups, num_full, num_written = self.num_groups, self.groups.num_full, num_written_tokens // self.block_size
        for index in range(first_index, len(hashes)):
            first = num_full if index < table.num_dropped else num_groups
            block_ids = table.block_ids[index * num_groups : index * num_groups + first]
            for place in self._pool.set_hashes(block_ids, self.groups.names(hashes[index])[:first]):
                if index >= num_written:
                    self._fresh[block_ids[place]] = None

    def holder(self, block_hash: BlockHash) -> BlockId | None:
        """The block that a hash finds."""
        return self._pool.find(block_hash)

    def touch(self, prefix: Sequence[BlockId]) -> None:
        """Make found blocks the last to be evicted, the head of the chain last of all."""
        block_ids = self.owned(self._table_of(prefix))
        self._pool.share(block_ids)
        self._pool.release(reversed(block_ids))

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Entries of a table for the beginning of a sequence, as far as it is found: `num_prefix_tokens` tokens. Those
        of window groups that the next token does not see are left over.
        """
        if not self.groups.num_windows:
            return self._pool.find_chain(hashes)
        # Hot path: a long prompt that waits for blocks looks in every step. Of window groups only the window counts.
        full = self._find_full(hashes)
        num_found = self._last_complete(hashes[: len(full)])
        num_unseen = self.groups.num_unseen(num_found * self.block_size, self.block_size)
        left_over = [BlockId(0)] * self.groups.num_windows
        block_ids: list[BlockId] = []
        for index in range(num_found):
            block_ids += full[index]
            block_ids += left_over if index < num_unseen else self._in_window(hashes[index])
        return block_ids

    def _find_full(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:
        """Full groups' blocks of the leading hashes, as many as all of them have."""
        num_full = self.groups.num_full
        if num_full <= 1:
            return [[block_id] for block_id in self._pool.find_chain(hashes)] if num_full else [[] for _ in hashes]
        found = []
        for block_hash in hashes:
            ids = self._pool.find_chain(self.groups.names(block_hash)[:num_full])
            if len(ids) < num_full:
                break
            found.append(ids)
        return found

    def _last_complete(self, hashes: Sequence[BlockHash]) -> int:
        """Most leading blocks behind which a token finds its window in window groups."""
        count, index, num_windows = len(hashes), len(hashes), self.groups.num_windows
        while count and index > self.groups.num_unseen(count * self.block_size, self.block_size):
            index -= 1
            if len(self._in_window(hashes[index])) < num_windows:
                count = index
        return count

    def _in_window(self, block_hash: BlockHash) -> list[BlockId]:
        """Window groups' blocks of a hash, up to the first that is not found."""
        return self._pool.find_chain(self.groups.names(block_hash)[self.groups.num_full :])

    def num_prefix_blocks(self, prefix: Sequence[BlockId]) -> int:
        """Number of blocks of tokens that a found prefix has."""
        return len(prefix) // self.num_groups

    def num_prefix_tokens(self, prefix: Sequence[BlockId]) -> int:
        return len(prefix) // self.num_groups * self.block_size

    def _table_of(self, prefix: Sequence[BlockId]) -> BlockTable:
        num_tokens = self.num_prefix_tokens(prefix)
        return BlockTable(list(prefix), self.groups.num_unseen(num_tokens, self.block_size))

    def can_start(self, prefix: Sequence[BlockId], num_tokens: int, *, keep_watermark: bool = False) -> bool:
        """Whether enough blocks are free for a new table of `num_tokens` that begins with the blocks of `prefix`."""
        if not self.groups.num_windows:
            num_new = num_blocks_for(num_tokens, self.block_size) - len(prefix)
            return self._are_free(num_new + self._pool.num_free_among(prefix), keep_watermark)
        groups, num_groups, num_found = self.groups, self.num_groups, self.num_prefix_blocks(prefix)
        num_all, num_dropped = num_blocks_for(num_tokens, self.block_size), self._table_of(prefix).num_dropped
        most = groups.num_window_blocks(self.block_size)
        in_full = [block_id for index, block_id in enumerate(prefix) if index % num_groups < groups.num_full]
        seen = enumerate(prefix[num_dropped * num_groups :])
        in_windows = [block_id for index, block_id in seen if index % num_groups >= groups.num_full]
        # Found blocks that others hold are not free once this table drops them: it needs as many of its own as ever.
        num_own = groups.num_windows * min(num_all - num_found, most) + self._pool.num_free_among(in_windows)
        num_in_windows = min(num_own, groups.num_windows * min(num_all - num_dropped, most))
        num_in_full = groups.num_full * (num_all - num_found) + self._pool.num_free_among(in_full)
        return self._are_free(num_in_full + num_in_windows, keep_watermark)

    def adopt(self, table: BlockTable, prefix: Sequence[BlockId]) -> None:
        """Start an empty table with found blocks, as one more owner of each."""
        assert not table.block_ids, table
        found = self._table_of(prefix)
        self._pool.share(self.owned(found))
        table.block_ids += found.block_ids
        table.num_dropped = found.num_dropped

    def _are_free(self, num_blocks: int, keep_watermark: bool) -> bool:
        return num_blocks + (self.watermark_blocks if keep_watermark else 0) <= self._pool.num_free_blocks

    @abstractmethod
    def _take(self, count: int) -> list[BlockId]:
        """Allocate blocks of the pool; moves and contents that were pending for them are dropped or stored first."""

    def _num_appended(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, num_blocks_for(num_tokens, self.block_size) * self.num_groups - table.num_blocks)

    def _shared_indices(self, table: BlockTable, first_token: int, num_tokens: int) -> list[int]:
        assert 0 <= first_token <= num_tokens, f"positions {first_token} up to {num_tokens}"
        num_groups = self.num_groups
        assert first_token * num_groups <= table.num_blocks * self.block_size, (
            f"{first_token} written tokens do not fit the {table.num_blocks} blocks of the table"
        )
        if first_token == num_tokens:
            return []
        end = min(table.num_blocks, num_blocks_for(num_tokens, self.block_size) * num_groups)
        touched = range(first_token // self.block_size * num_groups, end)
        return [index for index in touched if self._pool.is_shared(table.block_ids[index])]


def count_listings(tables: Iterable[BlockTable], num_blocks: int) -> list[int]:
    """Number of tables that list each block. Raises AssertionError for one listed twice, or not existing."""
    counts = [0] * num_blocks
    last_table = [-1] * num_blocks
    for table_index, table in enumerate(tables):
        for block_id in table.block_ids:
            assert 0 <= block_id < num_blocks, f"a table lists block {block_id} of {num_blocks}"
            assert last_table[block_id] != table_index, f"a table lists block {block_id} twice: {table.block_ids}"
            last_table[block_id] = table_index
            counts[block_id] += 1
    return counts
