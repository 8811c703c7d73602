"""Suffix drafts (suffix decoding, arXiv 2411.04975): what most often followed the longest matches of the row's end.

A match of m last tokens may draft `max_spec_factor * m` tokens, and match and drafts together at most `max_tree_depth`.
The draft goes on with the token that followed most often, of equally frequent ones the latest, while the product of the
shares is at least `min_token_prob`; the end of the row itself counts as one occurrence that nothing followed. The sum
of these products is the draft's score. Of all m the highest score wins, of equal ones the longest match; the outputs
of rows that were answered are searched in the same way, and win with a higher score. Unlike a suffix tree, counts are
of the latest `MAX_OCCURRENCES` of each run of 1, 3 and 8 tokens.
"""

from array import array
from typing import Final, NamedTuple

from spmd_worker.replica.drafts.answered_texts import AnsweredTexts
from spmd_worker.replica.drafts.indexed_text import SEPARATOR, IndexedText
from spmd_worker.replica.drafts.row_texts import RowTexts
from spmd_worker.replica.sequence.sequence import Sequence

_NEARLY: Final = 1e-6
"""Added before rounding down, as a factor times a length may come out just below a whole number."""


class Draft(NamedTuple):
    """Drafted tokens, and the sum of their estimated probabilities."""

    score: float
    token_ids: tuple[int, ...]


_NO_DRAFT: Final = Draft(0.0, ())


class SuffixProposer:
    """Drafts from each row's prompt and output, and from the outputs of answered rows."""

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self.rows = RowTexts(lambda num_tokens: IndexedText(2 * num_tokens))
        self.answered = AnsweredTexts(max_cached_requests)
        self._max_depth, self._min_prob = max_tree_depth, min_token_prob
        # Most drafts after a match of each length.
        self._most_after = [
            min(int(length * max_spec_factor + _NEARLY), max_tree_depth - length) for length in range(max_tree_depth)
        ]

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        text = self.rows.text_of(sequence)
        # All of the text, or of a branch of the tree, cannot have occurred before.
        last = text.token_ids[-self._max_depth :][1:]
        best = self._draft(text, last, len(text) - 1, most, _NO_DRAFT)
        for answers in self.answered.texts():
            best = self._draft(answers, last, len(answers), most, best)
        return best.token_ids

    def forget(self, sequence: Sequence) -> None:
        self.rows.forget(sequence)
        self.answered.add(sequence.output_token_ids)

    def _draft(self, text: IndexedText, last: "array[int]", stop: int, most: int, best: Draft) -> Draft:
        """The best draft of a text if its score is above that of `best`; matches end before `stop`."""
        # The end of the row itself, in its own text.
        num_ends = len(text) - stop
        longest = len(last)
        for shortest, lengths in text.matches(last, stop):
            positions = sorted(lengths, reverse=True)
            levels = sorted({min(length, longest): None for length in lengths.values()}, reverse=True)
            for level, below in zip(levels, [*levels[1:], shortest - 1]):
                # All matches of these lengths are of the same positions.
                limit = min(most, max(self._most_after[below + 1 : level + 1], default=0))
                if limit > best.score:
                    same = [position for position in positions if lengths[position] >= level]
                    found = _most_frequent(text.token_ids, same, num_ends, limit, self._min_prob)
                    best = max(best, found, key=lambda draft: draft.score)
            longest = shortest - 1
            if max(self._most_after[1:shortest], default=0) <= best.score:
                break
        return best


def _most_frequent(token_ids: "array[int]", positions: list[int], num_ends: int, most: int, min_prob: float) -> Draft:
    """The path of the most frequent tokens after `positions`, the latest first; nothing follows `num_ends` more."""
    drafted, score, share, end = list[int](), 0.0, 1.0, len(token_ids)
    num_positions = len(positions) + num_ends
    while len(drafted) < most:
        counts: dict[int, int] = {}
        positions = [position + 1 for position in positions if position + 1 < end]
        for position in positions:
            token_id = token_ids[position]
            if token_id != SEPARATOR:
                counts[token_id] = counts.get(token_id, 0) + 1
        if not counts:
            break
        token_id = max(counts, key=counts.__getitem__)
        share *= counts[token_id] / num_positions
        if share < min_prob:
            break
        drafted.append(token_id)
        score += share
        num_positions = counts[token_id]
        if num_positions < len(positions):
            positions = [position for position in positions if token_ids[position] == token_id]
    return Draft(score, tuple(drafted))
