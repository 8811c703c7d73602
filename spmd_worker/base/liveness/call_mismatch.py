"""Detects ranks that wait in different calls: some wait for others, which are between steps.

A program may leave a rank between steps for any time, so this is no failure until a waiting rank gives up. But calls
that not every rank makes look the same, so it is logged long before.
"""

import logging
from collections.abc import Sequence

from spmd_worker.base.liveness.failure_diagnosis import RankStatus, status_lines
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS

logger = logging.getLogger(__name__)

_Positions = tuple[tuple[int, int, str, str], ...]
"""Rank, step, phase, and the line where it waits of each rank; empty for one that does not wait, which may move."""


class CallMismatch:
    """Tracks the ranks of an engine. `limit_s` is how long they wait in different calls before it is logged."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._positions: _Positions = ()
        self._since_s = 0.0
        self._is_logged = False

    def look(self, now_s: float, statuses: Sequence[RankStatus]) -> float | None:
        """Log a mismatch, once until a rank has moved. Returns the seconds since one did, if this call logged it."""
        positions = tuple(
            (each.rank, heartbeat.step, heartbeat.phase, heartbeat.where if heartbeat.is_waiting else "")
            for each in statuses
            if (heartbeat := each.last_heartbeat) is not None and each.is_living
        )
        if positions != self._positions:
            self._positions, self._since_s, self._is_logged = positions, now_s, False
        waited_s = now_s - self._since_s
        if self._is_logged or waited_s < self._limit_s or not _are_apart(positions):
            return None
        self._is_logged = True
        lines = "\n".join(f"  {line}" for line in status_lines(statuses))
        text = "ranks wait for others that are between steps, for %.1f s now: do all make the same calls?\n%s"
        logger.warning(text, waited_s, lines)
        return waited_s


def _are_apart(positions: _Positions) -> bool:
    """Whether one rank waits, and another is between steps and not in the same wait."""
    calls = {(phase, where): None for _, _, phase, where in positions}
    return len(calls) > 1 and any(where for _, where in calls) and any(phase == BETWEEN_STEPS for phase, _ in calls)
