"""Launches of `count_slots` and `place_slots` of expert_kernels.py: rows by expert or by adapter, for grouped GEMMs.

Shapes follow from the number of slots alone, and nothing is read back.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.triton import expert_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two

_LAUNCH: Final = expert_kernels.LAUNCH | {"num_warps": 4}


@dataclass(frozen=True, slots=True)
class Placed:
    """A step's slots by expert: see expert_kernels.py. `num_own`: experts that they were placed by; `num_rows`: of a
    tile.
    """

    num_slots: int
    num_chosen: int
    num_own: int
    num_rows: int
    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


def most_tiles(num_slots: int, num_own: int, num_rows: int) -> int:
    """Maximum number of row tiles of any routing: full ones, and for each expert one that is not full."""
    return num_slots // num_rows + min(num_own, num_slots)


def count(ids: Tensor, slots: Tensor | None, num_experts: int, totals: Tensor | None) -> Tensor:
    """int32 [E]: slots of each expert, of `ids` [T, C], which are added to `totals`, int64 [E], if given."""
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    expert_kernels.count_slots[(num_experts,)](
        *(ids, slots, counts, totals, ids.numel()),
        CHOSEN=ids.shape[1],
        PADDED=slots is not None,
        BLOCK=expert_kernels.BLOCK,
        **_LAUNCH,
    )
    return counts


def place(ids: Tensor, slots: Tensor | None, counts: Tensor, own: Tensor | None, num_rows: int) -> Placed:
    """Places of the slots that chose the experts `own`, int32 [N], or all if None, in tiles of `num_rows`."""
    num_slots, num_own = ids.numel(), len(counts if own is None else own)
    # One tensor each: kernels are compiled anew for pointers that are not aligned.
    order, tiles, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_slots, 3 * most_tiles(num_slots, num_own, num_rows), 1)
    )
    expert_kernels.place_slots[(num_own,)](
        *(ids, slots, counts, own, order, tiles, num_tiles, num_slots),
        OWN=num_own,
        OWN_PADDED=power_of_two(num_own),
        CHOSEN=ids.shape[1],
        PADDED=slots is not None,
        BM=num_rows,
        BLOCK=expert_kernels.BLOCK,
        **_LAUNCH,
    )
    return Placed(num_slots, ids.shape[1], num_own, num_rows, order, tiles, num_tiles)
