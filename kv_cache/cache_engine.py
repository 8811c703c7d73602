"""The tensors of the cache and the moves of whole blocks between and within them.

Knows block numbers and bytes. Knows nothing of tables, and never looks inside a block: how one layer's keys and values
are packed in `block_shape` is the attention backend's business.

Shapes: device_cache [num_layers, num_device_blocks, *block_shape],
        host_cache   [num_layers, num_host_blocks, *block_shape].
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps
from kv_cache.cache_spec import CacheSpec

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load of the CPU kernels

_Pairs = Sequence[tuple[BlockId, BlockId]]


class CacheEngine:
    """One rank's cache: `allocate`, then any number of steps, then `release`; `allocate` may follow again.

    **What unwritten positions hold.** A fresh cache is zero everywhere, on the CPU too, where the zero pages cost no
    memory until they are written. A block in use for the second time still holds its last owner's keys and values, and
    those may be NaN or infinite if that row's model overflowed. Nothing here erases them, so a backend must leave
    masked positions out by selection; a product with a weight of zero would carry the NaN into another row.
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
        self._host_cache: Tensor | None = None

    @property
    def device_cache(self) -> Tensor:
        """[num_layers, num_device_blocks, *block_shape], between `allocate` and `release`."""
        assert self._device_cache is not None, "the cache is not allocated"
        return self._device_cache

    @property
    def host_cache(self) -> Tensor:
        """[num_layers, num_host_blocks, *block_shape] in host memory, pinned where the device is CUDA."""
        assert self._host_cache is not None, "the cache is not allocated"
        return self._host_cache

    def layer_cache(self, layer_index: int) -> Tensor:
        """[num_device_blocks, *block_shape]: a view that one layer reads and writes. Each rank counts layers from 0."""
        assert 0 <= layer_index < self.spec.num_layers, f"layer {layer_index} of {self.spec.num_layers}"
        return self.device_cache[layer_index]

    def allocate(self) -> None:
        """Make both caches, zero-filled."""
        assert self._device_cache is None, "the cache is allocated already"
        packed_bytes = math.prod(self.block_shape) * self.dtype.itemsize
        assert packed_bytes == self.spec.layer_block_bytes, (
            f"block_shape {self.block_shape} of {self.dtype} is {packed_bytes} bytes, "
            f"one block of one layer is {self.spec.layer_block_bytes}"
        )
        device_shape = (self.spec.num_layers, self.num_device_blocks, *self.block_shape)
        host_shape = (self.spec.num_layers, self.num_host_blocks, *self.block_shape)
        # A tensor born in inference mode could not be written outside it, and the cache outlives both.
        with torch.inference_mode(False):
            if self.device.type == "cpu":
                self._device_cache = _lazy_zeros(device_shape, self.dtype)
                self._host_cache = _lazy_zeros(host_shape, self.dtype)
            else:
                self._device_cache = torch.zeros(device_shape, dtype=self.dtype, device=self.device)
                self._host_cache = torch.zeros(host_shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def release(self) -> None:
        """Drop both caches with all they hold. Views of them keep the memory alive: they go first."""
        self._device_cache = None
        self._host_cache = None

    def execute(self, block_ops: BlockOps) -> None:
        """One step's moves in the order swap out, swap in, copy (see `BlockOps`).

        Raises ValueError naming the block, before anything moves, if a pair of any kind is outside the caches or two
        pairs of one kind have the same destination.
        """
        self._check_swap_out(block_ops.swap_out)
        self._check_swap_in(block_ops.swap_in)
        self._check_copy(block_ops.copy)
        _move(block_ops.swap_out, self.device_cache, self.host_cache)
        _move(block_ops.swap_in, self.host_cache, self.device_cache)
        _move(block_ops.copy, self.device_cache, self.device_cache)

    def swap_out(self, pairs: _Pairs) -> None:
        """Whole blocks (device, host), all layers. Raises ValueError as `execute` does."""
        self.execute(BlockOps(swap_out=tuple(pairs)))

    def swap_in(self, pairs: _Pairs) -> None:
        """Whole blocks (host, device), all layers. Raises ValueError as `execute` does."""
        self.execute(BlockOps(swap_in=tuple(pairs)))

    def copy(self, pairs: _Pairs) -> None:
        """Whole blocks (device source, device destination), all layers; every source is read before any write."""
        self.execute(BlockOps(copy=tuple(pairs)))

    def _check_swap_out(self, pairs: _Pairs) -> None:
        _check_pairs("swap_out", pairs, ("device", self.num_device_blocks), ("host", self.num_host_blocks))

    def _check_swap_in(self, pairs: _Pairs) -> None:
        _check_pairs("swap_in", pairs, ("host", self.num_host_blocks), ("device", self.num_device_blocks))

    def _check_copy(self, pairs: _Pairs) -> None:
        _check_pairs("copy", pairs, ("device", self.num_device_blocks), ("device", self.num_device_blocks))


def _check_pairs(kind: str, pairs: _Pairs, source_memory: tuple[str, int], destination_memory: tuple[str, int]) -> None:
    written: dict[BlockId, BlockId] = {}
    for source, destination in pairs:
        for block_id, (memory, num_blocks) in ((source, source_memory), (destination, destination_memory)):
            if not 0 <= block_id < num_blocks:
                raise ValueError(
                    f"{kind} of block {source} to {destination}: {memory} block {block_id} does not exist, "
                    f"there are {num_blocks}"
                )
        if destination in written:
            raise ValueError(
                f"{kind} of block {source} to {destination}: {destination_memory[0]} block {destination} "
                f"already receives block {written[destination]} in this step"
            )
        written[destination] = source


def _move(pairs: _Pairs, source_cache: Tensor, destination_cache: Tensor) -> None:
    """Gather all sources, then scatter them: so a block that is both is read before it is written.

    Takes a temporary of the blocks moved, [num_layers, num_pairs, *block_shape].
    """
    if not pairs:
        return
    sources = torch.tensor([source for source, _ in pairs], device=source_cache.device)
    destinations = torch.tensor([destination for _, destination in pairs], device=destination_cache.device)
    gathered = source_cache.index_select(1, sources)
    destination_cache.index_copy_(1, destinations, gathered.to(destination_cache.device))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory whose pages the system commits when they are first written.

    torch.zeros writes, so it commits everything at once; torch.empty may return a recycled page with anything in it.
    numpy.zeros asks the system for zeroed memory and writes nothing, but aligns to 16 bytes only, hence the margin.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).view(shape)
