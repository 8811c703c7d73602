"""A runner in a `ModelRunner`'s place that computes steps and samples nothing, for launches that only compile: sampling
would look at results that nobody has computed.
"""

from collections.abc import Sequence
from typing import Any

from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.worker.runner.model_runner import ModelRunner


class ForwardOnlyRunner:
    """The part of a runner that a backend's `warm_up` uses."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.model = runner, runner.model
        self.sampler = None if runner.sampler is None else _NoSampler()

    def forward(self, step: int, scheduled: Sequence[ScheduledSequence]) -> None:
        self._runner.forward(step, scheduled)
        self._runner.drop()

    def sample(self) -> None:
        """Nothing."""


class _NoSampler:
    def sample(self, *arguments: Any) -> None:
        """Nothing."""
