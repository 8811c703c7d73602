"""Pools a step's hidden states into the vectors of the rows that end in it.

Rows with a vector for each token keep those of earlier chunks on the host, at most `MAX_TOKEN_NUMBERS` a row. Mean
pooling, and late chunking for its last chunk, keeps a float32 sum per row, to which hidden states are added one token
after another. So the bits of a mean do not depend on how its prompt was split into chunks.

T: tokens of the step; R: its rows; H: hidden size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from spmd_worker.model.pooler import Pooler
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import PoolingParams, vector_digest
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import NON_FINITE

ScoresOf = Callable[[int], Mapping[str, Tensor]]
Vectors = tuple[tuple[RequestId, bytes], ...]


def add_rows(totals: Tensor, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Add each row's span (start, end) of `hidden` [T, H] to its row of `totals`, float32 [R, H], token by token.

    The first token of all rows is added, then the second of all that have one: short rows take few calls, and a row's
    sum is the same in every batch.
    """
    order = sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1])
    lengths = [spans[row][1] - spans[row][0] for row in order]
    starts, rows = (_indices(each, hidden.device) for each in ([spans[row][0] for row in order], order))
    # The longest first: rows with tokens left are a prefix.
    sums, num_left, offset = totals.index_select(0, rows), len(order), 0
    while num_left > 1:
        sums[:num_left].add_(hidden.index_select(0, starts[:num_left] + offset).float())
        offset += 1
        while num_left and lengths[num_left - 1] <= offset:
            num_left -= 1
    if num_left:
        start, end = spans[order[0]]
        for token in hidden[start + offset : end].float().unbind(0):
            sums[0].add_(token)
    totals.index_copy_(0, rows, sums)


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.array(values, dtype=np.int64)), device)


def _params(row: ScheduledSequence) -> PoolingParams:
    params = row.sequence.request.pooling
    assert params is not None, "all rows of a pooling run are pooled"
    return params


class RowPooling:
    """Pools the rows of one engine and keeps the partial results of unfinished rows."""

    def __init__(self, pooler: Pooler, scores_of: ScoresOf | None = None) -> None:
        """`scores_of`: parameters of the pooler that a row's adapter replaces (`Request.adapter`)."""
        self._pooler, self._scores_of = pooler, scores_of
        self._begun: dict[RequestId, tuple[int, Tensor]] = {}
        """Number of pooled tokens and their total, by request."""
        self._begun_tokens: dict[RequestId, list[NDArray[np.float32]]] = {}
        """Vectors of the tokens of each chunk, by request."""

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._begun.pop(request_id, None)
            self._begun_tokens.pop(request_id, None)

    def pool(
        self, scheduled: Sequence[ScheduledSequence], query_starts: Sequence[int], hidden: Tensor
    ) -> tuple[tuple[int, ...], Vectors]:
        """Pool `hidden` [T, H]. Returns, for each row that ends, in plan order, the digest of its vector or
        `NON_FINITE`; and the vectors, little-endian float32.
        """
        digests, vectors = [], []
        spans = list(pairwise(query_starts))
        rows = [(each, span) for each, span in zip(scheduled, spans, strict=True) if not _params(each).is_for_tokens]
        pooled_rows = iter(self._pooled([each for each, _ in rows], [span for _, span in rows], hidden))
        for each, (start, end) in zip(scheduled, spans, strict=True):
            if _params(each).is_for_tokens:
                states = self._late_chunks(each, hidden, start, end)
                numbers = self._with_earlier(each, self._headed(each, states) if len(states) else None)
            else:
                pooled = next(pooled_rows)
                numbers = None if pooled is None else self._headed(each, pooled)
            if numbers is None:
                continue
            if not np.isfinite(numbers).all():
                digests.append(NON_FINITE)
                continue
            content = numbers.astype("<f4").tobytes()
            digests.append(vector_digest(content))
            vectors.append((each.sequence.request.request_id, content))
        return tuple(digests), tuple(vectors)

    def _headed(self, row: ScheduledSequence, pooled: Tensor) -> NDArray[np.float32]:
        """The pooler's numbers for a row, on the host."""
        params, adapter = _params(row), row.sequence.request.adapter
        options = {
            "dimensions": params.dimensions,
            "normalizes": bool(params.normalize),
            "activates": bool(params.use_activation),
            "is_for_tokens": params.is_for_tokens,
        }
        scores = self._scores_of(adapter) if adapter and self._scores_of is not None else {}
        if scores:
            found: Tensor = functional_call(self._pooler, dict(scores), (pooled,), options)
        else:
            found = self._pooler(pooled, **options)
        numbers: NDArray[np.float32] = found.cpu().numpy()
        return numbers

    def _late_chunks(self, row: ScheduledSequence, hidden: Tensor, start: int, end: int) -> Tensor:
        """States of a row's tokens from `hidden` [T, H], float32 [tokens, H], or with late chunking the means of the
        chunks that end here, [chunks, H].
        """
        params, request_id, first = _params(row), row.sequence.request.request_id, row.sequence.num_computed_tokens
        if params.late_chunking_params is None:
            return hidden[start:end].float()
        size, behind = params.late_chunking_params.chunk_size, first + end - start
        edges = [first, *range(first - first % size + size, behind, size), behind]
        totals = torch.zeros(len(edges) - 1, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        if first % size:
            num_pooled, totals[0] = self._begun.pop(request_id)
            assert num_pooled == first, (request_id, num_pooled, first, "tokens were skipped")
        add_rows(totals, hidden, [(start + begin - first, start + stop - first) for begin, stop in pairwise(edges)])
        counts = [stop - (begin - begin % size) for begin, stop in pairwise(edges)]
        if not row.num_samples and behind % size:
            # A copy: a view would keep the totals of all chunks of the step.
            self._begun[request_id] = (behind, totals[-1].clone())
            totals, counts = totals[:-1], counts[:-1]
        return totals / to_device(torch.tensor(counts, dtype=torch.float32), hidden.device).unsqueeze(1)

    def _with_earlier(self, row: ScheduledSequence, numbers: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        """`numbers` of a step's tokens, or chunks that end in it, behind those of earlier steps; None for a row that
        continues.
        """
        request_id, num_computed = row.sequence.request.request_id, row.sequence.num_computed_tokens
        earlier = self._begun_tokens.pop(request_id, [])
        # A preempted row starts again from zero.
        earlier = earlier if num_computed else []
        num_pooled, chunking = sum(map(len, earlier)), _params(row).late_chunking_params
        num_expected = num_computed if chunking is None else num_computed // chunking.chunk_size
        assert num_pooled == num_expected, (request_id, num_pooled, num_expected, "tokens were skipped")
        if row.num_samples:
            assert numbers is not None, (request_id, "the last token ends a chunk")
            return np.concatenate([*earlier, numbers])
        # A copy: a view would keep the states of all rows of the step.
        self._begun_tokens[request_id] = earlier if numbers is None else [*earlier, numbers.copy()]
        return None

    def _pooled(
        self, scheduled: Sequence[ScheduledSequence], spans: Sequence[tuple[int, int]], hidden: Tensor
    ) -> list[Tensor | None]:
        """Float32 [H] of each row that ends, or [tokens, H] for late pooling; None for rows that continue."""
        kind = self._pooler.config.pooling_type
        if not scheduled:
            return []
        if kind == "last":
            return [hidden[end - 1].float() if each.num_samples else None for each, (_, end) in zip(scheduled, spans)]
        if kind == "late":
            # Rows of encoders are computed in one step.
            assert all(each.num_samples and not each.sequence.num_computed_tokens for each in scheduled), scheduled
            return [hidden[start:end].float() for start, end in spans]
        if kind == "cls":
            totals = hidden.index_select(0, _indices([start for start, _ in spans], hidden.device)).float()
        else:
            totals = torch.zeros(len(spans), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for row, each in enumerate(scheduled):
            # A preempted row starts again from zero.
            request_id, num_computed = each.sequence.request.request_id, each.sequence.num_computed_tokens
            if num_computed:
                num_pooled, totals[row] = self._begun.pop(request_id)
                assert num_pooled == num_computed, (request_id, num_pooled, num_computed, "tokens were skipped")
        if kind == "mean":
            add_rows(totals, hidden, spans)
        pooled: list[Tensor | None] = []
        for each, total in zip(scheduled, totals.unbind(0), strict=True):
            num_tokens = each.sequence.num_computed_tokens + each.num_scheduled_tokens
            if each.num_samples:
                self._begun.pop(each.sequence.request.request_id, None)
                pooled.append(total / num_tokens if kind == "mean" else total)
            else:
                # A copy: a view would keep the totals of all rows of the step.
                self._begun[each.sequence.request.request_id] = (num_tokens, total.clone())
                pooled.append(None)
        return pooled
