"""Which tokens the forms of a step's rows forbid, and the logits without them.

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
    """`allowed` int32 [M, words], a bit a token, as `StepMasks` has it; `places` row -> its mask; `failed` are the rows
    that have no token to choose.
    """

    allowed: Tensor
    places: Mapping[int, int]
    failed: Sequence[int] = field(default=())

    @staticmethod
    def of_step(masks: StepMasks | None, device: torch.device) -> "TokenMasks":
        """On the device of the logits."""
        if masks is None:
            return NO_MASKS
        places = {index: place for place, index in enumerate(masks.indices)}
        return TokenMasks(to_device(torch.from_numpy(masks.allowed), device), places, masks.failed)

    def of(self, indices: Sequence[int]) -> "TokenMasks":
        """Of the rows named, which are numbered in this order from 0 on."""
        if not self.places:
            return NO_MASKS
        places = {new: self.places[index] for new, index in enumerate(indices) if index in self.places}
        return TokenMasks(self.allowed, places)

    def apply(self, kernels: Kernels, logits: Tensor, first_id: int) -> None:
        """Minus infinity for what is forbidden, in place: [K, Vs], whose first column is token `first_id`."""
        if not self.places:
            return
        places = torch.tensor([list(self.places), list(self.places.values())], dtype=torch.int64)
        pairs = to_device(places, logits.device)
        kernels.forbid_(logits, self.allowed, pairs[0], pairs[1], first_id)


NO_MASKS: Final = TokenMasks(torch.empty((0, 0), dtype=torch.int32), {})
