"""Continuous batching: queues -> StepPlan, StepResult -> queues. Every rank runs a replica.

A replica is a pure function of (state, events, sampled ids): no clock, set, hash or host randomness. Deciding needs
counts, and values only of tokens that an earlier step has computed (for the hashes of full blocks), so the next step's
plan could be made while this one computes; new values enter only in `apply` and in `updates.group_updates`, which sends
the mirrors what they do not have yet.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from kv_cache.block import BlockHash
from kv_cache.cache_manager import CacheManager
from kv_cache.state_ops import NO_STATE_OPS
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.drafts.proposer import Proposer
from spmd_worker.replica.drafts.rule import record_drafts
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.allocator_factory import new_allocator
from spmd_worker.replica.scheduler.catching_up import catch_up, lagging
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.drafting import Drafting
from spmd_worker.replica.scheduler.integrity import check_adapters, check_integrity, check_states
from spmd_worker.replica.scheduler.media_rows import MediaRows
from spmd_worker.replica.scheduler.pause import Pause
from spmd_worker.replica.scheduler.planner import Planner, SchedulerLimits
from spmd_worker.replica.scheduler.policy import WaitingQueue
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.scheduler.step_verifier import StepVerifier
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.scheduler.updates import Decision, Decisions, given_ids, group_updates
from spmd_worker.replica.sequence.adapter_kind import PROMPT
from spmd_worker.replica.sequence.events import (
    Abort,
    AddAdapter,
    AddPromptAdapter,
    Admit,
    CommitWeights,
    Event,
    FinishTransfers,
    FoundBlocks,
    PauseGeneration,
    PinAdapter,
    PinPromptAdapter,
    RemoveAdapter,
    RemovePromptAdapter,
    ResetMediaRows,
    ResetPrefixCache,
    ResumeGeneration,
    SetWeightVersion,
)
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.prompt_adapter_request import digest_in
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import GRAMMAR_FAILED, NON_FINITE, SampledIds, num_equal, sample_indices
from spmd_worker.replica.sequence.sequence import (
    FinishReason,
    Sequence,
    SequenceGroup,
    SequenceKey,
    SequenceStatus,
    fork_of,
    new_group,
    split_off,
)
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.replica.sequence.weight_spans import begin_span, replace_span


class Scheduler:
    """The replica. Call `schedule`, then (after the devices answered) `apply`; events between steps go to `handle`.
    `queues` is read-only for callers: sequences in `running` hold blocks of `cache`, the others hold none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        stop_checker: StopChecker,
        adapters: AdapterRegistry | None = None,
        prompt_adapters: AdapterRegistry | None = None,
        state_slots: StateSlots | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`state_slots`: of a model with recurrent states, one at least for each sequence that may run. `proposer`:
        with `limits.speculation`, unless the workers draft.
        """
        assert state_slots is None or state_slots.num_slots >= limits.max_num_seqs, (state_slots, limits)
        self.counters, self.queues = SchedulerCounters(), Queues()
        self.pause = Pause(self.queues)
        self.adapters = AdapterRegistry() if adapters is None else adapters
        self.prompt_adapters = AdapterRegistry(kind=PROMPT) if prompt_adapters is None else prompt_adapters
        self.limits, self.cache, self._stop_checker = limits, cache, stop_checker
        self.state_slots = state_slots
        self._allocator = new_allocator(limits, cache, state_slots, self.counters)
        assert not (limits.media.sees_whole_image and state_slots), "chunks end at snapshots, perhaps inside an image"
        self.media_rows = MediaRows(limits.media, self.counters)
        self._is_recording = limits.media.is_recording
        self._drafting = None
        if limits.speculation is not None:
            sizes = (limits.vocab_size, limits.num_lookahead_tokens, self._allocator.snapshot_unit)
            most = stop_checker.max_output_tokens
            self._drafting = Drafting(limits.speculation, cache, most, proposer, *sizes)
        parts = (self._split, self.media_rows, self._drafting)
        self._planner = Planner(limits, self.queues, cache, self._allocator, *parts)
        self._step_verifier = StepVerifier(limits.verify_steps)
        self._in_flight: deque[Decisions] = deque()
        self._ended_sequences: list[SequenceKey] = []
        self._ended_requests: list[RequestId] = []
        self._sampling_version = self._step = 0
        self._wants_drafts = self._has_worker_drafts = False
        # Of the last step with rows.
        self._continuing: list[Sequence] = []
        self._continuing_keys: tuple[SequenceKey, ...] = ()

    def num_computing(self) -> int:
        """Requests for which steps compute: none of those that a pause keeps."""
        return self.pause.num_computing

    @property
    def has_unfinished(self) -> bool:
        """Whether steps compute for any request. States that lag catch up before a pause."""
        return self.pause.num_computing > 0 or (self.pause.is_frozen and bool(lagging(self.queues)))

    @property
    def waits_for_ids(self) -> bool:
        """Whether steps are decided ahead of their ids, and no step could compute anything before some arrive, or one
        could have drafts, which follow them; also after a step whose workers draft, from the tokens that rows have.
        """
        is_ahead, planner = self.limits.num_steps_ahead > 0, self._planner
        return is_ahead and (self._wants_drafts or planner.has_drafts or not planner.has_ready())

    @property
    def running(self) -> list[Sequence]:
        return self.queues.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.queues.waiting

    @property
    def num_swapped(self) -> int:
        """Waiting sequences whose blocks are on the host."""
        return self._allocator.num_swapped

    @property
    def weight_version(self) -> int:
        return self._allocator.weight_version

    def handle(self, event: Event) -> SequenceGroup | None:
        """Apply an event. Returns the group that an abort ended."""
        if isinstance(event, Admit):
            self._admit(event.request)
        elif isinstance(event, Abort):
            return self._abort(event.request_id)
        elif isinstance(event, ResetPrefixCache):
            self._allocator.reset_prefix_cache(self.queues.groups.values())
            if not event.keeps_names:
                self.cache.turn_off_outside()
            self.media_rows.drop_all()
        elif isinstance(event, SetWeightVersion | CommitWeights):
            self._allocator.set_weight_version(event.version, self.queues.groups.values())
            self.media_rows.drop_all()
            # A commit's version is a digest; a caller's may stand for other weights in another run.
            if isinstance(event, SetWeightVersion):
                self.cache.turn_off_outside()
        elif isinstance(event, PauseGeneration):
            self.pause.begin(event.mode)
            if event.clear_cache:
                self._recompute_all()
        elif isinstance(event, ResumeGeneration):
            self.pause.end()
        elif isinstance(event, ResetMediaRows):
            self.media_rows.drop_all()
        elif isinstance(event, FinishTransfers):
            for number in event.numbers:
                num_loaded, num_left_out = self.cache.finish_transfer(number)
                self.counters.num_loaded_blocks += num_loaded
                self.counters.num_stored_blocks -= num_left_out
            self.queues.finish_loading(map(abs, event.numbers))
        elif isinstance(event, FoundBlocks) and self.cache.looks_outside:
            self.cache.update_found(event.hashes, event.missing)
        elif isinstance(event, AddAdapter):
            self.adapters.add(event)
        elif isinstance(event, RemoveAdapter):
            self.adapters.remove(event.int_id)
        elif isinstance(event, PinAdapter):
            self.adapters.pin(event.int_id)
        elif isinstance(event, AddPromptAdapter):
            self.prompt_adapters.add(event)
        elif isinstance(event, RemovePromptAdapter):
            self.prompt_adapters.remove(event.int_id)
        elif isinstance(event, PinPromptAdapter):
            self.prompt_adapters.pin(event.int_id)
        return None

    def begin_weights(self, version: int) -> None:
        """Weights of `version` sample from the result on that is applied next."""
        self._sampling_version = version
        for group in self.queues.groups.values():
            for sequence in group.sequences:
                if sequence.status is not SequenceStatus.FINISHED:
                    first = len(sequence.output_token_ids)
                    sequence.weight_spans = begin_span(sequence.weight_spans, first, version)

    def missing_prefix(self, request: Request, weight_version: int | None = None) -> list[BlockHash]:
        """Names of the leading full blocks of a request that is not admitted yet, with the weights of a version that is
        about to be set, if one is; empty if none of them is missing on the device, or none may be used.
        """
        (sequence,) = new_group(request).sequences
        hashes = self._allocator.prefix_hashes(sequence, weight_version)
        return hashes if self.cache.num_missing(hashes) else []

    def schedule(self) -> StepPlan:
        """Decide the next step. Call `apply` for each plan with rows, in order, `num_in_flight` plans later at most."""
        self._step += 1
        self.counters.num_steps += 1
        is_frozen = self.pause.is_frozen
        decisions = catch_up(self.queues, self.cache, self._allocator) if is_frozen else self._planner.decide()
        drafting = None if is_frozen else self._drafting
        num_tokens = decisions.num_tokens
        if num_tokens:
            self._in_flight.append(decisions)
        self.counters.num_computed_tokens += num_tokens
        block_ops = self.cache.take_block_ops()
        continuing, continuing_blocks = decisions.all_continuing()
        continuing_ids, continuing_num_ids = given_ids(decisions)
        self.counters.num_stored_blocks += len(block_ops.store) + len(block_ops.save)
        encode, drop_rows = self.media_rows.take_plan()
        repeated_rows = self._step_verifier.choose(len(continuing))
        self._wants_drafts = num_tokens > 0 and drafting is not None and drafting.wants_drafts
        self.counters.num_verified_steps += len(repeated_rows)
        plan = StepPlan(
            step=self._step,
            groups=group_updates(decisions.others),
            block_ops=block_ops,
            finished_sequences=tuple(self._ended_sequences),
            finished_request_ids=tuple(self._ended_requests),
            num_tokens=num_tokens,
            continuing=self._keys_of(continuing),
            continuing_token_ids=continuing_ids,
            continuing_num_ids=continuing_num_ids,
            continuing_blocks=tuple(continuing_blocks),
            num_ahead=len(decisions.ahead),
            state_ops=NO_STATE_OPS if self.state_slots is None else self.state_slots.take_state_ops(),
            encode=encode,
            drop_rows=drop_rows,
            hit_comparisons=self._allocator.take_comparisons(),
            repeated_rows=repeated_rows,
            wants_drafts=self._wants_drafts,
        )
        self._ended_sequences.clear()
        self._ended_requests.clear()
        return plan

    def take_logged_drafts(self, plan: StepPlan) -> None:
        """Give sequences the drafts of their next step in a log, which the workers made: for a replay."""
        for group in plan.groups:
            known = self.queues.groups.get(group.request_id)
            drafts = {data.sample_index: data.draft_token_ids for data in group.sequences if data.draft_token_ids}
            for sequence in known.sequences if known is not None and drafts else ():
                sequence.worker_drafts = drafts.get(sequence.sample_index, ())

    def _keys_of(self, continuing: list[Sequence]) -> tuple[SequenceKey, ...]:
        """The same tuple if the same sequences continue: digest and mirror then see at once that it is equal."""
        if continuing != self._continuing:
            self._continuing, self._continuing_keys = continuing, tuple([sequence.key for sequence in continuing])
        return self._continuing_keys

    def apply(self, result: StepResult) -> list[SequenceGroup]:
        """Append the sampled ids, fork, finish. Returns the groups that ended, in plan order.

        A sequence with logits that are not finite, or a grammar that allows no token, ends; others of its request
        continue, so that the error does not depend on the order of steps. Ids after the one that ends a sequence are
        dropped, also those of a step that went ahead of it. A sequence without an id recomputes its last token, and
        all others where its recurrent state has that token already. A sequence with drafts has computed those that it
        gets as ids.
        """
        ended: list[SequenceGroup] = []
        num_ended = len(self._ended_sequences)
        token_ids, logprobs = result.token_ids, result.logprobs
        groups = self.queues.groups
        for request_id, first, entries in result.prompt_logprobs:
            if request_id in groups:
                # A recomputed prompt overwrites them; given keys and values have none.
                known = groups[request_id].prompt_logprobs
                known += [None] * (first - len(known))
                known[first : first + len(entries)] = entries
                spans = (groups[request_id].prompt_spans, first, first + len(entries))
                groups[request_id].prompt_spans = replace_span(*spans, self._sampling_version, len(known))
        for scored in result.prompt_scores:
            if scored.request_id in groups:
                groups[scored.request_id].prompt_scores.append(scored)
        for tokens in result.routed_experts:
            if tokens.request_id in groups:
                groups[tokens.request_id].take_routed(tokens)
        for request_id, vector in result.vectors:
            if request_id in groups:
                groups[request_id].vector = vector
                groups[request_id].prompt_spans = ((0, self._sampling_version),)
        decisions = self._in_flight.popleft()
        # The order of `sampled.sampling_keys`, but over the sequences themselves.
        sampling: Iterable[Sequence] = chain(decisions.ahead, decisions.continuing, self._sampling(decisions.others))
        nothing = (None,) * len(token_ids)
        reported, kept = logprobs or nothing, result.kept_ids or nothing
        has_drafts = self._drafting is not None and decisions.has_drafts
        if self._has_worker_drafts:
            self._drop_worker_drafts()
        if result.drafts:
            sampling, self._has_worker_drafts = _with_drafts(sampling, result.drafts), True
        if result.num_token_ids or has_drafts:
            ids = SampledIds(token_ids, result.num_token_ids)
            rows = zip(sampling, ids.rows(), ids.divide(reported), ids.divide(kept), strict=True)
            for sequence, row_ids, row_logprobs, row_kept in rows:
                self._append_row(sequence, row_ids, row_logprobs, row_kept, ended)
        else:
            are_ids = min(token_ids, default=0) >= 0 and not result.kept_ids
            for sequence, token_id, token_logprobs, kept_ids in zip(sampling, token_ids, reported, kept, strict=True):
                # Hot path: nearly every token continues its answer. One that ended has a `num_outputs_plain` of 0.
                outputs = sequence.output_token_ids
                may_end = len(outputs) + 1 >= sequence.num_outputs_plain or token_id in sequence.end_ids
                if not may_end and are_ids and token_logprobs is None:
                    outputs.append(token_id)
                elif sequence.status is SequenceStatus.RUNNING:
                    self._append(sequence, token_id, token_logprobs, kept_ids, ended)
                else:
                    self.counters.num_output_tokens -= 1
        self.counters.num_output_tokens += len(token_ids)
        if len(self._ended_sequences) > num_ended:
            self.queues.drop_ended()
        return ended

    def _drop_worker_drafts(self) -> None:
        """Drop those of an earlier result."""
        for sequence in self.running:
            sequence.worker_drafts = ()
        self._has_worker_drafts = False

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, states and blocks agree: for tests and SPMD_WORKER_CHECK."""
        check_integrity(self.queues, self.cache, self.limits.max_num_seqs, self.num_swapped)
        if self.state_slots is not None:
            check_states(self.queues, self.state_slots)
        check_adapters(self.queues, self.adapters, self.limits.max_loras)
        self.media_rows.check_integrity()
        self._allocator.check_verifications(self.queues.running)

    def _sampling(self, decisions: Iterable[Decision]) -> Iterator[Sequence]:
        """Sequence per sampled id: each row's own, then its forks, made now; for those of an ended one, itself."""
        for sequence, _, _, num_samples, _, _ in decisions:
            if num_samples <= 1 or sequence.status is not SequenceStatus.RUNNING:
                yield from [sequence] * num_samples
                continue
            group = self.queues.group_of(sequence)
            indices = sample_indices(sequence.sample_index, num_samples)[1:]
            sequence.num_samples = 1
            yield from [sequence, *[self._fork(group, sequence, index) for index in indices]]

    def _append_row(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        kept: tuple[bytes | None, ...],
        ended: list[SequenceGroup],
    ) -> None:
        """Append zero, one or several ids of one sequence, up to the one that ends it."""
        drafts, sequence.drafts = sequence.drafts, ()
        # The last one's keys and values are computed next.
        num_accepted = num_equal(drafts, token_ids[:-1])
        if drafts and sequence.status is SequenceStatus.RUNNING:
            record_drafts(sequence, len(drafts), num_accepted)
            self.counters.count_drafts(len(drafts), num_accepted)
        for index, (token_id, entry, kept_ids) in enumerate(zip(token_ids, logprobs, kept, strict=True)):
            if sequence.status is not SequenceStatus.RUNNING:
                self.counters.num_output_tokens -= 1
                continue
            # Its keys and values were computed as a draft's.
            sequence.num_computed_tokens += index < num_accepted
            self._append(sequence, token_id, entry, kept_ids, ended)
        if self.state_slots is not None and sequence.status is SequenceStatus.RUNNING:
            sequence.num_lagging_tokens = num_accepted
        if not token_ids and sequence.status is SequenceStatus.RUNNING:
            if self.state_slots is not None:
                self._recompute(sequence)
                return
            sequence.num_computed_tokens -= 1
            num_full = sequence.num_computed_tokens // self.cache.block_size
            sequence.num_hashed_blocks = min(sequence.num_hashed_blocks, num_full)
            sequence.repeats_last = True

    def _append(
        self,
        sequence: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        kept_ids: bytes | None,
        ended: list[SequenceGroup],
    ) -> None:
        has_ended = True
        if token_id in (NON_FINITE, GRAMMAR_FAILED):
            self.counters.num_output_tokens -= 1
            sequence.finish_reason = FinishReason.ERROR if token_id == NON_FINITE else FinishReason.GRAMMAR_ERROR
            self._stop_checker.forget(sequence)
        elif sequence.request.pooling is not None:
            # The id is the digest of its vector.
            self.counters.num_output_tokens -= 1
            sequence.finish_reason = FinishReason.STOP
        else:
            sequence.output_token_ids.append(token_id)
            if kept_ids is not None:
                sequence.kept_ids.append(kept_ids)
            if logprobs is not None:
                sequence.cumulative_logprob += logprobs[token_id].logprob
                if sequence.request.sampling.returns_logprobs:
                    sequence.logprobs.append(logprobs)
            has_ended = self._stop_checker.has_ended(sequence)
        if has_ended:
            self._finish(sequence)
            group = self.queues.group_of(sequence)
            if group.is_finished:
                ended.append(self._end(group))

    def _fork(self, group: SequenceGroup, parent: Sequence, sample_index: int) -> Sequence:
        assert not parent.output_token_ids, "sequences fork when their first tokens are sampled"
        fork = fork_of(parent, sample_index, self.cache.fork(parent.table))
        self._allocator.fork_state(parent, fork)
        parent.shares_tail = True
        parent.num_outputs_ahead = fork.num_outputs_ahead = self._num_outputs_ahead(group.request)
        self._stop_checker.prepare(fork)
        group.add(fork)
        position = self.running.index(parent) + sample_index - parent.sample_index
        self.running.insert(position, fork)
        return fork

    def _recompute(self, sequence: Sequence) -> None:
        """Preempt a sequence that no step in flight computes: its state has a token that must be computed again."""
        assert sequence.num_computed_tokens == sequence.num_tokens, f"{sequence.key} got no id and is ahead of it"
        self.running.remove(sequence)
        self._allocator.preempt(sequence, self.queues.group_of(sequence), may_swap=False)
        self.queues.waiting.reinsert(sequence)

    def _recompute_all(self) -> None:
        """Preempt all sequences, between two steps of which none is in flight, and empty the cache."""
        for sequence in self.queues.running:
            self._allocator.preempt(sequence, self.queues.group_of(sequence), may_swap=False)
            self.queues.waiting.reinsert(sequence)
        self.queues.running.clear()
        for sequence in self.queues.waiting:
            if sequence.status is SequenceStatus.SWAPPED:
                self._allocator.drop_swapped(sequence)
        self._allocator.reset_prefix_cache(self.queues.groups.values())
        self.media_rows.drop_all()

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            self.queues.stop_waiting(sequence)
        self._allocator.release(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        sequence.status, sequence.num_outputs_plain = SequenceStatus.FINISHED, 0
        self._ended_sequences.append(sequence.key)

    def _end(self, group: SequenceGroup) -> SequenceGroup:
        del self.queues.groups[group.request.request_id]
        self._ended_requests.append(group.request.request_id)
        self.counters.num_prompt_tokens += len(group.request.prompt_token_ids)
        self._count_end([sequence.finish_reason for sequence in group.sequences])
        media = () if group.request.num_encoder_positions else group.request.media
        frames = [item.num_rows for item in media if item.frame]
        recordings = [item.num_rows for item in media if self._is_recording(item)]
        images = [item.num_rows for item in media if not item.frame and not self._is_recording(item)]
        self.counters.num_recordings += len(recordings)
        self.counters.num_recording_tokens += sum(recordings)
        self.counters.num_images += len(images)
        self.counters.num_image_tokens += sum(images)
        self.counters.num_videos += sum([item.frame == 1 for item in media])
        self.counters.num_video_tokens += sum(frames)
        return group

    def _count_end(self, reasons: list[FinishReason | None]) -> None:
        """Count a request that has ended, by the worst reason of its samples."""
        self.counters.num_finished += 1
        if FinishReason.ERROR in reasons or FinishReason.GRAMMAR_ERROR in reasons:
            self.counters.num_failed += 1
        elif FinishReason.ABORT in reasons:
            self.counters.num_aborted += 1
        elif FinishReason.REPETITION in reasons:
            self.counters.num_finished_by_repetition += 1
        elif FinishReason.LENGTH in reasons:
            self.counters.num_finished_by_length += 1

    def _admit(self, request: Request) -> None:
        assert request.request_id not in self.queues.groups, request.request_id
        if request.adapter:
            self.adapters.use(request.adapter)
        if request.has_prompt_adapter:
            self.prompt_adapters.use(digest_in(request.rows[0]))
        self.media_rows.admit(request)
        group = new_group(request, self._sampling_version)
        self.queues.groups[request.request_id] = group
        self.queues.newest_id = request.request_id
        if group.is_forked:
            group.sequences[0].num_outputs_ahead = self._num_outputs_ahead(request)
        self._stop_checker.prepare(group.sequences[0])
        (self.queues.held if self.pause.is_paused else self.queues.waiting).append(group.sequences[0])

    def _split(self, sequence: Sequence, num_samples: int) -> None:
        """Let `sequence` keep `num_samples` of its samples: the others wait, and find its prompt in the cache."""
        others = split_off(sequence, num_samples)
        for part in (sequence, others):
            # A part with a single sample does not fork.
            if part.num_samples == 1:
                part.num_outputs_ahead = self._num_outputs_ahead(part.request)
        self._stop_checker.prepare(others)
        self.queues.group_of(sequence).add(others)
        self.queues.waiting.reinsert(others)

    def _num_outputs_ahead(self, request: Request) -> int:
        """`Sequence.num_outputs_ahead` of a request's sequences once forked. A pooling request samples once."""
        limits, sampling = self.limits, request.sampling
        # The host computes masks of grammars and rules from the ids.
        needs_ids = sampling.needs_output_ids and not (limits.keeps_histories and not sampling.masks_need_output_ids)
        if not limits.num_steps_ahead or needs_ids or request.pooling is not None:
            return 0
        # The last possible token ends the sequence whatever its value.
        return self._stop_checker.max_output_tokens(request) - 1

    def _abort(self, request_id: RequestId) -> SequenceGroup | None:
        group = self.queues.groups.get(request_id)
        if group is None:
            return None
        for sequence in [each for each in group.sequences if each.status is not SequenceStatus.FINISHED]:
            sequence.finish_reason = FinishReason.ABORT
            self._stop_checker.forget(sequence)
            self._finish(sequence)
        self.queues.drop_ended()
        return self._end(group)


def _with_drafts(sampling: Iterable[Sequence], drafts: tuple[tuple[int, ...], ...]) -> Iterator[Sequence]:
    """The sequences, each with the drafts that the workers made after its ids."""
    for sequence, own in zip(sampling, drafts, strict=True):
        sequence.worker_drafts = own
        yield sequence
