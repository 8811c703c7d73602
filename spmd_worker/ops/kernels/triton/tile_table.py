"""Tiles that ship: measured on an H200, for GPUs of its capability and number of multiprocessors (H100, H200).

By kind of matmul, outputs (of a half if gated) and inputs, a tile for each bucket of rows; see `tiles.py`. Shapes are
those of Llama 3.1 8B, on one GPU.
"""

from typing import Final

from spmd_worker.ops.kernels.triton.tiles import Chip, Tile

Entry = tuple[Tile, ...]
Key = tuple[bool, int, int]
"""Whether gated, outputs, inputs."""

_CAPABILITY, _NUM_MULTIPROCESSORS = (9, 0), 132


def shipped(chip: Chip) -> dict[Key, Entry]:
    """Entries for `chip`: none for chips that were not measured."""
    is_measured = (chip.capability, chip.num_multiprocessors) == (_CAPABILITY, _NUM_MULTIPROCESSORS)
    return MEASURED if is_measured else {}


MEASURED: Final[dict[Key, Entry]] = {}
