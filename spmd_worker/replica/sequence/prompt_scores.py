"""Log-probabilities of a prompt as arrays: of each row's next token, of candidates, and of the most probable tokens.

Row i of a prompt predicts its token i + 1. All are of the unprocessed logits.

n: scored rows; M: candidates of a row; K: most probable tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.replica.sequence.request import Request, RequestId


class ScoredRows(NamedTuple):
    """Some rows of a request, from `first` on: `logprobs`, float32 [rows, 1 + M + K], and `top_ids`, uint32 [rows, K],
    as little-endian bytes.
    """

    request_id: RequestId
    first: int
    logprobs: bytes
    top_ids: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Scored rows of a prompt, from row `start` on. `token_logprobs` float32 [n]: of the token that follows in the
    prompt, minus infinity for one that is part of an image or of embeddings. `candidate_logprobs` float32 [n, M], in
    the order of the given ids and minus infinity where a row has fewer; None without candidates. `top_token_ids` uint32
    [n, K] and `top_logprobs` float32 [n, K]: most probable first, ties by ascending id; None unless asked for.
    """

    start: int
    token_logprobs: NDArray[np.float32]
    candidate_logprobs: NDArray[np.float32] | None = None
    top_token_ids: NDArray[np.uint32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptScores):
            return NotImplemented
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        return all((mine is None) == (its is None) and np.array_equal(mine, its) for mine, its in pairs)

    __hash__: Any = None


def scored_rows(request: Request) -> range:
    """The rows to score, as positions in the request's tokens; empty if it does not ask for arrays."""
    if not request.sampling.has_score_arrays:
        return range(0)
    first = request.num_virtual_tokens + request.sampling.first_scored_row
    return range(first, len(request.prompt_token_ids) - 1)


def candidates_of(request: Request, rows: range) -> NDArray[np.int64]:
    """Candidates of some of the rows to score, int64 [rows, M], filled up with -1."""
    lists = request.sampling.prompt_logprob_token_ids or ((),)
    width = max(map(len, lists))
    first = scored_rows(request).start
    chosen = lists * len(rows) if len(lists) == 1 else lists[rows.start - first : rows.stop - first]
    return np.array([(*each, *[-1] * (width - len(each))) for each in chosen], np.int64).reshape(len(rows), width)


def num_top(request: Request) -> int:
    """K."""
    return request.sampling.prompt_logprobs or 0


def joined_scores(request: Request, pieces: Sequence[ScoredRows]) -> PromptScores:
    """The scores of all rows. A prompt that was computed twice has pieces that are equal where they overlap."""
    rows, count, width = scored_rows(request), num_top(request), _num_columns(request)
    lists = request.sampling.prompt_logprob_token_ids
    logprobs = np.full((len(rows), width), np.nan, np.float32)
    top_ids = np.zeros((len(rows), count), np.uint32)
    for piece in pieces:
        found = np.frombuffer(piece.logprobs, "<f4").reshape(-1, width)
        place = slice(piece.first - rows.start, piece.first - rows.start + len(found))
        logprobs[place], top_ids[place] = found, np.frombuffer(piece.top_ids, "<u4").reshape(len(found), count)
    return PromptScores(
        request.sampling.first_scored_row,
        logprobs[:, 0],
        None if lists is None else logprobs[:, 1 : width - count],
        top_ids if count else None,
        logprobs[:, width - count :] if count else None,
    )


def first_nan_row(request: Request, pieces: Sequence[ScoredRows]) -> int | None:
    """The first row whose logits are not finite."""
    first = scored_rows(request).start - request.sampling.first_scored_row
    found = []
    for piece in pieces:
        is_nan = np.isnan(np.frombuffer(piece.logprobs, "<f4").reshape(-1, _num_columns(request))).any(axis=1)
        found += [piece.first - first + int(each) for each in np.flatnonzero(is_nan)[:1]]
    return min(found, default=None)


def _num_columns(request: Request) -> int:
    """1 + M + K."""
    lists = request.sampling.prompt_logprob_token_ids or ((),)
    return 1 + max(map(len, lists)) + num_top(request)
