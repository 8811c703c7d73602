"""Block moves that run before a step's forward pass: a value sent from the scheduler to the workers."""

from dataclasses import dataclass

from kv_cache.block import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Pairs (from, to) of one step, in the order in which they were decided.

    Contract of execution. The kinds run in the order swap_out, copy, swap_in, all of them before the step's forward
    pass writes anything:

    1. Swap-outs and copies read the device as it was when the step began. Within one kind every source is read before
       any destination is written: the pairs are one parallel assignment, their order carries no meaning, and a block
       may be one copy's source and another's destination.
    2. Swap-ins arrive last. They read the host after the step's swap-outs were written.

    So a step may reuse at once what it frees: a device block that is swapped out may receive a copy or a swap-in, and a
    copy's source may receive a swap-in.

    Guaranteed by the recorder:

    3. No host block is the destination of two swap-outs. No device block receives twice, copies and swap-ins together.
    4. A copy whose source arrives in this step by a swap-in is a second swap-in, from the same host block: a copy would
       read the block's old contents.
    5. The copies of a chain (a to b, then b to c) are (a, b) and (a, c), by rule 1; see `CacheManager.extend`.
    6. A host block that a swap-in of this step reads is not given to another swap-out in this step, although it is free
       as soon as the swap-in is decided: by rule 2 its contents would be overwritten before they are read.

    Stores go with the swap-outs and loads come after everything else (see `connector.py`): together they are transfer
    number `transfer`, which outlives the step.
    """

    swap_in: tuple[tuple[BlockId, BlockId], ...] = ()
    """(host block, device block)."""
    swap_out: tuple[tuple[BlockId, BlockId], ...] = ()
    """(device block, host block)."""
    copy: tuple[tuple[BlockId, BlockId], ...] = ()
    """(device source, device destination)."""
    store: tuple[tuple[BlockId, int], ...] = ()
    """(device block, the connector's slot)."""
    load: tuple[tuple[int, BlockId], ...] = ()
    """(the connector's slot, device block)."""
    transfer: int = 0
    """Number of the transfer that the stores and loads, or saves and fetches, make; 0 without any."""
    save: tuple[tuple[BlockId, BlockHash], ...] = ()
    """(device block, name), to a connector outside the engine: run after the forward pass, which completes them."""
    fetch: tuple[tuple[BlockHash, BlockId], ...] = ()
    """(name, device block), from a connector outside the engine: run with the loads."""

    @property
    def is_empty(self) -> bool:
        moves = (self.swap_in, self.swap_out, self.copy, self.store, self.load, self.save, self.fetch)
        return not any(moves)
