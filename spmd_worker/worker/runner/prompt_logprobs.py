"""Prompt logprobs of the rows that ask for them, as entries or as arrays.

K: positions; T: tokens of the step.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.sampling.read_back import Awaited
from spmd_worker.ops.sampling.shard_scores import Scores
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.prompt_scores import ScoredRows, candidates_of, num_top, scored_rows
from spmd_worker.replica.sequence.request import Request, RequestId

_IS_PLAIN = attrgetter("sequence.is_plain")
_ROWS_AT_ONCE = 64
"""Number of positions with logits in memory at a time: 37 MiB for a vocabulary of 150,000 ids."""

Report = Callable[[Tensor, list[int], int], list[Awaited[list[TokenLogprobs]]]]
"""Hidden states [K, hidden], the token that each predicts, the number of top logprobs -> one entry each, in pieces that
are available after the step's read-back.
"""

PromptLogprobs = tuple[RequestId, int, tuple[TokenLogprobs | None, ...]]


class LaunchedPromptLogprobs(NamedTuple):
    """Prompt logprobs of a sequence's positions from `first` on; None for the first `num_unpredicted`."""

    request_id: RequestId
    first: int
    pieces: list[Awaited[list[TokenLogprobs]]]
    num_unpredicted: int = 0

    def collect(self) -> PromptLogprobs:
        """Entries, once the read-back is done."""
        entries: list[TokenLogprobs | None] = [None] * self.num_unpredicted
        for piece in self.pieces:
            entries += piece.value
        return self.request_id, self.first, tuple(entries)


def prompt_logprobs(
    scheduled: Sequence[ScheduledSequence],
    query_starts: tuple[int, ...],
    hidden: Tensor,
    report: Report,
) -> tuple[LaunchedPromptLogprobs, ...]:
    """`hidden` is [T, hidden]."""
    if all(map(_IS_PLAIN, scheduled)):
        return ()
    return tuple(
        _of_sequence(each, hidden[start:end], report)
        for each, start, end in zip(scheduled, query_starts, query_starts[1:])
        if _is_wanted(each)
    )


def _is_wanted(each: ScheduledSequence) -> bool:
    """Whether these are prompt positions of sample 0; others recompute the prompt only after a preemption."""
    sequence, sampling = each.sequence, each.sequence.request.sampling
    if sampling.prompt_logprobs is None or sampling.has_score_arrays:
        return False
    return sequence.num_computed_tokens < len(sequence.request.prompt_token_ids) and sequence.sample_index == 0


def _of_sequence(each: ScheduledSequence, hidden: Tensor, report: Report) -> LaunchedPromptLogprobs:
    """Logits of position p - 1 predict position p: a chunk [a, b) gives the entries of [a + 1, b + 1). Nothing predicts
    position 0, an encoder's positions, and the first of the decoder's.
    """
    sequence = each.sequence
    prompt, num_before = sequence.request.prompt_token_ids, sequence.request.num_encoder_positions
    computed = sequence.num_computed_tokens
    last = computed + each.num_scheduled_tokens
    reported, first = computed + 1 if computed else 0, min(max(computed, num_before), last)
    hidden = hidden[first - computed :]
    targets = list(prompt[first + 1 : last + 1])
    for item in sequence.request.media:
        for token, _, count in item.rows_between(first + 1, last + 1):
            # Image tokens have no log-probability, and in some models no logit.
            start = token - first - 1
            targets[start : start + count] = [0] * count
    num_logprobs = sequence.request.sampling.prompt_logprobs or 0
    pieces = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        some = targets[start : start + _ROWS_AT_ONCE]
        pieces += report(hidden[start : start + len(some)], some, num_logprobs)
    return LaunchedPromptLogprobs(sequence.request.request_id, reported, pieces, first + 1 - reported)


Score = Callable[[Tensor, NDArray[np.int64], int], Awaited[Scores]]
"""Hidden states [K, hidden], tokens of each, the number of most probable ones -> their log-probabilities."""


class LaunchedPromptScores(NamedTuple):
    """Scores of a sequence's rows from `first` on."""

    request_id: RequestId
    first: int
    pieces: list[Awaited[Scores]]

    def collect(self) -> ScoredRows:
        """The scores, once the read-back is done."""
        logprobs = b"".join([piece.value[0].astype("<f4").tobytes() for piece in self.pieces])
        top_ids = b"".join([piece.value[1].astype("<u4").tobytes() for piece in self.pieces])
        return ScoredRows(self.request_id, self.first, logprobs, top_ids)


def prompt_scores(
    scheduled: Sequence[ScheduledSequence], query_starts: tuple[int, ...], hidden: Tensor, score: Score
) -> tuple[LaunchedPromptScores, ...]:
    """`hidden` is [T, hidden]."""
    if all(map(_IS_PLAIN, scheduled)):
        return ()
    found = []
    for each, start, end in zip(scheduled, query_starts, query_starts[1:]):
        rows = scored_rows(each.sequence.request)
        computed = each.sequence.num_computed_tokens
        own = range(max(computed, rows.start), min(computed + each.num_scheduled_tokens, rows.stop))
        if own and each.sequence.sample_index == 0:
            states = hidden[start:end][own.start - computed : own.stop - computed]
            found.append(_scored(each.sequence.request, own, states, score))
    return tuple(found)


def _scored(request: Request, rows: range, hidden: Tensor, score: Score) -> LaunchedPromptScores:
    pieces = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        ids = np.concatenate((_next_tokens(request, some), candidates_of(request, some)), axis=1)
        pieces.append(score(hidden[start : start + len(some)], ids, num_top(request)))
    return LaunchedPromptScores(request.request_id, rows.start, pieces)


def _next_tokens(request: Request, rows: range) -> NDArray[np.int64]:
    """Int64 [rows, 1]; -1 for one that is part of an image, or of given embeddings."""
    first, end = rows.start + 1, rows.stop + 1
    ids = np.array(request.prompt_token_ids[first:end], np.int64)
    for item in request.media:
        for token, _, count in item.rows_between(first, end):
            ids[token - first : token - first + count] = -1
    for given in request.rows:
        ids[max(given.start - first, 0) : max(given.end - first, 0)] = -1
    return ids[:, np.newaxis]
