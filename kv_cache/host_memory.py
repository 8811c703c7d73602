"""Cache blocks in host memory, and their moves to and from the device, for preempted sequences and evicted prefixes
alike. Each memory is of the layers whose blocks have one shape.

Shapes: device_cache [num_layers, num_device_blocks, *block_shape],
        tensor       [num_layers, num_blocks, *block_shape],
        staging      [num_layers, blocks in flight, *block_shape].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kv_cache.host_reserve import HostReserve

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load of the CPU kernels

_STAGING_BYTES = 2**26
"""Pinned staging memory for the blocks of a CUDA cache: bigger moves take several turns."""

Pairs = Sequence[tuple[int, int]]


class HostMemory(Protocol):
    """Host blocks of a cache, zero-filled at first."""

    @property
    def tensor(self) -> Tensor:
        """[num_layers, num_blocks, *block_shape]."""

    @property
    def num_bytes(self) -> int:
        """Host memory in use, staging included."""

    def move_out(self, pairs: Pairs) -> None:
        """(device block, host block): returns when the blocks are in `tensor`."""

    def move_in(self, pairs: Pairs) -> None:
        """(host block, device block): device work queued after this call finds the blocks moved."""


def new_host_memory(device_cache: Tensor, num_blocks: int) -> HostMemory:
    """Host memory for `num_blocks` blocks of a cache."""
    if device_cache.is_cuda and num_blocks > 0:
        return LazyHostMemory(partial(_new_cuda_host_memory, device_cache, num_blocks))
    return PlainHostMemory(device_cache, num_blocks)


def _new_cuda_host_memory(device_cache: Tensor, num_blocks: int) -> "CudaHostMemory":
    num_layers, _, *block_shape = device_cache.shape
    block_bytes = num_layers * math.prod(block_shape) * device_cache.itemsize
    num_staged = min(max(1, _STAGING_BYTES // block_bytes), num_blocks)
    shape, staged_shape = (num_layers, num_blocks, *block_shape), (num_layers, num_staged, *block_shape)
    tensor = torch.zeros(shape, dtype=device_cache.dtype, pin_memory=True)
    staging = torch.empty(staged_shape, dtype=device_cache.dtype, pin_memory=True)
    stream = torch.cuda.Stream(device_cache.device)  # type: ignore[no-untyped-call]  # torch's own is not typed
    staging_read = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own is not typed
    # Memory freed while the side stream still reads or writes it is not reused before that ends.
    device_cache.record_stream(stream)
    return CudaHostMemory(device_cache, tensor, staging, stream, staging_read)


class LazyHostMemory:
    """Allocates when the first block moves: pinning gigabytes takes seconds, and most jobs never swap."""

    def __init__(self, make: Callable[[], HostMemory]) -> None:
        self._make = make
        self._made: HostMemory | None = None

    @property
    def tensor(self) -> Tensor:
        return self._memory.tensor

    @property
    def num_bytes(self) -> int:
        return 0 if self._made is None else self._made.num_bytes

    def move_out(self, pairs: Pairs) -> None:
        if pairs:
            self._memory.move_out(pairs)

    def move_in(self, pairs: Pairs) -> None:
        if pairs:
            self._memory.move_in(pairs)

    @property
    def _memory(self) -> HostMemory:
        if self._made is None:
            # A tensor created in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._made = self._make()
        return self._made


class PlainHostMemory:
    """Host blocks of a cache in host memory: moved block by block, without a temporary."""

    def __init__(self, device_cache: Tensor, num_blocks: int) -> None:
        num_layers, _, *block_shape = device_cache.shape
        self.tensor = lazy_zeros((num_layers, num_blocks, *block_shape), device_cache.dtype)
        self._device_cache = device_cache

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def move_out(self, pairs: Pairs) -> None:
        for source, destination in pairs:
            self.tensor[:, destination] = self._device_cache[:, source]

    def move_in(self, pairs: Pairs) -> None:
        for source, destination in pairs:
            self._device_cache[:, destination] = self.tensor[:, source]


class CudaHostMemory:
    """Swaps between a CUDA device and the host, on its own stream, through pinned memory.

    A block's layers are not adjacent in either cache. One kernel gathers or scatters them on the device, one transfer
    carries all of them, and the host copies between its cache and the staging memory, which is faster than a transfer a
    layer.
    """

    def __init__(
        self,
        device_cache: Tensor,
        tensor: Tensor,
        staging: Tensor,
        stream: torch.cuda.Stream,
        staging_read: torch.cuda.Event,
    ) -> None:
        """`staging_read` is recorded whenever the device has read the staging memory."""
        self._device_cache, self.tensor, self._staging = device_cache, tensor, staging
        self._stream, self._staging_read = stream, staging_read

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes + self._staging.nbytes

    def move_out(self, pairs: Pairs) -> None:
        """Returns when the blocks are in the host cache; waits for nothing queued on the device after them."""
        if not pairs:
            return
        self._stream.wait_stream(self._compute_stream)
        for turn in self._turns(pairs):
            staging = self._staging_for(turn)
            with torch.cuda.stream(self._stream):
                sources = indices([source for source, _ in turn], self._device_cache.device)
                staging.copy_(self._device_cache.index_select(1, sources), non_blocking=True)
            self._stream.synchronize()
            for index, (_, destination) in enumerate(turn):
                self.tensor[:, destination] = staging[:, index]

    def move_in(self, pairs: Pairs) -> None:
        """Returns when the blocks are in flight; later work of the compute stream waits for them."""
        if not pairs:
            return
        # The step's copies may still have to read what the arriving blocks overwrite.
        self._stream.wait_stream(self._compute_stream)
        for turn in self._turns(pairs):
            self._staging_read.synchronize()
            staging = self._staging_for(turn)
            for index, (source, _) in enumerate(turn):
                staging[:, index] = self.tensor[:, source]
            with torch.cuda.stream(self._stream):
                arrived = staging.to(self._device_cache.device, non_blocking=True)
                self._staging_read.record(self._stream)
                destinations = indices([destination for _, destination in turn], self._device_cache.device)
                self._device_cache.index_copy_(1, destinations, arrived)
        self._compute_stream.wait_stream(self._stream)

    @property
    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device_cache.device)

    def _turns(self, pairs: Pairs) -> Iterator[Pairs]:
        num_staged = self._staging.shape[1]
        for start in range(0, len(pairs), num_staged):
            yield pairs[start : start + num_staged]

    def _staging_for(self, turn: Pairs) -> Tensor:
        """[num_layers, len(turn), *block_shape], contiguous, so that one transfer carries it."""
        num_layers, _, *block_shape = self._staging.shape
        shape = (num_layers, len(turn), *block_shape)
        return self._staging.view(-1)[: math.prod(shape)].view(shape)


def indices(block_ids: list[int], device: torch.device) -> Tensor:
    """int64 on a CUDA device, through pinned memory: from pageable memory the host would wait for the stream."""
    return torch.tensor(block_ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def lazy_caches(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, reserve: HostReserve | None
) -> tuple[Tensor, ...]:
    """`lazy_zeros` of [layers, blocks, ...], of equally many blocks, in which all layers of a block are adjacent, so
    that the first blocks are the beginning of the memory: that of `reserve` if it is given and big enough.
    """
    if not shapes:
        return ()
    sizes = [shape[0] * math.prod(shape[2:]) for shape in shapes]
    by_blocks = (shapes[0][1], sum(sizes))
    memory = None if reserve is None else reserve.take(math.prod(by_blocks) * dtype.itemsize)
    if memory is None:
        zeros = lazy_zeros(by_blocks, dtype)
    else:
        zeros = torch.frombuffer(memory, dtype=dtype).view(by_blocks)
    parts = zip(zeros.split_with_sizes(sizes, dim=1), shapes, strict=True)
    return tuple([part.view(shape[1], shape[0], *shape[2:]).transpose(0, 1) for part, shape in parts])


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory whose pages the system commits when they are first written.

    torch.zeros writes, so it commits everything at once; torch.empty may return a recycled page with any contents.
    numpy.zeros asks the system for zeroed memory and writes nothing, but aligns to 16 bytes only, hence the margin.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT_BYTES
    zeros: Tensor = raw[start : start + num_bytes].view(dtype).view(shape)
    return zeros
