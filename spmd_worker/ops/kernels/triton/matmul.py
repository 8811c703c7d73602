"""Launches of matmul_kernels.py: tiles, descriptors and number of programs.

A tile follows from the matmul's shape and bucket of rows: from the user's table, from the table that ships, or by
estimate; bits do not depend on it. Operands go by TMA where the chip has it, the tile says so and rows of the operand
are at multiples of 16 bytes; else by pointers. A tile that Triton cannot compile, or for which the chip has too little
shared memory, is replaced, once for all, by one that works.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from spmd_worker.ops.kernels.triton import matmul_kernels, tile_files, tile_table
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS, can_describe, describe
from spmd_worker.ops.kernels.triton.launching import num_programs
from spmd_worker.ops.kernels.triton.tiles import (
    BUCKETS,
    FLOAT32,
    GATED_SAFE,
    ROWS,
    SAFE,
    Chip,
    Tile,
    chip_of,
    estimated,
)

logger = logging.getLogger(__name__)

REPLACED: dict[tuple[bool, Tile], tuple[bool, Tile]] = {}
"""Whether gated, and a tile that does not work -> the same, and the tile that is launched in its place."""
_Choice = TypeVar("_Choice")
_TILE_ERRORS = (OutOfResources, PTXASError, CompilationError)
_PASS_FAILED = "PassManager::run failed"
"""The message of the RuntimeError that Triton raises if a compiler pass rejects a kernel."""


def tile_for(
    num_rows: int, num_columns: int, num_inputs: int, dtype: torch.dtype, device: torch.device, *, is_gated: bool
) -> Tile:
    """The tile of [num_rows, num_inputs] x [num_columns, num_inputs] (twice if gated)."""
    if dtype == torch.float32:
        return FLOAT32
    return _tiles(is_gated, num_columns, num_inputs, device)[bucket_of(num_rows)]


def bucket_of(num_rows: int) -> int:
    """Index of the bucket of so many rows."""
    return bisect_left(BUCKETS, num_rows)


@cache
def _tiles(is_gated: bool, num_columns: int, num_inputs: int, device: torch.device) -> tuple[Tile, ...]:
    """A tile for each bucket of rows."""
    chip, key = chip_of(device), (is_gated, num_columns, num_inputs)
    measured = _table(chip).get(key)
    return measured or tuple(estimated(rows, num_columns, num_inputs, chip, is_gated=is_gated) for rows in ROWS)


@cache
def _table(chip: Chip) -> dict[tile_table.Key, tile_table.Entry]:
    return tile_table.shipped(chip) | tile_files.read_table(chip)


def warm_up_rows(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that between them launch each kernel that matmuls of up to `max_rows` rows launch: both ends of
    each bucket, because x goes by pointer if a tile has more rows than there are. No tile of the last bucket has.
    """
    counts = {1, min(max_rows, BUCKETS[-1]), *BUCKETS, *(bucket + 1 for bucket in BUCKETS)}
    return tuple(sorted(count for count in counts if count <= max_rows))


def shared_bytes(itemsize: int) -> int:
    """Bytes of shared memory that a chip must have: those of the tiles that replace others, on chips without wgmma or
    tcgen05, which have the least. One stage of operands is in registers there.
    """
    tiles = ((FLOAT32, False), (FLOAT32, True)) if itemsize == 4 else ((SAFE, False), (GATED_SAFE, True))
    return max(
        tile.shared_bytes(itemsize, is_gated=is_gated) * (tile.num_stages - 1) // tile.num_stages
        for tile, is_gated in tiles
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """[..., K] x [N, K] -> [..., N] of `dtype`, None: theirs: see `matmul_kernels.linear`. `tile` None: from
    `tile_for`.
    """
    out = x.new_empty((*x.shape[:-1], len(weight)), dtype=dtype)
    if out.numel():
        _launch(as_rows(x), (weight,), (bias,), out.view(-1, len(weight)), tile)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """[..., K] x [2 I, K] -> [..., I]: see `matmul_kernels.gated_linear`."""
    width = len(weight) // 2
    out = x.new_empty((*x.shape[:-1], width))
    if out.numel():
        biases = (None, None) if bias is None else (bias[:width], bias[width:])
        _launch(as_rows(x), (weight[:width], weight[width:]), biases, out.view(-1, width), tile)
    return out


def as_rows(x: Tensor) -> Tensor:
    """[M, K], K contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], out: Tensor, tile: Tile | None
) -> None:
    """`weights` and `biases` of one matmul, or of gate and up."""
    is_gated = len(weights) > 1
    num_rows, num_columns = out.shape
    if tile is None:
        tile = tile_for(num_rows, num_columns, x.shape[1], x.dtype, x.device, is_gated=is_gated)
    launch_working(
        (is_gated, tile), REPLACED, _replacement_of, lambda choice: _launch_tile(x, weights, biases, out, choice[1])
    )


def launch_working(
    choice: _Choice,
    replaced: dict[_Choice, _Choice],
    replacement_of: Callable[[_Choice], _Choice | None],
    launch: Callable[[_Choice], None],
) -> None:
    """Launch `choice`, or what has replaced it: a tile, in some way. `replaced` is noted where a choice fails."""
    while True:
        if replaced:
            choice = replaced.get(choice, choice)
        try:
            return launch(choice)
        except (*_TILE_ERRORS, RuntimeError) as error:
            if not isinstance(error, _TILE_ERRORS) and _PASS_FAILED not in str(error):
                raise
            replacement = replacement_of(choice)
            if replacement is None:
                raise
            replaced[choice] = replacement
            logger.warning("%s does not work here (%s): %s in its place", choice, _first_line(error), replacement)


def _replacement_of(choice: tuple[bool, Tile]) -> tuple[bool, Tile] | None:
    is_gated, tile = choice
    found = replacement_of(tile, is_gated=is_gated)
    return None if found is None else (is_gated, found)


def replacement_of(tile: Tile, *, is_gated: bool) -> Tile | None:
    """The tile to launch if `tile` does not work: itself without specialization, then one that works everywhere."""
    if tile.is_specialized:
        shape = (tile.rows, tile.columns, tile.inputs, tile.num_warps, tile.num_stages)
        return Tile(*shape, tile.x_by_tma, tile.weight_by_tma, tile.out_by_tma)
    safe = GATED_SAFE if is_gated else SAFE
    return None if tile in (safe, FLOAT32) else safe


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}".splitlines()[0]


def _launch_tile(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], out: Tensor, tile: Tile
) -> None:
    num_rows, num_columns = out.shape
    num_inputs = x.shape[1]
    x_by_tma = tile.x_by_tma and num_rows >= tile.rows and can_describe(x)
    weight_by_tma = tile.weight_by_tma and num_columns >= tile.width and can_describe(*weights)
    out_by_tma = stores_by_tma(tile, x, out)
    flags = (biases[0] is not None, num_inputs % tile.inputs == 0, x_by_tma, weight_by_tma, out_by_tma)
    num_tiles = -(-num_rows // tile.rows) * -(-num_columns // tile.width)
    rows = describe(x, tile.rows, tile.inputs) if x_by_tma else x
    boxes = [describe(each, tile.columns, tile.inputs) if weight_by_tma else each for each in weights]
    to = describe(out, tile.rows, tile.columns) if out_by_tma else out
    operands: tuple[object, ...]
    # Kernels are looked up at each launch: tests put others in their place.
    if len(weights) > 1:
        kernel = matmul_kernels.gated_linear
        operands = (rows, boxes[0], biases[0], boxes[1], biases[1], to)
    else:
        kernel = matmul_kernels.linear
        rest, rest_to = None, None
        if tile.rest_columns:
            rest = describe(weights[0], tile.rest_columns, tile.inputs) if weight_by_tma else weights[0]
            rest_to = describe(out, tile.rows, tile.rest_columns) if out_by_tma else out
        operands = (rows, boxes[0], rest, biases[0], to, rest_to)
    kernel[(min(num_tiles, num_programs(x.device, tile.per_multiprocessor)),)](
        *operands, num_rows, num_columns, num_inputs, x.stride(0), weights[0].stride(0), out.stride(0),
        **constants(tile, out.dtype, len(weights) > 1, *flags),
    )  # fmt: skip


def stores_by_tma(tile: Tile, x: Tensor, out: Tensor) -> bool:
    """Whether the result goes by TMA: not one of more bytes than the tile was chosen for."""
    return tile.out_by_tma and out.dtype == x.dtype and can_describe(out)


@cache
def constants(
    tile: Tile,
    dtype: torch.dtype,
    is_gated: bool,
    has_bias: bool,
    is_even: bool,
    x_by_tma: bool,
    weight_by_tma: bool,
    out_by_tma: bool,
) -> dict[str, Any]:
    """Constexprs and options of a launch whose result is of `dtype`."""
    rest = {} if is_gated else {"REST": tile.rest_columns}
    return {
        **rest,
        "ELEMENT": ELEMENTS[dtype],
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.inputs,
        "GROUP": GROUP,
        "BIAS": has_bias,
        "EVEN": is_even,
        "X_BY_TMA": x_by_tma,
        "WEIGHT_BY_TMA": weight_by_tma,
        "OUT_BY_TMA": out_by_tma,
        # Without TMA there is nothing that a warp of its own could load.
        "SPECIALIZED": tile.is_specialized and x_by_tma and weight_by_tma,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **matmul_kernels.LAUNCH,
    }


GROUP = 8
"""Row tiles that share columns in L2."""
