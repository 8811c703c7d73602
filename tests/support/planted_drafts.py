"""Proposers that are planted: their drafts are right, wrong, or by chance either, whatever a row's tokens are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

from spmd_worker.replica.scheduler import factory
from spmd_worker.replica.sequence.sequence import Sequence as ScheduledSequence
from spmd_worker.replica.sequence.sequence import SequenceKey

Right = Callable[[SequenceKey, int, int], Sequence[int]]
"""The right tokens of a sequence: after so many outputs, at most so many."""

KINDS = ("right", "wrong", "chance", "none")


class PlantedProposer:
    """Implements `Proposer`; `vocab_size` bounds wrong drafts."""

    def __init__(self, right: Right, kind: str, vocab_size: int) -> None:
        self._right, self._kind, self._vocab_size = right, kind, vocab_size
        self.num_forgotten = 0

    def propose(self, sequence: ScheduledSequence, most: int) -> tuple[int, ...]:
        num_outputs = len(sequence.output_token_ids)
        right = tuple(self._right(sequence.key, num_outputs, most))
        if self._kind == "right":
            return right
        right += (0,) * (most - len(right))
        if self._kind == "wrong":
            return tuple((token_id + 1) % self._vocab_size for token_id in right)
        chance = chance_of(*sequence.key, num_outputs)
        count = chance % (most + 1) if self._kind == "chance" else 0
        shifts = [(chance >> index) % 4 // 3 for index in range(count)]
        return tuple((token_id + shift) % self._vocab_size for token_id, shift in zip(right, shifts))

    def forget(self, sequence: ScheduledSequence) -> None:
        self.num_forgotten += 1


def chance_of(*numbers: int) -> int:
    """A number that these alone decide."""
    return crc32(repr(tuple(map(int, numbers))).encode())


@contextmanager
def planted(right: Right, kind: str) -> Iterator[None]:
    """Drafts of engines that are opened meanwhile."""
    make = factory.make_proposer
    factory.make_proposer = lambda config, vocab_size: PlantedProposer(right, kind, vocab_size)
    try:
        yield
    finally:
        factory.make_proposer = make
