"""Resizing with the same bits under every release of Pillow.

Pillow rounds to 8 bits between its two passes, and releases differ in which pass comes first (13.0: the cheaper one).
Each call here changes one axis, the horizontal one first, so only one pass is made in each.
"""

from typing import Final

import numpy as np

from spmd_worker.media.prepared import Pixels

RESAMPLINGS: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Number in a file of settings -> name."""
_NUMBERS: Final = {name: number for number, name in RESAMPLINGS.items()}


def resize(pixels: Pixels, height: int, width: int, resampling: str) -> Pixels:
    """[H, W, 3] -> [height, width, 3]."""
    from PIL import Image

    number = Image.Resampling(_NUMBERS[resampling])
    image = Image.fromarray(pixels)
    if image.width != width:
        image = image.resize((width, image.height), number)
    if image.height != height:
        image = image.resize((width, height), number)
    return np.asarray(image)
