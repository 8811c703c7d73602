"""Attention to listed keys in Triton: steps' tokens, and launches of ops/kernels/triton/listed.py.

T: tokens; D: size of a key.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.group_keys import GroupKeys
from spmd_worker.ops.kernels.triton import listed
from spmd_worker.ops.kernels.triton.listed import PlacedTokens


class TritonListedKeys:
    """Implements `attention.listed.ListedKeys`. `placed` gives tokens of a step with blocks of a size."""

    def __init__(self, placed: Callable[[AttentionMetadata, int], PlacedTokens]) -> None:
        self._placed = placed

    def positions(self, metadata: AttentionMetadata, block_size: int) -> Tensor:
        return self._placed(metadata, block_size).positions

    def write(
        self,
        values: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        rate: int = 1,
        cleared: Tensor | None = None,
    ) -> None:
        listed.write_places(values, cache, self._placed(metadata, block_size), block_size, rate, cleared)

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        num_chosen: int,
        rate: int = 1,
    ) -> Tensor:
        tokens = self._placed(metadata, block_size)
        return listed.choose(queries, weights, keys, tokens, block_size, rate, num_chosen)

    def compress(
        self,
        rows: Tensor,
        bias: Tensor,
        metadata: AttentionMetadata,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        *,
        overlaps: bool,
    ) -> Tensor:
        tokens = self._placed(metadata, rows.shape[1])
        return listed.compress(rows, bias, tokens, *sizes, overlaps=overlaps, dtype=dtype)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        value_size: int,
        groups: GroupKeys,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens = self._placed(metadata, keys.shape[3])
        return listed.attend(query, keys, tokens, scale, value_size, groups, window, sinks)
