"""Replays a step log: scheduler, cache and mirror in one process, without weights, checked against every plan and
digest.

A replica is a pure function of (state, events, sampled ids), and the log has events and sampled ids, so a replay makes
the same plans or reports the first difference.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from kv_cache.outside_transfers import OutsideTransfers
from spmd_worker.base.errors import ReplayDivergedError, ReplayError
from spmd_worker.frontends.replay.step_log import StepLog, StepLogHeader, header_to_json
from spmd_worker.replica.lockstep.difference import Record, first_difference, record_of
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import Decoder
from spmd_worker.replica.lockstep.wire.message import MessageError, StepMessage
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.mirror.plan_check import AdapterRules
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.factory import CacheSizes, new_scheduler
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.step_order import end_step, must_end_oldest
from spmd_worker.replica.sequence.adapter_kind import PROMPT
from spmd_worker.replica.sequence.events import AddAdapter, AddPromptAdapter, Admit, Close, Event
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream
from spmd_worker.replica.sequence.sampled import SampledIds, sample_indices, sampling_keys
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.tokenizer.tokenizer import Tokenizer

HEADER_KEYS_THAT_MAY_DIFFER = (
    *("code", "model_path", "adapter_paths", "prompt_adapter_paths"),
    *("tensor_parallel_size", "data_parallel_size"),
)
"""Runs that differ only in these should have equal steps: comparing them checks that."""


class SampledPosition(NamedTuple):
    """Position of a sequence's first sampled id, from 0 over prompt and output."""

    request_id: RequestId
    sample_index: int
    position: int

    def __str__(self) -> str:
        return f"request {self.request_id}, sample {self.sample_index}, position {self.position}"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One replayed step: `plan` is the same in run and replay, `ended` are the groups it ended.

    `positions` has the first sampled id's of each sequence. `sampled`, parallel to it, is None at the end of a
    truncated log: the message that carries the ids is missing, so neither they nor `events` were applied.
    """

    plan: StepPlan
    events: tuple[Event, ...]
    positions: tuple[SampledPosition, ...]
    sampled: SampledIds | None
    ended: tuple[SequenceGroup, ...]


class Replay:
    """A replay of one run. Read `steps` to its end; between two steps `scheduler` and `mirror` have the run's state."""

    def __init__(self, header: StepLogHeader, tokenizer: Tokenizer | None) -> None:
        """`tokenizer` finds stop strings; None if no request has any."""
        self.scheduler = _new_replica(header, tokenizer)
        rules = AdapterRules(self.scheduler.adapters.has, header.max_loras)
        sizes = (header.num_blocks, header.block_size, header.num_steps_ahead)
        config = header.speculative_config
        most_drafts = 0 if config is None else config.most_drafts
        self.mirror = Mirror(*sizes, rules, header.num_state_slots, header.groups, most_drafts)
        self.num_steps = 0
        self.num_equal_digests = 0
        self.num_requests = 0
        self.is_closed = False
        self._header, self._tokenizer = header, tokenizer
        self._digest = ChainedDigest()
        # Steps in flight, oldest first, and the positions of their ids.
        self._in_flight: deque[tuple[StepMessage, tuple[SampledPosition, ...]]] = deque()

    def steps(self, payloads: Iterable[bytes]) -> Iterator[ReplayedStep]:
        """Each step once its result is known. Raises ReplayDivergedError at the first that differs."""
        last_events: tuple[Event, ...] = ()
        for message in read_messages(payloads, self._header.num_in_flight):
            yield from self._settle(message.sampled)
            self._plan(message, last_events)
            self._in_flight.append((message, self._mirror(message.plan)))
            last_events = message.events
        is_known = True
        for message, positions in self._in_flight:
            is_known = is_known and not positions
            yield self._finish(message, positions, SampledIds() if is_known else None)

    def _settle(self, sampled: SampledIds) -> Iterator[ReplayedStep]:
        """End the steps that the engine ended before it sent the next message."""
        step, num_samples = 0, 0
        newest_events = self._in_flight[-1][0].events if self._in_flight else ()
        while must_end_oldest(len(self._in_flight), self._is_full, newest_events, self.scheduler, self.is_closed):
            message, positions = self._in_flight.popleft()
            step, num_samples = message.step, len(positions)
            yield self._finish(message, positions, sampled.first(num_samples))
            sampled = sampled.after(num_samples)
        if sampled.num_sequences and self.num_steps:
            raise _wrong_count(step, num_samples, num_samples + sampled.num_sequences)

    @property
    def _is_full(self) -> bool:
        return len(self._in_flight) == self._header.num_in_flight

    def _plan(self, message: StepMessage, last_events: tuple[Event, ...]) -> None:
        self.scheduler.take_logged_drafts(message.plan)
        plan, sampled = self.scheduler.schedule(), message.sampled
        if self.num_steps == 0 and message.step != plan.step:
            raise ReplayError(
                f"the log begins at step {message.step}, without the steps before: it can be compared with another "
                f"(--diff) but not replayed"
            )
        run, replay = (Record(each, last_events, *sampled, message.mask_checksums) for each in (message.plan, plan))
        if plan != message.plan:
            difference = first_difference(run, replay, 0, 1)
            assert difference is not None, f"step {plan.step}: the plans are unequal and no field differs"
            raise ReplayDivergedError(f"step {message.step}: {_with_names(difference, 'in the log', 'in the replay')}")
        digest = self._digest.update(replay)
        if message.digest and digest != message.digest:
            raise ReplayDivergedError(
                f"step {message.step}: the plans are equal but the digests are not: {message.digest.hex()} in the log, "
                f"{digest.hex()} in the replay; the run's rank 0 digested other events or ids than it sent"
            )
        self.num_equal_digests += bool(message.digest)
        self.num_steps += 1

    def _mirror(self, plan: StepPlan) -> tuple[SampledPosition, ...]:
        """Positions of the sampled ids of each sequence in the step."""
        try:
            rows = self.mirror.apply(plan)
        except MirrorError as error:
            raise ReplayError(f"the replayed plan matches the log but fails the worker's check: {error}") from None
        return tuple(
            SampledPosition(
                row.sequence.request.request_id,
                sample_index,
                # Drafts are behind the position.
                row.sequence.num_computed_tokens + row.sequence.num_scheduled_tokens,
            )
            for row in rows
            for sample_index in sample_indices(row.sequence.sample_index, row.num_samples)
        )

    def _finish(
        self, message: StepMessage, positions: tuple[SampledPosition, ...], sampled: SampledIds | None
    ) -> ReplayedStep:
        """Apply the sampled ids, then the events."""
        plan = message.plan
        if sampled is None:
            return ReplayedStep(plan, message.events, positions, None, ())
        if sampled.num_sequences != len(positions):
            raise _wrong_count(plan.step, len(positions), sampled.num_sequences)
        result = StepResult(plan.step, sampled.token_ids, num_token_ids=sampled.num_ids)
        self.mirror.take_sampled(plan.step, sampled)
        ended = end_step(self.scheduler, plan, result, message.events, self._apply_event)
        return ReplayedStep(plan, message.events, positions, sampled, tuple(ended))

    def _apply_event(self, event: Event) -> SequenceGroup | None:
        self.is_closed = self.is_closed or isinstance(event, Close)
        if isinstance(event, Admit):
            self.num_requests += 1
            if event.request.sampling.stop and self._tokenizer is None:
                raise ReplayError(
                    f"request {event.request.request_id} has stop strings {list(event.request.sampling.stop)!r}, which "
                    f"need the tokenizer, but {self._header.model_path} no longer has tokenizer.json: give a folder "
                    f"that has it with --model"
                )
        return self.scheduler.handle(event)


def _wrong_count(step: int, num_samples: int, num_logged: int) -> ReplayDivergedError:
    return ReplayDivergedError(f"step {step} samples {num_samples} ids, but the log has {num_logged}")


def read_messages(payloads: Iterable[bytes], num_in_flight: int = 1) -> Iterator[StepMessage]:
    """Decode the messages of a log with `num_in_flight` steps in flight. Raises ReplayError for an inconsistent one."""
    decoder = Decoder(num_in_flight)
    for number, payload in enumerate(payloads, start=1):
        try:
            yield decoder.decode(payload)
        except MessageError as error:
            raise ReplayError(f"message {number} of the log: {error}") from None


def find_request(messages: Iterable[StepMessage], key: str, seed: int) -> Request | None:
    """The request of `key`: its number, or `index:N` for the row's index in the input, or a custom id.

    The log has neither indices nor custom ids, but each request's random stream is made from one of them and the job's
    seed; a row with its own seed is found by number only.
    """
    streams = [random_stream(seed, None, key.removeprefix("id:"), 0)]
    index = key.removeprefix("index:")
    if index != key and index.isdecimal():
        streams.append(random_stream(seed, None, None, int(index)))
    for request in (event.request for each in messages for event in each.events if isinstance(event, Admit)):
        has_stream = request.sampling.seed is None and request.stream in streams
        if request.request_id == int(key) if key.isdecimal() else has_stream:
            return request
    return None


def header_differences(first: StepLogHeader, other: StepLogHeader) -> list[tuple[str, object, object]]:
    """(key, value in the first, value in the other) of every key that differs, in the order of declaration."""
    mine, theirs = header_to_json(first), header_to_json(other)
    return [(key, value, theirs[key]) for key, value in mine.items() if value != theirs[key]]


def first_log_difference(first: StepLog, other: StepLog, names: tuple[str, str]) -> str | None:
    """First message in which two logs, called `names`, differ, and the field; None if they are equal. Of logs that
    begin at different steps (the last records of two ranks) the common steps are compared. Raises ReplayError.
    """
    depth, other_depth = first.header.num_in_flight, other.header.num_in_flight
    last_step = 0
    # Steps whose ids are in later messages, the oldest first.
    in_flight: deque[StepMessage] = deque(maxlen=depth)
    pairs = _common_steps(read_messages(first.messages(), depth), read_messages(other.messages(), other_depth))
    for mine, theirs in pairs:
        if mine is None and theirs is None:
            return None
        if mine is None or theirs is None:
            longer, shorter = names if theirs is None else names[::-1]
            return f"{shorter} ends after step {last_step}, {longer} continues"
        sampled_by = in_flight[0] if len(in_flight) == depth else None
        difference = _message_difference(mine, theirs, sampled_by, names)
        if difference is not None:
            return difference
        last_step = mine.step
        in_flight.append(mine)
    return None


def _common_steps(
    first: Iterator[StepMessage], other: Iterator[StepMessage]
) -> Iterator[tuple[StepMessage | None, StepMessage | None]]:
    """Pairs from the first common step on; None for a log that has ended."""
    mine, theirs = next(first, None), next(other, None)
    while mine is not None and theirs is not None and mine.step != theirs.step:
        if mine.step < theirs.step:
            mine = next(first, None)
        else:
            theirs = next(other, None)
    yield mine, theirs
    yield from zip_longest(first, other)


def _message_difference(
    mine: StepMessage, theirs: StepMessage, sampled_by: StepMessage | None, names: tuple[str, str]
) -> str | None:
    in_first, in_other = (f"in {name}" for name in names)
    # The message carries an earlier step's samples and mask checksums: report that step, the cause first.
    if sampled_by is not None and mine.mask_checksums != theirs.mask_checksums:
        masks = replace(mine, mask_checksums=theirs.mask_checksums)
        difference = first_difference(record_of(mine), record_of(masks), 0, 1)
        assert difference is not None, (mine.mask_checksums, theirs.mask_checksums)
        return f"step {sampled_by.step} sampled with different masks: {_with_names(difference, in_first, in_other)}"
    if sampled_by is not None and mine.sampled != theirs.sampled:
        for key, one, two in zip(sampling_keys(sampled_by.plan), mine.sampled.rows(), theirs.sampled.rows()):
            if one != two:
                sequence = f"request {key.request_id}, sample {key.sample_index}"
                mine_text, their_text = (", ".join(map(str, row)) or "nothing" for row in (one, two))
                return f"step {sampled_by.step} sampled for {sequence}: {mine_text} {in_first}, {their_text} {in_other}"
    difference = first_difference(record_of(mine), record_of(theirs), 0, 1) if mine != theirs else None
    if difference is not None:
        return f"step {mine.step}: {_with_names(difference, in_first, in_other)}"
    if mine.digest and theirs.digest and mine.digest != theirs.digest:
        return f"step {mine.step}: only the digests differ: another version of the code wrote one of the logs"
    return None


def _with_names(difference: str, first: str, other: str) -> str:
    """Replace ranks by names: two logs are compared like two ranks."""
    return difference.replace(" on rank 0", f" {first}").replace(" on rank 1", f" {other}")


def _new_replica(header: StepLogHeader, tokenizer: Tokenizer | None) -> Scheduler:
    limits = SchedulerLimits(
        header.max_num_seqs,
        header.max_num_batched_tokens,
        header.enable_chunked_prefill,
        header.enable_prefix_caching,
        PreemptionPolicy(header.preemption_mode, header.block_copy_tokens, header.slot_copy_tokens),
        header.watermark_blocks_per_sequence,
        header.pipeline_parallel_size,
        header.num_steps_ahead,
        header.keeps_histories,
        header.max_loras,
        header.snapshot_interval,
        header.media,
        header.verify_hits,
        header.verify_steps,
        header.speculative_config,
        header.num_lookahead_tokens,
        header.vocab_size,
    )
    sizes = CacheSizes(
        header.num_blocks,
        header.num_host_blocks,
        header.num_tier_blocks,
        header.num_state_slots,
        header.num_host_state_slots,
        header.groups,
    )
    adapters = AdapterRegistry(header.max_cpu_loras, map(_pinned, header.adapters))
    prompt_adapters = AdapterRegistry(header.max_prompt_adapters, map(_pinned, header.prompt_adapters), PROMPT)
    saves = header.connector_saves
    outside = None if saves is None else OutsideTransfers(saves=saves)
    given = (header.block_size, header.eos_token_ids, header.max_model_len, tokenizer)
    return new_scheduler(limits, sizes, *given, adapters, prompt_adapters, outside)


def _pinned(event: AddAdapter | AddPromptAdapter) -> RegisteredAdapter:
    """An adapter that was loaded at the start."""
    num_tokens = event.num_tokens if isinstance(event, AddPromptAdapter) else 0
    given = (event.int_id, event.name, event.path, event.digest)
    return RegisteredAdapter(*given, is_pinned=True, last_use=event.int_id, num_tokens=num_tokens)
