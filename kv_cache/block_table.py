"""Block table of one sequence, logical to physical blocks, and its change as a delta carries it.

Ownership and copy-on-write belong to the cache manager.
"""

from dataclasses import dataclass, field

from kv_cache.block import BlockId


@dataclass(frozen=True, slots=True)
class TableChange:
    """Keep the first `first_index` entries, then append `block_ids`: all that a copy of the table needs.

    `first_index` is the old length and `block_ids` the added blocks if nothing was shared. After a copy-on-write
    `first_index` is the index of the first replaced block, and `block_ids` is the rest of the table from there on.
    """

    first_index: int
    block_ids: tuple[BlockId, ...]


@dataclass(slots=True)
class BlockTable:
    """`block_ids[i]` holds the tokens at positions i * block_size up to (i + 1) * block_size; with several groups of
    layers entry i * num_groups + g does for group g, and window groups have dropped their first `num_dropped` blocks
    (`layer_groups.py`).
    """

    block_ids: list[BlockId] = field(default_factory=list)
    num_dropped: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of entries, of all groups."""
        return len(self.block_ids)

    def apply(self, change: TableChange) -> None:
        """Apply a change made elsewhere to a table that was equal to this one."""
        assert 0 <= change.first_index <= len(self.block_ids), (change, len(self.block_ids))
        self.block_ids[change.first_index :] = change.block_ids
