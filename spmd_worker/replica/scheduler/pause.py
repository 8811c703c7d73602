"""Pause of generation: the requests that steps compute for meanwhile."""

from typing import Final

from spmd_worker.replica.scheduler.policy import request_order
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.sequence.record_checks import INT64
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.sleep_tags import WAIT

_BEFORE_ALL: Final = (INT64.start, -1)


class Pause:
    """State of one scheduler's pause. `is_frozen`: no step computes anything until it ends, but for states that
    catch up first (`catching_up.py`).
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.is_paused = self.is_frozen = False

    def begin(self, mode: str) -> None:
        """Begin, or change, a pause. In mode "wait" requests that have begun end first, with those that are
        served before one of them, for one that waits behind these could not end. Those that arrive in a pause are held
        until it is over, however urgent: else a stream of them could be served first without end.
        """
        self.is_paused, self.is_frozen = True, mode != WAIT
        begun = [request_order(group.request) for group in self._queues.groups.values() if has_begun(group)]
        self._queues.last_to_join = max(begun, default=_BEFORE_ALL)

    def end(self) -> None:
        self.is_paused = self.is_frozen = False
        self._queues.last_to_join = None
        for sequence in self._queues.held:
            self._queues.waiting.append(sequence)
        self._queues.held.clear()

    @property
    def num_computing(self) -> int:
        """Requests for which steps compute."""
        groups, last = self._queues.groups, self._queues.last_to_join
        if not self.is_paused or last is None:
            return len(groups)
        if self.is_frozen:
            return 0
        held = dict.fromkeys(sequence.request.request_id for sequence in self._queues.held)
        requests = [group.request for request_id, group in groups.items() if request_id not in held]
        return sum(request_order(request) <= last for request in requests)


def has_begun(group: SequenceGroup) -> bool:
    """Whether something of a request was ever scheduled."""
    return group.num_cached_tokens is not None
