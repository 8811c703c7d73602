"""Attention of one image: the runtime's paged attention over blocks of this call, as encoders have it.

Every patch sees all of its sequence: an image, a square of it, or a window. N: patches; H: heads; D: head size.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kv_cache.block import num_blocks_for
from spmd_worker.model_config.vision_config import TowerConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.metadata import AttentionMetadata

BLOCK_SIZE: Final = 64
"""Tokens of a block: a tile of compiled attention, and a window of Qwen2.5-VL."""


class ImageSequences:
    """The sequences of one image, one behind the other, each of complete blocks."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = np.array(lengths, dtype=np.int64)
        num_blocks = np.array([num_blocks_for(length, BLOCK_SIZE) for length in lengths], dtype=np.int64)
        firsts = num_blocks.cumsum() - num_blocks
        starts = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
        positions = np.arange(starts[-1]) - starts[:-1].repeat(counts)
        # Entries after a sequence's blocks are arbitrary, but of the cache.
        last = firsts + num_blocks - 1
        tables = np.minimum(firsts[:, None] + np.arange(num_blocks.max()), last[:, None])
        self.num_blocks = int(num_blocks.sum())
        self.metadata = AttentionMetadata(
            query_starts=tuple(starts.tolist()),
            context_lengths=tuple(lengths),
            block_tables=torch.from_numpy(tables).to(device),
            token_blocks=torch.from_numpy(firsts.repeat(counts) + positions // BLOCK_SIZE).to(device),
            token_offsets=torch.from_numpy(positions % BLOCK_SIZE).to(device),
            sees_later=True,
        )


class ImageAttention:
    """Attention of the layers of a tower on one image, in blocks that they share."""

    def __init__(self, backend: AttentionBackend, config: TowerConfig, like: Tensor, num_blocks: int) -> None:
        """`like` [N, ...] has the dtype and device; `num_blocks` are enough for every layer's sequences."""
        self._backend, self._size, self._scale = backend, config.head_size, config.attention_scale
        heads, padded_size = (config.num_heads, *[config.num_key_heads] * 2), config.padded_head_size
        shape = backend.block_shape(config.num_key_heads, BLOCK_SIZE, padded_size)
        self._blocks = like.new_zeros((num_blocks, *shape))
        self._padded: list[Tensor] | None = None
        if padded_size != self._size:
            self._padded = [like.new_zeros((len(like), each, padded_size)) for each in heads]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: ImageSequences) -> Tensor:
        """[N, H, D] each, strided or not -> [N, H * D]. Keys and values may have fewer heads."""
        if self._padded is not None:
            for padded, each in zip(self._padded, (query, key, value), strict=True):
                padded[..., : self._size] = each
            query, key, value = self._padded
        self._backend.write(key, value, self._blocks, sequences.metadata)
        attended = self._backend.attend(query, self._blocks, sequences.metadata, self._scale, window=0)
        return attended[..., : self._size].reshape(len(query), -1)
