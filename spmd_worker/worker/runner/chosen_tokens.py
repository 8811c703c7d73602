"""Last step's sampled ids, kept on the device for async scheduling.

T: tokens of a step; R: its samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.worker.runner.batch import Batch

_SEQUENCE: Final = itemgetter(0)
_NUM_SAMPLES: Final = itemgetter(2)


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
        """The batch with the ids of its first `num_ahead` rows, of one token each, which the host has not read. They
        are written into its `token_ids` if that has any.
        """
        if not num_ahead or self._step == self._read_step:
            return batch
        # A row that got no id has ended, and what is computed for it is never read.
        if self.are_all(scheduled, num_ahead):
            return replace(batch, token_ids=self._chosen.clamp(min=0))
        chosen, sources = self._chosen, self._sources(scheduled, num_ahead)
        if sources is not None:
            chosen = chosen.index_select(0, to_device(torch.from_numpy(sources), self._device))
        torch.clamp(chosen[:num_ahead], min=0, out=batch.token_ids[:num_ahead])
        return replace(batch, token_ids=batch.token_ids)

    def _sources(self, scheduled: Sequence[ScheduledSequence], num_ahead: int) -> NDArray[np.int64] | None:
        """Numbers of the samples of the first `num_ahead` rows; None if they are the first samples, in order."""
        ahead = list(map(_SEQUENCE, scheduled[:num_ahead]))
        sampled = [row for row in self._scheduled if row.num_samples]
        firsts = [*accumulate(map(_NUM_SAMPLES, sampled), initial=0)]
        sequences = list(map(_SEQUENCE, sampled))
        if ahead == sequences[:num_ahead] and firsts[num_ahead] == num_ahead:
            return None
        # A row that samples for its forks too does not go ahead.
        samples = dict(zip(sequences, firsts))
        return np.fromiter(map(samples.__getitem__, ahead), np.int64, num_ahead)
