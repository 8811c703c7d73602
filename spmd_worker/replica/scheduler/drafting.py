"""Drafts of a step's decoding sequences: whose, how many, and the blocks for them.

Numbers follow from counts, as a planner's decisions do. The drafts themselves are token values, read where they are
proposed: by the replica's proposer (`replica/drafts`), or by the workers with their last result.

Drafts take only what the step leaves over: tokens of its budget, and free blocks. Blocks that a table has beyond its
tokens are given back before a sequence is preempted, so drafts cause no preemption.

In a model with recurrent states a step leaves a slot with the state after the given tokens. So that answers can be
continued from snapshots, which are made at multiples of a unit, drafts end before the last token that leads to one: the
next step is given that token.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized

from kv_cache.cache_manager import CacheManager
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.proposer import Proposer
from spmd_worker.replica.drafts.rule import num_drafts
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sequence import Sequence


class Drafting:
    """Call `begin` when a step is planned, then `choose` for its sequences. `max_output_tokens` is the stop checker's:
    a draft that could not be an output is not made. Tables get blocks for `num_lookahead_tokens` more than that, where
    the workers draft. Without `proposer` the drafts are those of the workers. Token ids are below `vocab_size`. Drafts
    end before the token that leads to a multiple of `snapshot_unit`, if that is not 0.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        cache: CacheManager,
        max_output_tokens: Callable[[Request], int],
        proposer: Proposer | None,
        vocab_size: int,
        num_lookahead_tokens: int,
        snapshot_unit: int = 0,
    ) -> None:
        self._config, self._cache, self._max_output_tokens = config, cache, max_output_tokens
        self._proposer, self._vocab_size, self._num_lookahead_tokens = proposer, vocab_size, num_lookahead_tokens
        self._snapshot_unit = snapshot_unit
        self._num_decoding = self._num_scheduled = 0
        self._num_tokens_left = self._num_blocks_left = self._num_compile_bytes = 0
        self.is_on = False
        """Whether a sequence may have drafts in the step being planned."""

    def begin(self, served: Sized[Sequence], num_joining_tokens: int, num_tokens: int) -> None:
        """Decide from counts whether the step has drafts. It may compute `num_tokens`; those of `served` and of the
        sequences that may join come first.
        """
        self._num_decoding = sum([each.num_uncomputed_tokens <= 1 for each in served])
        num_given = sum([max(each.num_uncomputed_tokens, 0) for each in served])
        self._num_scheduled = min(num_given + num_joining_tokens, num_tokens)
        self._num_compile_bytes = MAX_COMPILE_BYTES
        num_spare = self._config.step_tokens - self._num_scheduled
        self._num_tokens_left = max(min(num_tokens - num_given, num_spare), 0)
        self.is_on = self._num_tokens_left > 0 and any(self._num_allowed(each) for each in served)

    def limit_blocks(self, num_blocks: int) -> None:
        """The step leaves so many free blocks."""
        self._num_blocks_left = max(num_blocks, 0)

    def choose(self, sequence: Sequence) -> tuple[int, ...]:
        """Drafts of a sequence that `can_draft`, and computes its given tokens in this step; perhaps none."""
        drafts = sequence.worker_drafts if self._proposer is None else ()
        most = min(self._num_allowed(sequence), self._num_tokens_left)
        if self._snapshot_unit:
            most = min(most, num_before_snapshot(sequence.num_tokens, self._snapshot_unit))
        if most:
            most = self._num_with_blocks(sequence, most)
        if most and self._proposer is not None:
            drafts = self._proposer.propose(sequence, most)
            if len(drafts) > most:
                raise ValueError(f"{sequence.key}: {len(drafts)} drafts were proposed, and {most} are the most")
        if drafts and not self._may_compile(sequence):
            drafts = ()
        drafts, sequence.worker_drafts = drafts[:most], ()
        if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            raise ValueError(f"{sequence.key}: drafts {drafts} must be token ids below {self._vocab_size}")
        self._num_tokens_left -= len(drafts)
        return drafts

    def _may_compile(self, sequence: Sequence) -> bool:
        """Whether the grammar of a sequence, if it has one, can be compiled once more for its first drafts."""
        constraint = sequence.request.sampling.structured_outputs
        if constraint is None or sequence.num_drafted:
            return True
        self._num_compile_bytes -= constraint.compile_bytes
        return self._num_compile_bytes >= 0

    def num_more_tokens(self, sequence: Sequence, num_given: int, num_drafts: int) -> int:
        """Tokens beyond the given ones for which a sequence's table is to have blocks: its drafts, and those that the
        workers make next, as far as blocks are free. Accounts for them.
        """
        num_more = num_drafts + (self._num_lookahead_tokens if self.is_on and sequence.num_samples == 1 else 0)
        num_left = self._most_outputs(sequence) - len(sequence.output_token_ids)
        num_more = max(min(num_more, num_left), num_drafts)
        end = sequence.num_computed_tokens + num_given
        num_wanted = self._num_blocks(sequence, end, num_more)
        can_extend = self._cache.can_extend(sequence.table, sequence.num_computed_tokens, end + num_more)
        if num_wanted > self._num_blocks_left or not can_extend:
            num_more, num_wanted = num_drafts, self._num_blocks(sequence, end, num_drafts)
        self._num_blocks_left -= num_wanted
        return num_more

    def has_room(self, sequence: Sequence, num_given: int, num_more: int) -> bool:
        """Whether the table has blocks for the given tokens and `num_more`."""
        end = sequence.num_computed_tokens + num_given + num_more
        return self._cache.num_new_blocks(sequence.table, sequence.num_computed_tokens, end) == 0

    @property
    def wants_drafts(self) -> bool:
        """Whether the workers are to draft after the step being planned."""
        return self.is_on and self._proposer is None

    def give_back(self, running: Iterable[Sequence]) -> bool:
        """Free the blocks beyond the tokens of sequences that are not in flight; whether there were any. The mirrors
        are sent these sequences again.
        """
        found = False
        for sequence in running:
            if sequence.num_uncomputed_tokens > 0 and self._cache.truncate(sequence.table, sequence.num_tokens):
                found, sequence.is_known = True, False
        return found

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ended."""
        if self._proposer is not None:
            self._proposer.forget(sequence)

    def _num_allowed(self, sequence: Sequence) -> int:
        """The rule's number, at most one less than the outputs that are left: the last comes without a draft."""
        if not may_draft(sequence):
            return 0
        num_left = self._most_outputs(sequence) - len(sequence.output_token_ids)
        allowed = num_drafts(self._config, self._num_decoding, self._num_scheduled, sequence)
        return max(min(allowed, self._config.most_drafts, num_left - 1), 0)

    def _most_outputs(self, sequence: Sequence) -> int:
        return self._max_output_tokens(sequence.request)

    def _num_with_blocks(self, sequence: Sequence, most: int) -> int:
        """Number of drafts, `most` at most, for which blocks are left."""
        end = sequence.num_tokens
        if not self._cache.num_blocks or self._num_blocks(sequence, end, most) <= self._num_blocks_left:
            return most
        size = self._cache.block_size
        num_in_last = -end % size
        num_more = self._num_blocks_left // self._cache.num_groups * size
        return min(most, num_in_last + num_more)

    def _num_blocks(self, sequence: Sequence, end: int, num_more: int) -> int:
        """Free blocks for `num_more` tokens after the first `end`, beyond those for these."""
        first, table = sequence.num_computed_tokens, sequence.table
        wanted = [self._cache.num_new_blocks(table, first, stop) for stop in (end, end + num_more)]
        return wanted[1] - wanted[0]


def num_before_snapshot(num_tokens: int, unit: int) -> int:
    """Most drafts behind the first `num_tokens` tokens that leave the next multiple of `unit` to a given token."""
    return unit - 1 - num_tokens % unit


def may_draft(sequence: Sequence) -> bool:
    """Whether a sequence decodes and may have drafts; beams are other rows at each step."""
    sampling = sequence.request.sampling
    is_beam = sampling.token_rules is not None and sampling.token_rules.num_beam_tokens is not None
    is_decoding = bool(sequence.output_token_ids) or sequence.num_uncomputed_tokens <= 0
    return is_decoding and sequence.request.pooling is None and not is_beam


def can_draft(sequence: Sequence) -> bool:
    """Whether the next step computes just what a sequence was given last, so that drafts can follow."""
    num_uncomputed, num_outputs = sequence.num_uncomputed_tokens, len(sequence.output_token_ids)
    num_unsent = num_outputs - sequence.num_sent_tokens
    is_given = num_uncomputed == 1 or (sequence.is_known and num_uncomputed == num_unsent)
    # A grammar's first mask is made without drafts.
    is_first = sequence.repeats_last or sequence.must_compile
    return num_outputs > 0 and num_uncomputed > 0 and is_given and not is_first
