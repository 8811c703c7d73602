"""A head's screen: a copy of its weight in int8, by which the few logits are found that may be a row's largest.

Only these are computed as they would be without it, so what comes out has the same bits (`native/screened_argmax.cpp`
has the bounds). It saves up to half of a product in which most of a small model's time may go. Where much of a
product is computed all the same, because logits are close to each other or rows have a few very large elements, it
costs more than it saves: then it rests for some calls, for twice as many each time.

R: rows; V: the weight's outputs; H: its inputs.
"""

from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.ops.kernels.api import Kernels

_MOST_COMPUTED: Final = 1 / 8
"""Of a product's logits: above it the screen rests."""

_FIRST_REST: Final = 64
_LONGEST_REST: Final = 4096
"""Calls."""


class HeadScreen(nn.Module):
    """Of one packed weight. It is made at the first use, and again when the weight has changed."""

    def __init__(self, kernels: Kernels, num_bytes: int) -> None:
        super().__init__()
        self._kernels = kernels
        self.numbers: Tensor
        self.register_buffer("numbers", torch.zeros(num_bytes, dtype=torch.int8), persistent=False)
        self._changes = -1
        self._rest, self._num_resting = _FIRST_REST, 0

    def largest(
        self, hidden: Tensor, weight: Tensor, count: int, rows: Tensor | None, changes: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.screened_argmax`: `hidden` [R, H], `weight` as packed, `rows` [V, H]. `changes`: how often the
        weight has been written.
        """
        if self._num_resting > 0:
            self._num_resting -= 1
            return self._kernels.linear_argmax(hidden, weight, count)
        if changes != self._changes:
            self._kernels.make_screen_(self.numbers, weight)
            self._changes = changes
        values, columns, num_computed = self._kernels.screened_argmax(hidden, weight, count, self.numbers, rows)
        if num_computed > _MOST_COMPUTED * len(hidden) * count:
            self._num_resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest = _FIRST_REST
        return values, columns
