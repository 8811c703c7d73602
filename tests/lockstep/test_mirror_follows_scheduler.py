"""Random histories through scheduler, codec and mirror: after every step the mirror holds what the scheduler holds.

Admissions, chunks, preemptions by recompute, forks, aborts and finishes come at random; the other ranks of the replica
are played by a second scheduler, whose digests must be those of the first.
"""

import copy
import dataclasses
import random
from dataclasses import dataclass, field

import pytest

from kv_cache.cache_manager import CacheManager
from spmd_worker.lockstep.codec import Decoder, Encoder
from spmd_worker.lockstep.digest import ChainedDigest
from spmd_worker.lockstep.message import StepMessage
from spmd_worker.lockstep.mirror import Mirror, MirrorError, ScheduledSequence
from spmd_worker.scheduler.scheduler import Scheduler, SchedulerLimits
from spmd_worker.scheduler.stop import StopChecker
from spmd_worker.sequence.events import Abort, Admit, Event
from spmd_worker.sequence.metadata import SequenceGroupMetadataDelta
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.sequence import SequenceStatus
from spmd_worker.sequence.step import StepPlan, StepResult

EOS, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 0, 40, 24, 4


def new_scheduler(chunked: bool) -> Scheduler:
    return Scheduler(
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=12 if chunked else 48, enable_chunked_prefill=chunked),
        CacheManager(NUM_BLOCKS, BLOCK_SIZE),
        StopChecker((EOS,), MAX_MODEL_LEN, None),
    )


@dataclass
class History:
    """One run on two ranks: rank 0's scheduler, a follower's, the wire between them and the follower's mirror."""

    chance: random.Random
    chunked: bool
    next_request_id: int = 0
    last_sampled: tuple[int, ...] = ()
    encoder: Encoder = field(default_factory=Encoder)
    decoder: Decoder = field(default_factory=Decoder)
    digests: tuple[ChainedDigest, ChainedDigest] = field(default_factory=lambda: (ChainedDigest(), ChainedDigest()))
    mirror: Mirror = field(default_factory=lambda: Mirror(NUM_BLOCKS, BLOCK_SIZE))
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schedulers = (new_scheduler(self.chunked), new_scheduler(self.chunked))

    def step(self, events: tuple[Event, ...]) -> None:
        leader, follower = self.schedulers
        for event in events:
            leader.handle(event)
        plan = leader.schedule()
        digest = self.digests[0].update(plan.step, events, plan, self.last_sampled)
        data = self.encoder.encode(StepMessage(plan.step, events, plan, self.last_sampled, digest))
        message = self.decoder.decode(data)
        for event in message.events:
            follower.handle(event)
        own_plan = follower.schedule()
        assert own_plan == message.plan == plan
        own_digest = self.digests[1].update(own_plan.step, message.events, own_plan, message.sampled_token_ids)
        assert own_digest == message.digest
        scheduled = self.mirror.apply(message.plan)
        self._compare(scheduled)
        if not plan.groups:
            return
        self.last_sampled = tuple(self.chance.randrange(6) for each in scheduled for _ in range(each.num_samples))
        for scheduler in self.schedulers:
            scheduler.apply(StepResult(plan.step, self.last_sampled))
        follower.check_integrity()

    def _compare(self, scheduled: tuple[ScheduledSequence, ...]) -> None:
        """Every sequence with blocks that was scheduled once is in the mirror, whole; nothing that ended is left."""
        held = self.mirror.state()
        scheduler = self.schedulers[1]
        alive = {sequence.key: sequence for sequence in scheduler._all_sequences()}
        for each in scheduled:
            mirrored = each.sequence
            sequence = alive[(mirrored.request.request_id, mirrored.sample_index)]
            first = mirrored.num_computed_tokens
            assert mirrored.token_ids(0, mirrored.num_tokens) == [
                *sequence.request.prompt_token_ids,
                *sequence.output_token_ids,
            ]
            assert first + each.num_scheduled_tokens == sequence.num_computed_tokens
        for key, sequence in alive.items():
            if sequence.status is SequenceStatus.RUNNING and sequence.is_known:
                sent = tuple(sequence.output_token_ids[: sequence.num_sent_tokens])
                assert held[key] == (sent, tuple(sequence.table.block_ids), sequence.num_computed_tokens), key
        for key in held:
            assert key in alive, f"{key} has ended and is still mirrored"
            assert alive[key].status is not SequenceStatus.FINISHED, key

    def random_events(self) -> tuple[Event, ...]:
        events: list[Event] = []
        while self.chance.random() < 0.35:
            events.append(Admit(self._request()))
        if self.next_request_id and self.chance.random() < 0.05:
            events.append(Abort(self.chance.randrange(self.next_request_id)))
        return tuple(events)

    def _request(self) -> Request:
        request_id = self.next_request_id
        self.next_request_id += 1
        prompt = tuple(self.chance.randrange(6) for _ in range(self.chance.randrange(1, 20)))
        n = self.chance.choice([1, 1, 1, 2, 3, 4])
        sampling = SamplingParams(n=n, max_tokens=self.chance.randrange(1, 20), ignore_eos=self.chance.random() < 0.5)
        return Request(request_id, prompt, sampling, self.chance.getrandbits(64))


def run_history(seed: int, num_steps: int) -> History:
    chance = random.Random(seed)
    history = History(chance, chunked=bool(seed & 1))
    for _ in range(num_steps):
        history.step(history.random_events())
    for _ in range(2000):
        if not history.schedulers[0].has_unfinished:
            break
        history.step(())
    history.step(())
    return history


def test_the_mirror_holds_what_the_scheduler_holds_in_random_histories():
    num_preemptions = 0
    for seed in range(60):
        history = run_history(seed, num_steps=25)
        assert not history.schedulers[0].has_unfinished
        assert len(history.mirror) == 0
        assert history.mirror.state() == {}
        num_preemptions += history.schedulers[0].counters.num_preemptions
    # Negative control: the histories reach the states in which a mirror could go wrong.
    assert num_preemptions > 50


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_random_histories():
    for seed in range(10_000):
        assert len(run_history(seed, num_steps=5).mirror) == 0


@pytest.mark.parametrize("num_steps", [3, 8, 20])
def test_a_message_lost_on_the_way_is_noticed_at_the_next_one(num_steps):
    history = History(random.Random(1), chunked=True)
    for _ in range(num_steps):
        history.step(history.random_events())
    before = copy.deepcopy(history.mirror)
    history.step(())
    history.mirror = before
    with pytest.raises(MirrorError, match=f"field step is {num_steps + 2}, the mirror expects {num_steps + 1}"):
        history.step(())


@pytest.mark.parametrize("forgotten", ["finished", "kept blocks"])
def test_a_mirror_that_forgets_part_of_a_plan_does_not_pass(monkeypatch, forgotten):
    """Negative control of the comparison above."""
    if forgotten == "finished":
        monkeypatch.setattr(Mirror, "_forget", lambda self, plan: None)
    else:
        apply = Mirror.apply
        monkeypatch.setattr(Mirror, "apply", lambda self, plan: apply(self, without_kept_blocks(plan)))
    with pytest.raises((AssertionError, MirrorError)):
        [run_history(seed, num_steps=25) for seed in range(20)]


def without_kept_blocks(plan: StepPlan) -> StepPlan:
    """The plan as it was if copy-on-write never replaced a block."""
    groups = tuple(
        dataclasses.replace(
            group, sequences=tuple(dataclasses.replace(data, num_kept_blocks=0) for data in group.sequences)
        )
        if isinstance(group, SequenceGroupMetadataDelta)
        else group
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)
