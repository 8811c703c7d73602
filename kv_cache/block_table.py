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
    """`block_ids[i]` holds the tokens at positions i * block_size up to (i + 1) * block_size."""

    block_ids: list[BlockId] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    def slot(self, position: int, block_size: int) -> int:
        """Slot of the token at `position` in a cache viewed as one row of num_blocks * block_size tokens."""
        assert 0 <= position < len(self.block_ids) * block_size, (
            f"position {position} lies outside a table of {len(self.block_ids)} blocks of {block_size} tokens"
        )
        return self.block_ids[position // block_size] * block_size + position % block_size

    def apply(self, change: TableChange) -> None:
        """Apply a change made elsewhere to a table that was equal to this one."""
        assert 0 <= change.first_index <= len(self.block_ids), (
            f"change keeps {change.first_index} blocks of a table of {len(self.block_ids)}"
        )
        self.block_ids[change.first_index :] = change.block_ids
