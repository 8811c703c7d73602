"""Service order and choice of the victim: first come, first served, in logical order of admission.

Uses no clock: ties cannot occur, because keys are unique and the same on every rank.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence

service_order: Final = attrgetter("key")
"""Sort key of a sequence: earlier requests first, within a request earlier samples first."""


class WaitingQueue:
    """Waiting sequences, in service order, with a lane for each adapter: rows whose adapter has no room in a step let
    those of others pass, however many they are.

    A builtin would not do: new requests arrive in order by the thousand (append, O(1)), preempted sequences return to
    their old position in front of them (a short sorted list), and both leave from the front of their lane.
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
        """Append a new request, later than all before it."""
        arrived = self._lane_of(sequence).arrived
        assert not arrived or arrived[-1].key < sequence.key, sequence.key
        arrived.append(sequence)
        self._num_sequences += 1

    def reinsert(self, sequence: Sequence) -> None:
        """Insert a preempted sequence at its old position."""
        insort(self._lane_of(sequence).returned, sequence, key=service_order)
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
        popped = lane.returned.pop(0) if lane.returned else lane.arrived.popleft()
        assert popped is head, (popped.key, head.key)
        self._leave(head, lane)

    def remove(self, sequence: Sequence) -> None:
        """Remove any sequence: O(number waiting), for aborts."""
        lane = self._lane_of(sequence)
        queue: list[Sequence] | deque[Sequence] = lane.returned if sequence in lane.returned else lane.arrived
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
    """Waiting sequences of one adapter: returned ones first, which were served before those that have just arrived."""

    def __init__(self) -> None:
        self.returned: list[Sequence] = []
        self.arrived: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return bool(self.returned or self.arrived)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.returned
        yield from self.arrived

    def first(self) -> Sequence:
        return self.returned[0] if self.returned else self.arrived[0]


def choose_victim(running: list[Sequence]) -> Sequence:
    """The sequence to preempt: the one with the least computed work, the last in service order of several.

    So the sequence with the most work is never preempted and always progresses, and the least work is lost.
    """
    return min(reversed(running), key=attrgetter("num_computed_tokens"))
