"""Continuous batching: queues -> StepPlan, StepResult -> queues. Every rank runs a replica of this.

A replica is a pure function of (state, events, sampled ids): no clock, no set, no hash, no host randomness. Deciding
needs counts, never token values, so the plan of the next step could be made while this one computes; values enter only
in `apply` and in `updates.group_updates`, which tells the mirrors what they do not know yet. Knows blocks as numbers
and tokens as counts. Knows nothing about tensors, ranks, text or files.

One step: running sequences first, in service order, each with what it has to compute (one token in decoding, a chunk in
a prompt); who finds no block takes those of the last in service order, which then waits to be recomputed. What is left
of the token budget goes to the waiting, first come, first served.
"""

from collections import deque
from dataclasses import dataclass

from kv_cache.cache_manager import CacheManager
from spmd_worker.scheduler.budget import StepBudget
from spmd_worker.scheduler.integrity import check_integrity
from spmd_worker.scheduler.policy import WaitingQueue, choose_victim, service_order
from spmd_worker.scheduler.stop import StopChecker
from spmd_worker.scheduler.updates import Decision, Decisions, group_updates, last_token_ids
from spmd_worker.sequence.events import Abort, Admit, Event
from spmd_worker.sequence.outputs import TokenLogprobs
from spmd_worker.sequence.request import Request, RequestId
from spmd_worker.sequence.sequence import (
    FinishReason,
    Sequence,
    SequenceGroup,
    SequenceKey,
    SequenceStatus,
    fork_of,
    new_group,
)
from spmd_worker.sequence.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step may hold. Without `enable_chunked_prefill` a prompt is computed in one piece."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True


@dataclass(slots=True)
class SchedulerCounters:
    """What happened so far, for the summary. `num_recomputed_tokens` were computed and lost by preemption."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0


class Scheduler:
    """The replica. Call `schedule`, then (once the devices answered) `apply`; events between steps go to `handle`.

    `running` holds blocks of `cache`, in service order; `waiting` holds none. Both are for reading.
    """

    def __init__(self, limits: SchedulerLimits, cache: CacheManager, stop_checker: StopChecker) -> None:
        self.counters = SchedulerCounters()
        self._limits = limits
        self.cache = cache
        self._stop_checker = stop_checker
        self._groups: dict[RequestId, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self._in_flight: deque[Decisions] = deque()
        self._ended_sequences: list[SequenceKey] = []
        self._ended_requests: list[RequestId] = []
        self._step = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._groups)

    def handle(self, event: Event) -> SequenceGroup | None:
        """Take an event in. Returns the group an abort ended."""
        if isinstance(event, Admit):
            self._admit(event.request)
        elif isinstance(event, Abort):
            return self._abort(event.request_id)
        return None

    def schedule(self) -> StepPlan:
        """Decide the next step and account for it; `apply` must be called for each plan with groups, in order."""
        self._step += 1
        self.counters.num_steps += 1
        decisions = self._decide()
        num_tokens = decisions.num_tokens
        if num_tokens:
            self._in_flight.append(decisions)
        self.counters.num_computed_tokens += num_tokens
        plan = StepPlan(
            step=self._step,
            groups=group_updates(decisions.others),
            block_ops=self.cache.take_block_ops(),
            finished_sequences=tuple(self._ended_sequences),
            finished_request_ids=tuple(self._ended_requests),
            num_tokens=num_tokens,
            continuing=tuple([sequence.key for sequence in decisions.continuing]),
            continuing_token_ids=last_token_ids(decisions.continuing),
            continuing_blocks=tuple(decisions.blocks),
        )
        self._ended_sequences.clear()
        self._ended_requests.clear()
        return plan

    def apply(self, result: StepResult) -> list[SequenceGroup]:
        """Append what was sampled, fork, finish. Returns the groups that ended, in plan order."""
        ended: list[SequenceGroup] = []
        token_ids, logprobs = result.token_ids, result.logprobs
        for request_id, first, entries in result.prompt_logprobs:
            if request_id in self._groups:
                self._groups[request_id].place_prompt_logprobs(first, entries)
        decisions = self._in_flight.popleft()
        # Rows are sampled in plan order: those in steady decoding, one token each, then the others.
        for index, sequence in enumerate(decisions.continuing):
            if sequence.status is SequenceStatus.RUNNING:
                self._append(sequence, token_ids[index], logprobs[index] if logprobs else None, ended)
        start = len(decisions.continuing)
        for sequence, _, _, num_samples, _ in decisions.others:
            for index, each in enumerate(self._samples_of(sequence, num_samples), start):
                if each.status is SequenceStatus.RUNNING:
                    self._append(each, token_ids[index], logprobs[index] if logprobs else None, ended)
            start += num_samples
        assert start == len(token_ids), (start, len(token_ids))
        self.counters.num_output_tokens += len(token_ids)
        self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, states and blocks agree: for tests and SPMD_WORKER_CHECK."""
        check_integrity(self._groups, self.running, self.waiting, self.cache, self._limits.max_num_seqs)

    # Deciding: counts only.

    def _decide(self) -> Decisions:
        decisions = Decisions()
        budget = StepBudget(self._limits.max_num_batched_tokens, self._limits.max_num_seqs - len(self.running))
        num_preemptions = self.counters.num_preemptions
        self._decide_running(budget, decisions)
        if self.waiting and self.counters.num_preemptions == num_preemptions:
            # After a preemption nobody joins: the blocks just freed belong to those who asked for them.
            self._decide_waiting(budget, decisions)
        return decisions

    def _decide_running(self, budget: StepBudget, decisions: Decisions) -> None:
        running, block_size = self.running, self.cache.block_size
        # Those from `end` on have given way: running is in service order, so victims are taken from its end.
        index, end = 0, len(running)
        while index < end and budget.num_tokens:
            sequence = running[index]
            index += 1
            num_outputs = len(sequence.output_token_ids)
            num_tokens = sequence.num_prompt_tokens + num_outputs - sequence.num_computed_tokens
            is_steady = num_tokens == 1 and sequence.is_known and num_outputs == sequence.num_sent_tokens + 1
            # A block that is written to is shared by forks alone: without forks, one that has begun needs no asking.
            if is_steady and sequence.num_computed_tokens % block_size and sequence.request.sampling.n == 1:
                sequence.num_computed_tokens += 1
                budget.num_tokens -= 1
                decisions.continuing.append(sequence)
            elif num_tokens:
                num_tokens = min(num_tokens, budget.num_tokens)
                end = self._make_room(sequence, num_tokens, index, end)
                if sequence.status is SequenceStatus.RUNNING:
                    self._go_on(sequence, num_tokens, budget, decisions, is_steady=is_steady)
        self.running = [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING]

    def _go_on(
        self, sequence: Sequence, num_tokens: int, budget: StepBudget, decisions: Decisions, *, is_steady: bool
    ) -> None:
        """There is room: take it. Steady decoding that appends a block stays steady; a copied block is told of."""
        num_blocks = sequence.table.num_blocks
        decision = self._take(sequence, num_tokens, budget)
        if is_steady and decision.change.first_index == num_blocks:
            decisions.blocks.extend((len(decisions.continuing), block_id) for block_id in decision.change.block_ids)
            decisions.continuing.append(sequence)
        else:
            decisions.others.append(decision)

    def _make_room(self, sequence: Sequence, num_tokens: int, index: int, end: int) -> int:
        """Preempt from running[index:end] until the sequence fits, at last itself; returns the new end."""
        first = sequence.num_computed_tokens
        while not self.cache.can_extend(sequence.table, first, first + num_tokens):
            victim = choose_victim([sequence, *self.running[index:end]])
            self._preempt(victim)
            if victim is sequence:
                break
            end -= 1
        return end

    def _decide_waiting(self, budget: StepBudget, decisions: Decisions) -> None:
        # Those that have not forked yet will be more than themselves.
        budget.num_sequences -= sum(self._width(sequence) - 1 for sequence in self.running)
        while self.waiting and budget.num_tokens:
            sequence = self.waiting.first()
            num_tokens = min(sequence.num_uncomputed_tokens, budget.num_tokens)
            if not self._may_join(sequence, num_tokens, budget, is_alone=not self.running):
                break
            self.waiting.pop_first()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            budget.num_sequences -= self._width(sequence)
            decisions.others.append(self._take(sequence, num_tokens, budget))
        self.running.sort(key=service_order)

    def _may_join(self, sequence: Sequence, num_tokens: int, budget: StepBudget, *, is_alone: bool) -> bool:
        if not self._limits.enable_chunked_prefill and num_tokens < sequence.num_uncomputed_tokens:
            return False
        if self._width(sequence) > budget.num_sequences:
            return False
        # Room for all of it, not for the first chunk alone: else half-computed prompts fill the cache and fight over
        # it. The watermark leaves running sequences some blocks to grow into.
        whole = sequence.num_tokens
        return self.cache.can_extend(sequence.table, 0, whole, keep_watermark=not is_alone)

    def _width(self, sequence: Sequence) -> int:
        """How many sequences this one will be: a group's first sequence stands for all of it until the fork."""
        num_samples = sequence.request.sampling.n
        if num_samples == 1 or self._groups[sequence.request.request_id].is_forked:
            return 1
        return num_samples

    def _take(self, sequence: Sequence, num_tokens: int, budget: StepBudget) -> Decision:
        first = sequence.num_computed_tokens
        change = self.cache.extend(sequence.table, first, first + num_tokens)
        is_sampling = num_tokens == sequence.num_uncomputed_tokens
        sequence.num_computed_tokens += num_tokens
        budget.spend(num_tokens)
        return Decision(sequence, first, num_tokens, self._width(sequence) if is_sampling else 0, change)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += sequence.num_computed_tokens
        self._groups[sequence.request.request_id].num_preemptions += 1
        self.cache.release(sequence.table)
        sequence.num_computed_tokens = 0
        sequence.is_known = False
        sequence.status = SequenceStatus.PREEMPTED
        self.waiting.give_back(sequence)

    # Applying: values.

    def _samples_of(self, sequence: Sequence, num_samples: int) -> list[Sequence]:
        """The sequences that the samples of one row belong to: itself, and its forks where it forks now."""
        if num_samples <= 1 or sequence.status is not SequenceStatus.RUNNING:
            return [sequence] * num_samples
        group = self._groups[sequence.request.request_id]
        return [sequence, *[self._fork(group, sequence, index) for index in range(1, num_samples)]]

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, ended: list[SequenceGroup]
    ) -> None:
        sequence.output_token_ids.append(token_id)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token_id].logprob
        if self._stop_checker.has_ended(sequence):
            self._finish(sequence)
            group = self._groups[sequence.request.request_id]
            if group.is_finished:
                ended.append(self._end(group))

    def _fork(self, group: SequenceGroup, parent: Sequence, sample_index: int) -> Sequence:
        assert not parent.output_token_ids, "sequences fork when their first tokens are sampled"
        fork = fork_of(parent, sample_index, self.cache.fork(parent.table))
        group.sequences.append(fork)
        position = self.running.index(parent) + sample_index
        self.running.insert(position, fork)
        return fork

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.PREEMPTED or sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self.cache.release(sequence.table)
        sequence.status = SequenceStatus.FINISHED
        self._ended_sequences.append(sequence.key)

    def _end(self, group: SequenceGroup) -> SequenceGroup:
        del self._groups[group.request.request_id]
        self._ended_requests.append(group.request.request_id)
        self.counters.num_prompt_tokens += len(group.request.prompt_token_ids)
        return group

    def _admit(self, request: Request) -> None:
        assert request.request_id not in self._groups, request.request_id
        group = new_group(request)
        self._groups[request.request_id] = group
        self.waiting.arrive(group.sequences[0])

    def _abort(self, request_id: RequestId) -> SequenceGroup | None:
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in group.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.finish_reason = FinishReason.ABORT
                self._stop_checker.forget(sequence)
                self._finish(sequence)
        self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        return self._end(group)
