"""Plans the next step: which sequences are preempted, continue or join.

Decides from counts, and from hashes of blocks whose tokens are known; token values are not used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.block_table import TableChange
from kv_cache.cache_manager import CacheManager
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.scheduler.adapter_turns import AdapterTurns
from spmd_worker.replica.scheduler.allocator import Allocator, PreemptionPolicy
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES, StepBudget, compile_bytes
from spmd_worker.replica.scheduler.drafting import Drafting, can_draft
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits, MediaRows
from spmd_worker.replica.scheduler.policy import choose_victim, service_order
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.scheduler.updates import Decision, Decisions
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus

MIN_PROMPT_TOKENS: Final = 64
"""Minimum of prompt tokens of a step: fewer would cost a pass over the weights for little work."""

PROMPT_ROUNDS: Final = 4
"""With several steps in flight, number of steps per step in flight over which prompts are spread."""

_SERVICE_ORDER: Final = attrgetter("sequence.key")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step, and the preemption policy. Without `enable_chunked_prefill` a prompt is computed in one piece.
    A joining sequence leaves `watermark_blocks_per_sequence` free for each running one: with none, decoding sequences
    would preempt those that have just joined (docs/internals/cache.md has its size); 0 leaves only the cache's own
    watermark. With `num_virtual_engines` steps in flight at once, a step decodes its share of the sequences.
    `num_steps_ahead` of 1 needs a single stage: a step is decided before the ids that the one before it samples are
    read, so decoding sequences go ahead of theirs. `keeps_histories`: every worker's device keeps the tokens of rows
    with penalties and bad words, so they go ahead too. Running sequences have at most `max_loras` different adapters.
    In a model with recurrent states a prompt's state is kept every `snapshot_interval` tokens; 0: only at its end.
    `media` are the limits of images in prompts. One of `verify_hits` prefix-cache hits is verified, and one
    of `verify_steps` decode steps; 0: none is. With `speculation` decoding sequences have drafts, of token ids below
    `vocab_size`; where workers draft, tables have blocks for `num_lookahead_tokens` more.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    preemption: PreemptionPolicy = field(default_factory=PreemptionPolicy)
    watermark_blocks_per_sequence: int = 0
    num_virtual_engines: int = 1
    num_steps_ahead: int = 0
    keeps_histories: bool = False
    max_loras: int = 0
    snapshot_interval: int = 0
    media: MediaRowLimits = NO_MEDIA
    verify_hits: int = 0
    verify_steps: int = 0
    speculation: SpeculativeConfig | None = None
    num_lookahead_tokens: int = 0
    vocab_size: int = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that may be decided before the oldest one's sampled ids are applied."""
        return self.num_virtual_engines + self.num_steps_ahead


class Planner:
    """Decides one step. If the free blocks do not suffice for all running sequences, those of the last priority with
    the least computed work are preempted until they do. Then the running sequences are served, in service order.
    Waiting sequences get the rest of the token budget.

    With several steps in flight, a sequence whose next token is being sampled cannot continue and is not preempted: its
    token would arrive for a sequence that is gone. All others can, whatever is in flight: stages execute steps in
    order, so a later step reads what has been written.

    One step ahead, a sequence whose next token is being sampled continues nevertheless, because its id is on the
    device; unless it is certain to end with that token, or its next sample depends on the token's value. If it ends
    with it, its next sample is dropped. If the free blocks do not suffice, no sequence goes ahead: once the ids are
    applied every sequence can be preempted. Nor does any while sequences may have drafts, which follow known ids.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        cache: CacheManager,
        allocator: Allocator,
        split: Callable[[Sequence, int], None],
        media: MediaRows,
        drafting: Drafting | None = None,
    ) -> None:
        """`split` leaves a joining sequence a given number of its samples; the others wait."""
        self._drafting = drafting
        self._limits, self._queues, self._cache, self._allocator = limits, queues, cache, allocator
        self._split, self._media = split, media
        self._turns = AdapterTurns(limits.max_loras, queues)
        self._min_watermark_blocks = cache.watermark_blocks
        self._allows_ahead = limits.num_steps_ahead > 0

    @property
    def has_drafts(self) -> bool:
        """Whether the next step may have drafts, which follow the ids of those in flight."""
        self._begin_drafts(self._limits.max_num_batched_tokens)
        return self._follows_ids()

    def has_ready(self) -> bool:
        """Whether a step could compute something before the results of those in flight are applied."""
        running = self._queues.running
        has_seat = len(running) < self._limits.max_num_seqs
        may_join = has_seat and self._turns.next(self._turns.running_adapters()) is not None
        return may_join or any(self._num_ready(sequence) for sequence in running)

    def decide(self) -> Decisions:
        """Decide and account for it: allocate blocks, move sequences, count tokens as computed."""
        self._allocator.make_snapshots(self._queues.running)
        if self._cache.groups.num_windows:
            self._allocator.drop_unseen(self._queues.running)
        decisions, num_tokens = Decisions(), self._token_budget()
        self._begin_drafts(num_tokens)
        is_short = self._preempt_for_blocks(num_tokens)
        budget = StepBudget(num_tokens, self._limits.max_num_seqs - len(self._queues.running))
        self._decide_running(budget, decisions)
        if self._queues.waiting and not is_short:
            # After a preemption no sequence joins: the freed blocks are for the running ones that needed them.
            self._decide_waiting(budget, decisions)
        # A plan lists each group once: sequences of one group are sent, and sampled, next to each other.
        decisions.others.sort(key=_SERVICE_ORDER)
        return decisions

    def _follows_ids(self) -> bool:
        """Whether sequences have drafts, in flight or in the step being planned."""
        drafting = self._drafting
        return drafting is not None and (drafting.is_on or any(each.drafts for each in self._queues.running))

    def _begin_drafts(self, num_tokens: int) -> None:
        if self._drafting is not None:
            num_seats = max(self._limits.max_num_seqs - len(self._queues.running), 0)
            joining = islice(self._queues.waiting, num_seats)
            self._drafting.begin(self._served(), sum([each.num_uncomputed_tokens for each in joining]), num_tokens)

    def _token_budget(self) -> int:
        """Most tokens that this step may compute. With several steps in flight, prompts are spread over them: a stage
        waits for the preceding step, and so for every step that is much longer than its neighbours.
        """
        limits = self._limits
        if limits.num_virtual_engines == 1 or not limits.enable_chunked_prefill:
            return limits.max_num_batched_tokens
        running = [sequence.num_uncomputed_tokens for sequence in self._served()]
        num_decoding = running.count(1)
        num_seats = max(limits.max_num_seqs - len(self._queues.running), 0)
        waiting = [sequence.num_uncomputed_tokens for sequence in islice(self._queues.waiting, num_seats)]
        num_prompt_tokens = sum(running) - num_decoding + sum(waiting)
        share = -(-num_prompt_tokens // (PROMPT_ROUNDS * limits.num_virtual_engines))
        least = max(MIN_PROMPT_TOKENS, self._media.longest_whole)
        return min(num_decoding + max(share, least), limits.max_num_batched_tokens)

    def _preempt_for_blocks(self, num_tokens: int) -> bool:
        """Preempt until the blocks suffice for all that still run; returns whether there were too few."""
        num_running = len(self._queues.running)
        self._allows_ahead = may_go_ahead = self._limits.num_steps_ahead > 0 and not self._follows_ids()
        if not self._cache.num_blocks:
            # Running sequences have slots already: nothing is ever preempted for memory.
            return False
        # Each needs at most its tokens' blocks, and one more if they begin or end inside one.
        most_blocks = num_tokens // self._cache.block_size + 2 * num_running
        if self._cache.num_free_blocks >= most_blocks * self._cache.num_groups:
            self._limit_drafts(most_blocks * self._cache.num_groups)
            return False
        if self._drafting is not None and self._num_wanted_blocks(num_tokens) > self._cache.num_free_blocks:
            self._drafting.give_back(self._queues.running)
        if self._allows_ahead and self._num_wanted_blocks(num_tokens) > self._cache.num_free_blocks:
            self._allows_ahead = False
        while self._num_wanted_blocks(num_tokens) > self._cache.num_free_blocks:
            ready = [sequence for sequence in self._queues.running if sequence.num_uncomputed_tokens]
            if len(ready) == 1:
                # No other is ready, or the others' tokens are being sampled: it waits, and no sequence joins meanwhile.
                self._limit_drafts(self._cache.num_free_blocks)
                return True
            victim = choose_victim(ready)
            self._queues.running.remove(victim)
            self._allocator.preempt(victim, self._queues.group_of(victim))
            self._queues.waiting.reinsert(victim)
        self._limit_drafts(self._num_wanted_blocks(num_tokens))
        is_short = may_go_ahead and not self._allows_ahead
        return is_short or len(self._queues.running) < num_running

    def _limit_drafts(self, num_wanted_blocks: int) -> None:
        """Leave the blocks that given tokens need."""
        if self._drafting is not None:
            self._drafting.limit_blocks(self._cache.num_free_blocks - num_wanted_blocks)

    def _num_ready(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that a step could compute now."""
        num_tokens = sequence.num_uncomputed_tokens
        goes_ahead = self._allows_ahead and len(sequence.output_token_ids) < sequence.num_outputs_ahead
        return 1 if not num_tokens and goes_ahead else num_tokens

    def _num_wanted_blocks(self, num_left: int) -> int:
        """Free blocks that running sequences need for `num_left` tokens; an upper bound if some just forked."""
        cache, num_wanted = self._cache, 0
        for sequence in self._served():
            first = sequence.num_computed_tokens
            num_tokens = min(self._num_ready(sequence), num_left)
            num_left -= num_tokens
            may_need = first % cache.block_size == 0 or sequence.shares_tail or sequence.repeats_last
            if num_tokens > 1 or (num_tokens and may_need):
                num_wanted += cache.num_new_blocks(sequence.table, first, first + num_tokens)
        return num_wanted

    def _served(self) -> list[Sequence]:
        """Sequences that may continue in this step: with several steps in flight, a share of the decoding ones. One
        that waits until its grammar can be compiled is skipped: others decode meanwhile.
        """
        running, num_steps = self._queues.running, self._limits.num_virtual_engines
        if num_steps == 1:
            return running
        num_left, num_bytes_left = -(-len(running) // num_steps), MAX_COMPILE_BYTES
        served = []
        for sequence in running:
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens > 1:
                served.append(sequence)
            elif num_tokens and num_left and (wanted := compile_bytes(sequence)) <= num_bytes_left:
                num_bytes_left -= wanted
                served.append(sequence)
                num_left -= 1
        return served

    def _decide_running(self, budget: StepBudget, decisions: Decisions) -> None:
        block_size, num_groups, allows_ahead = self._cache.block_size, self._cache.num_groups, self._allows_ahead
        served = self._served()
        if allows_ahead:
            served = self._decide_ahead(served, budget, decisions)
        if self._drafting is not None and self._drafting.is_on:
            served = self._decide_drafts(self._drafting, served, budget, decisions)
        append, append_id = decisions.continuing.append, decisions.last_ids.append
        num_left = budget.num_tokens
        beginning: list[int] = []
        for sequence in served:
            if not num_left:
                break
            # Hot path: a started block that is not shared needs no check.
            outputs, num_computed = sequence.output_token_ids, sequence.num_computed_tokens
            num_outputs = len(outputs)
            num_tokens = sequence.num_prompt_tokens + num_outputs - num_computed
            is_decode = num_tokens == 1 and sequence.is_known and num_outputs == sequence.num_sent_tokens + 1
            if is_decode and num_computed % block_size and not sequence.shares_tail:
                sequence.num_computed_tokens = num_computed + 1
                # As `Decisions.proceed` does.
                sequence.num_sent_tokens = num_outputs
                num_left -= 1
                append(sequence)
                append_id(outputs[-1])
                continue
            budget.num_tokens = num_left
            # Most blocks are allocated here: the token is the first of a new block, and nothing else needs deciding.
            is_full = num_computed * num_groups == len(sequence.table.block_ids) * block_size
            if is_decode and is_full and not sequence.must_compile:
                if self._are_blocks_counted(budget):
                    beginning.append(len(decisions.continuing))
                    decisions.proceed(sequence)
                    budget.num_tokens -= 1
                elif self._has_blocks(sequence, 1, budget):
                    decisions.proceed(sequence)
                    self._begin_blocks([len(decisions.continuing) - 1], decisions.continuing, decisions.blocks)
                    budget.num_tokens -= 1
            else:
                # Blocks are taken in service order.
                self._begin_blocks(beginning, decisions.continuing, decisions.blocks)
                beginning = []
                self._decide_other(sequence, num_tokens, budget, decisions)
            num_left = budget.num_tokens
        budget.num_tokens = num_left
        self._begin_blocks(beginning, decisions.continuing, decisions.blocks)

    def _decide_other(self, sequence: Sequence, num_tokens: int, budget: StepBudget, decisions: Decisions) -> None:
        """Decide for a sequence that computes several tokens, shares its block, or goes ahead of its id."""
        num_computed, block_size = sequence.num_computed_tokens, self._cache.block_size
        if num_tokens:
            self._continue(sequence, min(num_tokens, budget.num_tokens), budget, decisions)
        elif self._allows_ahead and len(sequence.output_token_ids) < sequence.num_outputs_ahead:
            has_block = num_computed * self._cache.num_groups < len(sequence.table.block_ids) * block_size
            # Blocks of drafts are in the table already.
            if num_computed % block_size or has_block:
                sequence.num_computed_tokens += 1
            elif self._has_blocks(sequence, 1, budget):
                new_blocks = self._allocator.begin_blocks([sequence])
                decisions.ahead_blocks.extend([(len(decisions.ahead), block_id) for block_id in new_blocks])
            else:
                return
            budget.num_tokens -= 1
            decisions.ahead.append(sequence)

    def _decide_drafts(
        self, drafting: Drafting, served: list[Sequence], budget: StepBudget, decisions: Decisions
    ) -> list[Sequence]:
        """Decide for the sequences that have drafts, or need blocks for those to come, and return the others."""
        others: list[Sequence] = []
        for sequence in served:
            first, num_tokens = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
            if not can_draft(sequence) or not self._cache.can_extend(sequence.table, first, first + num_tokens):
                others.append(sequence)
                continue
            drafts = drafting.choose(sequence)
            num_more = drafting.num_more_tokens(sequence, num_tokens, len(drafts))
            if not drafts and (not num_more or drafting.has_room(sequence, num_tokens, num_more)):
                others.append(sequence)
                continue
            sequence.drafts = drafts
            decision = self._compute(sequence, num_tokens, budget, num_more)
            budget.num_tokens -= len(drafts)
            decisions.others.append(decision._replace(num_drafts=len(drafts)))
        return others

    def _begin_blocks(self, indices: list[int], sequences: list[Sequence], blocks: list[tuple[int, BlockId]]) -> None:
        """Compute the next token of the sequences at these indices, in new blocks, which are added to `blocks`."""
        if indices:
            new_blocks = self._allocator.begin_blocks([sequences[index] for index in indices])
            repeated = [index for index in indices for _ in range(self._cache.num_groups)]
            blocks.extend(zip(repeated, new_blocks, strict=True))

    def _decide_ahead(self, running: list[Sequence], budget: StepBudget, decisions: Decisions) -> list[Sequence]:
        """Decide for all that go ahead of their ids, at once, and return the others. If the budget may be short, decide
        only for those before the first other; if it or the blocks are short, for none.
        """
        block_size, ahead = self._cache.block_size, decisions.ahead
        others: list[Sequence] = []
        # Places in `ahead` of those that begin a block.
        beginning: list[int] = []
        num_leading = num_others = 0
        for sequence in running:
            num_outputs, num_computed = len(sequence.output_token_ids), sequence.num_computed_tokens
            num_uncomputed = sequence.num_prompt_tokens + num_outputs - num_computed
            if not num_uncomputed and num_outputs < sequence.num_outputs_ahead:
                # Blocks of drafts are in the table already.
                if not num_computed % block_size and (
                    num_computed * self._cache.num_groups == len(sequence.table.block_ids) * block_size
                ):
                    beginning.append(len(ahead))
                ahead.append(sequence)
            else:
                num_leading = num_leading if others else len(ahead)
                others.append(sequence)
                num_others += num_uncomputed
        if others and len(running) + num_others > budget.num_tokens:
            others = running[num_leading:]
            beginning = [index for index in beginning if index < num_leading]
            del ahead[num_leading:]
        if len(ahead) > budget.num_tokens or len(beginning) * self._cache.num_groups > self._cache.num_free_blocks:
            ahead.clear()
            return running
        self._begin_blocks(beginning, ahead, decisions.ahead_blocks)
        begun = dict.fromkeys(beginning)
        for index, sequence in enumerate(ahead):
            if index not in begun:
                sequence.num_computed_tokens += 1
        budget.num_tokens -= len(ahead)
        return others

    def _continue(self, sequence: Sequence, num_tokens: int, budget: StepBudget, decisions: Decisions) -> None:
        """A sequence that computes just its given ids continues if its table only grows; a copy needs a delta."""
        num_ids = len(sequence.output_token_ids) - sequence.num_sent_tokens
        num_tokens = self._end_of_chunk(sequence, num_tokens, budget)
        if not num_tokens:
            return
        is_all = num_tokens == sequence.num_uncomputed_tokens
        if is_all and not budget.may_sample(sequence):
            # It has just forked, or reached the end of its prompt.
            budget.has_skipped = True
            return
        continues = sequence.is_known and is_all and (num_ids == num_tokens or sequence.repeats_last)
        if not self._has_blocks(sequence, num_tokens, budget):
            return
        num_blocks = sequence.table.num_blocks
        decision = self._compute(sequence, num_tokens, budget)
        if continues and decision.change.first_index == num_blocks:
            if num_ids != 1:
                decisions.uneven[len(decisions.continuing)] = num_ids
            decisions.blocks.extend((len(decisions.continuing), block_id) for block_id in decision.change.block_ids)
            decisions.proceed(sequence)
        else:
            decisions.others.append(decision)

    def _has_blocks(self, sequence: Sequence, num_tokens: int, budget: StepBudget) -> bool:
        """Whether blocks for the next tokens are free. False only if no sequence is left to preempt: transfers or steps
        in flight hold the blocks, and finish by themselves.
        """
        if self._are_blocks_counted(budget):
            return True
        first = sequence.num_computed_tokens
        return self._cache.can_extend(sequence.table, first, first + num_tokens)

    def _are_blocks_counted(self, budget: StepBudget) -> bool:
        """Whether the running sequences' blocks were counted before the first was decided on, and suffice."""
        # Tokens of a skipped sequence go to others, whose blocks were not counted.
        is_counted = self._limits.num_in_flight == 1 and not budget.has_skipped
        return is_counted and len(self._queues.running) > 1

    def _decide_waiting(self, budget: StepBudget, decisions: Decisions) -> None:
        # A sequence that has not forked yet counts as all its samples.
        running, is_sorted = self._queues.running, True
        num_running = sum([sequence.num_samples for sequence in running])
        budget.num_sequences -= num_running - len(running)
        adapters = self._turns.running_adapters()
        deferred: list[Sequence] = []
        while budget.num_tokens and len(deferred) <= budget.num_sequences:
            sequence = self._turns.next(adapters)
            if sequence is None:
                break
            is_swapped = sequence.status is SequenceStatus.SWAPPED
            prefix = [] if is_swapped else self._allocator.find_prefix(sequence, self._queues.group_of(sequence))
            if self._allocator.must_wait(sequence, prefix):
                self._queues.waiting.pop(sequence)
                deferred.append(sequence)
                continue
            num_samples = sequence.num_samples
            if sequence.request.sampling.num_sequences > self._limits.max_num_seqs:
                # Its samples can never all run at once.
                num_samples = min(num_samples, budget.num_sequences)
            # Its forks copy a block each as soon as they exist.
            self._set_watermark(num_running + num_samples - 1)
            if not self._may_join(sequence, prefix, num_samples, budget):
                break
            self._queues.waiting.pop(sequence)
            # It waits once only: loaded blocks that growing sequences evict meanwhile are recomputed.
            if not is_swapped and not sequence.has_loaded:
                transfer = self._allocator.load_prefix(sequence, prefix)
                if transfer is not None:
                    self._queues.wait_for(transfer, sequence)
                    continue
            may_join = partial(self._may_join, sequence, [], num_samples, budget)
            if self._allocator.starts_verification(sequence, prefix, may_join):
                prefix = []
            if num_samples < sequence.num_samples:
                self._split(sequence, num_samples)
            following = self._queues.waiting.first() if self._queues.waiting else None
            self._allocator.allocate(sequence, self._queues.group_of(sequence), prefix, following)
            is_sorted = is_sorted and (not running or running[-1].order < sequence.order)
            running.append(sequence)
            if sequence.request.adapter:
                adapters[sequence.request.adapter] = None
            num_running += num_samples
            budget.num_sequences -= num_samples
            num_tokens = min(sequence.num_uncomputed_tokens, budget.num_tokens)
            num_tokens = self._end_of_chunk(sequence, num_tokens, budget)
            decision = self._compute(sequence, num_tokens, budget)
            decisions.others.append(decision._replace(change=TableChange(0, tuple(sequence.table.block_ids))))
        for sequence in deferred:
            self._queues.waiting.reinsert(sequence)
        self._turns.note_blocked(adapters)
        if not is_sorted:
            running.sort(key=service_order)

    def _may_join(self, sequence: Sequence, prefix: list[BlockId], num_samples: int, budget: StepBudget) -> bool:
        num_there = max(self._cache.num_prefix_tokens(prefix), sequence.request.num_given_tokens)
        num_uncomputed = min(sequence.num_tokens - num_there, sequence.num_uncomputed_tokens)
        if not self._limits.enable_chunked_prefill and num_uncomputed > budget.num_tokens:
            return False
        if not 1 <= num_samples <= budget.num_sequences:
            return False
        if num_uncomputed <= budget.num_tokens and not budget.may_sample(sequence):
            return False
        if sequence.request.media and not self._has_media(sequence, num_uncomputed, budget):
            return False
        is_alone = not (self._queues.running or self._queues.loading)
        return self._allocator.can_allocate(sequence, prefix, keep_watermark=not is_alone)

    def _has_media(self, sequence: Sequence, num_uncomputed: int, budget: StepBudget) -> bool:
        """Whether the rows of a joining sequence's next images are there or fit the step: all of a prompt's that is
        computed in one piece.
        """
        num_tokens = min(num_uncomputed, budget.num_tokens)
        num_now = self._media.num_tokens_now(sequence.request, sequence.num_tokens - num_uncomputed, num_tokens)
        return num_now == num_tokens if not self._limits.enable_chunked_prefill else num_now > 0

    def _set_watermark(self, num_running: int) -> None:
        """Joining sequences leave running ones some blocks to grow into, and the blocks of those that wait for a
        transfer: else later ones would use them up, and loaded blocks would be evicted before use.
        """
        num_spared = self._limits.watermark_blocks_per_sequence * num_running
        loading = [sequence.num_tokens for waits in self._queues.loading.values() for sequence in waits]
        num_reserved = sum([num_blocks_for(num_tokens, self._cache.block_size) for num_tokens in loading])
        num_blocks = max(self._min_watermark_blocks, num_spared) + num_reserved
        self._cache.watermark_blocks = num_blocks * self._cache.num_groups

    def _end_of_chunk(self, sequence: Sequence, num_tokens: int, budget: StepBudget) -> int:
        """Number of the next `num_tokens` tokens to compute now: a chunk ends where a snapshot is made, and before an
        image whose rows do not fit the step, perhaps at once.
        """
        num_now = self._allocator.end_of_chunk(sequence, num_tokens)
        if sequence.request.media:
            num_now = self._media.take(sequence.request, sequence.num_computed_tokens, num_now)
        # The rest goes to others, whose blocks were not counted.
        budget.has_skipped = budget.has_skipped or num_now < num_tokens
        return num_now

    def _compute(self, sequence: Sequence, num_tokens: int, budget: StepBudget, num_more: int = 0) -> Decision:
        """Compute the next tokens. The table gets blocks for `num_more` behind them."""
        assert 0 < num_tokens <= budget.num_tokens, (num_tokens, budget.num_tokens)
        first = sequence.num_computed_tokens
        is_sampling = num_tokens == sequence.num_uncomputed_tokens
        sequence.repeats_last = False
        if self._drafting is not None and is_sampling and not num_more and sequence.num_samples == 1:
            num_more = self._drafting.num_more_tokens(sequence, num_tokens, 0)
        change = self._allocator.extend(sequence, num_tokens, num_more)
        budget.num_tokens -= num_tokens
        if is_sampling:
            budget.spend_grammar(sequence)
        return Decision(sequence, first, num_tokens, sequence.num_samples if is_sampling else 0, change)
