"""Block moves of the step being planned, collected as they are decided."""

from collections.abc import Iterable
from typing import Final

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps

_NO_MOVES: Final = BlockOps()


class PendingMoves:
    """Keeps the contract of `BlockOps`: a move reads the right contents when it runs, in any order of the decisions.

    **A source means its block's contents at the beginning of the step.** A block that is itself to receive something
    may be copied again before the step runs: the second copy is recorded from the first one's source, in this memory or
    on the host. So all sources can be read before any destination is written, and a move whose destination is allocated
    again (`overwrite`) is dropped without harm to the moves derived from it.
    """

    def __init__(self) -> None:
        # Destination -> source; for swap-outs the destination is on the host.
        self._copies: dict[BlockId, BlockId] = {}
        self._swap_ins: dict[BlockId, BlockId] = {}
        self._swap_outs: dict[BlockId, BlockId] = {}

    def copy(self, source: BlockId, destination: BlockId) -> None:
        """Record a copy within the device. `destination` was allocated for it."""
        host_block = self._swap_ins.get(source)
        if host_block is not None:
            self._swap_ins[destination] = host_block
            return
        origin = self._copies.get(source, source)
        # Equal when the origin was freed in this step and is now allocated for its own contents: nothing to move.
        if origin != destination:
            self._copies[destination] = origin

    def swap_in(self, host_block: BlockId, destination: BlockId) -> None:
        """Record a move from the host. `destination` was allocated for it."""
        self._swap_ins[destination] = host_block

    def swap_out(self, source: BlockId, host_block: BlockId) -> None:
        """Record a move to the host; `source` must not receive anything in this step (`receives`)."""
        assert not self.receives(source), f"block {source} receives a move in this step and cannot be swapped out"
        self._swap_outs[host_block] = source

    def receives(self, block_id: BlockId) -> bool:
        """Whether a move of this step fills a device block."""
        return block_id in self._copies or block_id in self._swap_ins

    def overwrite(self, block_ids: Iterable[BlockId]) -> None:
        """Drop the moves to device blocks that were allocated again."""
        if self._copies or self._swap_ins:
            for block_id in block_ids:
                self._copies.pop(block_id, None)
                self._swap_ins.pop(block_id, None)

    def take(self) -> BlockOps:
        """Return all moves and clear them."""
        if not (self._copies or self._swap_ins or self._swap_outs):
            return _NO_MOVES
        block_ops = BlockOps(
            swap_in=tuple((host_block, destination) for destination, host_block in self._swap_ins.items()),
            swap_out=tuple((source, host_block) for host_block, source in self._swap_outs.items()),
            copy=tuple((source, destination) for destination, source in self._copies.items()),
        )
        self._copies.clear()
        self._swap_ins.clear()
        self._swap_outs.clear()
        return block_ops

    def check_integrity(self, num_blocks: int, num_host_blocks: int) -> None:
        """Raise AssertionError where a move names a block that does not exist, or two have one destination."""
        for destination, source in self._copies.items():
            assert source != destination, f"block {source} is to be copied to itself"
            assert destination not in self._swap_ins, f"block {destination} is to receive a copy and a swap-in"
            assert 0 <= source < num_blocks, f"copy {source} to {destination}: there are {num_blocks} blocks"
        for destination, host_block in self._swap_ins.items():
            assert 0 <= host_block < num_host_blocks, f"swap-in of host block {host_block} of {num_host_blocks}"
            assert 0 <= destination < num_blocks, f"swap-in to block {destination} of {num_blocks}"
        for host_block, source in self._swap_outs.items():
            assert 0 <= source < num_blocks, f"swap-out of block {source} of {num_blocks}"
            assert 0 <= host_block < num_host_blocks, f"swap-out to host block {host_block} of {num_host_blocks}"
