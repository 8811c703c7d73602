"""Where the keys and values of sequences are: on the device, on the host, to be found in the cache, or nowhere.

The one place that moves a sequence between these and keeps its record in step: table, host table, names of its blocks,
how much of it is computed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sized
from dataclasses import dataclass

from kv_cache.block import BlockHash, BlockId
from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import TableChange
from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.sequence.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Whether a sequence that is preempted is copied to the host or computed again: from counts, never from a clock.

    `mode` is auto, swap or recompute. `block_copy_tokens` is the price of a block's way out and back, in tokens that
    could be computed in that time (see `worker/memory/plan.py`); auto takes the cheaper way.
    """

    mode: str = "recompute"
    block_copy_tokens: float = 0.0

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """For a sequence of `num_computed_tokens` in `num_blocks`."""
        if self.mode == "auto":
            return num_blocks * self.block_copy_tokens < num_computed_tokens
        return self.mode == "swap"


class Allocator:
    """Brings sequences in and puts them out. `num_swapped` of them are on the host now.

    A cache without blocks is that of an encoder: sequences hold nothing, and are computed whole in the step in which
    they join.
    """

    def __init__(
        self,
        cache: CacheManager,
        preemption: PreemptionPolicy,
        counters: SchedulerCounters,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self._cache, self._preemption, self._counters = cache, preemption, counters
        self._enable_prefix_caching = enable_prefix_caching
        self._weight_version = 0
        self.num_swapped = 0

    def find_prefix(self, sequence: Sequence) -> list[BlockId]:
        """Blocks that hold the beginning of a sequence that has none. Its last token is always left to compute.

        A request that wants its prompt computed finds nothing.
        """
        if not sequence.request.sampling.reads_prefix_cache:
            return []
        return self._cache.find_prefix(self._findable(sequence))

    def load_prefix(self, sequence: Sequence, prefix: Sized[BlockId]) -> int | None:
        """The transfer that brings what comes after `prefix`, for which the sequence had better wait."""
        if not sequence.request.sampling.reads_prefix_cache:
            return None
        return self._cache.load_prefix(prefix, self._findable(sequence), sequence.num_tokens)

    def num_uncomputed_tokens(self, sequence: Sequence, prefix: Sized[BlockId]) -> int:
        """What is left to compute of a sequence that waits, if it begins with `prefix`."""
        return sequence.num_uncomputed_tokens - len(prefix) * self._cache.block_size

    def has_room(self, sequence: Sequence, prefix: Sized[BlockId], *, keep_watermark: bool) -> bool:
        """Whether the whole of a sequence that waits finds room, not only what the next step computes of it: else
        half-computed prompts fill the cache and fight over it.
        """
        if not self._cache.num_blocks:
            return True
        if sequence.status is SequenceStatus.SWAPPED:
            hashes = self._named(sequence)
            return self._cache.can_swap_in(
                sequence.host_table, hashes, sequence.num_tokens, keep_watermark=keep_watermark
            )
        return self._cache.can_start(prefix, sequence.num_tokens, keep_watermark=keep_watermark)

    def allocate(self, sequence: Sequence, group: SequenceGroup, prefix: Sized[BlockId]) -> None:
        """A sequence that waits gets its blocks: from the host, or those that were found."""
        if sequence.status is SequenceStatus.SWAPPED:
            hashes = self._named(sequence)
            sequence.table = self._cache.swap_in(sequence.host_table, hashes)
            sequence.num_named_blocks = len(hashes)
            self.num_swapped -= 1
            self._counters.num_swapped_in += 1
        else:
            self._cache.adopt(sequence.table, prefix)
            sequence.num_computed_tokens = len(prefix) * self._cache.block_size
            sequence.num_named_blocks = len(prefix)
            self._count_found(sequence, group)
        sequence.status, sequence.has_loaded = SequenceStatus.RUNNING, False

    def extend(self, sequence: Sequence, num_tokens: int) -> TableChange:
        """Room for the next `num_tokens` to be computed; those that fill a block can be found from now on."""
        first = sequence.num_computed_tokens
        if not self._cache.num_blocks:
            assert (first, num_tokens) == (0, sequence.num_tokens), (sequence.key, first, num_tokens)
            sequence.num_computed_tokens = num_tokens
            return TableChange(0, ())
        change = self._cache.extend(sequence.table, first, first + num_tokens)
        sequence.shares_tail = False
        sequence.num_computed_tokens += num_tokens
        self._name_full_blocks(sequence, num_written_tokens=first)
        return change

    def begin_block(self, sequence: Sequence) -> BlockId:
        """`extend` by one token, of a sequence whose blocks are full: the block that it begins."""
        first = sequence.num_computed_tokens
        block_id = self._cache.begin_block(sequence.table, first)
        sequence.shares_tail = False
        sequence.num_computed_tokens = first + 1
        self._name_full_blocks(sequence, num_written_tokens=first)
        return block_id

    def preempt(self, sequence: Sequence, group: SequenceGroup) -> None:
        """A running sequence is preempted: to the host if that is cheaper and has room, else its blocks are lost."""
        self._counters.num_preemptions += 1
        group.num_preemptions += 1
        if self._swap_out(sequence):
            return
        self._release_table(sequence)
        sequence.num_lost_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.is_known = False
        sequence.status = SequenceStatus.PREEMPTED

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it is."""
        if sequence.status is SequenceStatus.SWAPPED:
            self._cache.release_host(sequence.host_table)
            self.num_swapped -= 1
        self._release_table(sequence)

    def reset_prefix_cache(self, groups: Iterable[SequenceGroup]) -> None:
        """Nothing that is cached now can be found; what running sequences hold, not later either."""
        self._cache.reset_prefix_cache()
        for group in groups:
            for sequence in group.sequences:
                is_held = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED)
                sequence.block_hashes = None if is_held else []
                sequence.num_named_blocks = 0

    def set_weight_version(self, version: int, groups: Iterable[SequenceGroup]) -> None:
        """Names of blocks begin from another root; what was computed with the old weights is forgotten as well."""
        self._weight_version = version
        self.reset_prefix_cache(groups)

    def _swap_out(self, sequence: Sequence) -> bool:
        # Nothing is computed of a prompt of one token whose first step gave it no id: there is nothing to copy.
        num_computed = sequence.num_computed_tokens
        if not num_computed or not self._preemption.prefers_swap(num_computed, sequence.table.num_blocks):
            return False
        self._name_full_blocks(sequence, num_written_tokens=sequence.num_computed_tokens)
        host_table = self._cache.swap_out(sequence.table, self._named(sequence))
        if host_table is None:
            return False
        sequence.host_table = host_table
        sequence.status = SequenceStatus.SWAPPED
        self.num_swapped += 1
        self._counters.num_swapped_out += 1
        return True

    def _release_table(self, sequence: Sequence) -> None:
        self._name_full_blocks(sequence, num_written_tokens=sequence.num_computed_tokens)
        self._cache.release(sequence.table)
        sequence.num_named_blocks = 0

    def _count_found(self, sequence: Sequence, group: SequenceGroup) -> None:
        num_found = sequence.num_computed_tokens
        self._counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_found)
        sequence.num_lost_tokens = 0
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_found
            self._counters.num_cached_prompt_tokens += num_found

    def _name_full_blocks(self, sequence: Sequence, *, num_written_tokens: int) -> None:
        # A token that is computed ahead of its id has no part in a name.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self._cache.block_size
        if num_full <= sequence.num_named_blocks or not self._enable_prefix_caching:
            return
        hashes = self._hashes(sequence, num_full)
        if hashes is not None:
            named = sequence.num_named_blocks
            self._cache.name_blocks(sequence.table, hashes[:num_full], named, num_written_tokens)
            sequence.num_named_blocks = num_full

    def _findable(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the full blocks that leave a token to compute."""
        num_full = (sequence.num_tokens - 1) // self._cache.block_size
        hashes = self._hashes(sequence, num_full)
        return hashes[:num_full] if hashes is not None else []

    def _named(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the full blocks that are computed."""
        num_full = sequence.num_computed_tokens // self._cache.block_size
        hashes = self._hashes(sequence, num_full)
        return hashes[:num_full] if hashes is not None else []

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[BlockHash] | None:
        """At least the first `num_blocks` names, worked out once; None where nothing of the sequence is shared."""
        hashes, block_size = sequence.block_hashes, self._cache.block_size
        if hashes is None or not self._enable_prefix_caching:
            return None
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self._root_of(sequence)
            token_ids = sequence.token_ids(len(hashes) * block_size, num_blocks * block_size)
            hashes += hash_blocks(parent, token_ids, block_size)
        return hashes

    def _root_of(self, sequence: Sequence) -> BlockHash:
        """See `kv_cache/block_hash.py` for what must be in it."""
        request = sequence.request
        return root_hash(
            weight_version=self._weight_version,
            rope_regime=request.rope_regime,
            cache_salt=request.sampling.cache_salt,
        )
