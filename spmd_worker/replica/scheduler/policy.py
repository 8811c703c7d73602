"""Who is served first and who is preempted: first come, first served, in logical order of admission.

Knows no clock: ties cannot occur, because keys are unique and the same on every rank.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from spmd_worker.replica.sequence.sequence import Sequence


def service_order(sequence: Sequence) -> tuple[int, int]:
    """Sort key: earlier requests first, within a request earlier samples first."""
    return sequence.key


class WaitingQueue:
    """Sequences that wait, in service order.

    A builtin would not do: new requests arrive in order by the thousand (append, O(1)), preempted sequences return to
    their old place in front of them (a short sorted list), and both leave from the front.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []
        self._arrived: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Everything that waits; returned ones come first because they were served before what has just arrived."""
        yield from self._returned
        yield from self._arrived

    def arrive(self, sequence: Sequence) -> None:
        """A new request, later than all before it."""
        assert not self._arrived or service_order(self._arrived[-1]) < service_order(sequence), sequence.key
        self._arrived.append(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """A preempted sequence keeps its place."""
        insort(self._returned, sequence, key=service_order)

    def first(self) -> Sequence:
        """The one to be served next."""
        return self._returned[0] if self._returned else self._arrived[0]

    def pop_first(self) -> Sequence:
        """Take the one to be served next."""
        return self._returned.pop(0) if self._returned else self._arrived.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Take one from anywhere: O(number waiting), for aborts."""
        queue: list[Sequence] | deque[Sequence] = self._returned if sequence in self._returned else self._arrived
        queue.remove(sequence)


def choose_victim(running: list[Sequence]) -> Sequence:
    """Who is preempted when there are no blocks: the one with the least computed work, of equals the last in service
    order.

    So the sequence with the most never does and always gets on, and what is lost is the least there is to lose.
    """
    return min(reversed(running), key=_computed_work)


def _computed_work(sequence: Sequence) -> int:
    return sequence.num_computed_tokens
