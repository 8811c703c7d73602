"""Turns of adapters: the waiting sequence that joins next, where the running ones may have few different adapters.

First come, first served. A sequence whose adapter has no room waits until all sequences of another adapter have ended;
meanwhile those behind it pass it if they have no adapter, or a running one: else interleaved adapters would run one row
at a time. What arrived after it began to wait does not prolong its wait: such sequences join only without an adapter.
"""

from spmd_worker.replica.scheduler.policy import request_order
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey


class AdapterTurns:
    """`max_adapters` is the number of different adapters of running sequences, 0 in a run without adapters."""

    def __init__(self, max_adapters: int, queues: Queues) -> None:
        self._max_adapters, self._queues = max_adapters, queues
        self._blocked: SequenceKey | None = None
        self._last_to_pass: RequestId | None = None
        """The newest request when `_blocked` began to wait for room."""

    def running_adapters(self) -> dict[int, None]:
        """Adapters of the running sequences, each once."""
        if not self._max_adapters:
            return {}
        found = dict.fromkeys(sequence.request.adapter for sequence in self._queues.running)
        found.pop(0, None)
        return found

    def next(self, running_adapters: dict[int, None]) -> Sequence | None:
        """The waiting sequence that joins next; None if none may."""
        return self._choose(running_adapters)[0]

    def note_blocked(self, running_adapters: dict[int, None]) -> None:
        """Note, at the end of a step's decisions, the first sequence that waits for room, and who may pass it."""
        blocked = self._choose(running_adapters)[1] if self._max_adapters and self._queues.waiting else None
        if blocked is None:
            self._blocked = None
        elif blocked.key != self._blocked:
            self._blocked, self._last_to_pass = blocked.key, self._queues.newest_id

    def _choose(self, running_adapters: dict[int, None]) -> tuple[Sequence | None, Sequence | None]:
        """The next sequence, and the first one before it that waits for room."""
        if not self._queues.waiting:
            return None, None
        has_room, blocked = len(running_adapters) < self._max_adapters, None
        last_to_join = self._queues.last_to_join
        for sequence in self._queues.waiting.heads():
            adapter = sequence.request.adapter
            if last_to_join is not None and request_order(sequence.request) > last_to_join:
                continue
            if adapter and not has_room and adapter not in running_adapters:
                blocked = blocked or sequence
            elif not adapter or self._may_pass(sequence, blocked):
                return sequence, blocked
        return None, blocked

    def _may_pass(self, sequence: Sequence, blocked: Sequence | None) -> bool:
        if blocked is None or blocked.key != self._blocked or self._last_to_pass is None:
            return True
        return sequence.request.request_id <= self._last_to_pass
