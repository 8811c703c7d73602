"""A worker whose ids are where a device would have them: the host sees them when it asks for them, and then it waits.

The order of what happens is written down, by step: `decided`, `launched`, `read`. What is computed is what the CPU
computes; nothing may look at a token before it is read, as on a device (`read_back.py`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

from spmd_worker.ops.sampling import read_back
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.backends.choice import with_device_backend
from spmd_worker.worker.backends.plain_torch import TorchDevice
from spmd_worker.worker.runner.chosen_tokens import ChosenTokens
from spmd_worker.worker.worker import Worker

NAME = "slow_device.SlowDevice"
STATEFUL_NAME = "slow_device.StatefulDevice"


class SlowDevice(Worker):
    """`events` are (what, step); `num_filled` counts steps that took tokens nobody had read."""

    events: ClassVar[list[tuple[str, int]]] = []
    num_filled: ClassVar[int] = 0
    read_s: ClassVar[float] = 0.0

    def launch_step(self, plan: StepPlan) -> None:
        super().launch_step(plan)
        self.events.append(("launched", plan.step))

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        if not self.resolved.num_steps_ahead:
            self.events.append(("launched", plan.step))
        return super().execute_model(plan)

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        super().initialize_cache(num_device_blocks, num_host_blocks)
        note = self.running.note

        def note_slowly(result: StepResult) -> StepResult:
            time.sleep(self.read_s)
            self.events.append(("read", result.step))
            return note(result)

        self.running.note = note_slowly


class StatefulBackend(TorchDevice):
    """Keeps block tables and layouts between steps (`batch_state.py`), which takes plain kernels."""

    keeps_state = True


class StatefulDevice(SlowDevice):
    """Computes with `StatefulBackend`."""

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        super().__init__(with_device_backend(resolved, "slow_device.StatefulBackend"), environment)


@contextmanager
def slow_device(read_s: float = 0.0) -> Iterator[type[SlowDevice]]:
    """Within it no value is looked at for free, and what happens is noted."""
    SlowDevice.events, SlowDevice.num_filled, SlowDevice.read_s = [], 0, read_s
    decide, fill = Scheduler.schedule, ChosenTokens.filled

    def schedule(self: Scheduler) -> StepPlan:
        plan = decide(self)
        SlowDevice.events.append(("decided", plan.step))
        return plan

    def filled(self: ChosenTokens, batch: Any, *given: Any) -> Any:
        made = fill(self, batch, *given)
        SlowDevice.num_filled += made is not batch
        return made

    with (
        mock.patch.object(read_back, "_FREE_ON", ()),
        mock.patch.object(Scheduler, "schedule", schedule),
        mock.patch.object(ChosenTokens, "filled", filled),
    ):
        yield SlowDevice
