"""Tree of relays that carries a step's answers and message where a star around rank 0 has too many ends.

Ranks are cut into groups of consecutive ranks, about the square root of their number each. The first rank of a group is
its relay. Rank 0 has the relays, and the ranks of its own group, as children; a relay has the others of its group. So
rank 0 and each relay have about as many ends, and a message takes two hops.
"""

from math import isqrt
from typing import Final, NamedTuple

MIN_RELAYED_RANKS: Final = 64
"""Fewer ranks are a star: there the second hop takes longer than the ends that rank 0 is spared."""


class RelayTree(NamedTuple):
    """`size` ranks in groups of `group_size`; a single group is a star."""

    size: int
    group_size: int

    @property
    def has_relays(self) -> bool:
        """Whether any rank has another parent than rank 0."""
        return any(self.children(relay) for relay in self.relays)

    @property
    def relays(self) -> range:
        """First ranks of all groups but rank 0's."""
        return range(self.group_size, self.size, self.group_size)

    def parent(self, rank: int) -> int:
        """The rank that passes messages to `rank`, which is not 0."""
        relay = rank - rank % self.group_size
        return 0 if rank == relay else relay

    def children(self, rank: int) -> list[int]:
        """Ranks to which `rank` passes messages, ascending."""
        if rank % self.group_size:
            return []
        own = list(range(rank + 1, min(rank + self.group_size, self.size)))
        return own if rank else own + list(self.relays)


def tree_of(size: int, min_relayed_ranks: int | None = None) -> RelayTree:
    """The tree of a replica of `size` ranks; a star of fewer than `min_relayed_ranks`, by default MIN_RELAYED_RANKS."""
    if min_relayed_ranks is None:
        min_relayed_ranks = MIN_RELAYED_RANKS
    return RelayTree(size, size if size < min_relayed_ranks else isqrt(size - 1) + 1)


class BundleError(ValueError):
    """Bytes that are not the answers of a relay's group."""


def pack_answers(answers: list[bytes]) -> bytes:
    """Answers of a relay and its children, in rank order; one for all where they are equal, as digests are."""
    if answers.count(answers[0]) == len(answers):
        return b"\1" + answers[0]
    return b"\0" + b"".join([len(answer).to_bytes(4, "little") + answer for answer in answers])


def unpack_answers(payload: bytes, num_answers: int) -> list[bytes]:
    """The inverse of `pack_answers`. Raises BundleError for any other bytes."""
    if payload[:1] == b"\1":
        return [payload[1:]] * num_answers
    answers, position = [], 1
    while position < len(payload):
        end = position + 4 + int.from_bytes(payload[position : position + 4], "little")
        answers.append(payload[position + 4 : end])
        position = end
    if payload[:1] != b"\0" or position != len(payload) or len(answers) != num_answers:
        raise BundleError(f"{len(answers)} answers where a relay sends {num_answers}")
    return answers
