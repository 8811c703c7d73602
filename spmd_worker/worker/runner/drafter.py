"""Seam of drafters: models beside the target, on its last stage, that draft the next tokens of rows.

T: tokens of the step; H: width of the hidden states.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.runner.batch import Batch


class Drafter(Protocol):
    """Call `begin`, then `propose` if the step samples, once each per step, both in the order of the steps. A draft's
    keys and values are in tensors of its own, at the indices of the target's block tables; a missing one costs
    acceptance, and never a bit.
    """

    num_lookahead_tokens: int
    """Tokens beyond a row's own for which its table has blocks, if blocks are free, so that drafts have slots."""
    needs_hidden: bool
    """Whether it computes from the target's hidden states, of all tokens of every step."""
    aux_layers: tuple[int, ...]
    """Layers of the target before which it reads the residual stream."""

    takes_media: bool
    """True if it computes from rows of images."""

    def begin(
        self,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        hidden: Tensor,
        aux: tuple[Tensor, ...],
        media: StepMedia | None = None,
    ) -> None:
        """Take the target's normed output [T, H] of all tokens of the step, if it `needs_hidden`, after each forward
        pass, its stream [T, H] before each of `aux_layers`, and `MediaStore.behind_step` if it `takes_media`.
        """

    def propose(
        self, scheduled: Sequence[ScheduledSequence], sampled: SampledIds, *, wants_drafts: bool = True
    ) -> tuple[tuple[int, ...], ...]:
        """Drafts, after sampling, behind the last id of each sampled sequence, the same on all ranks of the group. If
        none are wanted, it only computes what it cannot compute later.
        """

    def forget(self, keys: Sequence[SequenceKey], request_ids: Sequence[RequestId]) -> None:
        """Drop sequences that ended, and requests with all of theirs."""
