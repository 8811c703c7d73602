"""Towers: pixels of one image -> the rows that its tokens take; or, in encoder-decoder models, ids or features of one
input -> the rows that the decoder attends to.

A tower sees one image or input a call, so its rows do not depend on what is beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spmd_worker.media.prepared import AudioFeatures, EncoderIds, ImagePixels

TowerInput = ImagePixels | EncoderIds | AudioFeatures
"""Prepared input of a tower; each tower takes one kind."""


@dataclass(frozen=True, slots=True)
class TowerRows:
    """`rows` [rows of the image, hidden size of the text]; `added` are as many for each of the text's first layers that
    add them to the residual stream behind them (deepstack).
    """

    rows: Tensor
    added: tuple[Tensor, ...] = ()


MakeRows = Callable[[Any], TowerRows]
"""A tower, or a table of rows in its place: of one kind of `TowerInput`."""


class Tower(nn.Module):
    """A module that is a `MakeRows`. Every rank of the first stage has all of it. `has_rows_behind`: it may make
    rows of padding behind those of the tokens.
    """

    has_rows_behind = False

    def forward(self, image: Any) -> TowerRows:
        """The rows of one image or input; with the same bits on any number of threads if the kernels are compiled."""
        raise NotImplementedError


class TwoTowers(Tower):
    """The towers of a model that takes images and audio."""

    def __init__(self, images: Tower, audio: Tower) -> None:
        super().__init__()
        self.images, self.audio = images, audio
        self.has_rows_behind = images.has_rows_behind or audio.has_rows_behind

    def forward(self, image: ImagePixels | AudioFeatures) -> TowerRows:
        rows: TowerRows = (self.audio if isinstance(image, AudioFeatures) else self.images)(image)
        return rows
