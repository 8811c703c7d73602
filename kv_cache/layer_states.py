"""Recurrent states of one layer, all slots: the memory that a layer reads and writes."""

from typing import NamedTuple

from torch import Tensor


class LayerStates(NamedTuple):
    """`state` float32 [slots, *shape], None for a layer that is a convolution alone; `tail` [slots, K - 1, C], the last
    inputs of the convolution, `saved` [slots, most drafts, N] what a row's drafts gave its recurrence, None in a run
    without drafts: both in the dtype of the model. `second_tail` and `second_saved` are the same of a second
    convolution, None in a layer with one.
    """

    state: Tensor | None
    tail: Tensor
    saved: Tensor | None = None
    second_tail: Tensor | None = None
    second_saved: Tensor | None = None
