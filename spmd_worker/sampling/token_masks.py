"""Which tokens the forms of a step's rows forbid, and the logits without them.

M: rows with a mask; V: vocabulary; K: rows of logits; Vs: token ids of a shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_worker.grammar.step_masks import StepMasks


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`forbidden` bool [M, V]; `places` row -> its mask; `failed` are the rows that have no token to choose."""

    forbidden: Tensor
    places: Mapping[int, int]
    failed: Sequence[int] = field(default=())

    @staticmethod
    def of_step(masks: StepMasks | None, device: torch.device) -> "TokenMasks":
        """On the device of the logits."""
        if masks is None:
            return NO_MASKS
        places = {index: place for place, index in enumerate(masks.indices)}
        return TokenMasks(torch.from_numpy(masks.forbidden).to(device), places, masks.failed)

    def of(self, indices: Sequence[int]) -> "TokenMasks":
        """Of the rows named, which are numbered in this order from 0 on."""
        if not self.places:
            return NO_MASKS
        places = {new: self.places[index] for new, index in enumerate(indices) if index in self.places}
        return TokenMasks(self.forbidden, places)

    def apply(self, logits: Tensor, first_id: int) -> None:
        """Minus infinity for what is forbidden, in place: [K, Vs], whose first column is token `first_id`."""
        if self._is_of_all_rows(len(logits)):
            # In one operation, which has all threads.
            forbidden = self.forbidden[:, first_id : first_id + logits.shape[1]]
            logits[:, : forbidden.shape[1]].masked_fill_(forbidden, -torch.inf)
            return
        for row, place in self.places.items():
            forbidden = self.forbidden[place, first_id : first_id + logits.shape[1]]
            logits[row, : len(forbidden)].masked_fill_(forbidden, -torch.inf)

    def _is_of_all_rows(self, num_rows: int) -> bool:
        """Whether mask m is that of row m, for all of the rows."""
        each = list(range(num_rows))
        return len(self.forbidden) == num_rows and list(self.places) == each and list(self.places.values()) == each


NO_MASKS: Final = TokenMasks(torch.empty((0, 0), dtype=torch.bool), {})
