"""Hidden states of a step -> the vectors of the rows that end in it.

What a mean needs of earlier chunks is kept for each row: a float32 sum, to which hidden states are added one after the
other in the order of tokens. So the bits of a mean do not depend on how its row was cut into chunks.

T: tokens of the step; R: its rows; H: hidden size.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from spmd_worker.model.pooler import Pooler
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import vector_digest
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import NON_FINITE

Vectors = tuple[tuple[RequestId, bytes], ...]


def add_rows(totals: Tensor, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Add to each of `totals`, float32 [R, H], its part of `hidden` [T, H], one token after the other; `spans` say
    where each begins and ends.

    Of all rows the first token, then of all that have one the second: short rows cost few calls, and the sums of one
    are those that it has alone.
    """
    order = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])
    lengths = [spans[row][1] - spans[row][0] for row in order]
    starts, rows = (_indices(each, hidden.device) for each in ([spans[row][0] for row in order], order))
    # The longest first: who has tokens left is a beginning of this.
    sums, num_left, place = totals.index_select(0, rows), len(order), 0
    while num_left > 1:
        sums[:num_left].add_(hidden.index_select(0, starts[:num_left] + place).float())
        place += 1
        while num_left and lengths[num_left - 1] <= place:
            num_left -= 1
    if num_left:
        start, end = spans[order[0]]
        for token in hidden[start + place : end].float().unbind(0):
            sums[0].add_(token)
    totals.index_copy_(0, rows, sums)


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.array(values, dtype=np.int64)), device)


class RowPooling:
    """The rows of one engine whose pooling has begun: of each, how many tokens are counted and what came of them."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self._begun: dict[RequestId, tuple[int, Tensor]] = {}

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Rows that have ended, by themselves or not."""
        for request_id in request_ids:
            self._begun.pop(request_id, None)

    def pool(
        self, scheduled: Sequence[ScheduledSequence], query_starts: Sequence[int], hidden: Tensor
    ) -> tuple[tuple[int, ...], Vectors]:
        """`hidden` is [T, H]. Of each row that ends, in plan order, the digest of its vector, or `NON_FINITE`; and the
        vectors, little-endian float32.
        """
        digests, vectors = [], []
        spans = list(pairwise(query_starts))
        for each, pooled in zip(scheduled, self._pooled(scheduled, spans, hidden), strict=True):
            if pooled is None:
                continue
            params, request_id = each.sequence.request.pooling, each.sequence.request.request_id
            assert params is not None, "a run that pools has no other rows"
            vector = self._pooler(
                pooled,
                dimensions=params.dimensions,
                normalizes=bool(params.normalize),
                activates=bool(params.use_activation),
            )
            if not vector.isfinite().all():
                digests.append(NON_FINITE)
                continue
            content = vector.cpu().numpy().astype("<f4").tobytes()
            digests.append(vector_digest(content))
            vectors.append((request_id, content))
        return tuple(digests), tuple(vectors)

    def _pooled(
        self, scheduled: Sequence[ScheduledSequence], spans: Sequence[tuple[int, int]], hidden: Tensor
    ) -> list[Tensor | None]:
        """Float32 [H] of each row that ends; None for another."""
        kind = self._pooler.config.pooling_type
        if not scheduled:
            return []
        if kind == "last":
            return [hidden[end - 1].float() if each.num_samples else None for each, (_, end) in zip(scheduled, spans)]
        if kind == "cls":
            totals = hidden.index_select(0, _indices([start for start, _ in spans], hidden.device)).float()
        else:
            totals = torch.zeros(len(spans), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for row, each in enumerate(scheduled):
            # A row that was preempted begins again.
            if each.sequence.num_computed_tokens:
                totals[row] = self._total_so_far(each)
        if kind == "mean":
            add_rows(totals, hidden, spans)
        return [self._ended(each, total) for each, total in zip(scheduled, totals.unbind(0), strict=True)]

    def _total_so_far(self, each: ScheduledSequence) -> Tensor:
        request_id, first = each.sequence.request.request_id, each.sequence.num_computed_tokens
        num_counted, total = self._begun.pop(request_id)
        assert num_counted == first, (request_id, num_counted, first, "tokens were skipped")
        return total

    def _ended(self, each: ScheduledSequence, total: Tensor) -> Tensor | None:
        """What a row comes to; None, and `total` is kept, where it goes on."""
        request_id = each.sequence.request.request_id
        num_tokens = each.sequence.num_computed_tokens + each.num_scheduled_tokens
        if not each.num_samples:
            # A copy: a view would keep the totals of all rows of the step.
            self._begun[request_id] = (num_tokens, total.clone())
            return None
        self._begun.pop(request_id, None)
        return total / num_tokens if self._pooler.config.pooling_type == "mean" else total
