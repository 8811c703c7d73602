"""Steps in flight: agreed on, results not yet applied. One, one per pipeline stage, or two with async scheduling.

Every rank agrees on a step at the same time; the ranks of stage s execute it s steps later, so that all stages compute
at once. With one stage a step is executed at once; with async scheduling its ids are read after the next launch.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace

from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.lockstep import AgreedStep
from spmd_worker.replica.lockstep.wire.result_coding import decode_result, encode_result
from spmd_worker.replica.sequence.routed_experts import RoutedTokens, joined_stages
from spmd_worker.replica.sequence.step import StepResult


@dataclass(slots=True)
class _StepInFlight:
    """`result` is that of this rank's executor, None until it begins the step."""

    agreed: AgreedStep
    is_expected: bool = False
    result: StepResult | Future[StepResult] | None = None


class StepPipeline:
    """Call `add` for each step, and `take_oldest` while `is_full` or to drain the pipeline."""

    def __init__(self, executor: Executor, channel: ControlChannel, num_shards: int, num_stages: int) -> None:
        self._executor, self._channel = executor, channel
        self._max_steps = executor.max_concurrent_batches
        self._num_shards = num_shards
        self._steps: deque[_StepInFlight] = deque()
        # An executor of all stages executes every step at once.
        has_own_stage = num_stages > 1 and channel.size > 1
        self._stage = channel.rank // num_shards if has_own_stage else 0
        # The first rank of the last stage, which samples.
        self._sampling_rank = (num_stages - 1) * num_shards if has_own_stage else 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be taken before another is added."""
        return len(self._steps) == self._max_steps

    def add(self, agreed: AgreedStep) -> None:
        """Add the next step, on every rank, and execute the one that is due on this rank's stage, if any."""
        assert not self.is_full, agreed.plan.step
        self._steps.append(_StepInFlight(agreed))
        if 0 < self._stage <= len(self._steps):
            expected = self._steps[-self._stage]
            # Receive the previous stage's hidden states while this rank computes the step before.
            if not expected.is_expected and expected.agreed.plan.has_rows:
                expected.is_expected = True
                self._executor.collective_rpc("expect_step", args=(expected.agreed.plan.num_tokens,))
        if self._stage < len(self._steps):
            self._execute(self._steps[-1 - self._stage])

    def take_oldest(self) -> tuple[AgreedStep, StepResult]:
        """Wait for the oldest step and remove it; returns it with its result, the same on all ranks of the replica."""
        step = self._steps.popleft()
        plan = step.agreed.plan
        if step.result is None:
            self._execute(step)
        result = self._executor.wait_for_step(step.result) if isinstance(step.result, Future) else step.result
        assert result is not None, plan.step
        if not (self._sampling_rank and plan.has_rows):
            return step.agreed, result
        # The last stage sampled.
        is_source = self._channel.rank == self._sampling_rank
        payload = self._channel.broadcast(encode_result(result) if is_source else None, self._sampling_rank)
        shared = decode_result(payload)
        # A rank of the last stage has made its own masks.
        own_masks = result.mask_checksums or shared.mask_checksums
        if shared.routed_experts:
            shared = replace(shared, routed_experts=self._joined_routes(shared, result))
        shared = replace(shared, finished_transfers=result.finished_transfers, mask_checksums=own_masks)
        return step.agreed, shared

    def _joined_routes(self, shared: StepResult, own: StepResult) -> tuple[RoutedTokens, ...]:
        """Experts of all layers, with those that the first rank of each stage before the last sends."""
        sends = self._channel.rank % self._num_shards == 0 and self._channel.rank < self._sampling_rank
        data = b"".join([tokens.data for tokens in own.routed_experts]) if sends else b""
        stages = self._channel.collect(data)[: self._sampling_rank : self._num_shards]
        return joined_stages(shared.routed_experts, stages)

    def _execute(self, step: _StepInFlight) -> None:
        step.result = self._executor.execute_model(step.agreed.plan, non_block=self._max_steps > 1)
