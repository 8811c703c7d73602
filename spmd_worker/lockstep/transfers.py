"""Which transfers every rank has finished: rank 0's book, from what the ranks say with their answers.

Knows numbers of transfers. Knows nothing about what is transferred, or how the answers come.
"""

import struct
from collections.abc import Sequence
from typing import Final

from spmd_worker.lockstep.digest import NUM_DIGEST_BYTES

_NUMBER_BYTES: Final = 8


class TransferBook:
    """A transfer is finished when each of `num_ranks` has said so; numbers come out in the order of completion."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._finished_by: dict[int, list[int]] = {}
        self._complete: list[int] = []

    def add(self, rank: int, numbers: Sequence[int]) -> None:
        """A rank has finished these; each once."""
        for number in numbers:
            ranks = self._finished_by.setdefault(number, [])
            assert rank not in ranks, f"rank {rank} finished transfer {number} twice"
            ranks.append(rank)
            if len(ranks) == self._num_ranks:
                del self._finished_by[number]
                self._complete.append(number)

    def take_complete(self) -> tuple[int, ...]:
        """What all ranks have finished since the last call."""
        complete, self._complete = tuple(self._complete), []
        return complete


def pack_answer(digest: bytes, finished_transfers: Sequence[int]) -> bytes:
    """What a follower says of a step: its digest, and the transfers it has finished since its last answer."""
    return digest + struct.pack(f"<{len(finished_transfers)}q", *finished_transfers)


def unpack_answer(answer: bytes) -> tuple[bytes, tuple[int, ...]]:
    """The inverse of `pack_answer`; bytes past the last whole number make a digest that equals none."""
    numbers = answer[NUM_DIGEST_BYTES:]
    if len(numbers) % _NUMBER_BYTES:
        return answer, ()
    return answer[:NUM_DIGEST_BYTES], struct.unpack(f"<{len(numbers) // _NUMBER_BYTES}q", numbers)
