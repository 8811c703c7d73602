"""N-gram drafts (prompt lookup): the tokens that followed the row's last tokens where they first occurred in it.

Definition of vLLM's `NgramProposer`: the longest run of last tokens, of `prompt_lookup_max` down to
`prompt_lookup_min`, that occurred before; of its occurrences the earliest; of what follows as much as there is.
"""

from array import array
from collections.abc import Iterable
from typing import Self

from spmd_worker.replica.drafts.row_texts import RowTexts
from spmd_worker.replica.sequence.sequence import Sequence


class NgramText:
    """A text with the position after the first occurrence of each of its n-grams, by their lengths.

    An n-gram is in the table when a token follows it, so the last ones never find themselves. A key is the n-gram as
    a number to the base of `vocab_size`.
    """

    __slots__ = ("_first_after", "_min_length", "_token_ids", "_vocab_size")

    def __init__(self, min_length: int, max_length: int, vocab_size: int) -> None:
        self._min_length, self._vocab_size = min_length, vocab_size
        self._token_ids = array("q")
        self._first_after: list[dict[int, int]] = [{} for _ in range(min_length, max_length + 1)]

    def __len__(self) -> int:
        return len(self._token_ids)

    def copy(self) -> Self:
        other = type(self)(self._min_length, self._min_length + len(self._first_after) - 1, self._vocab_size)
        other._token_ids = self._token_ids[:]
        other._first_after = [dict(table) for table in self._first_after]
        return other

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            after = len(self._token_ids)
            for table, key in zip(self._first_after, self._last_keys()):
                table.setdefault(key, after)
            self._token_ids.append(token_id)

    def following(self, most: int) -> "array[int]":
        """The tokens, at most so many, after the earliest occurrence of the longest of the last n-grams."""
        for table, key in reversed(list(zip(self._first_after, self._last_keys()))):
            after = table.get(key)
            if after is not None:
                return self._token_ids[after : after + most]
        return array("q")

    def _last_keys(self) -> list[int]:
        """Keys of the last n-grams, the shortest first, as far as there are tokens."""
        num_lengths, length, base = len(self._first_after), self._min_length, self._vocab_size
        last = self._token_ids[-(length + num_lengths - 1) :]
        keys, key, scale = [], 0, 1
        for number, token_id in enumerate(reversed(last), 1):
            key += token_id * scale
            scale *= base
            if number >= length:
                keys.append(key)
        return keys


class NgramProposer:
    """Drafts from each row's own prompt and output, in O(`prompt_lookup_max`) a token."""

    def __init__(self, min_length: int, max_length: int, vocab_size: int) -> None:
        assert 1 <= min_length <= max_length, (min_length, max_length)
        self.rows = RowTexts(lambda num_tokens: NgramText(min_length, max_length, vocab_size))

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return tuple(self.rows.text_of(sequence).following(most))

    def forget(self, sequence: Sequence) -> None:
        self.rows.forget(sequence)
