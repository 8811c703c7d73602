"""Verification of prefix-cache hits: of every few hits one is not used, and its prompt is computed again and compared.

The canary of everything that keeps, moves and finds blocks and states: a byte that anything has changed since it was
computed, or that depended on what was computed beside it, is an error and not an answer.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized
from dataclasses import dataclass

from kv_cache.block import BlockHash, BlockId
from kv_cache.cache_manager import CacheManager
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.sequence.hit_comparison import UNKNOWN_WRITER, CachedCopy, HitComparison
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey


class Writers:
    """Requests that computed what has a name, for error messages. Names that nothing is found by may be forgotten."""

    def __init__(self, capacity: int, is_findable: Callable[[BlockHash], bool]) -> None:
        self._capacity, self._is_findable = capacity, is_findable
        self._requests: dict[BlockHash, RequestId] = {}

    def note(self, name: BlockHash, writer: RequestId) -> None:
        self._requests[name] = writer
        if len(self._requests) > 2 * self._capacity:
            self._requests = {each: writer for each, writer in self._requests.items() if self._is_findable(each)}

    def of(self, name: BlockHash) -> int:
        return self._requests.get(name, UNKNOWN_WRITER)


@dataclass(slots=True)
class _Verification:
    """A hit of `hashes`, of which the first `num_computed` blocks are computed again. `is_complete`: what was found was
    still there when each of them was.
    """

    sequence: Sequence
    hashes: Sized[BlockHash]
    num_computed: int = 0
    is_complete: bool = True


class HitVerifier:
    """Chooses one of `interval` hits, for the planner, which lets its sequence compute all of its prompt.

    **Nothing is held.** What was found stays in the cache as if nobody had found it, so a verification takes no block
    or slot that a running sequence needs, and ends wherever its sequence does. In the step that computes a block again,
    its name says where the first copy is; if it was evicted meanwhile, the hit counts as unverified. It becomes the
    last to be evicted when it is chosen, and most prompts take a step or two.

    **Comparisons come after a step's forward pass**, which writes the second copies and perhaps the first ones: rows of
    a step find each other's blocks. Later steps may overwrite either copy.
    """

    def __init__(
        self, interval: int, cache: CacheManager, slots: StateSlots | None, counters: SchedulerCounters
    ) -> None:
        assert interval >= 1, interval
        self._interval, self._cache, self._slots, self._counters = interval, cache, slots, counters
        self._num_hits_left = interval
        self._active: dict[SequenceKey, _Verification] = {}
        self.block_writers = Writers(cache.num_blocks, lambda name: cache.holder(name) is not None)
        num_slots = 0 if slots is None else slots.num_slots
        self.state_writers = Writers(num_slots, lambda name: slots is not None and slots.has_snapshot(name))

    def chooses_hit(self, *, can_verify: bool) -> bool:
        """Count a hit; returns whether to compute it again. One that cannot be gives its turn to the next."""
        self._num_hits_left -= 1
        if self._num_hits_left > 0 or not can_verify:
            return False
        self._num_hits_left = self._interval
        return True

    def can_verify(self, num_tokens: int, prefix: Sized[BlockId]) -> bool:
        """Whether a sequence of `num_tokens` fits beside what it has found."""
        num_all = num_tokens + self._cache.num_prefix_tokens(prefix)
        has_slots = self._slots is None or self._slots.num_free_slots > 1
        return has_slots and self._cache.can_start(prefix, num_all, keep_watermark=True)

    def begin(self, sequence: Sequence, hashes: Sized[BlockHash], prefix: Sized[BlockId]) -> None:
        """Compare a joining sequence, which starts from nothing, with the blocks of `prefix`, that `hashes` name."""
        assert len(hashes) == self._cache.num_prefix_blocks(prefix) > 0, (len(hashes), len(prefix))
        self._cache.touch(prefix)
        if self._slots is not None:
            self._slots.touch(hashes[-1])
        self._active[sequence.key] = _Verification(sequence, hashes)

    def drop(self, sequence: Sequence) -> None:
        """End the verification of a sequence that is preempted or has ended, if it has one."""
        if self._active.pop(sequence.key, None) is not None:
            self._counters.num_unverified_hits += 1

    def clear(self) -> None:
        """End all verifications: what they have found is not to be found any more."""
        self._counters.num_unverified_hits += len(self._active)
        self._active.clear()

    def end_of_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of the next `num_tokens` tokens to compute before a state is compared."""
        verification = self._active.get(sequence.key)
        if verification is None or self._slots is None:
            return num_tokens
        return min(num_tokens, len(verification.hashes) * self._cache.block_size - sequence.num_computed_tokens)

    def note_blocks(self, sequence: Sequence, hashes: Sized[BlockHash], first_index: int) -> None:
        """Note who computed the blocks of a table, from `first_index` on, that now have their `hashes`."""
        for index in range(first_index, len(hashes)):
            for entry, name in self._entries(hashes, index):
                if self._cache.holder(name) == sequence.table.block_ids[entry]:
                    self.block_writers.note(name, sequence.request.request_id)

    def take(self) -> tuple[HitComparison, ...]:
        """Comparisons of the step that was just decided. Call before its plan is handed out."""
        if not self._active:
            return ()
        found = [self._compare(each) for each in list(self._active.values())]
        return tuple([each for each in found if each is not None])

    def check_integrity(self, running: Sized[Sequence]) -> None:
        """Raise AssertionError unless verified sequences run, and have computed what was compared and no more."""
        for key, each in self._active.items():
            assert each.sequence in running, f"{key} is verified and does not run"
            num_full = each.sequence.num_computed_tokens // self._cache.block_size
            assert each.num_computed == num_full < len(each.hashes), f"{key}: {each.num_computed} of {num_full} blocks"

    def _compare(self, verification: _Verification) -> HitComparison | None:
        sequence, hashes, first = verification.sequence, verification.hashes, verification.num_computed
        end = min(len(hashes), sequence.num_computed_tokens // self._cache.block_size)
        blocks: list[CachedCopy] = []
        for index in range(first, end):
            copies = self._cached_blocks(sequence, hashes, index)
            blocks += copies
            verification.is_complete = verification.is_complete and self._has_found(copies, hashes, index)
        verification.num_computed = end
        states: tuple[CachedCopy, ...] = ()
        if end == len(hashes):
            del self._active[sequence.key]
            if self._slots is not None:
                states = self._cached_state(self._slots, sequence, hashes)
                verification.is_complete = verification.is_complete and bool(states)
            self._counters.num_verified_hits += verification.is_complete
            self._counters.num_unverified_hits += not verification.is_complete
        return HitComparison(sequence.key, tuple(blocks), states) if blocks or states else None

    def _entries(self, hashes: Sized[BlockHash], index: int) -> Iterable[tuple[int, BlockHash]]:
        """Entries of a table for one block of tokens, one for each group of layers, and their names."""
        groups = self._cache.groups
        names = groups.names(hashes[index]) if groups.num_groups > 1 else hashes[index : index + 1]
        return enumerate(names, index * groups.num_groups)

    def _has_found(self, copies: Sized[CachedCopy], hashes: Sized[BlockHash], index: int) -> bool:
        """Whether all of a hit's blocks of `index` are among the copies. Full groups come first: of window groups none
        is needed behind what the next token sees, but may be there.
        """
        groups, size = self._cache.groups, self._cache.block_size
        is_unseen = index < groups.num_unseen(len(hashes) * size, size)
        first, num_needed = index * groups.num_groups, groups.num_full if is_unseen else groups.num_groups
        entries = [copy.block_index for copy in copies]
        return all(entry in entries for entry in range(first, first + num_needed))

    def _cached_blocks(self, sequence: Sequence, hashes: Sized[BlockHash], index: int) -> list[CachedCopy]:
        """The first copies of a block, unless they were evicted: then the second ones may have their names."""
        copies = []
        for entry, name in self._entries(hashes, index):
            block_id = self._cache.holder(name)
            if block_id is not None and block_id != sequence.table.block_ids[entry]:
                copies.append(CachedCopy(entry, block_id, name, self.block_writers.of(name)))
        return copies

    def _cached_state(self, slots: StateSlots, sequence: Sequence, hashes: Sized[BlockHash]) -> tuple[CachedCopy, ...]:
        end, name = len(hashes), hashes[-1]
        assert sequence.num_computed_tokens == end * self._cache.block_size, (sequence.key, end)
        slot = slots.snapshot_slot(name)
        return () if slot is None else (CachedCopy(end - 1, slot, name, self.state_writers.of(name)),)
