"""Launches of leaf_kernels.py: how leaves are cut, tiles, and where sums of leaves are kept.

A tile that keeps them all in registers has few numbers, so it is for few rows; a large one keeps two, and the others in
scratch memory of a launch, which is as large as the number of programs times that of levels, not as the result. Bits
depend on neither. Tiles are those of `tile_table.LEAVES`, or chosen by estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.triton import leaf_kernels, matmul, matmul_kernels, tile_table, tiles
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS, can_describe, describe
from spmd_worker.ops.kernels.triton.launching import num_programs
from spmd_worker.ops.kernels.triton.tiles import ROWS, SAFE, Chip, Tile, chip_of
from spmd_worker.ranks.leaves import GRANULE

MAX_LEVELS_IN_REGISTERS: Final = 3
_MAX_SUMS_IN_REGISTERS: Final = 128
"""Registers of a thread that may hold sums."""
_LEAST_STEP: Final = 16
"""Inputs of a matrix instruction."""
_MAX_STAGES: Final = 8
_STEP_CLOCKS, _END_CLOCKS, _LOOP_CLOCKS = 100, 200, 1500
"""Estimated costs: a step whose matrix instruction is waited for, as it is where levels are in registers; a leaf's end;
the first loads of another loop.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """Leaves of a rank's inputs, see `leaf_kernels`: `1 << num_levels` of `base` units of inputs, the first `longer` of
    them of one more.
    """

    unit: int
    base: int
    longer: int
    num_levels: int
    divisor: int
    """Largest power of two that divides each leaf."""


@dataclass(frozen=True, slots=True)
class LeafTile:
    """A tile, and whether all levels are in registers, or the first alone."""

    tile: Tile
    in_registers: bool

    def num_programs(self, num_rows: int, num_columns: int, device: torch.device) -> int:
        num_tiles = -(-num_rows // self.tile.rows) * -(-num_columns // self.tile.width)
        return min(num_tiles, num_programs(device, self.tile.per_multiprocessor))


REPLACED: dict[LeafTile, LeafTile] = {}
"""A tile that does not work -> the one that is launched in its place."""
_SAFE: Final = LeafTile(SAFE, in_registers=False)


@cache
def cut_of(ends: tuple[int, ...]) -> Cut:
    """The cut whose leaves end at `ends`, which are those of `leaves.leaf_ends`, a power of two of them."""
    lengths = [end - start for start, end in pairwise((0, *ends))]
    unit = GRANULE if all(length % GRANULE == 0 for length in lengths) else min(lengths)
    base = min(lengths) // unit
    divisor = gcd(*lengths)
    cut = Cut(
        unit, base, sum(length > base * unit for length in lengths), (len(ends) - 1).bit_length(), divisor & -divisor
    )
    found = tuple(unit * (leaf * base + min(leaf, cut.longer)) for leaf in range(1, len(ends) + 1))
    assert (found, len(ends)) == (ends, 1 << cut.num_levels), ends
    return cut


def linear_of_leaves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Sequence[int],
    dtype: torch.dtype,
    tile: LeafTile | None = None,
) -> Tensor:
    """`Kernels.linear_of_leaves`. `tile` None: from `tile_for`."""
    assert ends[-1] == x.shape[-1], (ends, x.shape)
    if len(ends) == 1:
        return matmul.linear(x, weight, bias, None if tile is None else tile.tile, dtype)
    out = x.new_empty((*x.shape[:-1], len(weight)), dtype=dtype)
    if out.numel():
        rows, to, cut = matmul.as_rows(x), out.view(-1, len(weight)), cut_of(tuple(ends))
        chosen = tile or tile_for(len(rows), len(weight), x.shape[-1], cut, x.dtype, x.device)
        matmul.launch_working(chosen, REPLACED, replacement_of, lambda each: _launch(rows, weight, bias, to, cut, each))
    return out


def replacement_of(tile: LeafTile) -> LeafTile | None:
    """The tile to launch if `tile` does not work."""
    return None if tile == _SAFE else _SAFE


def tile_for(
    num_rows: int, num_columns: int, num_inputs: int, cut: Cut, dtype: torch.dtype, device: torch.device
) -> LeafTile:
    """The tile of [num_rows, num_inputs] x [num_columns, num_inputs] in such leaves."""
    if dtype == torch.float32:
        tile = _fitted(matmul.tile_for(num_rows, num_columns, num_inputs, dtype, device, is_gated=False), cut)
        return LeafTile(tile, in_registers=_is_in_registers(tile, cut))
    return _tiles(num_columns, num_inputs, cut, device)[matmul.bucket_of(num_rows)]


@cache
def _tiles(num_columns: int, num_inputs: int, cut: Cut, device: torch.device) -> tuple[LeafTile, ...]:
    """A tile for each bucket of rows: measured, or by estimate."""
    chip = chip_of(device)
    measured = tile_table.shipped_leaves(chip, (num_columns, num_inputs, 1 << cut.num_levels))
    return tuple(
        LeafTile(*measured[bucket]) if bucket in measured else estimated(rows, num_columns, num_inputs, cut, chip)
        for bucket, rows in enumerate(ROWS)
    )


def estimated(num_rows: int, num_columns: int, num_inputs: int, cut: Cut, chip: Chip) -> LeafTile:
    """The tile with the least estimated time."""

    def clocks(choice: LeafTile) -> float:
        more = _more_clocks(choice, num_inputs, cut)
        sizes = (num_rows, num_columns, num_inputs)
        return tiles.estimated_clocks(choice.tile, *sizes, chip, is_gated=False, more_clocks=more)

    return min(family(cut, chip) or [_SAFE], key=clocks)


def family(cut: Cut, chip: Chip) -> list[LeafTile]:
    """Tiles to choose from, all of whom the compile gate sees for 8 leaves."""
    more = _MORE if chip.capability[0] == 9 else ()
    found = [_fitted(tile, cut) for tile in (*tiles.family(chip, is_gated=False), *more)]
    fitting = [tile for tile in dict.fromkeys(found) if tiles.fits(tile, chip, is_gated=False)]
    # Triton 3.7.1 does not compile a loop for tcgen05 that takes a sum out of its accumulator.
    has_registers = chip.capability[0] != tiles.TCGEN05
    # Operands of mma.sync take registers too.
    most = _MAX_SUMS_IN_REGISTERS // (1 if chip.capability[0] in tiles.WITH_OPERANDS_IN_SHARED_MEMORY else 2)
    return [
        *(LeafTile(tile, in_registers=True) for tile in fitting if has_registers and _is_in_registers(tile, cut)),
        *(LeafTile(tile, in_registers=False) for tile in fitting if 2 * _registers(tile) <= most),
    ]


_MORE: Final = (Tile(64, 128, 64, 8, 6), Tile(128, 64, 64, 8, 6))
"""Two warpgroups on tiles of one, for more sums in registers: wgmma's."""


def _fitted(tile: Tile, cut: Cut) -> Tile:
    """The tile with steps that pass no leaf's end, of as many bytes in flight; if there are none, without TMA, because
    steps have masks then.
    """
    if cut.divisor >= tile.inputs:
        return tile
    if cut.divisor < _LEAST_STEP:
        return replace(tile, x_by_tma=False, weight_by_tma=False)
    num_stages = min(_MAX_STAGES, tile.num_stages * tile.inputs // cut.divisor)
    return replace(tile, inputs=cut.divisor, num_stages=num_stages)


def _is_in_registers(tile: Tile, cut: Cut) -> bool:
    num_sums = cut.num_levels + 1
    is_even = cut.divisor >= tile.inputs
    is_small = num_sums * _registers(tile) <= _MAX_SUMS_IN_REGISTERS
    return is_even and is_small and cut.num_levels <= MAX_LEVELS_IN_REGISTERS


def _registers(tile: Tile) -> int:
    """Registers of a thread that hold one sum of each element."""
    return tile.rows * tile.width // (32 * tile.num_warps)


def _more_clocks(choice: LeafTile, num_inputs: int, cut: Cut) -> float:
    """Clocks of a tile for its leaves."""
    tile, num_leaves = choice.tile, 1 << cut.num_levels
    if choice.in_registers:
        return num_leaves * _END_CLOCKS + num_inputs / tile.inputs * _STEP_CLOCKS
    moved = 2 * (num_leaves // 2 - 1) * tile.rows * tile.width * 4
    return num_leaves * _LOOP_CLOCKS + moved / tiles.LOADED_BYTES


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, cut: Cut, choice: LeafTile) -> None:
    tile, (num_rows, num_columns) = choice.tile, out.shape
    # A step that passes a leaf's end needs masks.
    is_even = cut.divisor >= tile.inputs
    x_by_tma = is_even and tile.x_by_tma and num_rows >= tile.rows and can_describe(x)
    weight_by_tma = is_even and tile.weight_by_tma and num_columns >= tile.width and can_describe(weight)
    out_by_tma = matmul.stores_by_tma(tile, x, out)
    programs = choice.num_programs(num_rows, num_columns, x.device)
    rows = describe(x, tile.rows, tile.inputs) if x_by_tma else x
    columns = describe(weight, tile.columns, tile.inputs) if weight_by_tma else weight
    to = describe(out, tile.rows, tile.columns) if out_by_tma else out
    sizes = (num_rows, num_columns, x.shape[1], cut.base, cut.longer, x.stride(0), weight.stride(0), out.stride(0))
    flags = (bias is not None, is_even, x_by_tma, weight_by_tma, out_by_tma)
    options = constants(choice, cut.num_levels, cut.unit, out.dtype, *flags)
    if choice.in_registers:
        leaf_kernels.linear_of_leaves[(programs,)](rows, columns, bias, to, *sizes, **options)
        return
    shape = (programs, max(cut.num_levels - 1, 1), tile.rows, tile.columns)
    scratch = x.new_empty(shape, dtype=torch.float32)
    leaf_kernels.linear_of_leaf_pairs[(programs,)](rows, columns, bias, to, scratch, *sizes, **options)


@cache
def constants(
    choice: LeafTile,
    num_levels: int,
    unit: int,
    dtype: torch.dtype,
    has_bias: bool,
    is_even: bool,
    x_by_tma: bool,
    weight_by_tma: bool,
    out_by_tma: bool,
) -> dict[str, Any]:
    """Constexprs and options of a launch whose result is of `dtype`."""
    tile = choice.tile
    return {
        "ELEMENT": ELEMENTS[dtype],
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.inputs,
        "GROUP": matmul.GROUP,
        "BIAS": has_bias,
        "EVEN": is_even,
        "LEVELS": num_levels,
        "UNIT": unit,
        "X_BY_TMA": x_by_tma,
        "WEIGHT_BY_TMA": weight_by_tma,
        "OUT_BY_TMA": out_by_tma,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **matmul_kernels.LAUNCH,
    }
