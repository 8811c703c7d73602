"""This rank's step time: sums per phase, read at the end of a run, and the current phase for the heartbeat.

Knows nothing about what is timed; no decision may depend on it.
"""

import time
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.base.metrics.stage_times import now_us

_NEXT_PHASES: Final = {"schedule": "lockstep", "lockstep": "execute", "execute": "apply", "apply": "execute"}
"""The next phase, as far as it can be known: where several steps are in flight, the next of them."""


@dataclass(slots=True)
class StepTimes:
    """Seconds per phase. `lockstep_s` is digest, messages and waiting for the other ranks to agree.

    Each step and phase that begins is reported to `heartbeat`.
    """

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    schedule_s: float = 0.0
    lockstep_s: float = 0.0
    execute_s: float = 0.0
    apply_s: float = 0.0
    began_s: float = 0.0
    """Start of the last step, on a clock of no particular origin."""
    first_began_us: int = 0
    """Start of the first step, in microseconds since the epoch."""
    step: int = 0
    """The step that began last, counted from 1."""
    _started_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.lockstep_s + self.execute_s + self.apply_s

    def phases(self) -> tuple[float, float, float, float]:
        """The four sums, in the order of the phases."""
        return self.schedule_s, self.lockstep_s, self.execute_s, self.apply_s

    def begin(self, step: int | None = None) -> None:
        """A step begins: the one after the last, or `step`."""
        self.step = self.step + 1 if step is None else step
        self.heartbeat.enter("schedule", self.step)
        self.began_s = self._started_s = time.perf_counter()
        self.first_began_us = self.first_began_us or now_us()

    def end(self, phase: str) -> None:
        """End the current phase, which began with `begin` or with the last `end`, and begin the next. Phases may come
        in any order and number; the caller reports the end of a step to the heartbeat.
        """
        now_s = time.perf_counter()
        setattr(self, f"{phase}_s", getattr(self, f"{phase}_s") + now_s - self._started_s)
        self.heartbeat.enter(_NEXT_PHASES[phase])
        self._started_s = now_s
