"""Blocks of a cache as bytes, for connectors that live outside the engine.

Shapes: tensors of the cache [layers of a shape, num_device_blocks, *block_shape]. A block's bytes are those of the
first shape's layers, then of the next one's.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kv_cache.block import BlockId
from kv_cache.cache_engine import CacheEngine
from kv_cache.host_memory import indices

_TURN_BYTES: Final = 2**26
"""Bytes that one copy from or to a GPU carries."""


class CacheBlocks:
    """Implements `BlockMemory` over an engine's cache, which may be released and allocated again."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine, self._is_on_host = engine, engine.device.type == "cpu"

    @property
    def block_bytes(self) -> int:
        return self._engine.spec.model_block_bytes

    def read(self, block_ids: Sequence[BlockId]) -> list[memoryview]:
        """Views of the cache on the CPU, copies elsewhere and of layers whose blocks differ in shape."""
        parts = [self._read(tensor, block_ids) for tensor in self._engine.model_tensors]
        if len(parts) == 1:
            return parts[0]
        return [memoryview(b"".join([part[index] for part in parts])) for index in range(len(block_ids))]

    def _read(self, cache: Tensor, block_ids: Sequence[BlockId]) -> list[memoryview]:
        if self._is_on_host:
            return [_as_bytes(cache[:, block_id]) for block_id in block_ids]
        contents: list[memoryview] = []
        for turn in self._turns(len(block_ids)):
            # [blocks, layers, *block_shape], as one block's layers lie side by side on the CPU.
            copied = cache.index_select(1, indices(list(block_ids[turn]), cache.device)).transpose(0, 1).contiguous()
            contents += [_as_bytes(block) for block in copied.cpu()]
        return contents

    def write(self, block_ids: Sequence[BlockId], contents: Sequence[bytes | bytearray | memoryview]) -> None:
        tensors = self._engine.model_tensors
        if len(tensors) == 1:
            self._write(tensors[0], block_ids, contents)
            return
        assert all(len(each) == self.block_bytes for each in contents), (list(map(len, contents)), self.block_bytes)
        start = 0
        for cache in tensors:
            end = start + cache.shape[0] * math.prod(cache.shape[2:]) * cache.itemsize
            self._write(cache, block_ids, [memoryview(each)[start:end] for each in contents])
            start = end

    def _write(
        self, cache: Tensor, block_ids: Sequence[BlockId], contents: Sequence[bytes | bytearray | memoryview]
    ) -> None:
        shape = (cache.shape[0], *cache.shape[2:])
        for turn in self._turns(len(block_ids)):
            # [blocks, layers, *block_shape]
            blocks = [_from_bytes(each, cache.dtype, shape) for each in contents[turn]]
            if self._is_on_host:
                for block_id, block in zip(block_ids[turn], blocks, strict=True):
                    cache[:, block_id] = block
                continue
            arrived = torch.stack(blocks, dim=1).to(cache.device)
            cache.index_copy_(1, indices(list(block_ids[turn]), cache.device), arrived)

    def _turns(self, count: int) -> list[slice]:
        size = max(1, _TURN_BYTES // max(self.block_bytes, 1))
        return [slice(start, start + size) for start in range(0, count, size)]


def _as_bytes(block: Tensor) -> memoryview:
    """A block [layers, *block_shape] in host memory, without a copy where its layers are adjacent."""
    return memoryview(block.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is a buffer


def _from_bytes(content: bytes | bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the same memory, which is only read."""
    data = content if isinstance(content, bytearray) else bytearray(content)
    return torch.frombuffer(data, dtype=dtype).view(shape)
