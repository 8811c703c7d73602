"""Running, waiting and loading sequences: the state shared by planning and applying."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from spmd_worker.replica.scheduler.policy import WaitingQueue
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class Queues:
    """Sequences that have not ended: `running` (in service order), `waiting`, `loading`, by transfer number, and `held`
    until a pause ends. `newest_id` is that of the request admitted last. While generation is paused, no request joins
    that is after `last_to_join` in `request_order`, or that arrives meanwhile: those are held.
    """

    groups: dict[RequestId, SequenceGroup] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    loading: dict[int, list[Sequence]] = field(default_factory=dict)
    held: list[Sequence] = field(default_factory=list)
    newest_id: RequestId | None = None
    last_to_join: tuple[int, int] | None = None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, for a transfer, or for the end of a pause."""
        return len(self.waiting) + sum(map(len, self.loading.values())) + len(self.held)

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        """The group of a sequence that has not ended."""
        return self.groups[sequence.request.request_id]

    def drop_ended(self) -> None:
        """Remove ended sequences from `running`."""
        runs = SequenceStatus.RUNNING
        self.running = [sequence for sequence in self.running if sequence.status is runs]

    def stop_waiting(self, sequence: Sequence) -> None:
        """Remove a sequence that ended without running."""
        if sequence in self.held:
            self.held.remove(sequence)
            return
        if sequence.status is not SequenceStatus.LOADING:
            self.waiting.remove(sequence)
            return
        for waits in self.loading.values():
            if sequence in waits:
                waits.remove(sequence)

    def wait_for(self, number: int, sequence: Sequence) -> None:
        """A sequence removed from `waiting` continues when the transfer has finished."""
        sequence.status, sequence.has_loaded = SequenceStatus.LOADING, True
        self.loading.setdefault(number, []).append(sequence)

    def finish_loading(self, numbers: Iterable[int]) -> None:
        """Return the sequences that waited for these transfers to their old positions in `waiting`."""
        for number in numbers:
            for sequence in self.loading.pop(number, ()):
                sequence.status = SequenceStatus.WAITING
                self.waiting.reinsert(sequence)
