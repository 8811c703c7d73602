"""Slots of recurrent states: each is owned by one running sequence, is a named snapshot, or is free.

A sequence's blocks hold every position, its slot only the state after the last one. So a prefix can be shared only
where a snapshot of the state was kept: a copy of a slot, named by the block hash at the same position.
"""

from collections.abc import Iterable
from typing import Final

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_pool import BlockPool
from kv_cache.pending_moves import PendingMoves
from kv_cache.state_ops import NO_STATE_OPS, SlotId, StateOps

STATE_GRID: Final = 64
"""Snapshots are made at multiples of this many tokens only: every form of the kernels has a state there."""


class StateSlots:
    """Device slots 0 .. num_slots - 1 of running sequences and snapshots, and host slots of sequences swapped out.

    A snapshot is a free slot with a name: it stays until its slot is needed, the least recently used first, so a
    sequence always finds a slot while fewer than `num_slots` own one.

    **When a snapshot can be found.** `snapshot` names a copy of what the slot holds when the step being planned begins:
    the state after the steps planned before. It can be found at once: who takes it in the same step gets a copy from
    the same source (`PendingMoves`). The state that the step being planned computes can be named by the next one only.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0, *, grid: int = STATE_GRID) -> None:
        self.grid = grid
        self._pool, self._host = BlockPool(num_slots), BlockPool(num_host_slots)
        self._moves = PendingMoves()
        self._read_by_step: list[BlockId] = []

    @property
    def num_slots(self) -> int:
        return self._pool.num_blocks

    @property
    def num_host_slots(self) -> int:
        return self._host.num_blocks

    @property
    def num_used_slots(self) -> int:
        """Slots of running sequences."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    @property
    def num_free_slots(self) -> int:
        """Slots that a sequence can take, snapshots included."""
        return self._pool.num_free_blocks

    @property
    def num_used_host_slots(self) -> int:
        """Host slots of sequences swapped out."""
        return self._host.num_blocks - self._host.num_free_blocks

    @property
    def num_snapshots(self) -> int:
        return self._pool.num_cached_blocks

    @property
    def num_empty_slots(self) -> int:
        """Free slots without a snapshot."""
        return self._pool.num_free_blocks - self._pool.num_cached_blocks

    def take(self) -> SlotId:
        """A slot for a sequence that starts from zeros."""
        (slot,) = self._pool.take(1)
        self._moves.overwrite((slot,))
        return SlotId(slot)

    def take_from(self, name: BlockHash) -> SlotId:
        """A slot with a copy of a snapshot, which becomes the most recently used one."""
        source = BlockId(self.touch(name))
        (slot,) = self._pool.take(1)
        # The snapshot's own slot, if no other is free, has the contents already, or receives them in this step.
        if slot != source:
            self._moves.overwrite((slot,))
            self._moves.copy(source, slot)
        return SlotId(slot)

    def fork(self, slot: SlotId) -> SlotId:
        """A slot with a copy of another sequence's, made in the next step, which may overwrite the other."""
        copied = self.take()
        self._moves.copy(BlockId(slot), BlockId(copied))
        return copied

    def release(self, slot: SlotId) -> None:
        """Free a sequence's slot."""
        self._moves.overwrite((BlockId(slot),))
        self._pool.release((BlockId(slot),))

    def has_snapshot(self, name: BlockHash) -> bool:
        return self._pool.find(name) is not None

    def snapshot_slot(self, name: BlockHash) -> SlotId | None:
        slot = self._pool.find(name)
        return None if slot is None else SlotId(slot)

    def touch(self, name: BlockHash) -> SlotId:
        """Make a snapshot the most recently used one; returns its slot."""
        slot = self._pool.find(name)
        assert slot is not None, f"there is no snapshot of {name.hex()}"
        self._pool.share((slot,))
        self._pool.release((slot,))
        return SlotId(slot)

    def snapshot(self, slot: SlotId, name: BlockHash) -> bool:
        """Keep a copy of a sequence's state, which no snapshot has yet. False where sequences own every slot."""
        if not self._pool.num_free_blocks:
            return False
        copied = self.fork(slot)
        is_new = self._pool.set_hash(BlockId(copied), name)
        assert is_new, f"there is a snapshot of {name.hex()} already"
        self._pool.release((BlockId(copied),))
        return True

    def forget(self, name: BlockHash) -> None:
        """Make a snapshot unfindable, if there is one; its slot is the next to be taken."""
        self._pool.remove_hash(name)

    def clear_names(self) -> None:
        """Make all snapshots unfindable."""
        self._pool.clear_hashes()

    def can_swap_out(self, slot: SlotId) -> bool:
        """Whether a host slot is free, and the step being planned is not still to fill the slot."""
        return self._host.num_free_blocks > 0 and not self._moves.receives(BlockId(slot))

    def swap_out(self, slot: SlotId) -> SlotId:
        """Move a state to the host; frees the slot. `can_swap_out` must hold."""
        (host_slot,) = self._host.take(1)
        self._moves.swap_out(BlockId(slot), host_slot)
        self._pool.release((BlockId(slot),))
        return SlotId(host_slot)

    def swap_in(self, host_slot: SlotId) -> SlotId:
        """Move a state back; its host slot is not reused in this step."""
        slot = self.take()
        self._moves.swap_in(BlockId(host_slot), BlockId(slot))
        self._read_by_step.append(BlockId(host_slot))
        return slot

    def release_host(self, host_slot: SlotId) -> None:
        """Free the host slot of a sequence that ended."""
        self._host.release((BlockId(host_slot),))

    def take_state_ops(self) -> StateOps:
        """Return this step's moves, once: the next call is for the next step."""
        moves = self._moves.take()
        self._host.release(self._read_by_step)
        self._read_by_step.clear()
        if not (moves.swap_in or moves.swap_out or moves.copy):
            return NO_STATE_OPS
        return StateOps(_slots(moves.swap_in), _slots(moves.swap_out), _slots(moves.copy))

    def check_integrity(self, slots: Iterable[SlotId], host_slots: Iterable[SlotId] = ()) -> None:
        """Raise AssertionError unless every slot has one owner (`slots` and `host_slots` are all there are), or a name,
        or is free.
        """
        self._pool.check_integrity()
        self._host.check_integrity()
        self._moves.check_integrity(self.num_slots, self.num_host_slots)
        _check_owners("slot", self._pool, slots)
        _check_owners("host slot", self._host, [*host_slots, *map(SlotId, self._read_by_step)])
        num_named = sum(self._pool.is_shared(BlockId(slot)) for slot in range(self.num_slots))
        assert num_named == self.num_snapshots, f"{num_named} slots have a name, {self.num_snapshots} are snapshots"


def snapshot_interval(slot_bytes: int, token_bytes: int, grid: int = STATE_GRID) -> int:
    """Tokens between two snapshots of a prompt: a multiple of the grid, whose keys and values, of `token_bytes` each,
    cost at least as much as a state of `slot_bytes`.
    """
    assert min(slot_bytes, token_bytes) > 0, (slot_bytes, token_bytes)
    return grid * -(-slot_bytes // (grid * token_bytes))


def check_state_block_size(block_size: int, grid: int = STATE_GRID) -> None:
    """Raise ValueError unless blocks of a model with recurrent states end where snapshots are made."""
    if block_size < 1 or (grid % block_size and block_size % grid):
        raise ValueError(
            f"cache.block_size={block_size} must divide {grid} or be a multiple of it for a model with recurrent "
            f"states, whose snapshots are made every {grid} tokens: use 16, 32, 64 or 128"
        )


def _slots(pairs: tuple[tuple[BlockId, BlockId], ...]) -> tuple[tuple[SlotId, SlotId], ...]:
    return tuple([(SlotId(source), SlotId(destination)) for source, destination in pairs])


def _check_owners(kind: str, pool: BlockPool, owned: Iterable[SlotId]) -> None:
    counts = [0] * pool.num_blocks
    for slot in owned:
        assert 0 <= slot < pool.num_blocks, f"a sequence owns {kind} {slot} of {pool.num_blocks}"
        counts[slot] += 1
    for index, count in enumerate(counts):
        ref_count = pool.ref_count(BlockId(index))
        assert ref_count == count <= 1, f"{kind} {index} counts {ref_count} owners, {count} sequences own it"
