"""Grammar masks of a step's rows, applied to logits.

M: rows with a mask; K: rows of logits; Vs: token ids of a shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.grammar.step_masks import StepMasks


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`allowed` int32 [M, words], one bit per token, as in `StepMasks`; `mask_rows`: row -> its row of `allowed`;
    `failed`: rows whose grammar allows no token.
    """

    allowed: Tensor
    mask_rows: Mapping[int, int]
    failed: Sequence[int] = field(default=())

    @staticmethod
    def of_step(masks: StepMasks | None, device: torch.device) -> "TokenMasks":
        """The masks on the device of the logits."""
        if masks is None:
            return NO_MASKS
        mask_rows = {index: mask_row for mask_row, index in enumerate(masks.indices)}
        return TokenMasks(to_device(torch.from_numpy(masks.allowed), device), mask_rows, masks.failed)

    def of(self, indices: Sequence[int]) -> "TokenMasks":
        """The masks of some rows, renumbered from 0 on in this order."""
        if not self.mask_rows:
            return NO_MASKS
        mask_rows = {new: self.mask_rows[index] for new, index in enumerate(indices) if index in self.mask_rows}
        return TokenMasks(self.allowed, mask_rows)

    def apply(self, kernels: Kernels, logits: Tensor, first_id: int) -> None:
        """Set forbidden logits to minus infinity, in place: [K, Vs], whose first column is token `first_id`."""
        if not self.mask_rows:
            return
        pairs = torch.tensor([list(self.mask_rows), list(self.mask_rows.values())], dtype=torch.int64)
        pairs = to_device(pairs, logits.device)
        kernels.forbid_(logits, self.allowed, pairs[0], pairs[1], first_id)


NO_MASKS: Final = TokenMasks(torch.empty((0, 0), dtype=torch.int32), {})
