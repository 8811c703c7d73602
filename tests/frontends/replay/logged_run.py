"""Runs the engine's loop without a model and writes the step log for tests of the replay.

Its sampled ids are a function of the request's stream, sample and position, as in a real run, so that runs with other
limits sample the same ids in other steps.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier
from kv_cache.state_slots import StateSlots
from spmd_worker.frontends.replay.replay import Replay, read_messages
from spmd_worker.frontends.replay.step_log import StepLogHeader, StepLogWriter, read_step_log
from spmd_worker.replica.lockstep.difference import Record
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.step_order import end_step, must_end_oldest
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    Event,
    FinishTransfers,
    ResetPrefixCache,
    SetWeightVersion,
)
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream
from spmd_worker.replica.sequence.sampled import SampledIds, num_equal, sampling_keys
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, SequenceGroup, SequenceKey, SequenceStatus
from spmd_worker.replica.sequence.step import StepPlan, StepResult

VOCAB_SIZE = 100
MAX_STEPS = 2000

HEADER = StepLogHeader(
    code="0" * 32,
    model_path="/no/such/model",
    load_format="auto",
    device="cpu",
    dtype="float32",
    quantization=None,
    tokenizer=None,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(0,),
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    enable_chunked_prefill=True,
    num_blocks=13,
    block_size=4,
    watermark_blocks_per_sequence=1,
    num_host_blocks=0,
    num_tier_blocks=0,
    enable_prefix_caching=False,
    preemption_mode="recompute",
    block_copy_tokens=1.0,
    seed=7,
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    data_parallel_size=1,
)
"""So little cache that nearly every run preempts; what is preempted is computed again."""

PRESSURE: Final[dict[str, object]] = {
    "max_num_batched_tokens": 24,
    "watermark_blocks_per_sequence": 0,
    "num_host_blocks": 8,
    "num_tier_blocks": 16,
    "enable_prefix_caching": True,
    "preemption_mode": "auto",
    "block_copy_tokens": 3.7,
}
"""Changes of the header that switch on all that a full cache can do: `pressure_events` makes use of it."""


def request(
    number: int,
    num_prompt_tokens: int,
    seed: int = HEADER.seed,
    head: tuple[int, ...] = (),
    media: tuple[MediaItem, ...] = (),
    priority: int = 0,
    **sampling: object,
) -> Request:
    """Row `number`, called row-<number>. Its prompt begins with `head`, which counts."""
    prompt = tuple((number * 31 + position) % (VOCAB_SIZE - 1) + 1 for position in range(num_prompt_tokens))
    prompt = (*head, *prompt[len(head) :])
    stream = random_stream(seed, sampling.get("seed"), f"row-{number}", number)
    return Request(RequestId(number), prompt, SamplingParams(**sampling), stream, media=media, priority=priority)


def standard_events() -> dict[int, list[Event]]:
    """By step: ten requests in two waves, two that fork, two that go before all others, two aborts, one of them
    while it is preempted or waits.
    """
    first = [Admit(request(number, 3 + 4 * (number % 4), max_tokens=6 + 3 * number)) for number in range(6)]
    forking = [Admit(request(number, 5, n=3, max_tokens=9)) for number in (6, 7)]
    late = [Admit(request(number, 9, priority=-number, max_tokens=12)) for number in (8, 9)]
    return {1: [*first, *forking], 9: [Abort(RequestId(5))], 12: late, 14: [Abort(RequestId(9))]}


def pressure_events() -> dict[int, list[Event]]:
    """By step: four waves of requests that share the beginnings of their prompts, some that fork; the cache is
    forgotten once, and the weights change once.
    """
    heads = [tuple(range(first, first + 12)) for first in (1, 20, 40)]
    events: dict[int, list[Event]] = {30: [ResetPrefixCache()], 45: [SetWeightVersion(3)]}
    for wave, step in enumerate((1, 12, 26, 40)):
        rows = [
            request(number, 14 + number % 3, head=heads[number % 3], max_tokens=8 + number % 9, n=1 + number % 4 // 3)
            for number in range(6 * wave, 6 * wave + 6)
        ]
        events.setdefault(step, []).extend(Admit(row) for row in rows)
    return events


class LoggedRun:
    """The engine's loop on rank 0, one call of `step` a step; transfers end in the step after the next."""

    def __init__(
        self,
        path: Path,
        header: StepLogHeader = HEADER,
        *,
        has_digests: bool = True,
        new_decoder=None,
        nums_of_ids: tuple[int, ...] = (1,),
    ):
        """Each sequence is given one of `nums_of_ids` ids a step."""
        limits = SchedulerLimits(
            header.max_num_seqs,
            header.max_num_batched_tokens,
            header.enable_chunked_prefill,
            header.enable_prefix_caching,
            PreemptionPolicy(header.preemption_mode, header.block_copy_tokens, header.slot_copy_tokens),
            header.watermark_blocks_per_sequence,
            header.pipeline_parallel_size,
            header.num_steps_ahead,
            snapshot_interval=header.snapshot_interval,
            verify_hits=header.verify_hits,
            verify_steps=header.verify_steps,
            media=header.media,
            speculation=header.speculative_config,
            num_lookahead_tokens=header.num_lookahead_tokens,
            vocab_size=header.vocab_size,
        )
        cache = CacheManager(
            header.num_blocks,
            header.block_size,
            num_host_blocks=header.num_host_blocks,
            connector=HostTier(header.num_tier_blocks) if header.num_tier_blocks else None,
            groups=header.groups,
        )
        checker = StopChecker(header.eos_token_ids, header.max_model_len, new_decoder)
        slots = StateSlots(header.num_state_slots, header.num_host_state_slots) if header.num_state_slots else None
        self.scheduler = Scheduler(limits, cache, checker, state_slots=slots)
        self.log = StepLogWriter(path, header)
        self.plans: list[StepPlan] = []
        self.ended: list[SequenceGroup] = []
        self.aborted: list[tuple[RequestId, SequenceStatus]] = []
        self._has_digests, self._nums_of_ids = has_digests, nums_of_ids
        self._max_under_way = header.num_in_flight
        self._in_flight: deque[tuple[StepPlan, StepResult, tuple[Event, ...]]] = deque()
        self._encoder, self._digest = Encoder(self._max_under_way), ChainedDigest()
        self._last_events: tuple[Event, ...] = ()
        self._sampled = SampledIds()
        self._transfers: list[int] = [0, 0]

    def step(self, *events: Event, plant=None) -> None:
        """`plant` may change the message before it is digested and sent: a rank 0 that went wrong."""
        plan = self.scheduler.schedule()
        if plant is not None:
            plan = plant(plan)
        self._transfers.append(plan.block_ops.transfer)
        number = self._transfers.pop(0)
        if number:
            events = (FinishTransfers((number,)), *events)
        digest = self._digest.update(Record(plan, self._last_events, *self._sampled))
        token_ids, num_ids = self._sampled
        message = StepMessage(plan.step, events, plan, token_ids, digest if self._has_digests else b"", num_ids)
        self.log.write(self._encoder.encode(message))
        self.plans.append(plan)
        self._last_events, self._sampled = events, SampledIds()
        self._in_flight.append((plan, self._compute(plan), events))
        while self._must_settle(events):
            self._settle(*self._in_flight.popleft())

    def _must_settle(self, events: tuple[Event, ...]) -> bool:
        is_full = len(self._in_flight) == self._max_under_way
        return must_end_oldest(len(self._in_flight), is_full, events, self.scheduler, is_closed=False)

    def _settle(self, plan: StepPlan, result: StepResult, events: tuple[Event, ...]) -> None:
        self._sampled = self._sampled.joined(SampledIds(result.token_ids, result.num_token_ids))
        self.ended += end_step(self.scheduler, plan, result, events, self.scheduler.handle)

    def keys_in(self, status: SequenceStatus) -> list[SequenceKey]:
        """Sequences that stand so now, in service order."""
        groups = self.scheduler.queues.groups.values()
        return [each.key for group in groups for each in group.sequences if each.status is status]

    def close(self) -> None:
        """The last message, and the file's end."""
        self.step(Close())
        self.log.close()

    def _compute(self, plan: StepPlan) -> StepResult:
        """Drafts of the workers, if they are wanted, are three ids of which most are right."""
        listed = [(group.request_id, data) for group in plan.groups for data in group.sequences]
        drafts_of = {(request_id, data.sample_index): data.draft_token_ids for request_id, data in listed}
        # The scheduler has counted what the step computes: the next position is the first sampled token's.
        positions = {sequence.key: sequence.num_computed_tokens for sequence in self.scheduler.running}
        rows, drafts = [], []
        for request_id, sample_index in sampling_keys(plan):
            # Forks are not there yet and are computed as far as sample 0.
            position = positions.get((request_id, sample_index), positions.get((request_id, 0), 0))
            num_ids = self._nums_of_ids[fake_token_id(request_id, sample_index, plan.step) % len(self._nums_of_ids)]
            known = drafts_of.get((request_id, sample_index), ())
            right = [fake_token_id(request_id, sample_index, position + offset) for offset in range(len(known) + 4)]
            num_ids = num_equal(known, right) + 1 if known else num_ids
            rows.append([fake_token_id(request_id, sample_index, position + offset) for offset in range(num_ids)])
            first = position + num_ids
            made = [fake_token_id(request_id, sample_index, first + offset) for offset in range(3)]
            drafts.append((*made[:2], made[2] if first % 3 else 1))
        sampled = SampledIds.from_rows(rows)
        made = tuple(drafts) if plan.wants_drafts else ()
        return StepResult(plan.step, sampled.token_ids, num_token_ids=sampled.num_ids, drafts=made)


def fake_token_id(request_id: int, sample_index: int, position: int) -> int:
    """Never the end-of-sequence id, which would make lengths a matter of luck."""
    name = f"{request_id}:{sample_index}:{position}".encode()
    return int.from_bytes(blake2b(name, digest_size=4).digest(), "little") % (VOCAB_SIZE - 1) + 1


def write_log(
    path: Path,
    events_by_step: Mapping[int, Sequence[Event]] | None = None,
    plants: Mapping[int, object] | None = None,
    abort_when: Sequence[SequenceStatus] = (),
    **changes: object,
) -> LoggedRun:
    """A whole run until everything is answered; `changes` are to the header, or `has_digests` or `nums_of_ids`.

    `abort_when`: from step 10 on, a request of which some sequence is in the first of these states is aborted; then one
    in the next.
    """
    options = {name: changes.pop(name) for name in ("has_digests", "nums_of_ids") if name in changes}
    run = LoggedRun(path, replace(HEADER, **changes), **options)
    events_by_step = dict(standard_events() if events_by_step is None else events_by_step)
    step, states = 0, list(abort_when)
    while events_by_step or run.scheduler.has_unfinished:
        step += 1
        assert step < MAX_STEPS, "the run makes no progress"
        events = list(events_by_step.pop(step, ()))
        found = run.keys_in(states[0]) if states and step >= 10 else []
        if found:
            events.append(Abort(found[0].request_id))
            run.aborted.append((found[0].request_id, states.pop(0)))
        run.step(*events, plant=(plants or {}).get(step))
    assert not states, f"no sequence was ever {states[0].value}"
    run.close()
    return run


def write_pressure_log(path: Path, **changes: object) -> LoggedRun:
    """A run with prefix caching, both kinds of preemption and a host tier; a request is aborted in each state."""
    states = (SequenceStatus.SWAPPED, SequenceStatus.LOADING, SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)
    return write_log(path, pressure_events(), abort_when=states, **{**PRESSURE, **changes})


def is_aborted(group: SequenceGroup) -> bool:
    """Whether any sample ended by an abort."""
    return any(sequence.finish_reason is FinishReason.ABORT for sequence in group.sequences)


def replay_all(path: Path) -> Replay:
    log = read_step_log(path)
    replay = Replay(log.header, tokenizer=None)
    for _ in replay.steps(log.messages()):
        replay.scheduler.check_integrity()
    return replay


def rewrite(source: Path, target: Path, change: Callable[[StepMessage], StepMessage | None]) -> Path:
    """A validly encoded log in which `change` may alter or drop messages, as rank 0 could have written it."""
    log = read_step_log(source)
    encoder = Encoder()
    with StepLogWriter(target, log.header) as writer:
        for message in read_messages(log.messages()):
            changed = change(message)
            if changed is not None:
                writer.write(encoder.encode(changed))
    return target
