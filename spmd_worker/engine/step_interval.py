"""Maximum time between two steps of rank 0: the other ranks wait for its next step up to `executor.timeout_s`."""

import time
from typing import Final

_STEPS_PER_TIMEOUT: Final = 8
_MAX_BUDGET_S: Final = 1.0
"""Rows that take a millisecond each fill the next steps in less."""


def max_step_interval_s(timeout_s: float) -> float:
    """Time after which a step is due, an empty one if there is nothing to compute."""
    return timeout_s / _STEPS_PER_TIMEOUT


class TimeBudget:
    """Time for other work between two steps, from now on."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + min(_MAX_BUDGET_S, max_step_interval_s(timeout_s))

    @property
    def is_over(self) -> bool:
        """Whether a step may be due: the rest of the work is done after it."""
        return time.monotonic() >= self._end_s
