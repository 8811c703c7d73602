"""Seam of drafters: models beside the target, on its last stage, that draft the next tokens of rows.

T: tokens of the step; H: width of the hidden states.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.runner.batch import Batch


class Drafter(Protocol):
    """Call `begin`, then `propose` if drafts are wanted, once each per step. A draft's keys and values are in tensors
    of its own, at the indices of the target's block tables; a missing one costs acceptance, and never a bit.
    """

    num_lookahead_tokens: int
    """Tokens beyond a row's own for which its table has blocks, if blocks are free, so that drafts have slots."""

    def begin(
        self, scheduled: Sequence[ScheduledSequence], batch: Batch, hidden: Tensor, aux: tuple[Tensor, ...]
    ) -> None:
        """After each forward pass of the target: hidden states [T, H] of all tokens of the step."""

    def propose(self, scheduled: Sequence[ScheduledSequence], sampled: SampledIds) -> tuple[tuple[int, ...], ...]:
        """After sampling: drafts after the last id of each sampled sequence, the same on all ranks of the group."""

    def forget(self, keys: Sequence[SequenceKey], request_ids: Sequence[RequestId]) -> None:
        """Drop sequences that ended, and requests with all of theirs."""
