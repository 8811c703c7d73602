"""A replica under load without a model: decoding rows of which some end and others join in each step."""

import time
from collections.abc import Callable
from typing import TypeVar

from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.lockstep.difference import Record
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import Admit, Event
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import num_sampling
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan, StepResult

BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
MAX_START_STEPS = 400
PARTS = ("schedule", "digest", "encode", "decode", "mirror", "apply", "events")

T = TypeVar("T")


class LoadedReplica:
    """Scheduler, digest, codec and mirror of rank 0, and the decoder of another rank, in turns of one step.

    `num_sequences` run. Each has a prompt of `num_prompt_tokens` and an answer of `num_output_tokens`; the first ones
    end one after another, so that about the same number of rows ends and joins in each step.
    """

    def __init__(self, num_sequences: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        num_tokens = num_prompt_tokens + num_output_tokens
        num_blocks = (num_sequences + 64) * (-(-num_tokens // BLOCK_SIZE) + 2)
        limits = SchedulerLimits(num_sequences, max(8192, 2 * num_sequences), enable_prefix_caching=True)
        self.scheduler = Scheduler(
            limits, CacheManager(num_blocks, BLOCK_SIZE), StopChecker((2,), 2 * num_tokens, None)
        )
        self.mirror = Mirror(num_blocks, BLOCK_SIZE)
        self.times_us: dict[str, list[float]] = {part: [] for part in PARTS}
        self.num_bytes: list[int] = []
        self.num_joined: list[int] = []
        self._encoder, self._decoder, self._digest = Encoder(), Decoder(), ChainedDigest()
        self._num_sequences, self._num_prompt_tokens = num_sequences, num_prompt_tokens
        self._num_output_tokens, self._num_admitted = num_output_tokens, 0
        self._sampling = SamplingParams(max_tokens=num_output_tokens)
        self._last_events: tuple[Event, ...] = ()
        self._sampled: tuple[int, ...] = ()

    def start(self) -> None:
        """Admit the first rows, compute their prompts, and go on until all decode."""
        first = tuple(self._admit(self._first_sampling(row)) for row in range(self._num_sequences))
        plan = self.step(first)
        while plan.step < MAX_START_STEPS and (len(plan.continuing) < 0.9 * self._num_sequences):
            plan = self.step()
        assert plan.step < MAX_START_STEPS, f"{len(plan.continuing)} of {self._num_sequences} rows decode"

    def step(self, events: tuple[Event, ...] | None = None) -> StepPlan:
        """One step: as many rows are admitted as have ended."""
        if events is None:
            num_new = self._num_sequences - len(self.scheduler.queues.groups)
            events = tuple(self._admit(self._sampling) for _ in range(num_new))
        sampled = self._sampled
        plan = self._measure("schedule", self.scheduler.schedule)
        digest = self._measure("digest", lambda: self._digest.update(Record(plan, self._last_events, sampled)))
        message = StepMessage(plan.step, events, plan, sampled, digest)
        payload = self._measure("encode", lambda: self._encoder.encode(message))
        agreed = self._measure("decode", lambda: self._decoder.decode(payload))
        self._measure("mirror", lambda: self.mirror.apply(agreed.plan))
        count = num_sampling(plan)
        self._sampled = tuple([3 + (plan.step * 7919 + row * 104_729) % VOCAB_SIZE for row in range(count)])
        if plan.has_rows:
            self._measure("apply", lambda: self.scheduler.apply(StepResult(plan.step, self._sampled)))
        self._measure("events", lambda: [self.scheduler.handle(event) for event in agreed.events])
        self.num_bytes.append(len(payload))
        self.num_joined.append(len(plan.groups))
        self._last_events = agreed.events
        return plan

    def forget_times(self) -> None:
        """Begin to measure anew."""
        for times in self.times_us.values():
            times.clear()
        self.num_bytes.clear()
        self.num_joined.clear()

    def _measure(self, part: str, action: Callable[[], T]) -> T:
        started_s = time.thread_time()
        result = action()
        self.times_us[part].append((time.thread_time() - started_s) * 1e6)
        return result

    def _first_sampling(self, row: int) -> SamplingParams:
        return SamplingParams(max_tokens=2 + self._num_output_tokens * (row + 1) // self._num_sequences)

    def _admit(self, sampling: SamplingParams) -> Event:
        number, self._num_admitted = self._num_admitted, self._num_admitted + 1
        prompt = tuple((number * 31 + index * 17) % VOCAB_SIZE for index in range(self._num_prompt_tokens))
        return Admit(Request(RequestId(number), prompt, sampling, number))
