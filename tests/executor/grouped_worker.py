"""A worker that is no `Worker` and works under torchrun, because it joins the groups that its contract asks for.

Computes nothing: every row samples the same token.
"""

import torch
from plain_worker import PlainWorker

from spmd_worker.ranks.groups import join_groups
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.sequence.step import StepPlan, StepResult

TOKEN_ID = 9


class GroupedWorker(PlainWorker):
    """`PlainWorker` with groups, and as many samples as a plan asks for."""

    def init_device(self) -> None:
        self.groups = join_groups(
            self.resolved.layout, self.environment, torch.device("cpu"), self.resolved.config.executor.timeout_s
        )

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.mirror = Mirror(num_device_blocks, self.resolved.config.cache.block_size)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        num_samples = sum(row.num_samples for row in self.mirror.apply(plan))
        return StepResult(plan.step, (TOKEN_ID,) * num_samples)

    def shutdown(self) -> None:
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
