"""Launches of fp8_kernels.py: quantised activations, tiles by shape, and the kernels of a model in FP8."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import QUANTISATION, Region
from spmd_worker.model_config.byte_rows import GROUP, fits_bytes
from spmd_worker.ops.kernels.byte_rows import is_packed
from spmd_worker.ops.kernels.fp8 import CHAIN, Fp8Packing, Fp8Weights
from spmd_worker.ops.kernels.triton import fp8_kernels, rows
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS, can_describe, describe
from spmd_worker.ops.kernels.triton.kernels import PackedTritonKernels, TritonKernels
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two
from spmd_worker.ops.kernels.triton.matmul import bucket_of
from spmd_worker.ops.kernels.triton.tile_table import is_measured
from spmd_worker.ops.kernels.triton.version import triton_region

FIRST_CAPABILITY: Final = (8, 9)
"""The first chips that multiply e4m3."""
NUMBERS: Final = torch.float8_e4m3fn
_HOPPER: Final = (9, 0)
_MOST_IN_REGISTERS: Final = 1 << 14
_GROUPS_IN_REGISTERS: Final = 1 << 12
_PER_WARP: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """Rows and columns of a program's tile, or of each of two if it `is_paired`; steps of 128 inputs in an iteration,
    warps, pipeline stages; `per_multiprocessor`: programs. See `fp8_kernels.linear`.
    """

    rows: int
    columns: int
    steps: int
    num_warps: int
    num_stages: int
    is_paired: bool = False
    is_swapped: bool = False
    is_flat: bool = False
    per_multiprocessor: int = 1

    def constants(self, *, is_gated: bool, kind: int, has_bias: bool) -> dict[str, Any]:
        """Constexprs of the kernel that follow from the tile. `kind` of scales: see `fp8_kernels`."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "INPUTS": GROUP * self.steps,
            "CHAIN": CHAIN,
            "GROUP": 8,
            "BIAS": has_bias,
            "IS_PAIRED": self.is_paired or is_gated,
            "IS_GATED": is_gated,
            "SCALES": kind,
            "SWAPPED": self.is_swapped,
            "FLATTEN": self.is_flat,
        }

    def box(self, kind: int) -> int:
        """Inputs that are loaded together."""
        return GROUP * (self.steps if kind == fp8_kernels.OF_ROWS.value else 1)

    def options(self) -> dict[str, Any]:
        """Launch options."""
        return fp8_kernels.LAUNCH | {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def num_tiles(self, num_rows: int, num_columns: int, *, is_gated: bool) -> int:
        """Tiles of a result of this shape."""
        width = self.columns * (2 if self.is_paired and not is_gated else 1)
        return -(-num_rows // self.rows) * -(-num_columns // width)


OTHER_CHIPS: Final = Fp8Tile(64, 64, 1, 4, 3)
"""Without wgmma there is no table yet, and shared memory may be 99 KB."""
OTHER_CHIPS_GATED: Final = Fp8Tile(64, 32, 1, 4, 3)
_FEW: Final = Fp8Tile(16, 64, 2, 4, 5, is_swapped=True, per_multiprocessor=2)
_FEW_GATED: Final = Fp8Tile(16, 128, 2, 4, 3, is_swapped=True)
_FEWER_THAN_32: Final = Fp8Tile(32, 64, 2, 4, 5, is_swapped=True, per_multiprocessor=2)
_FEWER_THAN_32_GATED: Final = Fp8Tile(32, 64, 2, 4, 3, is_swapped=True)
_SOME_NARROW: Final = Fp8Tile(64, 32, 4, 4, 3)
_SOME: Final = Fp8Tile(64, 64, 2, 4, 4, is_swapped=True)
_SOME_WIDE: Final = Fp8Tile(64, 128, 1, 4, 6)
_SOME_GATED: Final = Fp8Tile(64, 64, 1, 4, 6)
_MANY_NARROW: Final = Fp8Tile(64, 128, 2, 4, 4)
_MANY: Final = Fp8Tile(64, 128, 1, 4, 4, per_multiprocessor=2)
_MANY_GATED: Final = Fp8Tile(64, 64, 1, 4, 4, per_multiprocessor=2)
_MANY_CHAINED: Final = Fp8Tile(128, 128, 1, 8, 6)
_MANY_SHORT_CHAINED: Final = Fp8Tile(128, 256, 1, 8, 3)
_SHORT_INPUTS: Final = 4096
"""Inputs up to which the larger tile was 3 % faster; with 14,336 it was 7 % slower."""
_SOME_GATED_CHAINED: Final = Fp8Tile(64, 64, 1, 4, 4, per_multiprocessor=2)
_MANY_GATED_CHAINED: Final = Fp8Tile(128, 64, 1, 4, 3, per_multiprocessor=2)
CHAINED_TILES: Final = (_MANY_SHORT_CHAINED, _MANY_CHAINED)
CHAINED_GATED_TILES: Final = (_SOME_GATED_CHAINED, _MANY_GATED_CHAINED)
"""Tiles of matmuls without scales of groups."""
HOPPER_TILES: Final = (_FEW, _FEWER_THAN_32, _SOME_NARROW, _SOME, _SOME_WIDE, _MANY_NARROW, _MANY)
HOPPER_GATED_TILES: Final = (_FEW_GATED, _FEWER_THAN_32_GATED, _SOME_GATED, _MANY_GATED)


MOST_FUSED_ROWS: Final = 128
"""Rows up to which gates are multiplied in the kernel of their matmul if scales are of rows. Tiles with two sums are
small: 2,048 rows of 28,672 x 4,096 took 580 us, and would take 414 at the plain matmul's rate. Gates apart are a launch
of about 45, which quantises them for the next matmul, and so saves one. A bucket's end: the warm-up compiles both.
"""
MEASURED: Final[dict[tuple[bool, int, int], dict[int, Fp8Tile]]] = {
    (False, 6144, 4096): {
        0: Fp8Tile(16, 64, 2, 4, 5, is_swapped=True, per_multiprocessor=2),  # 8.8/15.2
        2: Fp8Tile(64, 64, 2, 4, 5),  # 9.7/16.1
        4: Fp8Tile(64, 128, 1, 4, 4, per_multiprocessor=2),  # 16.4/20.9
        6: Fp8Tile(128, 256, 1, 8, 3),  # 88.8/132.6
    },
    (False, 4096, 4096): {
        0: Fp8Tile(16, 64, 2, 4, 5, is_swapped=True, per_multiprocessor=2),  # 7.8/12.9
        2: Fp8Tile(64, 32, 2, 4, 6),  # 7.9/11.3
        4: Fp8Tile(64, 128, 2, 4, 4),  # 10.7/16.6
        6: Fp8Tile(128, 256, 1, 8, 3),  # 59.6/88.1
    },
    (True, 14336, 4096): {
        0: Fp8Tile(16, 64, 4, 4, 3, is_swapped=True),  # 32.0/56.9
        2: Fp8Tile(64, 64, 1, 4, 4, per_multiprocessor=2),  # 35.5/62.2
        4: Fp8Tile(128, 64, 1, 4, 3, per_multiprocessor=2),  # 85.7/91.9
        6: Fp8Tile(128, 64, 1, 4, 3, per_multiprocessor=2),  # 580.1/611.0
    },
    (False, 4096, 14336): {
        0: Fp8Tile(16, 64, 2, 4, 5, is_swapped=True, per_multiprocessor=2),  # 19.6/31.8
        2: Fp8Tile(64, 32, 2, 4, 6),  # 19.6/35.3
        4: Fp8Tile(64, 128, 2, 4, 4),  # 29.6/48.4
        6: Fp8Tile(128, 128, 1, 8, 6),  # 193.8/296.3
    },
}
"""Tiles without scales of groups by is_gated, outputs (of a half) and inputs, and by bucket of rows: of those that
`scripts/gpu_sweep.py` measured on an H200, 2026-11-28, the fastest, or the estimate's unless one is 2 % faster. Beside
each: microseconds with the most rows of the bucket (2,048 in the last), and cuBLAS's in bfloat16, without silu.
"""


def tile_for(
    device: torch.device, num_rows: int, num_columns: int, num_inputs: int, *, is_gated: bool, has_groups: bool = False
) -> Fp8Tile:
    """The tile of a matmul of this shape. Those for groups were measured on an H200 for the shapes of an 8B model; the
    others are in MEASURED, or what was fastest there for similar shapes.
    """
    chip = capability(device)
    if not has_groups and is_measured(chip, num_programs(device)):
        measured = MEASURED.get((is_gated, num_columns, num_inputs), {}).get(bucket_of(num_rows))
        if measured is not None:
            return measured
    if chip not in (_HOPPER, (0, 0)):
        return OTHER_CHIPS_GATED if is_gated else OTHER_CHIPS
    of_hopper = (
        _gated_tile_for(num_rows, has_groups)
        if is_gated
        else _tile_for(device, num_rows, num_columns, num_inputs, has_groups)
    )
    # The interpreter adds more products at once in another order; the matrix unit does not.
    return of_hopper if chip == _HOPPER else replace(of_hopper, steps=1)


def _gated_tile_for(num_rows: int, has_groups: bool) -> Fp8Tile:
    some = _SOME_GATED if has_groups else _SOME_GATED_CHAINED
    limits = ((16, _FEW_GATED), (32, _FEWER_THAN_32_GATED), (64, some))
    many = _MANY_GATED if has_groups else _MANY_GATED_CHAINED
    return next((tile for most, tile in limits if num_rows <= most), many)


def _tile_for(device: torch.device, num_rows: int, num_columns: int, num_inputs: int, has_groups: bool) -> Fp8Tile:
    if num_rows <= 32:
        return _FEW if num_rows <= 16 else _FEWER_THAN_32
    multiprocessors = num_programs(device)
    if num_rows <= 64:
        is_narrow = num_columns <= _SOME_NARROW.columns * multiprocessors
        is_wide = num_columns >= _SOME_WIDE.columns * multiprocessors
        return _SOME_NARROW if is_narrow else _SOME_WIDE if is_wide else _SOME
    # With a tile for each multiprocessor at most, one program alone has more of the memory's bandwidth.
    if _MANY.num_tiles(num_rows, num_columns, is_gated=False) <= multiprocessors:
        return _MANY_NARROW
    # Larger tiles read less of L2, which smaller ones wait for, once they are enough for all multiprocessors.
    large = () if has_groups else CHAINED_TILES if num_inputs <= _SHORT_INPUTS else CHAINED_TILES[1:]
    enough = (tile for tile in large if tile.num_tiles(num_rows, num_columns, is_gated=False) >= multiprocessors)
    return next(enough, _MANY)


def num_warps(block: int) -> int:
    """Warps that quantise a row, or a piece of one, of `block` numbers."""
    return max(1, min(16, block // _PER_WARP))


def quantise(x: Tensor, *, is_grouped: bool, dtype: torch.dtype = NUMBERS) -> tuple[Tensor, Tensor]:
    """[M, K] -> e4m3 [M, K] and float32 scales [M] or [M, K / 128]. `dtype` float32: the numbers before rounding."""
    num_rows, num_inputs = x.shape
    out, scales = _room(num_rows, num_inputs, x.device, dtype, is_grouped=is_grouped)
    if num_rows == 0:
        return out, scales
    block = min(max(power_of_two(num_inputs), GROUP), _GROUPS_IN_REGISTERS if is_grouped else _MOST_IN_REGISTERS)
    options = fp8_kernels.LAUNCH | {"num_warps": num_warps(block)}
    if is_grouped:
        grid = (num_rows, -(-num_inputs // block))
        fp8_kernels.quantise_groups[grid](x, out, scales, num_inputs, x.stride(0), BLOCK=block, **options)
    else:
        constants = {"BLOCK": block, "IS_WHOLE": num_inputs <= block}
        fp8_kernels.quantise_rows[(num_rows,)](x, out, scales, num_inputs, x.stride(0), **constants, **options)
    return out, scales


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, is_grouped: bool, dtype: torch.dtype = NUMBERS
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows.add_rms_norm` of [M, K], and `quantise` of the result, in one launch."""
    assert residual.is_contiguous(), residual.stride()
    x, width = x.contiguous(), x.shape[1]
    out, numbers, scales = torch.empty_like(x), *_room(len(x), width, x.device, dtype, is_grouped=is_grouped)
    if out.numel():
        options = rows.row_options(width)
        fp8_kernels.add_rms_norm[(len(x),)](
            *(x, residual, weight, out, numbers, scales, width, eps),
            BH=power_of_two(width),
            IS_GROUPED=is_grouped,
            **options,
        )
    return out, numbers, scales


def silu_and_mul(gate_up: Tensor, *, is_grouped: bool, dtype: torch.dtype = NUMBERS) -> tuple[Tensor, Tensor, Tensor]:
    """`rows.silu_and_mul` of [M, 2 N], and `quantise` of the result, in one launch."""
    width = gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = gate_up.new_empty((len(gate_up), width))
    numbers, scales = _room(len(out), width, out.device, dtype, is_grouped=is_grouped)
    if out.numel():
        block = max(power_of_two(width), GROUP)
        options = fp8_kernels.LAUNCH | {"num_warps": num_warps(block)}
        fp8_kernels.silu_and_mul[(len(out),)](
            *(gate_up, out, numbers, scales, width, gate_up.stride(0)), BN=block, IS_GROUPED=is_grouped, **options
        )
    return out, numbers, scales


def fits_registers(width: int, *, is_grouped: bool) -> bool:
    """Whether rows of this width are quantised by the kernel that makes them, which holds a row in registers."""
    most = _GROUPS_IN_REGISTERS if is_grouped else _MOST_IN_REGISTERS
    return fits_bytes(width) and GROUP <= width <= most


def _room(
    num_rows: int, num_inputs: int, device: torch.device, dtype: torch.dtype, *, is_grouped: bool
) -> tuple[Tensor, Tensor]:
    """Uninitialised numbers and scales of quantised rows."""
    shape = (num_rows, num_inputs // GROUP) if is_grouped else (num_rows,)
    numbers = torch.empty((num_rows, num_inputs), dtype=dtype, device=device)
    return numbers, torch.empty(shape, dtype=torch.float32, device=device)


def multiply(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
    is_blocked: bool = False,
    tile: Fp8Tile | None = None,
    by_tma: bool | None = None,
) -> Tensor:
    """E4m3 [M, K] x [N, K] with scales from `quantise` and float32 [N, G] -> [M, N], or [M, N / 2] of gate and up. See
    `fp8_kernels.linear`. `is_blocked`: 128 rows of the weight share scales. `tile` and `by_tma` None: as is best. Fewer
    rows than the tile has go by pointers.
    """
    num_rows, num_inputs = x.shape
    num_columns, kind = len(weight) // (1 + is_gated), fp8_kernels.OF_ROWS
    if scales.shape[1] > 1:
        # Blocks of the up projection must begin where a tile does.
        has_blocks = is_blocked and (num_columns % GROUP == 0 or not is_gated)
        kind = fp8_kernels.OF_BLOCKS if has_blocks else fp8_kernels.OF_GROUPS
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    has_groups = scales.shape[1] > 1
    tile = tile or tile_for(x.device, num_rows, num_columns, num_inputs, is_gated=is_gated, has_groups=has_groups)
    by_tma = can_describe(x, weight) if by_tma is None else by_tma
    x_by_tma = by_tma and num_rows >= tile.rows
    stores_by_tma = x_by_tma and can_describe(out)
    box = tile.box(kind.value)
    x_rows = describe(x, tile.rows, box) if x_by_tma else x
    columns = describe(weight, tile.columns, box) if by_tma else weight
    result = describe(out, tile.rows, tile.columns) if stores_by_tma else out
    sizes = (num_rows, num_columns, num_inputs, x.stride(0), weight.stride(0), scales.stride(0), out.stride(0))
    constants = tile.constants(is_gated=is_gated, kind=kind.value, has_bias=bias is not None)
    constants |= {"ELEMENT": ELEMENTS[dtype], "EVEN": num_inputs % box == 0}
    constants |= {"X_BY_TMA": x_by_tma, "BY_TMA": by_tma, "STORES_BY_TMA": stores_by_tma}
    programs = num_programs(x.device, tile.per_multiprocessor)
    grid = (min(tile.num_tiles(num_rows, num_columns, is_gated=is_gated), programs),)
    fp8_kernels.linear[grid](x_rows, columns, x_scales, scales, bias, result, *sizes, **constants, **tile.options())
    return out


class Fp8TritonKernels(Fp8Packing, PackedTritonKernels):
    """Implements `kernels.api.QuantisedKernels` on CUDA from sm_89 on; all but the GEMMs of packed weights is that of
    `TritonKernels`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.weights, self.head = dtype, Fp8Weights(dtype), TritonKernels()
        self._is_grouped = False
        """Whether a checkpoint's weights have scales of groups: then activations too."""

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        own = triton_region()
        return super().numerics(dtype) | {QUANTISATION: Region(f"FP8, {own.implementation}", own.version)}

    def pack_stored(self, weight: Tensor, scales: Tensor) -> Tensor:
        self._is_grouped |= scales.shape[1] > 1
        return super().pack_stored(weight, scales)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim != 2 or not fits_registers(x.shape[1], is_grouped=self._is_grouped):
            return rows.add_rms_norm(x, residual, weight, eps)
        normed, *quantised = add_rms_norm(x, residual, weight, eps, is_grouped=self._is_grouped)
        return _with_quantised(normed, *quantised)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.ndim != 2 or not fits_registers(gate_up.shape[1] // 2, is_grouped=self._is_grouped):
            return rows.silu_and_mul(gate_up)
        gated, *quantised = silu_and_mul(gate_up, is_grouped=self._is_grouped)
        return _with_quantised(gated, *quantised)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One launch or two, with the same bits."""
        is_apart = is_packed(weight) and weight.ndim == 2 and x[..., 0].numel() > MOST_FUSED_ROWS
        if is_apart and capability(x.device) in (_HOPPER, (0, 0)):
            return self.silu_and_mul(self.linear(x, weight, bias))
        return super().gated_linear(x, weight, bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
        numbers, scales = self.weights.numbers(weight), self.weights.scales(weight)
        result = multiply(
            *_quantised_of(x, is_grouped=weight.ndim > 2),
            numbers,
            scales,
            bias,
            x.dtype,
            is_gated=is_gated,
            is_blocked=weight.ndim == 4,
        )
        return result.view(*x.shape[:-1], result.shape[1])


_QUANTISED: Final = "quantised_rows"
"""Attribute of rows that were quantised where they were made: it ends with the tensor, and no view of it has it."""


def _with_quantised(made: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """The rows, which nothing changes in place before a GEMM takes them."""
    setattr(made, _QUANTISED, (numbers, scales))
    return made


def _quantised_of(x: Tensor, *, is_grouped: bool) -> tuple[Tensor, Tensor]:
    """`quantise` of x [..., K], unless the kernel that made it has done so."""
    made: tuple[Tensor, Tensor] | None = getattr(x, _QUANTISED, None)
    if made is not None and (made[1].ndim > 1) == is_grouped:
        return made
    flat = x.reshape(-1, x.shape[-1])
    return quantise(flat if flat.stride(1) == 1 else flat.contiguous(), is_grouped=is_grouped)
