"""Service order and choice of the victim: first come, first served, in logical order of admission.

Uses no clock: ties cannot occur, because keys are unique and the same on every rank.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence

service_order: Final = attrgetter("key")
"""Sort key of a sequence: earlier requests first, within a request earlier samples first."""


class WaitingQueue:
    """Waiting sequences, in service order.

    A builtin would not do: new requests arrive in order by the thousand (append, O(1)), preempted sequences return to
    their old position in front of them (a short sorted list), and both leave from the front.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []
        self._arrived: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Returned sequences first: they were served before those that have just arrived."""
        yield from self._returned
        yield from self._arrived

    def append(self, sequence: Sequence) -> None:
        """Append a new request, later than all before it."""
        assert not self._arrived or self._arrived[-1].key < sequence.key, sequence.key
        self._arrived.append(sequence)

    def reinsert(self, sequence: Sequence) -> None:
        """Insert a preempted sequence at its old position."""
        insort(self._returned, sequence, key=service_order)

    def first(self) -> Sequence:
        return self._returned[0] if self._returned else self._arrived[0]

    def pop_first(self) -> Sequence:
        return self._returned.pop(0) if self._returned else self._arrived.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Remove any sequence: O(number waiting), for aborts."""
        queue: list[Sequence] | deque[Sequence] = self._returned if sequence in self._returned else self._arrived
        queue.remove(sequence)


def choose_victim(running: list[Sequence]) -> Sequence:
    """The sequence to preempt: the one with the least computed work, the last in service order of several.

    So the sequence with the most work is never preempted and always progresses, and the least work is lost.
    """
    return min(reversed(running), key=attrgetter("num_computed_tokens"))
