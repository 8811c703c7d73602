"""Last step's sampled ids, kept on the device for async scheduling.

T: tokens of a step; R: its samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.worker.runner.batch import Batch


class ChosenTokens:
    """The sampled ids of one model runner's last step: the next step may compute them before the host has read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = self._read_step = -1
        self._scheduled: Sequence[ScheduledSequence] = ()
        self._chosen = torch.empty(0, dtype=torch.int64, device=device)

    def keep(self, step: int, scheduled: Sequence[ScheduledSequence], chosen: Tensor) -> None:
        """Keep a step's rows, in plan order, and their sampled ids, int64 [R]."""
        self._step, self._scheduled, self._chosen = step, scheduled, chosen

    def note_read(self, step: int) -> None:
        self._read_step = step

    def are_all(self, scheduled: Sequence[ScheduledSequence], num_ahead: int) -> bool:
        """Whether a step continues exactly the rows of the last one, before the host has read their ids."""
        return num_ahead == len(scheduled) and self._step != self._read_step and scheduled == self._scheduled

    def filled(self, batch: Batch, scheduled: Sequence[ScheduledSequence], num_ahead: int) -> Batch:
        """The batch with the ids of its first `num_ahead` rows, which the host has not read."""
        if not num_ahead or self._step == self._read_step:
            return batch
        # A row that got no id has ended, and what is computed for it is never read.
        chosen = self._chosen.clamp(min=0)
        if self.are_all(scheduled, num_ahead):
            return replace(batch, token_ids=chosen)
        # A row that is ahead computes one token.
        starts = torch.tensor(batch.attention.query_starts[:num_ahead], dtype=torch.int64)
        first_samples = accumulate((each.num_samples for each in self._scheduled), initial=0)
        samples = {each.sequence: first for each, first in zip(self._scheduled, first_samples) if each.num_samples == 1}
        sources = torch.tensor([samples[each.sequence] for each in scheduled[:num_ahead]], dtype=torch.int64)
        starts, sources = to_device(torch.stack((starts, sources)), self._device)
        return replace(batch, token_ids=batch.token_ids.index_copy(0, starts, chosen.index_select(0, sources)))
