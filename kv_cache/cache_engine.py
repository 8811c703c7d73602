"""Tensors of the KV cache and the moves of blocks between and within them.

Knows nothing of tables, and never looks inside a block: the attention backend decides how one layer's keys and values
are packed in `block_shape`.

Shapes: device_cache [num_layers, num_device_blocks, *block_shape],
        host_cache   [num_layers, num_host_blocks, *block_shape].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_memory import HostMemory, indices, lazy_cache, new_host_memory
from kv_cache.host_reserve import HostReserve

_Pairs = Sequence[tuple[BlockId, BlockId]]


class CacheEngine:
    """One rank's cache: `allocate`, then any number of steps, then `release`; `allocate` may follow again.

    **Unwritten positions.** A fresh cache is zero everywhere, on the CPU too, where the zero pages cost no memory until
    they are written. A reused block still holds its last owner's keys and values, which may be NaN or infinite if that
    row's model overflowed. Nothing here erases them, so a backend must mask positions by selection: a multiplication by
    a weight of zero would carry the NaN into another row.
    """

    def __init__(
        self,
        spec: CacheSpec,
        block_shape: tuple[int, ...],
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`block_shape`: elements of `dtype` that hold one block of one layer, exactly `spec.layer_block_bytes`."""
        self.spec = spec
        self.block_shape = block_shape
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.dtype = dtype
        self.device = device
        self._device_cache: Tensor | None = None
        self._host: HostMemory | None = None

    @property
    def device_cache(self) -> Tensor:
        """[num_layers, num_device_blocks, *block_shape], between `allocate` and `release`."""
        assert self._device_cache is not None, "the cache is not allocated"
        return self._device_cache

    @property
    def num_host_bytes(self) -> int:
        """Host memory in use; on CUDA 0 before the first block moves there."""
        return 0 if self._host is None else self._host.num_bytes

    def allocate(self, reserve: HostReserve | None = None) -> None:
        """Make both caches, zero-filled, and on CUDA the side stream that moves blocks between them. On the CPU the
        device cache is the beginning of `reserve`, if there is one.
        """
        assert self._device_cache is None, "the cache is allocated already"
        packed_bytes = math.prod(self.block_shape) * self.dtype.itemsize
        assert packed_bytes == self.spec.layer_block_bytes, (
            f"block_shape {self.block_shape} of {self.dtype} is {packed_bytes} bytes, "
            f"one block of one layer is {self.spec.layer_block_bytes}"
        )
        # A tensor created in inference mode could not be written outside it, and the cache outlives both.
        with torch.inference_mode(False):
            shape = (self.spec.num_layers, self.num_device_blocks, *self.block_shape)
            if self.device.type == "cpu":
                self._device_cache = lazy_cache(shape, self.dtype, reserve)
            else:
                self._device_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._host = new_host_memory(self._device_cache, self.num_host_blocks)

    def release(self) -> None:
        """Drop both caches with their contents. Views keep the memory alive, so drop them first."""
        self._device_cache = None
        self._host = None

    def execute(self, block_ops: BlockOps) -> None:
        """Run one step's moves in the order swap out, copy, swap in (see `BlockOps`).

        On CUDA, work queued on the current stream before this call finishes before a block moves, and work queued after
        it sees the moved blocks.

        Raises ValueError naming the block, before anything moves, if a pair of any kind is outside the caches, a host
        block receives twice, or a device block receives twice, by copy or swap_in.
        """
        device, host = ("device", self.num_device_blocks), ("host", self.num_host_blocks)
        received: dict[BlockId, tuple[str, BlockId]] = {}
        _check_pairs("swap_out", block_ops.swap_out, device, host, {})
        _check_pairs("copy", block_ops.copy, device, device, received)
        _check_pairs("swap_in", block_ops.swap_in, host, device, received)
        self._host_memory.move_out(block_ops.swap_out)
        if self.device.type == "cpu":
            _copy_each(block_ops.copy, self.device_cache)
        else:
            _copy_at_once(block_ops.copy, self.device_cache)
        self._host_memory.move_in(block_ops.swap_in)

    @property
    def _host_memory(self) -> HostMemory:
        assert self._host is not None, "the cache is not allocated"
        return self._host


def _check_pairs(
    kind: str,
    pairs: _Pairs,
    source_memory: tuple[str, int],
    destination_memory: tuple[str, int],
    received: dict[BlockId, tuple[str, BlockId]],
) -> None:
    """`received`: destination -> (kind, source) of the move it receives; the pairs are added."""
    for source, destination in pairs:
        for block_id, (memory, num_blocks) in ((source, source_memory), (destination, destination_memory)):
            if not 0 <= block_id < num_blocks:
                raise ValueError(
                    f"{kind} of block {source} to {destination}: {memory} block {block_id} does not exist, "
                    f"there are {num_blocks}"
                )
        if destination in received:
            other_kind, other_source = received[destination]
            raise ValueError(
                f"{kind} of block {source} to {destination}: {destination_memory[0]} block {destination} "
                f"already receives block {other_source} by {other_kind} in this step"
            )
        received[destination] = (kind, source)


def _copy_each(pairs: _Pairs, cache: Tensor) -> None:
    """Copy within host memory: only a source that is also a destination is cloned first."""
    destinations = dict.fromkeys(destination for _, destination in pairs)
    cloned = {source: cache[:, source].clone() for source, _ in pairs if source in destinations}
    for source, destination in pairs:
        cache[:, destination] = cloned[source] if source in cloned else cache[:, source]


def _copy_at_once(pairs: _Pairs, cache: Tensor) -> None:
    """Copy within a device's memory, one operation for all layers: gathers all sources, then scatters them.

    Needs a temporary of the copied blocks, [num_layers, num_pairs, *block_shape].
    """
    if not pairs:
        return
    sources = indices([source for source, _ in pairs], cache.device)
    destinations = indices([destination for _, destination in pairs], cache.device)
    cache.index_copy_(1, destinations, cache.index_select(1, sources))
