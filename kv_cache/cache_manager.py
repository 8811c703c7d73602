"""The scheduler's interface to the cache: device tables, swapping, and the connector."""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_ops import BlockOps
from kv_cache.block_pool import BlockPool
from kv_cache.block_table import BlockTable
from kv_cache.connector import Connector, Transfers
from kv_cache.device_tables import DeviceTables, count_listings
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from kv_cache.outside_transfers import OutsideTransfers
from kv_cache.swap_space import SwapSpace


class CacheManager(DeviceTables):
    """Device tables, tables swapped out to the host, and the blocks of a connector."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark_blocks: int = 0,
        *,
        num_host_blocks: int = 0,
        connector: Connector | None = None,
        outside: OutsideTransfers | None = None,
        groups: LayerGroups = ONE_GROUP,
    ) -> None:
        """`num_host_blocks`: capacity of the swap space; `connector`: receives evicted blocks that have a hash;
        `outside`, instead: saves blocks as soon as they are complete. The rest is as in `DeviceTables`.
        """
        assert connector is None or outside is None, "one connector at most"
        assert not groups.num_windows or (connector is None and outside is None), "connectors keep all of a row"
        pool = BlockPool(num_blocks, records_evictions=connector is not None)
        super().__init__(pool, block_size, watermark_blocks, groups)
        self._swap = SwapSpace(num_host_blocks)
        self._transfers = Transfers(connector) if connector is not None else outside

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the swap space, in use or free."""
        return self._swap.num_blocks

    @property
    def num_tier_blocks(self) -> int:
        """Capacity of the connector in blocks."""
        return 0 if self._transfers is None else self._transfers.num_slots

    @property
    def looks_outside(self) -> bool:
        """Whether blocks may be found outside the engine (`update_found`)."""
        return isinstance(self._transfers, OutsideTransfers) and not self._transfers.is_off

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks of tables that are swapped out."""
        return self._swap.num_used_blocks

    def reset_prefix_cache(self) -> None:
        """Make everything cached now unfindable, on the device, on the host and in the connector."""
        self._pool.clear_hashes()
        self._swap.clear_hashes()
        self._fresh.clear()
        if self._transfers is not None:
            self._transfers.forget()

    def turn_off_outside(self) -> None:
        """Load and save nothing outside the engine any more: equal hashes may mean other bytes by now. Comes after
        `reset_prefix_cache`.
        """
        if isinstance(self._transfers, OutsideTransfers):
            self._transfers.turn_off()

    def set_hashes(
        self,
        table: BlockTable,
        hashes: Sequence[BlockHash],
        first_index: int,
        num_written_tokens: int,
        num_saved_blocks: int = 0,
    ) -> None:
        """`DeviceTables.set_hashes`; the first `num_saved_blocks` of the table go to a connector outside the engine."""
        super().set_hashes(table, hashes, first_index, num_written_tokens)
        if self._transfers is not None:
            for index in range(first_index, min(len(hashes), num_saved_blocks)):
                self._transfers.save(hashes[index])

    def num_missing(self, hashes: Sequence[BlockHash]) -> int:
        """Number of the last `hashes` that are not on the device."""
        return len(hashes) - self.num_prefix_blocks(self.find_prefix(hashes))

    def is_outside(self, block_hash: BlockHash) -> bool:
        """Whether a block is known to exist outside the engine."""
        return isinstance(self._transfers, OutsideTransfers) and self._transfers.is_found(block_hash)

    def update_found(self, found: Sequence[BlockHash], missing: Sequence[BlockHash]) -> None:
        """Blocks that exist outside the engine, and blocks that do not any more, by an event."""
        assert isinstance(self._transfers, OutsideTransfers), "there is no connector"
        self._transfers.add_found(found)
        self._transfers.forget_found(missing)

    def swap_out(self, table: BlockTable, hashes: Sequence[BlockHash]) -> BlockTable | None:
        """Move a table's contents to the host: returns the host table and empties this one; None, without a change, if
        the host has too few free blocks or the step being planned is still to fill a block. `hashes` are those of the
        table's leading full blocks.
        """
        block_ids, names = self.owned(table), self._names(table, hashes)
        if any(block_id in self._fresh or self._moves.receives(block_id) for block_id in block_ids):
            return None
        if not self._swap.can_store(len(block_ids), names):
            return None
        host_table, copied = self._swap.store(len(block_ids), names)
        for index in copied:
            self._moves.swap_out(block_ids[index], host_table.block_ids[index])
        host_table.num_dropped = table.num_dropped
        self.release(table)
        return host_table

    def _names(self, table: BlockTable, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of the leading blocks of `owned`, of a device or host table with leading full blocks of `hashes`."""
        if not self.groups.num_windows:
            return hashes
        num_full = self.groups.num_full
        return [
            name
            for index, block_hash in enumerate(hashes)
            for name in self.groups.names(block_hash)[: num_full if index < table.num_dropped else None]
        ]

    def can_swap_in(
        self, host_table: BlockTable, hashes: Sequence[BlockHash], num_tokens: int, *, keep_watermark: bool = False
    ) -> bool:
        """Whether enough blocks are free for a swapped-out table, extended to `num_tokens`."""
        held = self._pool.find_all(self._names(host_table, hashes)[: host_table.num_blocks])
        num_blocks = self.groups.num_blocks(num_tokens, self.block_size, host_table.num_dropped)
        num_blocks = max(host_table.num_blocks, num_blocks)
        num_new = num_blocks - len(held) + self._pool.num_free_among(held.values())
        return self._are_free(num_new, keep_watermark)

    def swap_in(self, host_table: BlockTable, hashes: Sequence[BlockHash]) -> BlockTable:
        """Swap a table in: returns the device table, empties the host table. `can_swap_in` must hold.

        Blocks that the device still holds, or holds again, are shared and not moved.
        """
        names = self._names(host_table, hashes)
        held = self._pool.find_all(names[: host_table.num_blocks])
        self._pool.share(held.values())
        allocated = iter(self._take(host_table.num_blocks - len(held)))
        block_ids = [held[index] if index in held else next(allocated) for index in range(host_table.num_blocks)]
        for index, (host_block, block_id) in enumerate(zip(host_table.block_ids, block_ids, strict=True)):
            if index not in held:
                self._moves.swap_in(host_block, block_id)
                if index < len(names):
                    self._pool.set_hash(block_id, names[index])
        table = BlockTable(self._with_left_over(block_ids, host_table.num_dropped), host_table.num_dropped)
        self._swap.release(host_table, is_read=True)
        return table

    def _with_left_over(self, block_ids: list[BlockId], num_dropped: int) -> list[BlockId]:
        """The entries of a table from its `owned` blocks."""
        if not num_dropped:
            return block_ids
        num_full, left_over = self.groups.num_full, [BlockId(0)] * self.groups.num_windows
        entries: list[BlockId] = []
        for first in range(0, num_dropped * num_full, num_full) if num_full else [0] * num_dropped:
            entries += [*block_ids[first : first + num_full], *left_over]
        return entries + block_ids[num_dropped * num_full :]

    def release_host(self, host_table: BlockTable) -> None:
        """Free a swapped-out table that is not needed any more."""
        self._swap.release(host_table, is_read=False)

    def load_prefix(self, prefix: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int) -> int | None:
        """Make the connector load the blocks after `prefix`; returns the number of the last transfer to wait for, or
        None. Blocks that an earlier transfer loads are not loaded again.

        Loads only if all `num_tokens` of the sequence fit, the watermark kept: it will need them.
        """
        rest = hashes[len(prefix) :]
        if self._transfers is None or not rest:
            return None
        transfers = self._transfers
        numbers = list(takewhile(lambda number: number is not None, map(transfers.number_loading, rest)))
        tail, in_flight = rest[len(numbers) :], numbers[-1] if numbers else None
        num_found = transfers.lookup(tail)
        # Blocks already on the device, or on their way, after the gap are not loaded again.
        num_wanted = next((index for index in range(num_found) if self._is_here(tail[index])), num_found)
        if num_wanted == 0 or not self.can_start(prefix, num_tokens, keep_watermark=True):
            return in_flight
        # Reserved first: blocks that `_take` evicts are stored, and must not evict what is about to be loaded.
        slots = transfers.reserve(tail[:num_wanted])
        # Shared meanwhile, so that `_take` does not evict the prefix for the blocks after it.
        self._pool.share(prefix)
        block_ids = self._take(num_wanted)
        self._pool.release(reversed(prefix))
        return transfers.load(tail[:num_wanted], slots, block_ids)

    def _is_here(self, block_hash: BlockHash) -> bool:
        """Whether a block is on the device, or on its way there."""
        assert self._transfers is not None
        return self._pool.find(block_hash) is not None or self._transfers.number_loading(block_hash) is not None

    def finish_transfer(self, number: int) -> tuple[int, int]:
        """Apply a transfer that every rank has finished: its loaded blocks can be found from now on. A negative number
        is that of a transfer that has failed on some rank: none of its loaded blocks can be found. Returns the numbers
        of blocks that were loaded, and of those that were to be saved and were not.
        """
        assert self._transfers is not None, f"transfer {number} without a connector"
        num_left_out = self._transfers.num_left_out(number)
        arrived = self._transfers.finish(number)
        for block_hash, block_id in arrived:
            if block_hash is not None:
                self._pool.set_hash(block_id, block_hash)
        self._pool.release(block_id for _, block_id in reversed(arrived))
        return len(arrived) if number > 0 else 0, num_left_out

    def take_block_ops(self) -> BlockOps:
        """Return this step's moves, once: the next call is for the next step."""
        block_ops = self._moves.take()
        if self._transfers is not None:
            block_ops = self._transfers.add_to(block_ops, self._pool.find)
        self._swap.end_step()
        self._fresh.clear()
        return block_ops

    def check_integrity(self, tables: Iterable[BlockTable], host_tables: Sequence[BlockTable] = ()) -> None:
        """Raise AssertionError, with values, unless tables (all there are) account for every owner of every block.

        Walks all blocks and tables: for tests, the end of a run and SPMD_WORKER_CHECK.
        """
        self._pool.check_integrity()
        self._swap.check_integrity(host_tables)
        self._moves.check_integrity(self.num_blocks, self.num_host_blocks)
        transferred: list[BlockId] = []
        if self._transfers is not None:
            self._transfers.check_integrity()
            transferred = self._transfers.owned_block_ids()
        owned = [BlockTable(self.owned(table)) for table in tables]
        self._pool.check_owners("block", count_listings([*owned, BlockTable(transferred)], self.num_blocks))

    def _take(self, count: int) -> list[BlockId]:
        allocated = self._pool.take(count)
        if self._transfers is not None:
            for block_hash, block_id in self._pool.take_evicted():
                if not self._moves.receives(block_id):
                    self._transfers.store(block_hash, block_id)
        self._moves.overwrite(allocated)
        return allocated
