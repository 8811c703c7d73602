"""The tokens that the last step chose, where it chose them: for a step that computes them before the host has read
them.

T: tokens of a step; R: its samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.worker.runner.batch import Batch


class ChosenTokens:
    """Of one model runner, whose device it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = self._read_step = -1
        self._scheduled: Sequence[ScheduledSequence] = ()
        self._chosen = torch.empty(0, dtype=torch.int64, device=device)

    def keep(self, step: int, scheduled: Sequence[ScheduledSequence], chosen: Tensor) -> None:
        """A step's rows, in plan order, and what was chosen for them, int64 [R]."""
        self._step, self._scheduled, self._chosen = step, scheduled, chosen

    def note_read(self, step: int) -> None:
        """The host has what the step chose."""
        self._read_step = step

    def are_all(self, scheduled: Sequence[ScheduledSequence], num_ahead: int) -> bool:
        """Whether a step takes just the rows of the last one further, before anybody has read their tokens."""
        return num_ahead == len(scheduled) and self._step != self._read_step and scheduled == self._scheduled

    def filled(self, batch: Batch, scheduled: Sequence[ScheduledSequence], num_ahead: int) -> Batch:
        """The batch with the tokens that the host has not read, which are those of the first `num_ahead` rows."""
        if not num_ahead or self._step == self._read_step:
            return batch
        # A row that was given no id ends with that, and nobody reads what is computed of it.
        chosen = self._chosen.clamp(min=0)
        if self.are_all(scheduled, num_ahead):
            return replace(batch, token_ids=chosen)
        # Of one that goes ahead there is no other token.
        starts, samples = batch.attention.query_starts, self._sample_of()
        places = torch.tensor(starts[:num_ahead], dtype=torch.int64)
        sources = torch.tensor([samples[each.sequence] for each in scheduled[:num_ahead]], dtype=torch.int64)
        places, sources = to_device(torch.stack((places, sources)), self._device)
        return replace(batch, token_ids=batch.token_ids.index_copy(0, places, chosen.index_select(0, sources)))

    def _sample_of(self) -> dict[MirroredSequence, int]:
        """Which of the tokens is whose."""
        found, index = {}, 0
        for sequence, _, num_samples in self._scheduled:
            if num_samples == 1:
                found[sequence] = index
            index += num_samples
        return found
