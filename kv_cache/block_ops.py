"""The moves of whole blocks that come before a step's forward pass: a value that travels from scheduler to worker.

Knows block numbers. Knows nothing of tables, tensors or why a block moves.
"""

from dataclasses import dataclass

from kv_cache.block import BlockId


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Pairs (from, to) of one step, in the order in which they were decided.

    Contract of execution:

    1. The kinds run in the order swap_out, swap_in, copy, all of them before the step's forward pass writes anything.
       What a step frees it may therefore reuse at once: swapped-out contents are gone from the device before something
       else arrives.
    2. Within one kind every source is read before any destination is written. The pairs of one kind are one parallel
       assignment: their order carries no meaning, and a block may be one pair's source and another's destination.
    3. Within one kind no block is a destination twice.

    The copies of a chain (a to b, then b to c) do not obey rule 2 as they stand: whoever records them writes (a, b) and
    (a, c), see `CacheManager.extend`.
    """

    swap_in: tuple[tuple[BlockId, BlockId], ...] = ()
    """(host block, device block)."""
    swap_out: tuple[tuple[BlockId, BlockId], ...] = ()
    """(device block, host block)."""
    copy: tuple[tuple[BlockId, BlockId], ...] = ()
    """(device source, device destination)."""

    @property
    def is_empty(self) -> bool:
        """Whether the step moves no block."""
        return not (self.swap_in or self.swap_out or self.copy)
