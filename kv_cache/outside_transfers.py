"""Transfers of a manager whose connector lives outside the engine (`connectors/interface.py`): the replicated part.

Blocks have no slots here: they are saved and loaded by name. Which ones exist outside is known from events, and from
transfers that every rank has finished. Ranks agree on a transfer's number and its sign alone, not on the names that one
of them could not load, so a failed transfer makes all its names unfindable: rank 0 finds again those that exist.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_ops import BlockOps
from kv_cache.connector import TierSlot

_MAX_FOUND: Final = 2**17
"""Names that are kept, 20 MB: the oldest are dropped first."""

_Move = tuple[BlockHash, BlockId]


class OutsideTransfers:
    """The transfers planned and in flight, numbered as those of `Transfers`, and the names that can be loaded."""

    num_slots: Final = 0

    def __init__(self, *, saves: bool) -> None:
        self.is_off = False
        """True once names may stand for other bytes (`turn_off`)."""
        self._saves_blocks = saves
        self._number = 1
        self._saves: list[BlockHash] = []
        self._loads: list[_Move] = []
        self._in_flight: dict[int, tuple[list[_Move], list[_Move]]] = {}
        self._loading: dict[BlockHash, int] = {}
        self._saving: dict[BlockHash, None] = {}
        self._found: dict[BlockHash, None] = {}

    def add_found(self, hashes: Sequence[BlockHash]) -> None:
        """Rank 0 has found these outside, an event says."""
        if not self.is_off:
            self._found |= dict.fromkeys(hashes)
            for block_hash in list(self._found)[: max(0, len(self._found) - _MAX_FOUND)]:
                del self._found[block_hash]

    def forget_found(self, hashes: Sequence[BlockHash]) -> None:
        """Rank 0 has not found these outside, an event says: they were deleted or replaced."""
        for block_hash in hashes:
            self._found.pop(block_hash, None)

    def is_found(self, block_hash: BlockHash) -> bool:
        """Whether a block is known to exist outside."""
        return block_hash in self._found

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading hashes whose blocks can be loaded."""
        return next((index for index, each in enumerate(hashes) if each not in self._found), len(hashes))

    def number_loading(self, block_hash: BlockHash) -> int | None:
        """Number of the transfer that loads this block, if one is planned or in flight."""
        return self._loading.get(block_hash)

    def reserve(self, hashes: Sequence[BlockHash]) -> Sequence[TierSlot]:
        """Nothing: blocks outside have names, not slots."""
        return ()

    def load(self, hashes: Sequence[BlockHash], slots: Sequence[TierSlot], block_ids: Sequence[BlockId]) -> int:
        """Load into device blocks, which the transfer owns until it has finished; returns its number."""
        self._loads += zip(hashes, block_ids, strict=True)
        self._loading.update(dict.fromkeys(hashes, self._number))
        return self._number

    def save(self, block_hash: BlockHash) -> None:
        """Save a block that the step being planned completes, unless it is outside already."""
        if self._saves_blocks and not self.is_off and block_hash not in self._found and block_hash not in self._saving:
            self._saving[block_hash] = None
            self._saves.append(block_hash)

    def store(self, block_hash: BlockHash, block_id: BlockId) -> None:
        """An evicted block needs nothing: it was saved when it was complete."""

    def add_to(self, block_ops: BlockOps, holder: Callable[[BlockHash], BlockId | None]) -> BlockOps:
        """The step's moves with its transfer. `holder` finds the block that has a name: one that was evicted since is
        not saved, because by the end of the step it holds something else.
        """
        saves: list[_Move] = []
        for block_hash in self._saves:
            block_id = holder(block_hash)
            if block_id is None:
                del self._saving[block_hash]
            else:
                saves.append((block_hash, block_id))
        loads, self._saves, self._loads = self._loads, [], []
        if not (saves or loads):
            return block_ops
        number, self._number = self._number, self._number + 1
        self._in_flight[number] = saves, loads
        return replace(
            block_ops,
            transfer=number,
            save=tuple((block_id, block_hash) for block_hash, block_id in saves),
            fetch=tuple(loads),
        )

    def num_left_out(self, number: int) -> int:
        """Number of blocks that a transfer in flight was to save, if it ends without: it fails and has no loads."""
        saved, loaded = self._in_flight[abs(number)]
        return len(saved) if number < 0 and not loaded else 0

    def finish(self, number: int) -> list[tuple[BlockHash | None, BlockId]]:
        """End a transfer that every rank has finished, and some have failed if its number is negative; returns the
        loaded hashes and blocks, which it owned until now. The hash is None where nothing can be found by it: the
        transfer has failed, or `forget` was called meanwhile. What a failed one has saved must be found by rank 0.
        """
        assert abs(number) in self._in_flight, f"transfer {abs(number)} is not in flight: {list(self._in_flight)}"
        saved, loaded = self._in_flight.pop(abs(number))
        for block_hash, _ in saved:
            if self._saving.pop(block_hash, False) is None and number > 0:
                self.add_found((block_hash,))
        arrived: list[tuple[BlockHash | None, BlockId]] = []
        for block_hash, block_id in loaded:
            is_wanted = self._loading.get(block_hash) == abs(number)
            if is_wanted:
                del self._loading[block_hash]
            if number < 0:
                self._found.pop(block_hash, None)
            arrived.append((block_hash if is_wanted and number > 0 else None, block_id))
        return arrived

    def turn_off(self) -> None:
        """Load and save nothing any more: weights may have changed without a change of the names. `forget` first."""
        self.is_off = True

    def forget(self) -> None:
        """Make everything found so far unfindable. Loads in flight are finished but cannot be found."""
        self._found.clear()
        self._saving.clear()
        self._loading.clear()
        self._saves.clear()

    def owned_block_ids(self) -> list[BlockId]:
        """Device blocks owned by transfers, planned or in flight."""
        loads = [self._loads, *[loaded for _, loaded in self._in_flight.values()]]
        return [block_id for each in loads for _, block_id in each]

    def check_integrity(self) -> None:
        """Raise AssertionError at a contradiction."""
        for block_hash, number in self._loading.items():
            assert number == self._number or number in self._in_flight, (block_hash.hex(), number)
        assert not (self.is_off and self._found), len(self._found)
