"""Detects ranks that wait in different calls: some wait for others, which are between steps.

A program may leave a rank between steps for as long as it likes, so this is no failure until a waiting rank gives up.
But calls that not every rank makes look the same, so it is logged long before.
"""

from collections.abc import Sequence

from spmd_worker.base.liveness.failure_diagnosis import RankStatus
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS

_Places = tuple[tuple[int, int, str, str], ...]
"""Rank, step, phase, and the line where it waits of each rank; empty for one that does not wait, which may move."""


class RankPlaces:
    """Tracks the ranks of an engine. `limit_s` is how long they wait in different calls before it is logged."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._places: _Places = ()
        self._since_s = 0.0
        self._is_said = False

    def look(self, now_s: float, statuses: Sequence[RankStatus]) -> float | None:
        """Seconds since a rank last moved, once that exceeds the limit; None before, and afterwards until one has
        moved.
        """
        places = _places_of(statuses)
        if places != self._places:
            self._places, self._since_s, self._is_said = places, now_s, False
        stood_s = now_s - self._since_s
        if self._is_said or stood_s < self._limit_s or not _are_apart(places):
            return None
        self._is_said = True
        return stood_s


def _places_of(statuses: Sequence[RankStatus]) -> _Places:
    return tuple(
        (each.rank, each.last_heartbeat.step, each.last_heartbeat.phase, _where(each))
        for each in statuses
        if each.last_heartbeat is not None and each.is_living
    )


def _where(status: RankStatus) -> str:
    last_heartbeat = status.last_heartbeat
    return last_heartbeat.where if last_heartbeat is not None and last_heartbeat.is_waiting else ""


def _are_apart(places: _Places) -> bool:
    """Whether one rank waits, and another is between steps and not in the same wait."""
    kinds = [(phase, where) for _, _, phase, where in places]
    has_waiting = any(where for _, where in kinds)
    has_between = any(phase == BETWEEN_STEPS for phase, _ in kinds)
    return has_waiting and has_between and len(dict.fromkeys(kinds)) > 1
