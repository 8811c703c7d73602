"""Random histories of steps: scheduler, codec and mirror, with everything that a scheduler can do to a sequence.

Admissions, chunks, preemptions by recompute and by swap, prefixes found in the cache or brought by a transfer, forks,
aborts and finishes come at random; the other ranks of the replica are played by a second scheduler, whose digests must
be those of the first.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mirror_state import SequenceState, mirror_slots, mirror_state

from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.lockstep.difference import Record
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.mirror.mirror import Mirror, ScheduledSequence
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import Abort, Admit, Event, FinishTransfers, ResetPrefixCache, SetWeightVersion
from spmd_worker.replica.sequence.metadata import SequenceDataDelta
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import SampledIds, sample_indices, sampling_keys
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey, SequenceStatus
from spmd_worker.replica.sequence.step import StepPlan, StepResult

EOS, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 0, 40, 24, 4


@dataclass(frozen=True)
class Ways:
    """Ways to find a sequence's prefix, and to offload it on preemption."""

    caching: bool = False
    preemption: str = "recompute"
    num_host_blocks: int = 0
    num_tier_blocks: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    verify_hits: int = 0
    groups: LayerGroups = ONE_GROUP

    @property
    def num_blocks(self) -> int:
        return NUM_BLOCKS if self.groups is ONE_GROUP else 12 * self.groups.num_groups

    def new_scheduler(self, chunked: bool) -> Scheduler:
        limits = SchedulerLimits(
            max_num_seqs=8,
            max_num_batched_tokens=12 if chunked else 48,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=self.caching,
            preemption=PreemptionPolicy(self.preemption, block_copy_tokens=2.0),
            verify_hits=self.verify_hits,
        )
        tier = HostTier(self.num_tier_blocks) if self.num_tier_blocks else None
        sizes = (self.num_blocks, BLOCK_SIZE)
        cache = CacheManager(*sizes, num_host_blocks=self.num_host_blocks, connector=tier, groups=self.groups)
        slots = StateSlots(self.num_state_slots, self.num_host_state_slots, grid=4) if self.num_state_slots else None
        return Scheduler(limits, cache, StopChecker((EOS,), MAX_MODEL_LEN, None), state_slots=slots)


WAYS = (
    Ways(),
    Ways(caching=True),
    Ways(preemption="swap", num_host_blocks=30),
    Ways(caching=True, preemption="swap", num_host_blocks=6),
    Ways(caching=True, num_tier_blocks=10),
    Ways(caching=True, preemption="auto", num_host_blocks=12, num_tier_blocks=30, verify_hits=2),
    Ways(caching=True, num_state_slots=10, verify_hits=2),
    Ways(caching=True, preemption="swap", num_host_blocks=40, num_state_slots=16, num_host_state_slots=8),
)
_GROUPS = LayerGroups(1, 2, (6,), 48)
GROUPED_WAYS = (
    Ways(groups=_GROUPS),
    Ways(caching=True, groups=_GROUPS, verify_hits=2),
    Ways(caching=True, preemption="swap", num_host_blocks=60, groups=_GROUPS),
    Ways(
        caching=True, preemption="swap", num_host_blocks=60, num_state_slots=9, num_host_state_slots=4, groups=_GROUPS
    ),
)
"""With windows."""


Look = Callable[[StepPlan, tuple[ScheduledSequence, ...]], None]
"""Check at a step, after the mirror has applied its plan."""


@dataclass
class History:
    """One run on two ranks: rank 0's scheduler, a follower's, the wire between them and the follower's mirror."""

    chance: random.Random
    chunked: bool
    max_output_tokens: int = 20
    ways: Ways = Ways()
    nums_of_ids: tuple[int, ...] = (1,)
    next_request_id: int = 0
    last_sampled: SampledIds = field(default_factory=SampledIds)
    encoder: Encoder = field(default_factory=Encoder)
    decoder: Decoder = field(default_factory=Decoder)
    digests: tuple[ChainedDigest, ChainedDigest] = field(default_factory=lambda: (ChainedDigest(), ChainedDigest()))
    mirror: Mirror = field(init=False)
    transfers: list[int] = field(default_factory=list)
    look: Look = lambda plan, scheduled: None
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schedulers = (self.ways.new_scheduler(self.chunked), self.ways.new_scheduler(self.chunked))
        given = {"num_state_slots": self.ways.num_state_slots, "groups": self.ways.groups}
        self.mirror = Mirror(self.ways.num_blocks, BLOCK_SIZE, **given)
        self.heads = [tuple(self.chance.randrange(6) for _ in range(length)) for length in (6, 9, 12)]

    def step(self, events: tuple[Event, ...]) -> None:
        leader, follower = self.schedulers
        events = (*self._finish_transfers(), *events)
        for event in events:
            leader.handle(event)
        plan = leader.schedule()
        digest = self.digests[0].update(Record(plan, events, *self.last_sampled))
        token_ids, num_ids = self.last_sampled
        data = self.encoder.encode(StepMessage(plan.step, events, plan, token_ids, digest, num_ids))
        message = self.decoder.decode(data)
        for event in message.events:
            follower.handle(event)
        own_plan = follower.schedule()
        assert own_plan == message.plan == plan
        own_digest = self.digests[1].update(Record(own_plan, message.events, *message.sampled))
        assert own_digest == message.digest
        if plan.block_ops.transfer:
            self.transfers.append(plan.block_ops.transfer)
        scheduled = self.mirror.apply(message.plan)
        self._compare(plan, scheduled)
        self.look(plan, scheduled)
        self._count(plan)
        if not plan.has_rows:
            self.last_sampled = SampledIds()
            return
        keys = [
            (each.sequence.request.request_id, index)
            for each in scheduled
            for index in sample_indices(each.sequence.sample_index, each.num_samples)
        ]
        assert keys == list(sampling_keys(plan))
        nums = [self.chance.choice(self.nums_of_ids) for _ in keys]
        self.last_sampled = SampledIds.from_rows([[self.chance.randrange(6) for _ in range(num)] for num in nums])
        for scheduler in self.schedulers:
            token_ids, num_ids = self.last_sampled
            scheduler.apply(StepResult(plan.step, token_ids, num_token_ids=num_ids))
        follower.check_integrity()

    def _compare(self, plan: StepPlan, scheduled: tuple[ScheduledSequence, ...]) -> None:
        """Check that the mirror has exactly the unfinished sequences with blocks, complete."""
        held = mirror_state(self.mirror)
        scheduler = self.schedulers[1]
        alive = {each.key: each for group in scheduler.queues.groups.values() for each in group.sequences}
        for each in scheduled:
            mirrored = each.sequence
            sequence = alive[(mirrored.request.request_id, mirrored.sample_index)]
            first = mirrored.num_computed_tokens
            assert mirrored.token_ids(0, mirrored.num_tokens) == [
                *sequence.request.prompt_token_ids,
                *sequence.output_token_ids,
            ]
            assert first + each.num_scheduled_tokens == sequence.num_computed_tokens
        assert [each.sequence.request.request_id for each in scheduled] == [
            request_id for request_id, _ in rows_of(plan)
        ]
        expected = {
            key: (
                tuple(sequence.output_token_ids[: sequence.num_sent_tokens]),
                tuple(sequence.table.block_ids),
                sequence.num_computed_tokens + sequence.repeats_last,
            )
            for key, sequence in alive.items()
            if sequence.status is SequenceStatus.RUNNING and sequence.is_known
        }
        slots = mirror_slots(self.mirror)
        for key in expected:
            assert slots[key] == (-1 if alive[key].state_slot is None else alive[key].state_slot), key
        # Who was preempted stays as it was until it is told of again.
        stale = {key: state for key, state in held.items() if key not in expected}
        assert held == {**expected, **stale}
        for key, state in stale.items():
            assert key in alive, f"{key} has ended and is still mirrored"
            self._compare_stale(alive[key], state)

    def _compare_stale(self, sequence: Sequence, state: SequenceState) -> None:
        """Check that a swapped-out sequence continues from its tokens, and a preempted one is sent again."""
        if sequence.status is SequenceStatus.SWAPPED:
            output_token_ids, _, num_computed_tokens = state
            assert sequence.is_known, sequence.key
            assert output_token_ids == tuple(sequence.output_token_ids[: sequence.num_sent_tokens]), sequence.key
            assert num_computed_tokens == sequence.num_computed_tokens + sequence.repeats_last, sequence.key
        else:
            waits = (SequenceStatus.PREEMPTED, SequenceStatus.LOADING, SequenceStatus.WAITING)
            assert sequence.status in waits, sequence.key
            # The only token of a prompt is repeated after a step that gave no id: nothing is lost.
            assert sequence.num_lost_tokens or sequence.num_tokens == 1, sequence.key
            assert not sequence.is_known, sequence.key

    def _count(self, plan: StepPlan) -> None:
        """Features of a plan, so that a test can report the coverage of its histories."""
        rows = [data for group in plan.groups for data in group.sequences]
        deltas = [data for data in rows if isinstance(data, SequenceDataDelta)]
        for name, number in (
            ("continuing", len(plan.continuing)),
            ("blocks of continuing", len(plan.continuing_blocks)),
            ("chunks", sum(data.num_samples == 0 for data in rows)),
            ("forking rows", sum(data.num_samples > 1 for data in rows)),
            ("first deltas of forks", sum(data.sample_index > 0 and data.num_kept_blocks == 0 for data in deltas)),
            ("copies", len(plan.block_ops.copy)),
            ("swap-outs", len(plan.block_ops.swap_out)),
            ("swap-ins", len(plan.block_ops.swap_in)),
            ("stores", len(plan.block_ops.store)),
            ("loads", len(plan.block_ops.load)),
            ("copies of states", len(plan.state_ops.copy)),
            ("swap-outs of states", len(plan.state_ops.swap_out)),
            ("swap-ins of states", len(plan.state_ops.swap_in)),
            ("blocks computed again", sum(len(each.blocks) for each in plan.hit_comparisons)),
            ("whole new tables", sum(not data.num_kept_blocks and not data.sample_index for data in deltas)),
            ("snapshots", len(rows) - len(deltas)),
            ("finished", len(plan.finished_sequences)),
            ("mixed", bool(plan.continuing and plan.groups)),
            ("continuing by none", plan.continuing_num_ids.count(0)),
            ("continuing by several", sum(num_ids > 1 for num_ids in plan.continuing_num_ids)),
        ):
            self.seen[name] = self.seen.get(name, 0) + number

    def random_events(self) -> tuple[Event, ...]:
        events: list[Event] = []
        while self.chance.random() < 0.35:
            events.append(Admit(self._request()))
        if self.next_request_id and self.chance.random() < 0.05:
            events.append(Abort(self.chance.randrange(self.next_request_id)))
        if self.ways.caching and self.chance.random() < 0.03:
            version = SetWeightVersion(self.chance.randrange(3))
            events.append(self.chance.choice([ResetPrefixCache(), version]))
        return tuple(events)

    def _finish_transfers(self) -> tuple[Event, ...]:
        """Transfers that every rank has finished, one or more steps after they began."""
        if not self.transfers or self.chance.random() < 0.4:
            return ()
        finished, self.transfers = tuple(self.transfers), []
        return (FinishTransfers(finished),)

    def _request(self) -> Request:
        request_id = self.next_request_id
        self.next_request_id += 1
        head = self.chance.choice(self.heads) if self.ways.caching and self.chance.random() < 0.7 else ()
        prompt = (*head, *[self.chance.randrange(6) for _ in range(self.chance.randrange(1, 20 - len(head)))])
        n = self.chance.choice([1, 1, 1, 2, 3, 4])
        sampling = SamplingParams(
            n=n,
            best_of=self.chance.choice([None, None, n, min(n + 1, 4)]),
            max_tokens=self.chance.randrange(1, self.max_output_tokens),
            ignore_eos=self.chance.random() < 0.5,
        )
        return Request(request_id, prompt, sampling, self.chance.getrandbits(64))


def rows_of(plan: StepPlan) -> list[SequenceKey]:
    listed = [SequenceKey(group.request_id, data.sample_index) for group in plan.groups for data in group.sequences]
    return [*plan.continuing, *listed]


def run_history(
    seed: int,
    num_steps: int,
    max_output_tokens: int = 20,
    nums_of_ids: tuple[int, ...] = (1,),
    look: Look | None = None,
    all_ways: tuple[Ways, ...] = WAYS,
) -> History:
    """`num_steps` at random, and more until nothing is left."""
    ways = all_ways[seed // 2 % len(all_ways)]
    history = History(random.Random(seed), bool(seed & 1), max_output_tokens, ways, nums_of_ids)
    history.look = look or history.look
    for _ in range(num_steps):
        history.step(history.random_events())
    for _ in range(2000):
        if not history.schedulers[0].has_unfinished:
            break
        history.step(())
    history.step(())
    assert not history.schedulers[0].has_unfinished
    assert mirror_state(history.mirror) == {}
    assert len(history.mirror._groups) == 0
    return history
