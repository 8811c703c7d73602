"""Recurrent states of sequences: each running one owns a slot, and its prompt's state is kept at a few positions.

A token must never be applied to a state twice, so a sequence either continues from exactly the tokens that its slot
has, or starts again: from zeros, or from a copy of a snapshot.

**Positions of snapshots**, all multiples of the grid, each reached by a chunk that the planner ends there:

* the last one below the prompt's length, and below all known tokens where an answer is recomputed;
* every `snapshot_interval` tokens, the length whose keys and values cost as much as a state;
* the junction: the last one inside the blocks that match further than snapshots do: another sequence shares them.
  Without blocks names of beginnings are remembered for this alone;
* the last one inside what the sequence that waits next shares.

A decoding sequence keeps the state at the last multiple that its answer has reached, for the next turn of a
conversation; a later one replaces it. It takes no slot from a prompt's snapshot: those are shared by other sequences,
and after the next turn's prompt only the answer is computed again.

**Drafts.** A slot never has a draft's tokens: it is `num_lagging_tokens` behind the computed ones. So a slot's position
is known when a step is planned, whichever of its drafts are right, and each multiple is a slot's position at some step,
as drafts are not made beyond the token before it (`drafting.py`).
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized
from typing import Final

from kv_cache.block import BlockHash
from kv_cache.state_slots import StateSlots, check_state_block_size
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.hit_verifier import Writers
from spmd_worker.replica.sequence.sequence import Sequence

_MOST_SEEN: Final = 65_536
"""Names of beginnings that are remembered in a cache without blocks: 4 million tokens at least."""

Hashes = Callable[[Sequence, int], list[BlockHash]]
"""Names of the first blocks of a sequence, as many as asked for; none if nothing of it is shared."""


class SequenceStates:
    """Gives sequences their slots and makes their snapshots, for `Allocator`, which decides when.

    Without `ends_chunks` prompts have no snapshots: each is computed in one piece, or nothing is cached.
    """

    def __init__(
        self,
        slots: StateSlots,
        counters: SchedulerCounters,
        block_size: int,
        snapshot_interval: int,
        *,
        ends_chunks: bool,
        writers: Writers | None = None,
    ) -> None:
        """`writers` are noted where hits are verified."""
        self.slots, self._writers = slots, writers
        self._counters, self._block_size, self._ends_chunks = counters, block_size, ends_chunks
        check_state_block_size(block_size, slots.grid)
        self.unit = max(slots.grid, block_size)
        """Snapshots are made at multiples of so many tokens."""
        self._interval = -(-snapshot_interval // self.unit) * self.unit
        # Names of snapshots that running sequences will make, each with the sequence that makes it first.
        self._expected: dict[BlockHash, Sequence] = {}
        # Names of snapshots of answers, the oldest first; some are gone.
        self._answers: dict[BlockHash, None] = {}
        # Names of beginnings of sequences that joined, the oldest first.
        self._seen: dict[BlockHash, None] = {}

    def num_usable(self, hashes: Sized[BlockHash], num_blocks: int) -> int:
        """Number of the first `num_blocks` blocks, at most, after which a sequence can go on: a snapshot is there."""
        return self._last_at(hashes, num_blocks, self.slots.has_snapshot)

    def is_expected(self, hashes: Sized[BlockHash], num_found: int) -> bool:
        """Whether a running sequence will make a snapshot after more of these blocks than the `num_found`."""
        return bool(self._expected) and self._last_at(hashes, len(hashes), self._expected.__contains__) > num_found

    def start(
        self, sequence: Sequence, hashes: Sized[BlockHash], num_blocks: int, num_matched: int | None, num_shared: int
    ) -> None:
        """Give a joining sequence a slot, from the snapshot after `num_blocks` blocks, or from zeros after 0, and
        choose where it makes snapshots: the device has `num_matched` of its blocks, None in a cache without blocks, and
        the sequence that waits next begins with `num_shared` of them.
        """
        assert not sequence.request.num_given_tokens, f"{sequence.key}: given keys and values have no state"
        sequence.state_slot = self.slots.take_from(hashes[num_blocks - 1]) if num_blocks else self.slots.take()
        self._counters.num_snapshot_hits += num_blocks > 0
        assert not sequence.num_lagging_tokens, f"{sequence.key} lags, and starts"
        if self._ends_chunks:
            num_matched = self._see(hashes) if num_matched is None else num_matched
            sequence.snapshot_stops = self._choose_stops(sequence, hashes, num_blocks, max(num_matched, num_shared))
            for _, name in sequence.snapshot_stops:
                self._expected.setdefault(name, sequence)

    def fork(self, parent: Sequence, fork: Sequence) -> None:
        """Give a fork a copy of its parent's state, made in the next step, before the parent goes on."""
        assert parent.state_slot is not None, parent.key
        assert not parent.num_lagging_tokens, f"{parent.key} forks behind drafts"
        fork.state_slot = self.slots.fork(parent.state_slot)

    def release(self, sequence: Sequence) -> None:
        """Free what a sequence that ended or is to be recomputed owns."""
        while sequence.snapshot_stops:
            self._drop_stop(sequence)
        sequence.answer_snapshot, sequence.last_snapshot_position, sequence.num_lagging_tokens = None, 0, 0
        if sequence.state_slot is not None:
            self.slots.release(sequence.state_slot)
            sequence.state_slot = None
        if sequence.host_state_slot is not None:
            self.slots.release_host(sequence.host_state_slot)
            sequence.host_state_slot = None

    def forget_snapshots(self, sequence: Sequence) -> None:
        """Make the snapshots of a sequence in error unfindable: its state may not be finite."""
        for name in (*sequence.prompt_snapshots, sequence.answer_snapshot):
            if name is not None:
                self.slots.forget(name)

    def can_swap_out(self, sequence: Sequence) -> bool:
        assert sequence.state_slot is not None, sequence.key
        return self.slots.can_swap_out(sequence.state_slot)

    def swap_out(self, sequence: Sequence) -> None:
        """Move a state to the host. No sequence waits for its snapshots to come meanwhile: it may be behind more of
        them than run at once, which would wait without end.
        """
        assert sequence.state_slot is not None, sequence.key
        for _, name in sequence.snapshot_stops:
            if self._expected.get(name) is sequence:
                del self._expected[name]
        sequence.host_state_slot = self.slots.swap_out(sequence.state_slot)
        sequence.state_slot = None

    def swap_in(self, sequence: Sequence) -> None:
        """The slot is another one, so the mirrors are sent the sequence again, with the tokens that it lags by."""
        assert sequence.host_state_slot is not None, sequence.key
        sequence.state_slot = self.slots.swap_in(sequence.host_state_slot)
        sequence.host_state_slot, sequence.is_known = None, False
        for _, name in sequence.snapshot_stops:
            self._expected.setdefault(name, sequence)

    def clear_names(self, sequences: Iterable[Sequence]) -> None:
        """Forget all snapshots, and those to come of `sequences`."""
        self.slots.clear_names()
        self._expected.clear()
        self._answers.clear()
        self._seen.clear()
        for sequence in sequences:
            sequence.snapshot_stops, sequence.prompt_snapshots, sequence.answer_snapshot = (), (), None

    def end_of_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of the next `num_tokens` tokens to compute before the next snapshot."""
        while sequence.snapshot_stops:
            position, name = sequence.snapshot_stops[0]
            if not self.slots.has_snapshot(name):
                return min(num_tokens, position - sequence.num_computed_tokens)
            self._drop_stop(sequence)
        return num_tokens

    def make_snapshots(self, running: Sized[Sequence], hashes: Hashes) -> None:
        """Keep the states that the steps planned so far compute. Call before a step's decisions: before anything is
        preempted or advances, and while the ids of all computed tokens are known.
        """
        unit = self.unit
        for sequence in running:
            position = sequence.num_computed_tokens - sequence.num_lagging_tokens
            if position % unit == 0 and position:
                self._reach(sequence, position, hashes)

    def _reach(self, sequence: Sequence, position: int, hashes: Hashes) -> None:
        if sequence.snapshot_stops:
            expected, name = sequence.snapshot_stops[0]
            if position == expected:
                self._drop_stop(sequence)
                self._keep(sequence, position, name)
        elif position > sequence.num_prompt_tokens and position != sequence.last_snapshot_position:
            assert position <= sequence.num_tokens, (sequence.key, position)
            names = hashes(sequence, position // self._block_size)
            if names:
                self._keep(sequence, position, names[-1])

    def _keep(self, sequence: Sequence, position: int, name: BlockHash) -> None:
        sequence.last_snapshot_position = position
        if self.slots.has_snapshot(name):
            return
        assert sequence.state_slot is not None, sequence.key
        is_answer = position > sequence.num_prompt_tokens
        if is_answer and sequence.answer_snapshot is not None:
            self._answers.pop(sequence.answer_snapshot, None)
            self.slots.forget(sequence.answer_snapshot)
            sequence.answer_snapshot = None
        has_slot = not is_answer or self._has_slot_for_answer()
        if not has_slot or not self.slots.snapshot(sequence.state_slot, name):
            self._counters.num_snapshots_skipped += 1
            return
        self._counters.num_snapshots += 1
        if self._writers is not None:
            self._writers.note(name, sequence.request.request_id)
        if is_answer:
            sequence.answer_snapshot = name
            self._answers[name] = None
        else:
            sequence.prompt_snapshots += (name,)

    def _has_slot_for_answer(self) -> bool:
        """Whether a slot is free that no snapshot of a prompt is in; the oldest of an answer makes room."""
        if len(self._answers) > 2 * self.slots.num_slots:
            self._answers = {name: None for name in self._answers if self.slots.has_snapshot(name)}
        while not self.slots.num_empty_slots and self._answers:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self.slots.forget(oldest)
        return self.slots.num_empty_slots > 0

    def _choose_stops(
        self, sequence: Sequence, hashes: Sized[BlockHash], num_blocks: int, num_shared: int
    ) -> tuple[tuple[int, BlockHash], ...]:
        """Positions and names of the snapshots to make, ascending. `hashes` leave a token to compute."""
        size, unit, num_tokens = self._block_size, self.unit, len(hashes) * self._block_size
        ends = (sequence.num_prompt_tokens - 1, sequence.num_tokens - 1, num_shared * size)
        wanted = [min(end, num_tokens) // unit * unit for end in ends]
        if self._interval:
            wanted += range(self._interval, num_tokens + 1, self._interval)
        first = num_blocks * size
        positions = sorted(dict.fromkeys(each for each in wanted if each > first))
        return tuple([(position, hashes[position // size - 1]) for position in positions])

    def _see(self, hashes: Sized[BlockHash]) -> int:
        """Number of leading blocks with which another sequence began, a multiple of the grid; remembers all of them."""
        every = self.unit // self._block_size
        names = hashes[every - 1 :: every]
        num_seen = next((index for index, name in enumerate(names) if name not in self._seen), len(names))
        for name in names:
            # Moved to the end.
            self._seen.pop(name, None)
            self._seen[name] = None
        while len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return num_seen * every

    def _drop_stop(self, sequence: Sequence) -> None:
        (_, name), *rest = sequence.snapshot_stops
        if self._expected.get(name) is sequence:
            del self._expected[name]
        sequence.snapshot_stops = tuple(rest)

    def _last_at(self, hashes: Sized[BlockHash], num_blocks: int, is_there: Callable[[BlockHash], bool]) -> int:
        """Number of the first `num_blocks` blocks, at most, that end on the grid at a name that `is_there`; else 0."""
        every = self.unit // self._block_size
        for count in range(num_blocks // every * every, 0, -every):
            if is_there(hashes[count - 1]):
                return count
        return 0
