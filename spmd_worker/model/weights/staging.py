"""Host memory that weights are read into, and their way to the device from there.

A block that is read for a GPU goes through pinned memory: threads read files, or generate dummy weights, into buffers
of their own, and each block is copied on the thread's CUDA stream while the thread fills its other buffer. Everything
after the copy (dequantisation, checks, conversion, the write into the parameter) follows on that stream.

Memory: two pinned buffers a thread, each as large as the largest block that it read.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor

_CPU: Final = torch.device("cpu")
_NUM_BUFFERS: Final = 2
_ROUNDING_BYTES: Final = 1 << 20


class HostStaging:
    """Blocks that stay on the host, in memory of their own."""

    device = _CPU

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised contiguous host memory to read a block into. The thread sends it before it asks for another."""
        return torch.empty(shape, dtype=dtype, device=_CPU)

    def sent(self, buffer: Tensor) -> Tensor:
        """A filled buffer on `device`."""
        return buffer

    def thread(self) -> AbstractContextManager[object]:
        """Context of a thread that reads and writes blocks."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for all copies and writes, and give the buffers back."""


HOST: Final = HostStaging()


class ReusedStaging(HostStaging):
    """Blocks that stay on the host, in one buffer of each thread: a block is valid until the thread reads another.
    Allocated block by block, the C library would keep two or three for each thread.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        found: Tensor | None = getattr(self._local, "buffer", None)
        if found is None or len(found) < num_bytes:
            found = self._local.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=_CPU)
        return found[:num_bytes].view(dtype).view(shape)

    def finish(self) -> None:
        self._local = threading.local()


@dataclass(slots=True)
class _Buffer:
    """Pinned bytes, and the event after their last copy."""

    pinned: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device=_CPU))
    copied: torch.cuda.Event | None = None


class _ThreadBuffers(threading.local):
    """One thread's buffers and stream."""

    def __init__(self) -> None:
        self.buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self.last = 0
        self.stream: torch.cuda.Stream | None = None


class PinnedStaging(HostStaging):
    """Blocks that are copied to a GPU through pinned buffers. Threads may share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._local = _ThreadBuffers()
        torch.cuda.synchronize(device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        local, num_bytes = self._local, prod(shape) * dtype.itemsize
        local.last = (local.last + 1) % _NUM_BUFFERS
        chosen = local.buffers[local.last]
        if chosen.copied is not None:
            # Releases the interpreter lock.
            chosen.copied.synchronize()
            chosen.copied = None
        if len(chosen.pinned) < num_bytes:
            chosen.pinned = self._pinned(-(-num_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES)
        return chosen.pinned[:num_bytes].view(dtype).view(shape)

    def sent(self, buffer: Tensor) -> Tensor:
        on_device, copied = self._copy(buffer)
        self._local.buffers[self._local.last].copied = copied
        return on_device

    def _copy(self, buffer: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start a copy on the current stream, which is the thread's in `thread`, and the event after it."""
        on_device = buffer.to(self.device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own is not typed
        copied.record(torch.cuda.current_stream(self.device))
        return on_device, copied

    @contextmanager
    def thread(self) -> Iterator[None]:
        if self._local.stream is None:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own is not typed
            self._local.stream = stream
        with torch.cuda.stream(self._local.stream):
            yield

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device=_CPU)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)
        self._local = _ThreadBuffers()
        torch.cuda.empty_cache()
        # Not public; builds without CUDA lack it.
        if empty_pinned := getattr(torch._C, "_host_emptyCache", None):
            empty_pinned()


def staging_for(device: torch.device) -> HostStaging:
    """Pinned staging for a GPU; on the CPU blocks stay where they are read."""
    return PinnedStaging(device) if device.type == "cuda" else HOST
