"""A rank's answer to a step beside its digest: transfers that it has finished, and how it prepared a worker event."""

import struct
from collections.abc import Sequence
from typing import Final

from spmd_worker.lockstep.digest import NUM_DIGEST_BYTES

_NUMBER_BYTES: Final = 8
_LENGTH: Final = struct.Struct("<I")


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


def pack_event_answer(answer: bytes, problem: str) -> bytes:
    """An answer of the step after a worker event: `answer`, and why this rank did not prepare; "" where it did."""
    return _LENGTH.pack(len(answer)) + answer + problem.encode("utf-8", "replace")


def unpack_event_answer(payload: bytes) -> tuple[bytes, str]:
    """The inverse of `pack_event_answer`; of bytes that it did not make the answer is one that equals none."""
    head = payload[: _LENGTH.size]
    end = _LENGTH.size + (_LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0)
    return payload[len(head) : end], payload[end:].decode("utf-8", "replace")
