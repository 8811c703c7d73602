"""Text whose repeats are found: for runs of 1, 3 and 8 tokens, chains of the positions where they ended.

A suffix tree in Python takes as many steps a token as it is deep; a chain takes one a length. Chains are hash buckets
in arrays: a position takes 20 bytes, whatever the text.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Final, Self

RUN_LENGTHS: Final = (1, 3, 8)
"""Lengths of the runs that have chains. Longer matches are found among the occurrences of the longest run in them."""
MAX_OCCURRENCES: Final = 16
"""Occurrences of a run that are looked at, the latest first."""
_MAX_LINKS: Final = 256
"""Links that are followed for them: buckets may be shared with frequent runs."""
_BASE: Final = 0x2C9277B5
_HASH_MASK: Final = (1 << 30) - 1
SEPARATOR: Final = -1
"""Between texts of one index; equals no token."""


class _Chain:
    """Ends of the runs of one length: the latest of each bucket, and from each end the one before it."""

    __slots__ = ("_hash", "_heads", "_leaving", "_links", "length")

    def __init__(self, length: int, num_buckets: int) -> None:
        self.length = length
        self._heads = array("i", [-1]) * num_buckets
        self._links = array("i")
        self._hash = 0
        self._leaving = pow(_BASE, length, _HASH_MASK + 1)

    def copy(self) -> "_Chain":
        other = _Chain(self.length, 0)
        other._heads, other._links, other._hash = self._heads[:], self._links[:], self._hash
        return other

    def add(self, token_ids: "array[int]", start: int) -> None:
        """Index the positions from `start` on; those before are."""
        heads, links, value, length, leaving = self._heads, self._links, self._hash, self.length, self._leaving
        mask = len(heads) - 1
        for position in range(start, len(token_ids)):
            value = value * _BASE + token_ids[position] + 1
            if position >= length:
                value -= (token_ids[position - length] + 1) * leaving
            value &= _HASH_MASK
            bucket = (value ^ value >> 15) & mask
            links.append(heads[bucket])
            heads[bucket] = position
        self._hash = value

    def ends(self, token_ids: "array[int]", run: "array[int]", stop: int) -> list[int]:
        """The latest positions before `stop` where the run ends, the latest first."""
        length, links, found = self.length, self._links, list[int]()
        position = self._heads[_bucket(run, len(self._heads) - 1)]
        for _ in range(_MAX_LINKS):
            if position < length - 1 or len(found) == MAX_OCCURRENCES:
                break
            if position < stop and token_ids[position + 1 - length : position + 1] == run:
                found.append(position)
            position = links[position]
        return found


class IndexedText:
    """Tokens that are appended to. Buckets are made for `num_tokens`, and for twice as many where there are more."""

    __slots__ = ("_chains", "_num_buckets", "token_ids")

    def __init__(self, num_tokens: int = 0) -> None:
        self.token_ids = array("q")
        self._num_buckets = _num_buckets(num_tokens)
        self._chains = [_Chain(length, self._num_buckets) for length in RUN_LENGTHS]

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> Self:
        other = type(self)()
        other.token_ids, other._num_buckets = self.token_ids[:], self._num_buckets
        other._chains = [chain.copy() for chain in self._chains]
        return other

    def extend(self, token_ids: Iterable[int]) -> None:
        start = len(self.token_ids)
        self.token_ids.extend(token_ids)
        if len(self.token_ids) > self._num_buckets:
            # Twice as many as now: what is indexed again adds up to the length of the text.
            self._num_buckets = _num_buckets(2 * len(self.token_ids))
            self._chains = [_Chain(length, self._num_buckets) for length in RUN_LENGTHS]
            start = 0
        for chain in self._chains:
            chain.add(self.token_ids, start)

    def matches(self, last: "array[int]", stop: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Places before `stop` where the end of `last` occurred -> the length that matches there, of all occurrences
        of the longest run, then also of the next; each with the length from which they are complete.
        """
        found: dict[int, int] = {}
        for chain in reversed(self._chains):
            length = chain.length
            if length <= len(last):
                for position in chain.ends(self.token_ids, last[-length:], stop):
                    if position not in found:
                        found[position] = self._match_length(last, position, length)
                yield length, found

    def _match_length(self, last: "array[int]", position: int, length: int) -> int:
        token_ids, num_last = self.token_ids, len(last)
        most = min(num_last, position + 1)
        while length < most and token_ids[position - length] == last[num_last - 1 - length]:
            length += 1
        return length


def _num_buckets(num_tokens: int) -> int:
    """A power of two, at least 1,024."""
    return 1 << max(10, (num_tokens - 1).bit_length())


def _bucket(run: "array[int]", mask: int) -> int:
    """Bucket of a run, the one that `_Chain.add` has come to at its end."""
    value = 0
    for token_id in run:
        value = value * _BASE + token_id + 1 & _HASH_MASK
    return (value ^ value >> 15) & mask
