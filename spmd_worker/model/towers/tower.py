"""Towers: pixels of one image -> the rows that its tokens take.

A tower sees one image a call, so an image's rows do not depend on what is beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from spmd_worker.media.prepared import ImagePixels


@dataclass(frozen=True, slots=True)
class TowerRows:
    """`rows` [rows of the image, hidden size of the text]; `added` are as many for each of the text's first layers that
    add them to the residual stream behind them (deepstack).
    """

    rows: Tensor
    added: tuple[Tensor, ...] = ()


MakeRows = Callable[[ImagePixels], TowerRows]
"""A tower, or a table of rows in its place."""


class Tower(nn.Module):
    """A module that is a `MakeRows`. Every rank of the first stage has all of it."""

    def forward(self, image: ImagePixels) -> TowerRows:
        """The rows of one image; with the same bits on any number of threads if the kernels are compiled."""
        raise NotImplementedError
