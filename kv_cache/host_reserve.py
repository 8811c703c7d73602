"""Memory for a cache that is not there yet: address space whose beginning a thread commits while a program starts.

The system hands out memory page by page when it is first written, and in a virtual machine its host may do so too, at a
gigabyte a second or less: a job would spend a tenth of its time on first writes. While a program imports and loads, a
core has nothing to do.
"""

import ctypes
import mmap
import os
import threading
from typing import Final

_PIECE_BYTES: Final = 8 << 20
_MAP_NORESERVE: Final = 0x4000
"""Linux: address space alone counts for nothing."""
_HUGE_PAGE_BYTES: Final = 2 << 20


class HostReserve:
    """Zeroed memory of as much address space as the machine has memory. Raises OSError where the system refuses."""

    def __init__(self) -> None:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Whole large pages from the first block on.
        self._skipped = -self._address % _HUGE_PAGE_BYTES
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.committed_bytes = 0

    def commit(self, num_bytes: int) -> None:
        """Begin to commit the first so many bytes, in a thread."""
        num_bytes = min(num_bytes, len(self._memory) - self._skipped)
        self._thread = threading.Thread(target=self._commit, args=(num_bytes,), name="spmd-commit", daemon=True)
        self._thread.start()

    def take(self, num_bytes: int) -> memoryview | None:
        """The beginning of the memory, for good; None where there is less. What is not committed yet stays so."""
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
    """The next cache of this process may have it. None takes it back."""
    global _offered
    _offered = reserve


def offered() -> HostReserve | None:
    """What there is, until it is taken back."""
    return _offered
