"""Launches of listed_kernels.py, and of attention to listed keys. No number of a launch depends on what is read back.

T: tokens; H: query heads of this rank; K: places of a list.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from spmd_worker.ops.kernels.group_keys import GroupKeys
from spmd_worker.ops.kernels.triton import attention, listed_kernels
from spmd_worker.ops.kernels.triton.launching import capability, num_programs, power_of_two

SCORE_TILE = 64
"""Keys that are scored together."""
_TOKENS, _BATCH = 64, 256
_NUMBERS = 1024
"""Numbers that a program writes, and places of a list."""
_CHOICE = 2048
_COMPRESSED = 128
_SCORES = 1 << 24
"""Scores that are there at one time."""
_MOST_HEADS = {9: 64}
"""Heads of a tile by major capability, where more than attention._LATENT_GROUP do not spill."""


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Implements `attention.listed.ListedKeys`. Sequences and positions of a step's tokens, int32 [T], below 0 of
    padding; `tables` int32 [S, B]; `slots` int32 [T]; no sequence has more than `longest` keys.
    """

    sequences: Tensor
    positions: Tensor
    tables: Tensor
    slots: Tensor
    longest: int

    def write(
        self, values: Tensor, cache: Tensor, block_size: int, rate: int = 1, cleared: Tensor | None = None
    ) -> None:
        count, size = values.shape
        if not count:
            return
        values = values if values.stride(1) == 1 else values.contiguous()
        listed_kernels.write_places[(count, -(-size // _NUMBERS))](
            *(values, cache, cache if cleared is None else cleared, self.slots, self.positions),
            *(values.stride(0), cache.stride(0), cache.stride(1), 0 if cleared is None else cleared.stride(0)),
            **write_constants(size, block_size, rate, 0 if cleared is None else cleared[0].numel()),
            **listed_kernels.LAUNCH,
        )

    def choose(
        self, queries: Tensor, weights: Tensor, keys: Tensor, block_size: int, num_chosen: int, rate: int = 1
    ) -> Tensor:
        (count, num_heads, size), device = queries.shape, queries.device
        chosen = torch.empty((count, num_chosen), dtype=torch.int32, device=device)
        width = max(self.longest // rate, 1)
        rows = max(1, min(count, _SCORES // width))
        scores = torch.empty((rows, width), dtype=torch.float32, device=device)
        # Tiles are shared where there are fewer rows than a device has room for.
        shares = max(1, min(-(-width // SCORE_TILE), num_programs(device, 8) // rows))
        queries, weights = queries.contiguous(), weights.contiguous()
        for first in range(0, count, rows):
            grid = min(rows, count - first)
            listed_kernels.score_keys[(grid, shares)](
                *(queries, weights, keys, self.tables, self.sequences, self.positions, scores, first, num_chosen),
                *(keys.stride(0), keys.stride(1), self.tables.stride(0), width),
                **score_constants(num_heads, size, block_size, rate),
                **score_options(),
            )
            listed_kernels.choose_keys[(grid,)](
                *(scores, self.positions, chosen, first, num_chosen, width, num_chosen), RATE=rate, **choice_options()
            )
        return chosen

    def compress(
        self, rows: Tensor, bias: Tensor, rate: int, size: int, *, overlaps: bool, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty((len(self.positions), size), dtype=dtype, device=rows.device)
        if not len(out):
            return out
        constants = compress_constants(rate, size, rows.shape[1], overlaps=overlaps)
        listed_kernels.compress[(len(out), -(-size // constants["EACH"]))](
            *(rows, bias, self.tables, self.sequences, self.positions, out),
            *(rows.stride(0), rows.stride(1), self.tables.stride(0)),
            **constants,
            **listed_kernels.LAUNCH,
        )
        return out

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        scale: float,
        value_size: int,
        groups: GroupKeys,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # The arithmetic is that of a sequence with these keys at positions from 0 on (attention_kernels.py): a page is
        # one key, and a table lists units of elements.
        count, num_heads, size = queries.shape
        block_size, page = keys.shape[3], keys.stride(0)
        assert keys.stride()[3:] == (size, 1), keys.stride()
        first = groups.cache.storage_offset() - keys.storage_offset()
        rows = (size, groups.cache.stride(1))
        unit = gcd(page, first, *rows)
        assert len(keys) * page // unit < 1 << 31, (keys.shape, page, unit)
        most = min(groups.most, self.longest // groups.rate)
        width = max(min(window, self.longest) + most, 1)
        listed = torch.empty((count, width), dtype=torch.int32, device=queries.device)
        counts = torch.empty(count, dtype=torch.int32, device=queries.device)
        if not count:
            return queries.new_empty((0, num_heads, value_size))
        numbers = listed if groups.numbers is None else groups.numbers
        each = min(_NUMBERS, power_of_two(width))
        listed_kernels.list_keys[(count, -(-width // each))](
            *(numbers, self.tables, self.sequences, self.positions, listed, counts),
            *(window, most, first // unit, page // unit, *[row // unit for row in rows]),
            *(numbers.stride(0), self.tables.stride(0), width),
            RATE=groups.rate,
            BLOCK=block_size,
            CHOSEN=groups.numbers is not None,
            EACH=each,
            num_warps=4,
        )
        num_tiles = num_groups(capability(queries.device), num_heads)
        plan = attention.plan_lists(counts, listed, width, num_heads, num_tiles, size, queries.element_size())
        pages = keys.as_strided((1, num_tiles, 1, size), (unit, 0, size, 1))
        queries = queries if queries.stride()[1:] == (size, 1) else queries.contiguous()
        return attention.attend_pages(
            queries, pages, pages[..., :value_size], plan, num_heads, scale, sinks=sinks, is_latent=True
        )


def place_tokens(starts: Tensor, lengths: Tensor, num_sequences: int, sequences: Tensor, positions: Tensor) -> None:
    """Fills `sequences` and `positions`: see `listed_kernels.place_tokens`."""
    count = len(positions)
    if count:
        listed_kernels.place_tokens[(-(-count // _TOKENS),)](
            *(starts, lengths, sequences, positions, num_sequences, count), EACH=_TOKENS, BATCH=_BATCH, num_warps=4
        )


def write_constants(size: int, block_size: int, rate: int, num_cleared: int) -> dict[str, int]:
    """Constexprs of `listed_kernels.write_places`."""
    each = min(_NUMBERS, power_of_two(size))
    return {"N": size, "EACH": each, "BLOCK": block_size, "RATE": rate, "CLEARED": num_cleared}


def score_constants(num_heads: int, size: int, block_size: int, rate: int) -> dict[str, int]:
    """Constexprs of `listed_kernels.score_keys`."""
    k0, k1 = attention.head_parts(size)
    sizes = {"HEADS": num_heads, "HP": max(16, power_of_two(num_heads)), "D": size, "K0": k0, "K1": k1}
    return sizes | {"RATE": rate, "BLOCK": block_size, "TILE": SCORE_TILE}


def score_options() -> dict[str, int]:
    """Launch options of `score_keys`. A sum over heads has an order that no warps change."""
    return listed_kernels.LAUNCH | {"num_warps": 4, "num_stages": 2}


def choice_options() -> dict[str, int]:
    """Constexpr and launch options of `listed_kernels.choose_keys`."""
    return {"BATCH": _CHOICE, "num_warps": 8, **listed_kernels.LAUNCH}


def compress_constants(rate: int, size: int, block_size: int, *, overlaps: bool) -> dict[str, int]:
    """Constexprs of `listed_kernels.compress`."""
    each = min(_COMPRESSED, power_of_two(size))
    return {"N": size, "RATE": rate, "OVERLAPS": overlaps, "BLOCK": block_size, "EACH": each}


def num_groups(device_capability: tuple[int, int], num_heads: int) -> int:
    """Number of equal groups in which query heads see a list: a group is the rows of a token in a tile, and a list's
    keys are read once for each.
    """
    return attention.latent_groups(num_heads, _MOST_HEADS.get(device_capability[0]))
