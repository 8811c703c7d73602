"""Interface of a worker's drafter: drafts of tokens that a model, or a head of the target, makes on the last stage."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey


class Drafter(Protocol):
    """Call `begin`, then, if the step samples, `propose`, once each per step, in the order of the steps.

    Drafts depend on the agreed plans and the sampled ids alone, so they are the same on every rank of the tensor group:
    each computes all of it. `num_lookahead_tokens` places beyond a row's tokens are allocated in each plan. A drafter
    that `needs_hidden` gets the output of all tokens, and the stream before `aux_layers` of the target.
    """

    num_lookahead_tokens: int
    needs_hidden: bool
    aux_layers: tuple[int, ...]

    def begin(self, scheduled: Sequence[ScheduledSequence], hidden: Tensor, aux: tuple[Tensor, ...]) -> None:
        """Take the target's normed output [T, hidden] of all tokens of the step, after its forward pass, and its
        stream [T, hidden] before each of `aux_layers`.
        """

    def propose(
        self, scheduled: Sequence[ScheduledSequence], sampled: SampledIds, *, wants_drafts: bool = True
    ) -> tuple[tuple[int, ...], ...]:
        """Drafts, after sampling, of each sequence that the step samples for, () for none; all are () unless it
        `wants_drafts`.
        """

    def forget(self, keys: Iterable[SequenceKey], request_ids: Iterable[RequestId]) -> None:
        """Drop sequences that ended, and requests with nothing left."""
