"""Service order and choice of the victim: by priority, and first come, first served, in logical order of admission.

Uses no clock: ties cannot occur, because keys are unique and the same on every rank.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence

service_order: Final = attrgetter("order")
request_order: Final = attrgetter("priority", "request_id")
"""The service order of requests."""
"""Sort key of a sequence: lower priorities first, then earlier requests, within a request earlier samples."""


_WORK: Final = attrgetter("num_computed_tokens")


class WaitingQueue:
    """Waiting sequences, in service order, with a lane for each adapter: rows whose adapter has no room in a step let
    those of others pass, however many they are.

    A builtin would not do: new requests arrive in order by the thousand (append, O(1)), preempted sequences, and
    requests of a lower priority than one before them, are inserted (a short sorted list), and both leave from the front
    of their lane.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        lanes = list(self._lanes.values())
        return iter(lanes[0]) if len(lanes) == 1 else merge(*lanes, key=service_order)

    def append(self, sequence: Sequence) -> None:
        """Append a new request, after all others of its priority."""
        arrived = self._lane_of(sequence).arrived
        if arrived and sequence.order < arrived[-1].order:
            assert sequence.request.priority < arrived[-1].request.priority, sequence.key
            self.reinsert(sequence)
            return
        arrived.append(sequence)
        self._num_sequences += 1

    def reinsert(self, sequence: Sequence) -> None:
        """Insert a sequence at its position in the service order: a preempted one at its old one."""
        insort(self._lane_of(sequence).inserted, sequence, key=service_order)
        self._num_sequences += 1

    def heads(self) -> list[Sequence]:
        """The first sequence of each adapter, in service order."""
        heads = [lane.first() for lane in self._lanes.values()]
        return heads if len(heads) == 1 else sorted(heads, key=service_order)

    def first(self) -> Sequence:
        return self.heads()[0]

    def pop(self, head: Sequence) -> None:
        """Remove one of `heads`."""
        lane = self._lane_of(head)
        is_inserted = lane.inserted and lane.inserted[0] is head
        popped = lane.inserted.pop(0) if is_inserted else lane.arrived.popleft()
        assert popped is head, (popped.key, head.key)
        self._leave(head, lane)

    def remove(self, sequence: Sequence) -> None:
        """Remove any sequence: O(number waiting), for aborts."""
        lane = self._lane_of(sequence)
        queue: list[Sequence] | deque[Sequence] = lane.inserted if sequence in lane.inserted else lane.arrived
        queue.remove(sequence)
        self._leave(sequence, lane)

    def _lane_of(self, sequence: Sequence) -> "_Lane":
        lane = self._lanes.get(sequence.request.adapter)
        if lane is None:
            lane = self._lanes[sequence.request.adapter] = _Lane()
        return lane

    def _leave(self, sequence: Sequence, lane: "_Lane") -> None:
        self._num_sequences -= 1
        if not lane:
            del self._lanes[sequence.request.adapter]


class _Lane:
    """Waiting sequences of one adapter: those that arrived in service order, and those that were inserted; both are
    sorted.
    """

    def __init__(self) -> None:
        self.inserted: list[Sequence] = []
        self.arrived: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return bool(self.inserted or self.arrived)

    def __iter__(self) -> Iterator[Sequence]:
        return merge(self.inserted, self.arrived, key=service_order)

    def first(self) -> Sequence:
        inserted, arrived = self.inserted, self.arrived
        if not inserted or not arrived:
            return inserted[0] if inserted else arrived[0]
        return min(inserted[0], arrived[0], key=service_order)


def choose_victim(running: list[Sequence]) -> Sequence:
    """The sequence to preempt: of those of the highest priority number the one with the least computed work, the last
    in service order of several.

    So of the first ones the sequence with the most work is never preempted and always progresses, and the least work is
    lost.
    """
    # In service order: the last has the highest number.
    last = running[-1].request.priority
    return min([each for each in reversed(running) if each.request.priority == last], key=_WORK)
