"""Tiles of matmuls: shape, warps, stages, and how operands are read; and a tile for a matmul by estimate.

`matmul.py` asks the user's table first (`tile_files.py`), then `tile_table.py`, measured on one kind of chip, and then
`estimated`, which compares what the tiles of the chip's family would read and compute. Bits depend on none of them, so
ranks may have different tables.

N counts the outputs of one half if the matmul is gated: two weights are multiplied by the same rows.
"""

from dataclasses import dataclass
from functools import cache

import torch

from spmd_worker.ops.kernels.triton import launching

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Maximum rows of a bucket; one more bucket is above the last."""
ROWS = (*BUCKETS, 2048)
"""Rows with which a bucket's tile is measured or estimated."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a program's result tile, inputs of a step along K, warps, pipeline stages; which operands TMA
    moves where the chip has it and their memory allows it, the others go by pointers; `is_specialized`: one flattened
    loop whose loads have warps of their own; programs a multiprocessor; columns beside the others, 0 if none, for
    widths that are no power of two, which gated matmuls do not have.

    Rows of x go by pointers if there are fewer than `rows`: TMA is slow past the end of a tensor.
    """

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int
    x_by_tma: bool = True
    weight_by_tma: bool = True
    out_by_tma: bool = True
    is_specialized: bool = False
    per_multiprocessor: int = 1
    rest_columns: int = 0

    @property
    def width(self) -> int:
        """All columns."""
        return self.columns + self.rest_columns

    def shared_bytes(self, itemsize: int, *, is_gated: bool) -> int:
        """Bytes of shared memory of a program: all stages of operands, and the result if TMA stores it."""
        staged = (self.rows + (1 + is_gated) * self.width) * self.inputs * self.num_stages
        return itemsize * (staged + self.rows * self.width * self.out_by_tma)


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU, as far as tiles depend on it."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int


INTERPRETED = Chip("interpreted", (9, 0), 132, 232_448)
"""Kernels that run on CPU tensors have the tiles of an H100."""


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind a CUDA device; an H100 if kernels are interpreted."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", INTERPRETED.shared_bytes))
    return Chip(properties.name, launching.capability(device), int(properties.multi_processor_count), shared_bytes)


FLOAT32 = Tile(32, 32, 32, 4, 2, False, False, False)
"""No matrix instruction keeps float32 precision (TF32 does not): plain FMA, with small tiles."""
SAFE = Tile(64, 64, 64, 4, 3, False, False, False)
"""It compiles for every chip and fits its shared memory: replaces tiles that do not."""
GATED_SAFE = Tile(64, 32, 64, 4, 3, False, False, False)


def estimated(num_rows: int, num_columns: int, num_inputs: int, chip: Chip, *, is_gated: bool) -> Tile:
    """The tile of the chip's family with the least estimated time."""
    fitting = [tile for tile in family(chip, is_gated=is_gated) if fits(tile, chip, is_gated=is_gated)]
    return min(
        fitting or [GATED_SAFE if is_gated else SAFE],
        key=lambda tile: estimated_clocks(tile, num_rows, num_columns, num_inputs, chip, is_gated=is_gated),
    )


def fits(tile: Tile, chip: Chip, *, is_gated: bool) -> bool:
    """Whether a program of a bfloat16 matmul has the shared memory it needs. Chips without wgmma and tcgen05 keep one
    stage in registers.
    """
    staged = tile.shared_bytes(2, is_gated=is_gated)
    if chip.capability[0] not in WITH_OPERANDS_IN_SHARED_MEMORY:
        staged = staged * (tile.num_stages - 1) // tile.num_stages
    is_of_kind = not (is_gated and tile.rest_columns)
    return is_of_kind and staged + _RESERVED_BYTES <= chip.shared_bytes and tile.rows >= least_rows(chip)


def least_rows(chip: Chip) -> int:
    """Minimum rows of a tile. Fewer than 64 take mma.sync, which is known to have the bits of wgmma, and not known to
    have those of tcgen05.
    """
    return 64 if chip.capability[0] == TCGEN05 else 16


TCGEN05 = 10
WITH_OPERANDS_IN_SHARED_MEMORY = (9, TCGEN05)
_RESERVED_BYTES = 512
"""Barriers."""
LOADED_BYTES, _SHARED_BYTES, _PRODUCTS = 40, 128, 2048
"""Per clock and multiprocessor: bytes loaded from L2, bytes moved between shared memory and the rest, products of the
matrix unit. Orders of magnitude of an H100; other chips have similar ratios.
"""
_TILE_CLOCKS = 3000
"""First loads, last stores."""


def estimated_clocks(
    tile: Tile,
    num_rows: int,
    num_columns: int,
    num_inputs: int,
    chip: Chip,
    *,
    is_gated: bool,
    more_clocks: float = 0.0,
) -> float:
    """The busiest multiprocessor's clocks: its tiles, each bound by loads, shared memory or products. `more_clocks` are
    those of a tile for anything else.
    """
    columns = tile.width * (1 + is_gated)
    loaded = 2 * (min(num_rows, tile.rows) + columns)
    # A warpgroup reads its own 64 rows, for each accumulator, and all columns.
    num_parts = 1 + (is_gated or tile.rest_columns > 0)
    moved = loaded + 2 * (num_parts * tile.rows + max(1, tile.rows // 64) * columns)
    step = max(loaded / LOADED_BYTES, moved / _SHARED_BYTES, tile.rows * columns / _PRODUCTS)
    num_tiles = -(-num_rows // tile.rows) * -(-num_columns // tile.width)
    num_inputs = -(-num_inputs // tile.inputs) * tile.inputs
    return -(-num_tiles // chip.num_multiprocessors) * (num_inputs * step + _TILE_CLOCKS + more_clocks)


def family(chip: Chip, *, is_gated: bool) -> tuple[Tile, ...]:
    """Tiles to choose from, all of whom the compile gate sees."""
    if chip.capability[0] == 9:
        return _GATED_HOPPER if is_gated else _HOPPER
    if chip.capability[0] == TCGEN05:
        return _GATED_BLACKWELL if is_gated else _BLACKWELL
    return _GATED_AMPERE if is_gated else _AMPERE


_HOPPER = (
    Tile(16, 16, 256, 4, 4, x_by_tma=False, weight_by_tma=False),
    Tile(16, 32, 256, 4, 4, x_by_tma=False),
    Tile(16, 64, 256, 4, 4, x_by_tma=False),
    Tile(16, 128, 128, 4, 4, x_by_tma=False),
    Tile(32, 32, 256, 4, 4),
    Tile(64, 32, 256, 4, 4),
    Tile(32, 64, 256, 4, 4),
    Tile(32, 128, 128, 4, 4),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 128, 64, 4, 7),
    Tile(64, 256, 64, 4, 4),
    Tile(128, 128, 64, 8, 6),
    Tile(128, 256, 64, 8, 4, out_by_tma=False),
)
_GATED_HOPPER = (
    Tile(16, 32, 128, 4, 5, x_by_tma=False, weight_by_tma=False),
    Tile(16, 64, 256, 4, 3, x_by_tma=False),
    Tile(32, 32, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 32, 128, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 8, 4),
    Tile(128, 64, 128, 8, 3),
    Tile(128, 128, 64, 8, 4, out_by_tma=False),
)
_BLACKWELL = (
    Tile(64, 32, 128, 4, 5),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 5),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)
_GATED_BLACKWELL = (
    Tile(64, 32, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
)
_AMPERE = (
    Tile(16, 32, 128, 4, 4, False, False, False),
    Tile(16, 64, 128, 4, 4, False, False, False),
    Tile(32, 64, 64, 4, 5, False, False, False),
    Tile(64, 64, 64, 4, 4, False, False, False),
    Tile(64, 128, 64, 4, 3, False, False, False),
    Tile(128, 128, 64, 8, 3, False, False, False),
    Tile(128, 128, 64, 8, 4, False, False, False),
)
_GATED_AMPERE = (
    Tile(16, 32, 128, 4, 4, False, False, False),
    Tile(16, 64, 64, 4, 5, False, False, False),
    Tile(32, 32, 64, 4, 5, False, False, False),
    Tile(64, 32, 64, 4, 4, False, False, False),
    Tile(64, 64, 64, 4, 4, False, False, False),
    Tile(128, 64, 64, 8, 3, False, False, False),
)
