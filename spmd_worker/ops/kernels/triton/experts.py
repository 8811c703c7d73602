"""Launches of router_kernels.py and expert_kernels.py: tiles by the mean number of an expert's rows.

Shapes and launches follow from the number of tokens alone, so a CUDA graph replays them for any routing.

Weights in MXFP4 and FP8 with scales stay as their file has them, and activations are not quantised: a tile is decoded
while it is loaded, and the rest is what is computed with dequantised weights, whose bits results have. Quantising
activations as fp8_kernels.py does would be faster on Hopper with many rows, has other bits, and is what
`model.quantization=fp8` asks for, which refuses models with experts. `ranks/stored_experts.py` has the rule.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels.adapters import AddsToExperts
from spmd_worker.ops.kernels.api import ExpertStack
from spmd_worker.ops.kernels.gates import bounded_gates
from spmd_worker.ops.kernels.triton import expert_kernels, placing, router_kernels, stored_kernels
from spmd_worker.ops.kernels.triton.descriptors import ELEMENTS, can_describe, describe
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two, shared_bytes
from spmd_worker.ops.kernels.triton.placing import Placed, most_tiles
from spmd_worker.ops.kernels.triton.rows import silu_and_mul
from spmd_worker.ops.kernels.triton.tiles import Tile

Tiles = tuple[Tile, Tile]
"""Tiles of the gate and up GEMM and of the others, with one number of rows."""

FEW_ROWS: Tiles = Tile(16, 128, 64, 4, 4), Tile(16, 128, 128, 4, 4)
SOME_ROWS: Tiles = Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)
MANY_ROWS: Tiles = Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4)
MANY_ROWS_SM_80: Tiles = Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 4)
FLOAT32: Tiles = Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2)
"""Plain FMA: see `matmul.FLOAT32`."""
STORED_FEW_ROWS: Tiles = Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 5)
STORED_SOME_ROWS: Tiles = Tile(64, 64, 128, 4, 3), Tile(64, 64, 128, 4, 4)
STORED_SOME_ROWS_OTHER_CHIPS: Tiles = Tile(64, 32, 128, 4, 3), Tile(64, 64, 128, 4, 4)
STORED_MANY_ROWS: Tiles = Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)
"""Decoded weights need registers and memory for a decoded tile: not measured yet."""
ROUTER, ROUTER_MANY_ROWS = Tile(32, 64, 32, 4, 3), Tile(32, 128, 32, 4, 3)
"""Plain FMA, with fewer columns if the router has fewer."""
ROUTER_FEW_TOKENS = 512
"""Maximum tokens of a step with the first of these tiles."""
MAX_FEW_ROWS, MAX_SOME_ROWS = 16, 96
"""Maximum mean number of rows of an expert with these tiles."""
_WITH_WGMMA = (9, 10)
"""Major capabilities of chips with matrix instructions of 64 rows and more."""
_LAST_WITHOUT_SPILLS = (9, 0)
_LIGHT = expert_kernels.LAUNCH | {"num_warps": 4}
_ONE_WARP = 256
_SUM_COLUMNS = 1024
_GROUP_ROWS = 256


def tiles_for(
    num_slots: int,
    num_experts: int,
    dtype: torch.dtype,
    chip: tuple[int, int],
    room_bytes: int,
    stored: StoredFormat | None = None,
) -> Tiles:
    """The tiles for `num_slots` chosen experts out of `num_experts`, with as many stages as fit into `room_bytes` of
    shared memory; bits do not depend on them.
    """
    if dtype == torch.float32:
        return FLOAT32
    if stored is not None:
        return _stored_tiles(num_slots, num_experts, dtype, chip, room_bytes, stored)
    pair = MANY_ROWS if chip[0] in _WITH_WGMMA else MANY_ROWS_SM_80
    if num_slots <= MAX_FEW_ROWS * num_experts:
        pair = FEW_ROWS
    elif num_slots <= MAX_SOME_ROWS * num_experts:
        pair = SOME_ROWS
    gate_tile, tile = pair
    return _fitted(gate_tile, 2, dtype.itemsize, room_bytes), _fitted(tile, 1, dtype.itemsize, room_bytes)


def _stored_tiles(
    num_slots: int, num_experts: int, dtype: torch.dtype, chip: tuple[int, int], room_bytes: int, stored: StoredFormat
) -> Tiles:
    pair = STORED_MANY_ROWS
    if num_slots <= MAX_FEW_ROWS * num_experts:
        pair = STORED_FEW_ROWS
    elif num_slots <= MAX_SOME_ROWS * num_experts:
        pair = STORED_SOME_ROWS if chip[0] in _WITH_WGMMA else STORED_SOME_ROWS_OTHER_CHIPS
    gate_tile, tile = pair
    if not stored.is_mxfp4 and stored.group_rows == 1 and not stored.group_inputs:
        # Scales of both halves' outputs, beside their sums, spill with fewer warps.
        gate_tile = replace(gate_tile, num_warps=8)
    return _fitted_stored(gate_tile, 2, dtype, room_bytes, stored), _fitted_stored(tile, 1, dtype, room_bytes, stored)


def _fitted_stored(tile: Tile, halves: int, dtype: torch.dtype, room_bytes: int, stored: StoredFormat) -> Tile:
    """`_fitted` of weights that are decoded: a stage has their bytes, and one decoded tile of each is in memory too."""
    num_weights = halves * tile.inputs * tile.columns
    decoded_bytes = dtype.itemsize * num_weights
    stage_bytes = dtype.itemsize * tile.inputs * tile.rows + num_weights // (2 if stored.is_mxfp4 else 1)
    num_stages = min(tile.num_stages, (room_bytes - decoded_bytes) // stage_bytes)
    return replace(tile, num_stages=max(1, num_stages))


def gates_by_tma(is_clamped: bool, chip: tuple[int, int]) -> bool:
    """Whether a chip with TMA reads gate and up weights by it: clamped gates spill registers on chips after sm_90."""
    return not is_clamped or chip <= _LAST_WITHOUT_SPILLS


def _fitted(tile: Tile, halves: int, itemsize: int, room_bytes: int) -> Tile:
    """The tile with fewer stages, if all do not fit. A stage has `halves` tiles of weights."""
    stage_bytes = itemsize * tile.inputs * (tile.rows + halves * tile.columns)
    return replace(tile, num_stages=max(1, min(tile.num_stages, room_bytes // stage_bytes)))


class TritonExperts:
    """Implements `kernels.api.ExpertKernels`. `activate_and_mul` is called for gates other than silu, `activate` for
    bounded ones and experts without gates.
    """

    def __init__(
        self, activate_and_mul: Callable[[Tensor, str], Tensor], activate: Callable[[Tensor, str], Tensor]
    ) -> None:
        self._activate_and_mul, self._activate = activate_and_mul, activate

    def route(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        choice_bias: Tensor | None,
        experts: ExpertsConfig,
        add: Callable[[Tensor], Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, num_rows = x.contiguous(), len(weight)
        num_tokens, hidden_size = x.shape
        num_pieces = -(-hidden_size // router_kernels.PIECE)
        ids = torch.empty((num_tokens, experts.num_chosen), dtype=torch.int64, device=x.device)
        weights, gates = (x.new_empty((num_tokens, each), dtype=torch.float32) for each in (experts.num_chosen, 1))
        if num_tokens:
            partials = x.new_empty((num_pieces, num_tokens, num_rows), dtype=torch.float32)
            tile = router_tile(num_tokens, num_rows)
            grid = (-(-num_tokens // tile.rows), -(-num_rows // tile.columns), num_pieces)
            router_kernels.partial_logits[grid](
                *(x, weight, partials, num_tokens, num_rows, hidden_size), **router_constants(tile)
            )
            if add is not None:
                # To the last of the numbers that are summed.
                add(partials[-1])
            router_kernels.choose[(num_tokens,)](
                *(partials, bias, choice_bias, ids, weights, gates, num_tokens),
                *(float(experts.scaling), experts.added_to_sum),
                *(float(experts.min_sum), 2 * float(experts.jitter)),
                **choice_constants(experts, num_rows, num_pieces),
            )
        return ids, weights, gates if num_rows > experts.num_choices else None

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        stack: ExpertStack,
        slots: Tensor | None,
        totals: Tensor,
        *,
        others_are_zero: bool,
        added: AddsToExperts | None = None,
    ) -> Tensor:
        x, ids = x.contiguous(), ids.contiguous()
        results = (x.new_zeros if others_are_zero else x.new_empty)((ids.numel(), x.shape[1]))
        if not ids.numel():
            return results
        chip, room_bytes = capability(x.device), shared_bytes(x.device)
        gate_tile, tile = tiles_for(ids.numel(), len(totals), x.dtype, chip, room_bytes, stack.stored)
        assert gate_tile.rows == tile.rows, "row tiles are placed once"
        counts = placing.count(ids, slots, len(totals), totals)
        num_own, width, _ = stack.gate_up.shape
        if not num_own:
            return results
        placed = placing.place(ids, slots, counts, stack.ids, tile.rows)
        is_adapted, is_clamped = added is not None, stack.is_gated and stack.limit > 0
        is_silu = stack.is_gated and stack.activation == "silu" and not stack.bound
        if not is_adapted and (is_clamped or is_silu):
            gated = x.new_empty((ids.numel(), width // 2))
            _gate_up(x, stack, placed, gated, gate_tile)
        else:
            columns = x.new_empty((ids.numel(), width))
            weights = stack.gate_up, stack.gate_up_scales, stack.gate_up_bias
            _linear(x, *weights, stack.stored, placed, columns, tile, gathers=True, by_slot=is_adapted)
            if added is not None:
                added.add_to_columns_(columns, x)
            gated = self._gated(columns, stack)
        weights, placed = (stack.down, stack.down_scales, stack.down_bias), replace(placed, num_chosen=1)
        _linear(gated, *weights, stack.stored, placed, results, tile, gathers=is_adapted, by_slot=True)
        if added is not None:
            added.add_to_parts_(results, gated)
        return results

    def _gated(self, columns: Tensor, stack: ExpertStack) -> Tensor:
        """Columns [S, 2 N], or [S, N] without gates -> [S, N], with the bits of `expert_kernels.gate_up`."""
        if stack.is_gated and stack.limit > 0:
            return _clamped(columns, stack.limit)
        if stack.bound:
            return bounded_gates(columns, stack.activation, stack.bound, self._activate)
        if stack.is_gated and stack.activation == "silu":
            return silu_and_mul(columns)
        activate = self._activate_and_mul if stack.is_gated else self._activate
        return activate(columns, stack.activation).contiguous()

    def weighted_sum(
        self, results: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None, is_own: Tensor | None
    ) -> Tensor:
        (num_tokens, num_chosen), width = ids.shape, results.shape[1]
        out = results.new_empty((num_tokens, width))
        if out.numel():
            columns = min(_SUM_COLUMNS, power_of_two(width))
            expert_kernels.weighted_sum[(num_tokens, -(-width // columns))](
                *(results, ids.contiguous(), weights.contiguous(), slots, is_own, out, width),
                CHOSEN=num_chosen,
                PADDED=slots is not None,
                ALL=is_own is None,
                BH=columns,
                **_LIGHT,
            )
        return out


def _gate_up(x: Tensor, stack: ExpertStack, placed: Placed, out: Tensor, tile: Tile) -> None:
    """x [T, H] -> `out` [S, I]: see `expert_kernels.gate_up`."""
    is_clamped = stack.limit > 0
    num_own, width, row_bytes = stack.gate_up.shape
    rows = stack.gate_up.flatten(0, 1)
    # Before joining: an up in the middle of a row begins at a multiple of 16 bytes too.
    by_tma = can_describe(rows) and gates_by_tma(is_clamped, capability(x.device))
    # A clamped expert's gate and up of one output are one row.
    rows = rows.view(num_own * width // 2, 2 * row_bytes) if is_clamped else rows
    expert_kernels.gate_up[_grid(placed, out, tile)](
        *(x, _source(rows, tile, by_tma, stack.stored), stack.gate_up_scales, stack.gate_up_bias, out),
        *(placed.order, placed.tiles, placed.num_tiles, width // 2, x.shape[1], float(stack.limit)),
        CLAMPED=is_clamped,
        BIAS=stack.gate_up_bias is not None,
        BY_TMA=by_tma,
        **constants(placed.num_chosen, ELEMENTS[x.dtype], tile, stack.stored),
    )


def _clamped(columns: Tensor, limit: float) -> Tensor:
    """[S, 2 N] -> [S, N]: see `expert_kernels.clamp_columns`."""
    num_rows, width = len(columns), columns.shape[1] // 2
    out = columns.new_empty((num_rows, width))
    block = min(_SUM_COLUMNS, power_of_two(width))
    expert_kernels.clamp_columns[(num_rows, -(-width // block))](columns, out, width, float(limit), BN=block, **_LIGHT)
    return out


def _linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    stored: StoredFormat | None,
    placed: Placed,
    out: Tensor,
    tile: Tile,
    *,
    gathers: bool,
    by_slot: bool,
) -> None:
    """One launch of `expert_kernels.expert_linear`; `weight` [own, N, K], or its bytes if it is stored."""
    rows = weight.flatten(0, 1)
    by_tma = can_describe(rows) and (gathers or can_describe(x))
    source = describe(x, tile.rows, tile.inputs) if by_tma and not gathers else x
    expert_kernels.expert_linear[_grid(placed, out, tile)](
        *(source, _source(rows, tile, by_tma, stored), scales, bias, out),
        *(placed.order, placed.tiles, placed.num_tiles, weight.shape[1], x.shape[1]),
        GATHERS=gathers,
        BY_SLOT=by_slot,
        BIAS=bias is not None,
        BY_TMA=by_tma,
        **constants(placed.num_chosen, ELEMENTS[x.dtype], tile, stored),
    )


def _source(rows: Tensor, tile: Tile, by_tma: bool, stored: StoredFormat | None) -> Tensor | TensorDescriptor:
    num_columns = tile.inputs // 2 if stored is not None and stored.is_mxfp4 else tile.inputs
    return describe(rows, tile.columns, num_columns) if by_tma else rows


def _grid(placed: Placed, out: Tensor, tile: Tile) -> tuple[int]:
    num_tiles = most_tiles(placed.num_slots, placed.num_own, tile.rows) * -(-out.shape[1] // tile.columns)
    return (min(num_tiles, num_programs(out.device)),)


def router_tile(num_tokens: int, num_rows: int) -> Tile:
    """The tile of a router of `num_rows` outputs; bits do not depend on it."""
    tile = ROUTER if num_tokens <= ROUTER_FEW_TOKENS else ROUTER_MANY_ROWS
    return replace(tile, columns=max(16, min(tile.columns, power_of_two(num_rows))))


def router_constants(tile: Tile) -> dict[str, Any]:
    """Constexprs and launch options of `router_kernels.partial_logits`."""
    return {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.inputs,
        "PIECE": router_kernels.PIECE,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **router_kernels.LAUNCH,
    }


def choice_constants(experts: ExpertsConfig, num_rows: int, num_pieces: int) -> dict[str, Any]:
    """Constexprs and launch options of `router_kernels.choose`."""
    return {
        "E": experts.num_choices,
        "EP": power_of_two(experts.num_choices),
        "R": num_rows,
        "PIECES": num_pieces,
        "CHOSEN": experts.num_chosen,
        "SCORE": experts.score,
        "RENORMALISES": experts.renormalises,
        "BIAS": experts.has_router_bias,
        "CHOICE_BIAS": experts.has_choice_bias,
        "GROUPS": experts.num_groups,
        "GROUPS_PADDED": power_of_two(experts.num_groups),
        "CHOSEN_GROUPS": experts.num_chosen_groups,
        "BY_BEST": experts.groups_by_best,
        "num_warps": 1 if experts.num_choices <= _ONE_WARP else 4,
        **router_kernels.LAUNCH,
    }


def constants(num_chosen: int, element: tl.dtype, tile: Tile, stored: StoredFormat | None = None) -> dict[str, Any]:
    """Constexprs and launch options of the grouped GEMMs."""
    kind = stored_kernels.PLAIN
    if stored is not None:
        kind = stored_kernels.MXFP4 if stored.is_mxfp4 else stored_kernels.FP8
    return {
        "STORED": kind.value,
        "GROUP_ROWS": 1 if stored is None else stored.group_rows,
        "GROUP_INPUTS": 0 if stored is None else stored.group_inputs,
        "CHOSEN": num_chosen,
        "ELEMENT": element,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.inputs,
        "GROUP": max(1, _GROUP_ROWS // tile.rows),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **expert_kernels.LAUNCH,
    }
