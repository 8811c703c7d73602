"""A rank's answer to a step: its digest, finished transfers, an interrupt, and whether it prepared a worker event."""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from spmd_worker.replica.lockstep.digest import NUM_DIGEST_BYTES

_NUMBER_BYTES: Final = 8
_LENGTH: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<II")


class TransferBook:
    """Collects each rank's finished transfers; one that all of `num_ranks` have finished is complete. A negative number
    is that of a transfer that has failed on the rank: its complete number is negative too.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._finished_by: dict[int, list[int]] = {}
        self._failed: dict[int, None] = {}
        self._complete: list[int] = []

    def add(self, rank: int, numbers: Sequence[int]) -> None:
        """Record that a rank has finished these; each once."""
        for given in numbers:
            number = abs(given)
            if given < 0:
                self._failed[number] = None
            ranks = self._finished_by.setdefault(number, [])
            assert rank not in ranks, f"rank {rank} finished transfer {number} twice"
            ranks.append(rank)
            if len(ranks) == self._num_ranks:
                del self._finished_by[number]
                self._complete.append(-number if number in self._failed else number)
                self._failed.pop(number, None)

    def take_complete(self) -> tuple[int, ...]:
        """Transfers completed since the last call, in the order of completion."""
        complete, self._complete = tuple(self._complete), []
        return complete


class Answer(NamedTuple):
    """A follower's answer to a step: its digest, the transfers it has finished since its last answer, and the text of
    an exception that a signal's handler raised there, or "".
    """

    digest: bytes
    finished_transfers: tuple[int, ...] = ()
    interrupt: str = ""


def pack_answer(digest: bytes, finished_transfers: Sequence[int], interrupt: str = "") -> bytes:
    """Encode an `Answer`: the digest alone if there is nothing else."""
    if not finished_transfers and not interrupt:
        return digest
    text = interrupt.encode("utf-8", "replace")
    lengths = _LENGTHS.pack(len(finished_transfers), len(text))
    return digest + lengths + struct.pack(f"<{len(finished_transfers)}q", *finished_transfers) + text


def unpack_answer(answer: bytes) -> Answer:
    """The inverse of `pack_answer`. Other bytes give a digest that equals no rank's."""
    start = NUM_DIGEST_BYTES + _LENGTHS.size
    if len(answer) < start:
        return Answer(answer)
    num_numbers, num_text_bytes = _LENGTHS.unpack(answer[NUM_DIGEST_BYTES:start])
    end = start + num_numbers * _NUMBER_BYTES
    if len(answer) != end + num_text_bytes or (num_numbers, num_text_bytes) == (0, 0):
        return Answer(answer)
    numbers = struct.unpack(f"<{num_numbers}q", answer[start:end])
    return Answer(answer[:NUM_DIGEST_BYTES], numbers, answer[end:].decode("utf-8", "replace"))


def pack_event_answer(answer: bytes, problem: str) -> bytes:
    """Encode an answer of the step after a worker event. `problem`: why this rank did not prepare it, "" if it did."""
    return _LENGTH.pack(len(answer)) + answer + problem.encode("utf-8", "replace")


def unpack_event_answer(payload: bytes) -> tuple[bytes, str]:
    """The inverse of `pack_event_answer`. Other bytes give an answer with a digest that equals no rank's."""
    head = payload[: _LENGTH.size]
    end = _LENGTH.size + (_LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0)
    return payload[len(head) : end], payload[end:].decode("utf-8", "replace")
