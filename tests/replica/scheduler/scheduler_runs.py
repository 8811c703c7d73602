"""A scheduler with made-up samples: what each step computes, as tuples, told by a mirror that accepts every plan.

Knows plans only through the mirror, so that how a plan spells a step does not matter. Every step is also done to a
cache with contents (`visible_cache.py`), where each row must find its past, and, in a model with recurrent states, to
slots with contents (`visible_states.py`). Needs no torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import pytest
from visible_cache import VisibleCache
from visible_states import VisibleStates

from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from kv_cache.outside_transfers import OutsideTransfers
from kv_cache.state_slots import StateSlots
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.proposer import Proposer
from spmd_worker.replica.mirror.block_check import BlockChanges, MirroredBlocks
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.mirror.plan_check import AdapterRules
from spmd_worker.replica.scheduler.adapter_plans import addition_of, plan_addition
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.step_order import must_end_oldest
from spmd_worker.replica.scheduler.stop import DecoderFactory, StopChecker
from spmd_worker.replica.sequence.adapter_kind import LORA
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    FinishTransfers,
    FoundBlocks,
    PauseGeneration,
    ResetPrefixCache,
    ResumeGeneration,
    SetWeightVersion,
)
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup, SequenceKey, SequenceStatus
from spmd_worker.replica.sequence.step import StepPlan, StepResult

EOS = 0
PLAIN_TOKEN = 9
VOCAB_SIZE = 1000

Values = Callable[[SequenceKey, int], int]
"""The token sampled for a sequence at a position."""


def without_block_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors let rows read any blocks, so that the cache with contents is what sees it."""
    monkeypatch.setattr(MirroredBlocks, "check", lambda self, *args, **options: BlockChanges({}, {}, {}, ()))


class Row(NamedTuple):
    """One sequence of a step: `num_tokens` from `first` on, then `num_samples` are sampled."""

    request: int
    sample: int
    first: int
    num_tokens: int
    num_samples: int


class Run:
    """Admit, abort and step; `ended` collects the groups that ended, by request."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        watermark: int = 0,
        watermark_per_sequence: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 100,
        chunked: bool = True,
        max_model_len: int = 64,
        new_decoder: DecoderFactory | None = None,
        caching: bool = False,
        preemption: str = "recompute",
        block_copy_tokens: float = 1.0,
        num_host_blocks: int = 0,
        num_tier_blocks: int = 0,
        transfer_steps: int = 2,
        virtual_engines: int = 1,
        ahead: int = 0,
        histories: bool = False,
        max_loras: int = 0,
        max_adapters: int = 3,
        saves_outside: bool | None = None,
        snapshot_slots: int | None = None,
        host_slots: int = 0,
        slot_copy_tokens: float = 0.0,
        grid: int = 8,
        interval: int = 0,
        media: MediaRowLimits = NO_MEDIA,
        verify_hits: int = 0,
        groups: LayerGroups = ONE_GROUP,
        drafts: int = 0,
        step_tokens: int = 100,
        lookahead: int = 0,
        proposer: Proposer | None = None,
    ) -> None:
        """`drafts`: most of a row, by `proposer`, or by `worker_drafts`, in steps of at most `step_tokens`.
        `snapshot_slots`: the model has recurrent states, and so many slots more than sequences run. `groups` have
        windows, or none.
        """
        self.cache = CacheManager(
            num_blocks,
            block_size,
            watermark,
            num_host_blocks=num_host_blocks,
            connector=HostTier(num_tier_blocks) if num_tier_blocks else None,
            outside=None if saves_outside is None else OutsideTransfers(saves=saves_outside),
            groups=groups,
        )
        policy = PreemptionPolicy(preemption, block_copy_tokens, slot_copy_tokens)
        counts = (watermark_per_sequence, virtual_engines, ahead, histories, max_loras, interval, media, verify_hits, 0)
        speculation = SpeculativeConfig("ngram", drafts, max_step_tokens=step_tokens) if drafts else None
        counts = (*counts, speculation, lookahead, VOCAB_SIZE)
        num_slots = 0 if snapshot_slots is None else max_num_seqs + snapshot_slots
        self.slots = StateSlots(num_slots, host_slots, grid=grid) if num_slots else None
        self.limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, chunked, caching, policy, *counts)
        self.adapters = AdapterRegistry(max_adapters if max_loras else 0)
        checker = StopChecker((EOS,), max_model_len, new_decoder)
        parts = (self.adapters, None, self.slots, proposer)
        self.scheduler = Scheduler(self.limits, self.cache, checker, *parts)
        self.worker_drafts: Callable[[SequenceKey, int], tuple[int, ...]] | None = None
        """Drafts of the workers for a sequence whose next token is at a position."""
        rules = AdapterRules(self.adapters.has, max_loras)
        self.mirror = Mirror(num_blocks, block_size, ahead, rules, num_slots, groups, drafts)
        self.states = VisibleStates(num_slots, host_slots)
        self.contents = VisibleCache(num_blocks, block_size, num_host_blocks, num_tier_blocks, groups)
        self.ended: dict[int, SequenceGroup] = {}
        self.last_plan = StepPlan(0)
        self._num_requests = 0
        self._transfer_steps, self._transfers = transfer_steps, deque[tuple[int, int]]()
        self._was_transferring = False
        self.has_failed: Callable[[int], bool] = lambda number: False
        self.num_ids: Callable[[], int] = lambda: 1
        """The number of ids of each sample; with steps ahead it must be 1."""
        self._in_flight = deque[StepResult | None]()

    def admit(
        self,
        num_prompt_tokens: int,
        prompt: tuple[int, ...] | None = None,
        adapter: int = 0,
        media: tuple[MediaItem, ...] = (),
        priority: int = 0,
        **sampling: object,
    ) -> int:
        """`prompt` is what the request asks, else `num_prompt_tokens` of the token 1. `adapter`: a loaded content."""
        request_id = RequestId(self._num_requests)
        self._num_requests += 1
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        given = (prompt or (1,) * num_prompt_tokens, params)
        request = Request(request_id, *given, stream=request_id, adapter=adapter, media=media, priority=priority)
        names = self.scheduler.missing_prefix(request) if self.cache.looks_outside else []
        found = tuple(takewhile(lambda name: name in self.contents.outside, names))
        missing = tuple(name for name in names[len(found) :] if self.cache.is_outside(name))
        if found or missing:
            self.scheduler.handle(FoundBlocks(found, missing))
        self.scheduler.handle(Admit(request))
        return request_id

    def load(self, int_id: int, digest: int) -> bool:
        """Load content `digest` under an id, as an engine does; returns False if requests need what would give way."""

        def num_requests(content: int) -> int:
            return sum(group.request.adapter == content for group in self.scheduler.queues.groups.values())

        request = LoRARequest(f"adapter {digest}", int_id, "folder", load_inplace=True)
        change = plan_addition(self.adapters, request, (digest, ""), num_requests)
        if not change.problem:
            self.scheduler.handle(addition_of(LORA, change))
        self.scheduler.check_integrity()
        return not change.problem

    def abort(self, request_id: int) -> SequenceGroup | None:
        group = self.scheduler.handle(Abort(RequestId(request_id)))
        if group is not None:
            self.ended[request_id] = group
        self.scheduler.check_integrity()
        return group

    def reset_prefix_cache(self) -> None:
        self.scheduler.handle(ResetPrefixCache())
        self.contents.forget()
        self.states.forget()
        self.scheduler.check_integrity()

    def pause(self, mode: str, clear_cache: bool = False) -> None:
        """Pause once all steps in flight have ended, as the engine does."""
        self._settle(is_last=True)
        self.scheduler.handle(PauseGeneration(mode, clear_cache))
        if clear_cache:
            self.contents.forget()
            self.states.forget()
        self.scheduler.check_integrity()

    def resume(self) -> None:
        self.scheduler.handle(ResumeGeneration())
        self.scheduler.check_integrity()

    def set_weight_version(self, version: int) -> None:
        self.scheduler.begin_weights(version)
        self.scheduler.handle(SetWeightVersion(version))
        self.contents.forget()
        self.states.forget()
        self.scheduler.check_integrity()

    def step(self, values: Values | int = PLAIN_TOKEN) -> list[Row]:
        """One step, checked; what it computed, in service order (plans list decoding that continues first)."""
        self._was_transferring = bool(self._transfers)
        settled = [*self.running(), *self.swapped()]
        plan = self.last_plan = self.scheduler.schedule()
        if plan.block_ops.transfer:
            self._transfers.append((plan.step + self._transfer_steps, plan.block_ops.transfer))
            self._was_transferring = True
        scheduled = self.mirror.apply(plan)
        kept = sorted(self.scheduler.media_rows.names)
        assert sorted(self.mirror.media_rows) == kept, "the mirror keeps other rows than the replica"
        joined = [key for key in self.running() if key not in settled]
        if self.cache.num_blocks:
            self.contents.run_step(plan.block_ops, [each.sequence for each in scheduled], joined)
        if self.slots is not None:
            self.states.run_step(plan.state_ops, [each.sequence for each in scheduled], joined)
        for each in plan.hit_comparisons:
            sequence = self.mirror.held(each.key)
            self.contents.compare(sequence, each.blocks)
            self.states.compare(sequence, each.states)
        self.scheduler.check_integrity()
        rows, ids_of_rows, drafts = [], [], []
        for each in scheduled:
            sequence = each.sequence
            key = SequenceKey(sequence.request.request_id, sequence.sample_index)
            rows.append(Row(*key, sequence.num_computed_tokens, each.num_scheduled_tokens, each.num_samples))
            for offset in range(each.num_samples):
                named = SequenceKey(key.request_id, key.sample_index + offset)
                ids = [_value(values, named, sequence.num_tokens)] * self.num_ids()
                if sequence.draft_token_ids:
                    ids = _verified(values, named, sequence.num_tokens, sequence.draft_token_ids)
                ids_of_rows.append(ids)
                if self.worker_drafts is not None and plan.wants_drafts:
                    drafts.append(self.worker_drafts(named, sequence.num_tokens + len(ids)))
        assert sum(row.num_tokens for row in rows) == plan.num_tokens <= self.limits.max_num_batched_tokens
        # The devices have what they sampled, whenever the scheduler is told.
        sampled = SampledIds.from_rows(ids_of_rows)
        self.mirror.take_sampled(plan.step, sampled)
        result = StepResult(plan.step, sampled.token_ids, num_token_ids=sampled.num_ids, drafts=tuple(drafts))
        self._in_flight.append(result if rows else None)
        self._settle()
        while self._transfers and self._transfers[0][0] <= plan.step:
            number = self._transfers.popleft()[1]
            number = -number if self.has_failed(number) else number
            self.contents.finish_transfer(number)
            self.scheduler.handle(FinishTransfers((number,)))
            self.scheduler.check_integrity()
        return sorted(rows)

    def _settle(self, *, is_last: bool = False) -> None:
        """What the engine does: the oldest step in flight ends, and all where nobody waits for them."""
        depth, scheduler = self.limits.num_in_flight, self.scheduler
        while must_end_oldest(len(self._in_flight), len(self._in_flight) == depth, (), scheduler, is_last):
            result = self._in_flight.popleft()
            for group in self.scheduler.apply(result) if result is not None else []:
                self.ended[group.request.request_id] = group
            self.scheduler.check_integrity()

    def steps(self, count: int) -> list[list[Row]]:
        return [self.step() for _ in range(count)]

    def finish(self, values: Values | int = PLAIN_TOKEN, limit: int = 10_000) -> int:
        """Step until nothing is left. Every step must compute something unless a transfer was in flight. Returns how
        many steps it took.
        """
        for count in range(limit):
            if not self.scheduler.has_unfinished:
                return count
            was_under_way = any(self._in_flight)
            is_busy = bool(self.step(values)) or self._was_transferring or was_under_way
            assert is_busy, f"step {self.last_plan.step} computes nothing though requests wait"
        raise AssertionError(f"requests are left after {limit} steps")

    def settle(self) -> None:
        """After the end: steps that compute nothing, until no transfer is in flight."""
        assert not self.scheduler.has_unfinished
        assert self.step() == []
        while self._transfers:
            assert self.step() == []

    def tokens(self, request_id: int) -> list[list[int]]:
        """Output tokens of each sample of a request that ended."""
        return [sequence.output_token_ids for sequence in self.ended[request_id].sequences]

    def waiting(self) -> list[tuple[int, int]]:
        return [tuple(sequence.key) for sequence in self.scheduler.waiting]

    def running(self) -> list[tuple[int, int]]:
        return [tuple(sequence.key) for sequence in self.scheduler.running]

    def loading(self) -> list[tuple[int, int]]:
        return self._keys_of(SequenceStatus.LOADING)

    def swapped(self) -> list[tuple[int, int]]:
        return self._keys_of(SequenceStatus.SWAPPED)

    def _keys_of(self, status: SequenceStatus) -> list[tuple[int, int]]:
        groups = self.scheduler.queues.groups.values()
        return [tuple(each.key) for group in groups for each in group.sequences if each.status is status]


def _value(values: Values | int, key: SequenceKey, position: int) -> int:
    return values if isinstance(values, int) else values(key, position)


def _verified(values: Values | int, key: SequenceKey, position: int, drafts: Sequence[int]) -> list[int]:
    """The ids sampled at the drafts' positions up to the first that its draft is not, or one after all of them."""
    ids = [_value(values, key, position)]
    while len(ids) <= len(drafts) and drafts[len(ids) - 1] == ids[-1]:
        ids.append(_value(values, key, position + len(ids)))
    return ids


def tokens(start: int, count: int) -> tuple[int, ...]:
    """Different tokens for different starts."""
    return tuple(range(start, start + count))


def cached_run(**limits: object) -> Run:
    return Run(caching=True, **limits)


def asked_once(prompt: tuple[int, ...], max_tokens: int = 1, **limits: object) -> Run:
    """Request 0 asked this and has ended."""
    run = cached_run(**limits)
    run.admit(0, prompt, max_tokens=max_tokens)
    run.finish()
    return run
