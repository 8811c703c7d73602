"""Who runs, who waits, and for what: the state that planning and applying share."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from spmd_worker.replica.scheduler.policy import WaitingQueue
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class Queues:
    """Every sequence that has not ended is in one of the three: `running` (in service order), `waiting`, or `loading`,
    which waits for the transfer of that number.
    """

    groups: dict[RequestId, SequenceGroup] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    loading: dict[int, list[Sequence]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, for room or for a transfer."""
        return len(self.waiting) + sum(map(len, self.loading.values()))

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        """The group of a sequence that has not ended."""
        return self.groups[sequence.request.request_id]

    def width(self, sequence: Sequence) -> int:
        """How many sequences this one will be: until it forks it stands for samples of its request."""
        return sequence.num_samples

    def drop_ended(self) -> None:
        """`running` keeps those that still run."""
        self.running = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]

    def stop_waiting(self, sequence: Sequence) -> None:
        """A sequence ends that does not run."""
        if sequence.status is not SequenceStatus.LOADING:
            self.waiting.remove(sequence)
            return
        for waits in self.loading.values():
            if sequence in waits:
                waits.remove(sequence)

    def wait_for(self, number: int, sequence: Sequence) -> None:
        """A sequence, taken from `waiting`, goes on when the transfer has finished."""
        sequence.status, sequence.has_loaded = SequenceStatus.LOADING, True
        self.loading.setdefault(number, []).append(sequence)

    def finish_loading(self, numbers: Iterable[int]) -> None:
        """Those who waited for these transfers are in their old places again."""
        for number in numbers:
            for sequence in self.loading.pop(number, ()):
                sequence.status = SequenceStatus.WAITING
                self.waiting.give_back(sequence)
