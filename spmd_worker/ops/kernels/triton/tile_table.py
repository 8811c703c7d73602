"""Tiles that ship: measured on an H200, for GPUs of its capability and number of multiprocessors (H100, H200).

By kind of matmul, outputs (of a half if gated) and inputs, a tile for each bucket of rows; see `tiles.py`. Shapes are
those of Llama 3.1 8B and of a Llama of 135M, on one GPU.
"""

from typing import Final

from spmd_worker.ops.kernels.triton.tiles import Chip, Tile

Entry = tuple[Tile, ...]
Key = tuple[bool, int, int]
"""Whether gated, outputs, inputs."""

LeafEntry = dict[int, tuple[Tile, bool]]
"""By bucket of rows: a tile, and whether all levels of sums are in registers."""
LeafKey = tuple[int, int, int]
"""Outputs, inputs, leaves."""

_CAPABILITY, _NUM_MULTIPROCESSORS = (9, 0), 132


def shipped(chip: Chip) -> dict[Key, Entry]:
    """Entries for `chip`: none for chips that were not measured."""
    return MEASURED if is_measured(chip.capability, chip.num_multiprocessors) else {}


def is_measured(capability: tuple[int, int], num_multiprocessors: int) -> bool:
    """Whether a chip is of the kind that was measured."""
    return (capability, num_multiprocessors) == (_CAPABILITY, _NUM_MULTIPROCESSORS)


def shipped_leaves(chip: Chip, key: LeafKey) -> LeafEntry:
    """Tiles of products in leaves, of the buckets that were measured on chips like `chip`."""
    return LEAVES.get(key, {}) if is_measured(chip.capability, chip.num_multiprocessors) else {}


LEAVES: Final[dict[LeafKey, LeafEntry]] = {
    (4096, 14336, 8): {
        0: (Tile(16, 32, 256, 4, 6, x_by_tma=False, weight_by_tma=False), True),  # 31.0/32.3
        2: (Tile(64, 32, 256, 4, 4), True),  # 33.1/35.3
        4: (Tile(64, 128, 128, 4, 4), False),  # 65.2/48.2
        6: (Tile(128, 128, 64, 8, 6), False),  # 396.3/295.8
    },
    (4096, 4096, 8): {
        0: (Tile(16, 32, 256, 4, 4, x_by_tma=False, weight_by_tma=False), True),  # 11.1/12.5
        2: (Tile(64, 32, 256, 4, 4), True),  # 11.7/11.3
    },
}
"""Measured on an H200, 2026-11-28, by `scripts/gpu_sweep.py`; buckets that were not have estimates. Beside each tile:
microseconds with the most rows of the bucket (2,048 in the last), and cuBLAS's, which adds in no leaves.
"""
MEASURED: Final[dict[Key, Entry]] = {
    (False, 6144, 4096): (
        Tile(16, 64, 256, 4, 4, x_by_tma=False),  # 15.1/14.8, 15.4/15.2
        Tile(16, 128, 128, 4, 5, x_by_tma=False),  # 16.2/15.3
        Tile(64, 64, 128, 4, 6),  # 16.3/15.9
        Tile(64, 128, 64, 4, 7),  # 18.1/16.2
        Tile(128, 128, 64, 8, 6),  # 23.5/21.4
        Tile(128, 256, 64, 8, 4, out_by_tma=False),  # 42.1/34.8
        Tile(128, 256, 64, 8, 4, out_by_tma=False),  # 132.7/130.2
    ),
    (False, 4096, 4096): (
        Tile(16, 32, 256, 4, 4, x_by_tma=False),  # 11.6/12.4, 11.7/12.7
        Tile(16, 64, 256, 4, 4, x_by_tma=False),  # 11.9/13.0
        Tile(64, 32, 256, 4, 4),  # 11.6/11.9
        Tile(64, 64, 128, 4, 6),  # 12.3/13.2
        Tile(64, 128, 64, 4, 7),  # 15.8/16.6
        Tile(128, 128, 64, 8, 6),  # 24.4/23.7
        Tile(128, 256, 64, 8, 3, is_specialized=True),  # 86.5/85.7
    ),
    (False, 4096, 14336): (
        Tile(16, 32, 256, 4, 4, x_by_tma=False),  # 30.9/30.8, 31.2/31.1
        Tile(16, 64, 256, 4, 4, x_by_tma=False),  # 32.4/32.3
        Tile(64, 32, 256, 4, 4),  # 33.0/34.5
        Tile(64, 64, 128, 4, 6),  # 34.6/36.4
        Tile(64, 128, 64, 4, 7),  # 48.9/47.1
        Tile(128, 128, 64, 4, 5),  # 78.6/77.4
        Tile(128, 256, 64, 8, 3, is_specialized=True),  # 293.7/291.1
    ),
    (True, 14336, 4096): (
        Tile(16, 64, 256, 4, 3, x_by_tma=False, per_multiprocessor=2),  # 56.8/56.2 (1 row), 57.9/57.2
        Tile(64, 128, 64, 8, 4),  # 60.2/56.9
        Tile(64, 128, 64, 8, 4),  # 60.5/61.0
        Tile(128, 128, 64, 8, 4, out_by_tma=False),  # 64.2/65.3
        Tile(128, 128, 64, 8, 4, out_by_tma=False),  # 94.8/88.9
        Tile(128, 128, 64, 8, 4, out_by_tma=False),  # 183.3/155.0
        Tile(128, 128, 64, 8, 4, out_by_tma=False),  # 640.2/605.0
    ),
    (False, 128256, 4096): (
        Tile(16, 128, 128, 4, 4, x_by_tma=False),  # 240.4/244.6, 244.1/247.8
        Tile(32, 128, 128, 4, 4, x_by_tma=False),  # 248.5/259.5
        Tile(64, 256, 64, 4, 4),  # 250.1/277.6
        Tile(128, 256, 64, 8, 4, out_by_tma=False),  # 268.9/268.3
        Tile(128, 256, 64, 8, 4, out_by_tma=False),  # 389.1/369.9
        Tile(128, 256, 64, 8, 4, out_by_tma=False),  # 731.1/733.9
        Tile(128, 256, 64, 8, 4, out_by_tma=False),
    ),
    (False, 960, 576): (
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 3.3/3.4, 3.6/3.4
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 3.7/3.8
        Tile(16, 32, 256, 4, 4, x_by_tma=False, weight_by_tma=False, out_by_tma=False),  # 3.7/3.7
        Tile(32, 32, 256, 4, 4),  # 4.4/3.9
        Tile(64, 64, 128, 4, 4),  # 3.9/4.0
        Tile(64, 64, 128, 4, 4),  # 4.3/4.0
        Tile(64, 256, 64, 4, 4),  # 6.7/6.5
    ),
    (False, 576, 576): (
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 3.2/3.3 (1 row), 3.2/3.2
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),
        Tile(16, 32, 256, 4, 4, x_by_tma=False, weight_by_tma=False, out_by_tma=False),  # 3.4/3.6
        Tile(32, 32, 256, 4, 4),
        Tile(64, 32, 256, 4, 4),
        Tile(64, 64, 128, 4, 6),
        Tile(128, 128, 64, 8, 6),
    ),
    (False, 576, 1536): (
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 4.7/5.0, 4.8/5.2
        Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 4.8/4.9
        Tile(16, 32, 256, 4, 4, x_by_tma=False, weight_by_tma=False),  # 5.1/5.1
        Tile(16, 64, 256, 4, 4, x_by_tma=False),  # 5.9/5.2
        Tile(64, 32, 256, 4, 4),  # 4.9/5.2
        Tile(64, 64, 128, 4, 6),  # 5.7/5.5
        Tile(64, 128, 64, 4, 5, rest_columns=64),  # 10.5/7.9
    ),
    (True, 1536, 576): (
        Tile(16, 32, 128, 4, 5, x_by_tma=False, weight_by_tma=False, out_by_tma=False),  # 4.5/4.0 (1 row), 4.5/4.1
        Tile(16, 32, 128, 4, 5, x_by_tma=False, weight_by_tma=False),  # 4.8/4.2
        Tile(16, 64, 128, 4, 4, x_by_tma=False),  # 5.4/4.2
        Tile(64, 32, 128, 4, 4),  # 5.4/4.4
        Tile(64, 64, 128, 4, 4),  # 6.4/4.4
        Tile(128, 64, 128, 8, 3),  # 8.3/5.7
        Tile(128, 64, 128, 8, 3),  # 21.6/13.6
    ),
}
"""Beside each tile: microseconds of the matmul with 8 and 16, or with the most rows of the bucket (2,048 in the last),
and cuBLAS's (without silu where gated), in CUDA graphs that read the weight from memory. Tiles without figures are
estimates.
"""
