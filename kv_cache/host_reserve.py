"""Host arena for the CPU's KV cache: address space whose beginning a thread prefaults while a program starts.

The system allocates memory page by page on the first write, and in a virtual machine its host may do so too, at a
gigabyte a second or less: a job would spend a tenth of its time on first writes. While a program imports and loads, a
core is idle.
"""

import ctypes
import mmap
import os
import threading
from typing import Final

_PIECE_BYTES: Final = 8 << 20
_MAP_NORESERVE: Final = 0x4000
"""Linux: reserved address space is not counted as memory in use."""
_HUGE_PAGE_BYTES: Final = 2 << 20


class HostReserve:
    """Zeroed address space of the size of the machine's memory. Raises OSError where the system rejects it."""

    def __init__(self) -> None:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # The first block begins at a huge page.
        self._skipped = -self._address % _HUGE_PAGE_BYTES
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.committed_bytes = 0

    def commit(self, num_bytes: int) -> None:
        """Start a thread that prefaults the first `num_bytes`."""
        num_bytes = min(num_bytes, len(self._memory) - self._skipped)
        self._thread = threading.Thread(target=self._commit, args=(num_bytes,), name="spmd-commit", daemon=True)
        self._thread.start()

    def take(self, num_bytes: int) -> memoryview | None:
        """Hand out the beginning of the memory, for good; None if it is smaller. Prefaulting stops."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()
        if num_bytes > len(self._memory) - self._skipped:
            return None
        return memoryview(self._memory)[self._skipped : self._skipped + num_bytes]

    def _commit(self, num_bytes: int) -> None:
        while self.committed_bytes < num_bytes and not self._is_stopping.is_set():
            piece = min(_PIECE_BYTES, num_bytes - self.committed_bytes)
            ctypes.memset(self._address + self._skipped + self.committed_bytes, 0, piece)
            self.committed_bytes += piece


_offered: HostReserve | None = None


def offer(reserve: HostReserve | None) -> None:
    """Offer the reserve to the next cache of this process; None withdraws it."""
    global _offered
    _offered = reserve


def offered() -> HostReserve | None:
    """The reserve on offer."""
    return _offered
