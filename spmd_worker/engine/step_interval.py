"""How long rank 0 does other things between two steps: the other ranks wait for its next one, and not for ever."""

import time
from typing import Final

_EMPTY_STEPS_A_TIMEOUT: Final = 8
_TURN_S: Final = 1.0
"""Rows that take a millisecond each fill the next steps in less."""


def max_step_interval_s(timeout_s: float) -> float:
    """So long after a step comes another, an empty one where there is nothing to compute; `timeout_s` is
    `executor.timeout_s`.
    """
    return timeout_s / _EMPTY_STEPS_A_TIMEOUT


class TimeBudget:
    """The time for what is done between two steps, from now on."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + min(_TURN_S, max_step_interval_s(timeout_s))

    @property
    def is_over(self) -> bool:
        """Whether a step may be due: what is left is done after it."""
        return time.monotonic() >= self._end_s
