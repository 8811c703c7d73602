"""Recurrent states of one layer, all slots: the memory that a layer reads and writes."""

from typing import NamedTuple

from torch import Tensor


class LayerStates(NamedTuple):
    """`state` float32 [slots, *shape], None for a layer that is a convolution alone; `tail` [slots, K - 1, C], the last
    inputs of the convolution, in the dtype of the model.
    """

    state: Tensor | None
    tail: Tensor
