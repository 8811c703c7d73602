"""Service order and choice of the victim: first come, first served, in logical order of admission.

Uses no clock: ties cannot occur, because keys are unique and the same on every rank.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from spmd_worker.replica.sequence.sequence import Sequence


def service_order(sequence: Sequence) -> tuple[int, int]:
    """Sort key: earlier requests first, within a request earlier samples first."""
    return sequence.key


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

    def arrive(self, sequence: Sequence) -> None:
        """Append a new request, later than all before it."""
        assert not self._arrived or service_order(self._arrived[-1]) < service_order(sequence), sequence.key
        self._arrived.append(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Insert a preempted sequence at its old position."""
        insort(self._returned, sequence, key=service_order)

    def first(self) -> Sequence:
        """Next sequence to be served."""
        return self._returned[0] if self._returned else self._arrived[0]

    def pop_first(self) -> Sequence:
        """Remove and return the next sequence to be served."""
        return self._returned.pop(0) if self._returned else self._arrived.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Remove any sequence: O(number waiting), for aborts."""
        queue: list[Sequence] | deque[Sequence] = self._returned if sequence in self._returned else self._arrived
        queue.remove(sequence)


def choose_victim(running: list[Sequence]) -> Sequence:
    """The sequence to preempt when there are no blocks: the one with the least computed work; of equals the last in
    service order.

    So the sequence with the most work is never preempted and always progresses, and the least work is lost.
    """
    return min(reversed(running), key=_computed_work)


def _computed_work(sequence: Sequence) -> int:
    return sequence.num_computed_tokens
