"""Where the time of the steps goes, on this rank: a few sums, read at the end of a run; and where the step is now.

Knows nothing about what is timed; nothing that is decided may depend on it.
"""

import time
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.base.metrics.stage_times import now_us

_NEXT_PHASES: Final = {"schedule": "lockstep", "lockstep": "execute", "execute": "apply", "apply": "execute"}
"""What a rank goes on to, as far as it can be known: where several steps are in flight, the next of them."""


@dataclass(slots=True)
class StepTimes:
    """Seconds by phase. `lockstep_s` is digest, messages and waiting for the other ranks to agree.

    `heartbeat` is told of every step and phase that begins.
    """

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    schedule_s: float = 0.0
    lockstep_s: float = 0.0
    execute_s: float = 0.0
    apply_s: float = 0.0
    began_s: float = 0.0
    """When the last step began, on a clock of no particular origin."""
    first_began_us: int = 0
    """When the first step began, in microseconds since the epoch."""
    step: int = 0
    """The step that began last, counted from 1."""
    _started_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All phases together."""
        return self.schedule_s + self.lockstep_s + self.execute_s + self.apply_s

    def phases(self) -> tuple[float, float, float, float]:
        """The four sums, in the order in which the phases follow one another."""
        return self.schedule_s, self.lockstep_s, self.execute_s, self.apply_s

    def begin(self, step: int | None = None) -> None:
        """A step begins: the one after the last, or `step`."""
        self.step = self.step + 1 if step is None else step
        self.heartbeat.enter("schedule", self.step)
        self.began_s = self._started_s = time.perf_counter()
        self.first_began_us = self.first_began_us or now_us()

    def end(self, phase: str) -> None:
        """The phase that began with `begin`, or with the `end` of the one before, is over; the next one begins. Phases
        may come in any order and number: that a step is over the caller tells the heartbeat.
        """
        now_s = time.perf_counter()
        setattr(self, f"{phase}_s", getattr(self, f"{phase}_s") + now_s - self._started_s)
        self.heartbeat.enter(_NEXT_PHASES[phase])
        self._started_s = now_s
