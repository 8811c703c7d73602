"""Hidden states of a step -> the vectors of the rows that end in it.

What a mean needs of earlier chunks is kept for each row: a float32 sum, to which hidden states are added one after the
other in the order of tokens. So the bits of a mean do not depend on how its row was cut into chunks.

T: tokens of the step; H: hidden size.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spmd_worker.mirror.mirror import ScheduledSequence
from spmd_worker.models.pooler import Pooler
from spmd_worker.sequence.pooling_params import vector_digest
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sampled import NON_FINITE

Vectors = tuple[tuple[RequestId, bytes], ...]


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add `rows` [T, H] to `total`, float32 [H], one after the other."""
    for row in rows.float().unbind(0):
        total.add_(row)


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
        for each, start, end in zip(scheduled, query_starts, query_starts[1:]):
            pooled = self._pooled(each, hidden[start:end])
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

    def _pooled(self, each: ScheduledSequence, hidden: Tensor) -> Tensor | None:
        """Float32 [H] of a row that ends, of which `hidden` are the states of its last tokens; None for another."""
        sequence, is_end = each.sequence, each.num_samples > 0
        request_id, first, kind = sequence.request.request_id, sequence.num_computed_tokens, self._pooler.config
        if kind.pooling_type == "last":
            return hidden[-1].float() if is_end else None
        if first == 0:
            # A row that was preempted begins again.
            total = hidden[0].float().clone() if kind.pooling_type == "cls" else torch.zeros_like(hidden[0].float())
        else:
            num_counted, total = self._begun.pop(request_id)
            assert num_counted == first, (request_id, num_counted, first, "tokens were skipped")
        if kind.pooling_type == "mean":
            add_rows(total, hidden)
        num_tokens = first + each.num_scheduled_tokens
        if not is_end:
            self._begun[request_id] = (num_tokens, total)
            return None
        self._begun.pop(request_id, None)
        return total / num_tokens if kind.pooling_type == "mean" else total
