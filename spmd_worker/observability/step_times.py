"""Where the time of the steps goes, on this rank: a few sums, read at the end of a run.

Knows a clock. Knows nothing about what is timed; nothing that is decided may depend on it.
"""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Seconds by phase. `lockstep_s` is digest, messages and waiting for the other ranks to agree."""

    schedule_s: float = 0.0
    lockstep_s: float = 0.0
    execute_s: float = 0.0
    apply_s: float = 0.0
    began_s: float = 0.0
    """When the last step began, on a clock of no particular origin."""
    _started_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All phases together."""
        return self.schedule_s + self.lockstep_s + self.execute_s + self.apply_s

    @property
    def lockstep_share(self) -> float:
        """Lockstep's part of all phases, 0 to 1."""
        return self.lockstep_s / self.total_s if self.total_s else 0.0

    def phases(self) -> tuple[float, float, float, float]:
        """The four sums, in the order in which the phases follow one another."""
        return self.schedule_s, self.lockstep_s, self.execute_s, self.apply_s

    def begin(self) -> None:
        """A step begins."""
        self.began_s = self._started_s = time.perf_counter()

    def end(self, phase: str) -> None:
        """The phase that began with `begin`, or with the `end` of the one before, is over."""
        now_s = time.perf_counter()
        setattr(self, f"{phase}_s", getattr(self, f"{phase}_s") + now_s - self._started_s)
        self._started_s = now_s
