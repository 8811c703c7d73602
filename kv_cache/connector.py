"""Connectors: store evicted blocks outside the device, in another memory or engine, and load them again.

A connector has two halves. `Connector` decides; every rank of a replica has one and makes the same calls, so its
answers must depend on those calls alone. `TransferEngine` moves this rank's bytes and reports when it has. A transfer
is what one step stores and loads; it counts when every rank has finished it, which is an event from rank 0
(`CacheManager.finish_transfer`): no replica may act on its own device's progress. The division is vLLM's
(KVConnectorBase_V1), cut to three verbs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NewType, Protocol

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_ops import BlockOps

TierSlot = NewType("TierSlot", int)
"""Index at which a connector keeps one block: the same on every rank."""


class Connector(Protocol):
    """The deciding half. A slot given for storing or loading stays reserved until the transfer has finished."""

    @property
    def num_slots(self) -> int:
        """Capacity in blocks."""

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading hashes whose blocks it could load now."""

    def store(self, block_hash: BlockHash) -> TierSlot | None:
        """A slot for a block about to be overwritten; None where it is not wanted or no slot is free."""

    def load(self, hashes: Sequence[BlockHash]) -> list[TierSlot]:
        """The slots of these hashes' blocks, all of which `lookup` has counted."""

    def finish(self, stored: Sequence[tuple[BlockHash, TierSlot]], loaded: Sequence[TierSlot]) -> None:
        """A transfer has ended on every rank: its stored blocks may be looked up, its loaded slots are free again."""

    def forget(self) -> None:
        """Make everything stored so far unfindable; transfers in flight end as usual."""

    def check_integrity(self) -> None:
        """Raise AssertionError at a contradiction."""


class TransferEngine(Protocol):
    """Moves this rank's share of the bytes: `store`, the step's other moves, `load`, all before the forward pass."""

    def store(self, number: int, pairs: Sequence[tuple[BlockId, int]]) -> None:
        """(device block, slot): keeps the blocks' contents as they are now, whatever is written to them next."""

    def load(self, number: int, pairs: Sequence[tuple[int, BlockId]]) -> None:
        """(slot, device block): the blocks are neither read nor written before the transfer has finished."""

    def finished(self) -> tuple[int, ...]:
        """Numbers of the transfers that this rank has finished since the last call, in order."""


_Move = tuple[BlockHash, BlockId, TierSlot]


class Transfers:
    """Transfers of one manager: the one being planned, and those in flight. Numbers go up by one."""

    is_off: Final = False

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self._number = 1
        self._stores: list[_Move] = []
        self._loads: list[_Move] = []
        self._in_flight: dict[int, tuple[list[_Move], list[_Move]]] = {}
        self._loading: dict[BlockHash, int] = {}

    def number_loading(self, block_hash: BlockHash) -> int | None:
        """Number of the transfer that loads this block, if one is planned or in flight."""
        return self._loading.get(block_hash)

    def store(self, block_hash: BlockHash, block_id: BlockId) -> None:
        """Store a device block that is about to be overwritten, if there is a slot."""
        slot = self.connector.store(block_hash)
        if slot is not None:
            self._stores.append((block_hash, block_id, slot))

    def load(self, hashes: Sequence[BlockHash], slots: Sequence[TierSlot], block_ids: Sequence[BlockId]) -> int:
        """Load into device blocks, which the transfer owns until it has finished; returns its number."""
        self._loads += zip(hashes, block_ids, slots, strict=True)
        self._loading.update(dict.fromkeys(hashes, self._number))
        return self._number

    @property
    def num_slots(self) -> int:
        """Capacity of the connector in blocks."""
        return self.connector.num_slots

    def lookup(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading hashes whose blocks can be loaded."""
        return self.connector.lookup(hashes)

    def reserve(self, hashes: Sequence[BlockHash]) -> Sequence[TierSlot]:
        """Slots of blocks about to be loaded, which keep their contents until then."""
        return self.connector.load(hashes)

    def save(self, block_hash: BlockHash) -> None:
        """A complete block needs nothing: it is stored when it is evicted."""

    def num_left_out(self, number: int) -> int:
        """Nothing: every block of a step is stored."""
        return 0

    def add_to(self, block_ops: BlockOps, holder: Callable[[BlockHash], BlockId | None]) -> BlockOps:
        """The step's moves with its transfer."""
        number, stores, loads = self.take()
        return replace(block_ops, transfer=number, store=stores, load=loads) if number else block_ops

    def take(self) -> tuple[int, tuple[tuple[BlockId, int], ...], tuple[tuple[int, BlockId], ...]]:
        """The step's transfer: its number (0: none), its (device block, slot) and its (slot, device block) pairs."""
        if not (self._stores or self._loads):
            return 0, (), ()
        number, stores, loads = self._number, self._stores, self._loads
        self._in_flight[number] = stores, loads
        self._number, self._stores, self._loads = number + 1, [], []
        return (
            number,
            tuple((block_id, slot) for _, block_id, slot in stores),
            tuple((slot, block_id) for _, block_id, slot in loads),
        )

    def finish(self, number: int) -> list[tuple[BlockHash | None, BlockId]]:
        """End a transfer that every rank has finished; returns the loaded hashes and blocks, which it owned until now.

        The hash is None where `forget` was called meanwhile.
        """
        assert number in self._in_flight, f"transfer {number} is not in flight: {list(self._in_flight)}"
        stored, loaded = self._in_flight.pop(number)
        self.connector.finish([(block_hash, slot) for block_hash, _, slot in stored], [slot for _, _, slot in loaded])
        arrived: list[tuple[BlockHash | None, BlockId]] = []
        for block_hash, block_id, _ in loaded:
            is_wanted = self._loading.get(block_hash) == number
            arrived.append((block_hash if is_wanted else None, block_id))
            if is_wanted:
                del self._loading[block_hash]
        return arrived

    def forget(self) -> None:
        """Forget all stored blocks (`Connector.forget`). Loads in flight are finished but cannot be found."""
        self.connector.forget()
        self._loading.clear()

    def owned_block_ids(self) -> list[BlockId]:
        """Device blocks owned by transfers, planned or in flight."""
        loads = [self._loads, *[loaded for _, loaded in self._in_flight.values()]]
        return [block_id for each in loads for _, block_id, _ in each]

    def check_integrity(self) -> None:
        """Raise AssertionError at a contradiction, in the connector too."""
        self.connector.check_integrity()
        for block_hash, number in self._loading.items():
            assert number == self._number or number in self._in_flight, (block_hash.hex(), number)
