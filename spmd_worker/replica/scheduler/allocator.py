"""Allocates, swaps and releases sequences' KV cache and recurrent states. Only this module moves a sequence between
device, host and prefix cache; it updates the sequence's record: block table, host table, block hashes, number of
computed tokens, and, through `sequence_states.py`, its slot.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from itertools import takewhile

from kv_cache.block import NO_BLOCK, BlockHash, BlockId
from kv_cache.block_hash import GivenRows, hash_blocks, root_hash
from kv_cache.block_table import TableChange
from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.hit_verifier import HitVerifier
from spmd_worker.replica.scheduler.sequence_states import SequenceStates
from spmd_worker.replica.sequence.hit_comparison import HitComparison
from spmd_worker.replica.sequence.prompt_scores import scored_rows
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Decides from counts, never from a clock, whether a preempted sequence is swapped to the host or recomputed.

    `mode` is auto (the cheaper), swap or recompute. `block_copy_tokens` is the cost of swapping a block out and in, in
    tokens that could be computed in that time (see `worker/memory/plan.py`); `slot_copy_tokens` that of a sequence's
    recurrent states, 0 in a model without any.
    """

    mode: str = "recompute"
    block_copy_tokens: float = 0.0
    slot_copy_tokens: float = 0.0

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        if self.mode == "auto":
            return num_blocks * self.block_copy_tokens + self.slot_copy_tokens < num_computed_tokens
        return self.mode == "swap"


class Allocator:
    """Allocates and releases the blocks of sequences. `num_swapped` sequences are on the host now.

    A cache without blocks is an encoder's, whose sequences are computed completely in the step in which they join, or
    that of a model without attention. With `states` a running sequence of a model with recurrent states owns a slot
    beside its blocks, if there are any, and a prefix is found as far as a snapshot was kept.
    """

    def __init__(
        self,
        cache: CacheManager,
        preemption: PreemptionPolicy,
        counters: SchedulerCounters,
        *,
        enable_prefix_caching: bool,
        states: SequenceStates | None = None,
        verifier: HitVerifier | None = None,
    ) -> None:
        self._cache, self._preemption, self._counters = cache, preemption, counters
        self._enable_prefix_caching = enable_prefix_caching
        self._weight_version = 0
        self.num_swapped = 0
        self.states, self._verifier = states, verifier

    def find_prefix(self, sequence: Sequence, group: SequenceGroup) -> list[BlockId]:
        """Blocks that hold the beginning of a waiting sequence, cached or of a running sample of its request; at least
        its last token is left to compute.
        """
        hashes = self._prefix_hashes(sequence)
        if not hashes:
            return self._blocks_of_sample(sequence, group)
        if self.states is not None and not self._cache.num_blocks:
            return [NO_BLOCK] * self.states.num_usable(hashes, len(hashes))
        found = self._cache.find_prefix(hashes)
        while self.states is not None:
            # Both a snapshot and the window before it must be there.
            num_usable = self.states.num_usable(hashes, self._cache.num_prefix_blocks(found))
            if num_usable == self._cache.num_prefix_blocks(found):
                break
            found = self._cache.find_prefix(hashes[:num_usable])
        return found

    def _blocks_of_sample(self, sequence: Sequence, group: SequenceGroup) -> list[BlockId]:
        """The prompt's full blocks, of a running sample that has computed it: what forks share. Without hashes nothing
        else finds them. One that ran when the prefix cache was reset may have them from other weights.
        """
        num_blocks = min(sequence.num_prompt_tokens, sequence.num_tokens - 1) // self._cache.block_size
        if not num_blocks or self.states is not None or self._cache.groups.num_windows:
            return []
        for other in group.sequences:
            is_running = other.status is SequenceStatus.RUNNING and other.block_hashes is not None
            if is_running and other.num_computed_tokens >= other.num_prompt_tokens:
                return other.table.block_ids[: num_blocks * self._cache.num_groups]
        return []

    def must_wait(self, sequence: Sequence, prefix: Sized[BlockId]) -> bool:
        """Whether a running sequence will soon make a snapshot that a waiting one could begin from. No other that could
        make a later one joins meanwhile: it would wait for the same, behind it.
        """
        if self.states is None or sequence.status is SequenceStatus.SWAPPED:
            return False
        return self.states.is_expected(self._prefix_hashes(sequence), self._cache.num_prefix_blocks(prefix))

    def prefix_hashes(self, sequence: Sequence, weight_version: int | None) -> list[BlockHash]:
        """Names of the leading blocks of a new sequence that may be found, on the device or outside; with the weights
        of a version that is about to be set, if one is.
        """
        return self._loadable(self._prefix_hashes(sequence, weight_version))

    def load_prefix(self, sequence: Sequence, prefix: Sized[BlockId]) -> int | None:
        """Transfer that loads the blocks after `prefix`, started if needed; None if there is none to wait for."""
        hashes = self._loadable(self._prefix_hashes(sequence))
        if self.states is not None:
            # The prefix ends at a snapshot, the blocks on the device perhaps later.
            prefix = self._cache.find_prefix(hashes)
        return self._cache.load_prefix(prefix, hashes, sequence.num_tokens)

    def can_allocate(self, sequence: Sequence, prefix: Sized[BlockId], *, keep_watermark: bool) -> bool:
        """Whether all blocks of a waiting sequence can be allocated, not only the next step's: else half-computed
        prompts fill the cache and preempt each other.
        """
        if not self._cache.num_blocks:
            return True
        num_tokens = sequence.num_tokens
        if sequence.status is SequenceStatus.SWAPPED:
            hashes = self._computed_hashes(sequence)
            return self._cache.can_swap_in(sequence.host_table, hashes, num_tokens, keep_watermark=keep_watermark)
        return self._cache.can_start(prefix, num_tokens, keep_watermark=keep_watermark)

    def allocate(
        self, sequence: Sequence, group: SequenceGroup, prefix: Sized[BlockId], following: Sequence | None = None
    ) -> None:
        """Give a waiting sequence its blocks and its state: swapped in from the host, or found in the prefix cache.
        `following` is the sequence that waits next.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            hashes = self._computed_hashes(sequence)
            sequence.table = self._cache.swap_in(sequence.host_table, hashes)
            sequence.num_hashed_blocks = len(hashes)
            self.num_swapped -= 1
            self._counters.num_swapped_in += 1
            if self.states is not None:
                self.states.swap_in(sequence)
        else:
            if self.states is not None:
                self._start_state(self.states, sequence, self._cache.num_prefix_blocks(prefix), following)
            if self._cache.num_blocks:
                self._cache.adopt(sequence.table, prefix)
            sequence.num_computed_tokens = self._cache.num_prefix_tokens(prefix)
            sequence.num_hashed_blocks = self._cache.num_prefix_blocks(prefix)
            num_found = sequence.num_computed_tokens
            self._counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_found)
            sequence.num_lost_tokens = 0
            if group.num_cached_tokens is None:
                group.num_cached_tokens = num_found
                self._counters.num_cached_prompt_tokens += num_found
                is_shared = self._enable_prefix_caching and sequence.block_hashes is not None
                if is_shared and sequence.request.sampling.reads_prefix_cache:
                    self._counters.num_queried_prompt_tokens += sequence.num_prompt_tokens
            num_given = sequence.request.num_given_tokens
            if num_found < num_given:
                # The workers write them before they compute the first chunk.
                self.extend(sequence, num_given - num_found)
        sequence.status, sequence.has_loaded = SequenceStatus.RUNNING, False

    def extend(self, sequence: Sequence, num_tokens: int, num_more: int = 0) -> TableChange:
        """Allocate blocks for the next `num_tokens` to be computed; blocks that they fill can be found from now on. The
        table has blocks for `num_more` tokens behind them, which are not known.
        """
        first = sequence.num_computed_tokens
        if not self._cache.num_blocks:
            is_all = (first, num_tokens) == (0, sequence.num_tokens)
            assert is_all or self.states is not None, (sequence.key, first, num_tokens)
            sequence.num_computed_tokens, sequence.shares_tail = first + num_tokens, False
            return TableChange(0, ())
        change = self._cache.extend(sequence.table, first, first + num_tokens + num_more)
        sequence.shares_tail = False
        sequence.num_computed_tokens += num_tokens
        self._set_full_block_hashes(sequence, num_written_tokens=first)
        return change

    def drop_unseen(self, running: Iterable[Sequence]) -> None:
        """Give back the blocks behind windows. Call before a step's decisions."""
        # Hot path: a decoding row drops a block once in as many steps as it has tokens.
        block_size, lookback = self._cache.block_size, self._cache.groups.lookback
        for sequence in running:
            if sequence.num_computed_tokens - lookback >= (sequence.table.num_dropped + 1) * block_size:
                self._cache.drop_unseen(sequence.table, sequence.num_computed_tokens)

    def begin_blocks(self, sequences: Sized[Sequence]) -> list[BlockId]:
        """`extend` by one token for sequences whose blocks are full, in order. Returns the new blocks, as many of each
        sequence as there are groups of layers.
        """
        if not self._cache.num_blocks:
            for sequence in sequences:
                self.extend(sequence, 1)
            return []
        firsts = [sequence.num_computed_tokens for sequence in sequences]
        block_ids = self._cache.begin_blocks([sequence.table for sequence in sequences], firsts)
        for sequence, first in zip(sequences, firsts):
            sequence.shares_tail = False
            sequence.num_computed_tokens = first + 1
            self._set_full_block_hashes(sequence, num_written_tokens=first)
        return block_ids

    def preempt(self, sequence: Sequence, group: SequenceGroup, *, may_swap: bool = True) -> None:
        """Preempt a running sequence: swap it out if that is cheaper and fits, else drop its blocks."""
        self._counters.num_preemptions += 1
        group.num_preemptions += 1
        if self._verifier is not None:
            self._verifier.drop(sequence)
        if may_swap and self._swap_out(sequence):
            return
        self._release_table(sequence)
        if self.states is not None:
            self.states.release(sequence)
        self._forget_computed(sequence)

    def _forget_computed(self, sequence: Sequence) -> None:
        sequence.num_lost_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.is_known = False
        # The step that recomputes its tokens samples the first of them.
        sequence.worker_drafts = ()
        sequence.status = SequenceStatus.PREEMPTED

    def drop_swapped(self, sequence: Sequence) -> None:
        """Drop what a sequence has on the host: it will be recomputed."""
        self._cache.release_host(sequence.host_table)
        self.num_swapped -= 1
        if self.states is not None:
            self.states.release(sequence)
        self._forget_computed(sequence)

    def starts_verification(self, sequence: Sequence, prefix: Sized[BlockId], may_join: Callable[[], bool]) -> bool:
        """Whether a joining sequence is to compute what it has found again, for a comparison. `may_join` tells whether
        it may join without a prefix.
        """
        verifier = self._verifier
        if verifier is None or not prefix or not self._prefix_hashes(sequence):
            return False
        can_verify = verifier.can_verify(sequence.num_tokens, prefix) and may_join()
        if not verifier.chooses_hit(can_verify=can_verify):
            return False
        hashes = self._prefix_hashes(sequence)[: self._cache.num_prefix_blocks(prefix)]
        verifier.begin(sequence, hashes, prefix)
        return True

    def end_of_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of the next `num_tokens` tokens to compute before a recurrent state is kept, or compared."""
        if self.states is not None:
            num_tokens = self.states.end_of_chunk(sequence, num_tokens)
            if self._verifier is not None:
                num_tokens = self._verifier.end_of_chunk(sequence, num_tokens)
        return num_tokens

    def take_comparisons(self) -> tuple[HitComparison, ...]:
        """Comparisons of hits that the step just decided computes again."""
        return () if self._verifier is None else self._verifier.take()

    def check_verifications(self, running: Sized[Sequence]) -> None:
        """Raise AssertionError where verified hits and running sequences contradict each other."""
        if self._verifier is not None:
            self._verifier.check_integrity(running)

    def make_snapshots(self, running: Sized[Sequence]) -> None:
        """Keep the states that the steps planned so far compute. Call before a step's decisions."""
        if self.states is not None and self._enable_prefix_caching:
            self.states.make_snapshots(running, self._hashes)

    def fork_state(self, parent: Sequence, fork: Sequence) -> None:
        """Give a fork its own recurrent state, copied in the next step; its blocks are shared already."""
        if self.states is not None:
            self.states.fork(parent, fork)

    def release(self, sequence: Sequence) -> None:
        """Release all that a sequence that ended holds, in any status."""
        if self._verifier is not None:
            self._verifier.drop(sequence)
        if self.states is not None:
            if sequence.finish_reason is FinishReason.ERROR:
                self.states.forget_snapshots(sequence)
            self.states.release(sequence)
        if sequence.status is SequenceStatus.SWAPPED:
            self._cache.release_host(sequence.host_table)
            self.num_swapped -= 1
        self._release_table(sequence)

    def reset_prefix_cache(self, groups: Iterable[SequenceGroup]) -> None:
        """Empty the prefix cache; blocks that running sequences hold are not added to it later either."""
        self._cache.reset_prefix_cache()
        if self._verifier is not None:
            self._verifier.clear()
        sequences = [sequence for group in groups for sequence in group.sequences]
        for sequence in sequences:
            is_held = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED)
            sequence.block_hashes = None if is_held else []
            sequence.num_hashed_blocks = 0
        if self.states is not None:
            self.states.clear_names(sequences)

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def snapshot_unit(self) -> int:
        """Tokens from one position to the next at which an answer's state is kept; 0 if none is."""
        return self.states.unit if self.states is not None and self._enable_prefix_caching else 0

    def set_weight_version(self, version: int, groups: Iterable[SequenceGroup]) -> None:
        """Start block hashes from another root; drop what was computed with the old weights from the prefix cache."""
        self._weight_version = version
        self.reset_prefix_cache(groups)

    def _swap_out(self, sequence: Sequence) -> bool:
        # A one-token prompt whose first step sampled nothing has no computed tokens: there is nothing to copy.
        num_computed = sequence.num_computed_tokens
        num_blocks = len(self._cache.owned(sequence.table))
        if not num_computed or not self._preemption.prefers_swap(num_computed, num_blocks):
            return False
        if self.states is not None and not self.states.can_swap_out(sequence):
            return False
        self._set_last_hashes(sequence)
        # Blocks for drafts hold nothing of the sequence.
        self._cache.truncate(sequence.table, sequence.num_tokens)
        host_table = self._cache.swap_out(sequence.table, self._computed_hashes(sequence))
        if host_table is None:
            return False
        sequence.host_table = host_table
        sequence.status = SequenceStatus.SWAPPED
        if self.states is not None:
            self.states.swap_out(sequence)
        self.num_swapped += 1
        self._counters.num_swapped_out += 1
        return True

    def _start_state(
        self, states: SequenceStates, sequence: Sequence, num_blocks: int, following: Sequence | None
    ) -> None:
        hashes, num_shared = self._prefix_hashes(sequence), 0
        # Without blocks the states know which beginnings were seen.
        has_blocks = self._cache.num_blocks > 0
        num_matched = self._cache.num_prefix_blocks(self._cache.find_prefix(hashes)) if has_blocks else None
        if following is not None and following.status is not SequenceStatus.SWAPPED:
            pairs = zip(hashes, self._prefix_hashes(following))
            num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # A prompt that must be computed may be found by others.
        names = hashes or self._hashes(sequence, (sequence.num_tokens - 1) // self._cache.block_size)
        states.start(sequence, names, num_blocks, num_matched, num_shared)

    def _loadable(self, hashes: list[BlockHash]) -> list[BlockHash]:
        """Names of the leading blocks that are of use: with recurrent states, those before the last snapshot."""
        return hashes if self.states is None else hashes[: self.states.num_usable(hashes, len(hashes))]

    def _release_table(self, sequence: Sequence) -> None:
        self._set_last_hashes(sequence)
        self._cache.release(sequence.table)
        sequence.num_hashed_blocks = 0

    def _set_last_hashes(self, sequence: Sequence) -> None:
        """Set the hashes of all full blocks of a table that is about to be released."""
        if not self._cache.num_blocks:
            return
        num_computed = sequence.num_computed_tokens
        self._set_full_block_hashes(sequence, num_written_tokens=num_computed)
        # Again: a block stayed without its hash where another one had it, which may be evicted by now.
        self._cache.set_hashes(sequence.table, self._hashes(sequence, sequence.num_hashed_blocks), 0, num_computed)

    def _set_full_block_hashes(self, sequence: Sequence, *, num_written_tokens: int) -> None:
        # A token that is computed ahead of its id is not hashed.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._cache.block_size
        if num_full <= sequence.num_hashed_blocks or not self._enable_prefix_caching or not self._cache.num_blocks:
            return
        hashes = self._hashes(sequence, num_full)
        if hashes:
            num_saved = sequence.num_prompt_tokens // self._cache.block_size
            self._cache.set_hashes(sequence.table, hashes, sequence.num_hashed_blocks, num_written_tokens, num_saved)
            if self._verifier is not None:
                self._verifier.note_blocks(sequence, hashes, sequence.num_hashed_blocks)
            sequence.num_hashed_blocks = num_full

    def _prefix_hashes(self, sequence: Sequence, weight_version: int | None = None) -> list[BlockHash]:
        """Hashes of the full blocks that may be found in the prefix cache: they leave a token to compute."""
        request = sequence.request
        if not request.sampling.reads_prefix_cache:
            return []
        num_tokens = sequence.num_tokens - 1
        if request.sampling.has_score_arrays:
            # Rows that are scored are computed.
            num_tokens = min(num_tokens, scored_rows(request).start)
        return self._hashes(sequence, num_tokens // self._cache.block_size, weight_version)

    def _computed_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes of the full blocks that are computed."""
        return self._hashes(sequence, sequence.num_computed_tokens // self._cache.block_size)

    def _hashes(self, sequence: Sequence, num_blocks: int, weight_version: int | None = None) -> list[BlockHash]:
        """The first `num_blocks` hashes, each computed once; empty if nothing of the sequence is shared."""
        hashes, block_size = sequence.block_hashes, self._cache.block_size
        if hashes is None or not self._enable_prefix_caching:
            return []
        if len(hashes) < num_blocks:
            version = self._weight_version if weight_version is None else weight_version
            parent = hashes[-1] if hashes else _root_hash(version, sequence.request)
            first = len(hashes) * block_size
            token_ids = sequence.token_ids(first, num_blocks * block_size)
            given = given_rows(sequence.request, first)
            if given:
                hashes += hash_blocks(parent, token_ids, block_size, given)
            else:
                hashes += hash_blocks(parent, token_ids, block_size)
        return hashes[:num_blocks]


def given_rows(request: Request, first: int) -> list[GivenRows]:
    """Names of a request's rows and of its images, where they stand from token `first` on."""
    given = [GivenRows(each.content, each.start - first, each.num_rows) for each in request.rows]
    given += [GivenRows(item.media_id, start - first, count) for item in request.media for start, count in item.runs]
    return given


def _root_hash(weight_version: int, request: Request) -> BlockHash:
    parts = {"adapter_id": request.adapter, "rope_regime": request.rope_regime}
    return root_hash(weight_version, **parts, cache_salt=request.sampling.cache_salt)
