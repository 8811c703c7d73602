"""Log-probabilities of prompt tokens, for the rows that ask.

K: positions; T: tokens of the step.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from spmd_worker.ops.sampling.read_back import Awaited
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.request import RequestId

_IS_PLAIN = attrgetter("sequence.is_plain")
_ROWS_AT_ONCE = 64
"""Logits of this many positions are held at a time: a vocabulary of 150,000 ids takes 37 MiB."""

Report = Callable[[Tensor, list[int], int], list[Awaited[list[TokenLogprobs]]]]
"""Hidden states [K, hidden], the token that each predicts, how many of the likeliest are wanted: an entry each, in
pieces that come with the step's read-back.
"""

PromptLogprobs = tuple[RequestId, int, tuple[TokenLogprobs | None, ...]]


class LaunchedPromptLogprobs(NamedTuple):
    """Those of a sequence's positions from `first` on. The entry of position 0 is None: nothing predicts it."""

    request_id: RequestId
    first: int
    pieces: list[Awaited[list[TokenLogprobs]]]

    def collect(self) -> PromptLogprobs:
        """After the read-back."""
        entries: list[TokenLogprobs | None] = [] if self.first else [None]
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
    """Other samples compute the prompt again only after a preemption; its positions are known by then."""
    sequence = each.sequence
    is_in_prompt = sequence.num_computed_tokens < len(sequence.request.prompt_token_ids)
    return sequence.request.sampling.prompt_logprobs is not None and is_in_prompt and sequence.sample_index == 0


def _of_sequence(each: ScheduledSequence, hidden: Tensor, report: Report) -> LaunchedPromptLogprobs:
    """Position p is predicted by the logits of position p - 1: a chunk [a, b) gives the entries of [a + 1, b + 1)."""
    sequence = each.sequence
    prompt = sequence.request.prompt_token_ids
    first = sequence.num_computed_tokens
    targets = prompt[first + 1 : first + each.num_scheduled_tokens + 1]
    num_likeliest = sequence.request.sampling.prompt_logprobs or 0
    pieces = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        some = targets[start : start + _ROWS_AT_ONCE]
        pieces += report(hidden[start : start + len(some)], list(some), num_likeliest)
    return LaunchedPromptLogprobs(sequence.request.request_id, first + 1 if first else 0, pieces)
