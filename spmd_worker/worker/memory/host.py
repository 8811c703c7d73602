"""Memory of this machine and of this process, from /proc and the limits of this process's control groups."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")

# Limit, usage, and the part of the usage that the kernel can reclaim.
_GROUP_FILES: Final = ("memory.max", "memory.current", "inactive_file")
_OLDER_GROUP_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAX_MMAP_THRESHOLD: Final = 32 * 1024 * 1024
"""glibc always maps larger allocations individually."""

_earlier_peak_bytes = 0


def total_bytes() -> int:
    """Maximum memory of this process: the machine's memory, or a control group's limit if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _group_limits())])


def keep_freed_memory() -> None:
    """Have this process keep and reuse the memory that it frees, if the C library is glibc.

    A step's tensors are as large as those of the last; without this each is returned to the system and faulted in
    again, page by page. For our own programs only, not for a caller's process.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in ((_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(parameter, value)


def give_back_freed() -> None:
    """Return freed memory that the C library keeps to the system, if it is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Memory that can be allocated now without swapping; the total if unknown."""
    machine = _field(_read(_PROC / "meminfo"), "MemAvailable:")
    available = total_bytes() if machine is None else machine * 1024
    return max(0, min([available, *(limit - used for limit, used in _group_limits())]))


def resident_bytes() -> int:
    """Current memory of this process."""
    fields = _read(_PROC / "self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak memory of this process."""
    return max(_earlier_peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def restart_peak() -> bool:
    """Reset the peak that `peak_since_restart_bytes` returns; False if the kernel does not allow it. This resets the
    kernel's own value, so the rest of this process sees a lower `ru_maxrss`; `peak_resident_bytes` does not.
    """
    global _earlier_peak_bytes
    earlier = peak_resident_bytes()
    try:
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    _earlier_peak_bytes = earlier
    return peak_since_restart_bytes() is not None


def peak_since_restart_bytes() -> int | None:
    """Peak memory of this process since `restart_peak`; None if unknown."""
    kib = _field(_read(_PROC / "self/status"), "VmHWM:")
    return None if kib is None else kib * 1024


def _forget_peak() -> None:
    global _earlier_peak_bytes
    _earlier_peak_bytes = 0


# A forked process begins with its memory as its peak, for the kernel as here.
os.register_at_fork(after_in_child=_forget_peak)


def _group_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every control group of this process that has a limit."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = _GROUPS, _GROUP_FILES
        elif "memory" in controllers.split(","):
            root, files = _GROUPS / "memory", _OLDER_GROUP_FILES
        else:
            continue
        # In a container the path may be the host's, which is not mounted; then the root is the container's own group.
        group, (limit_file, used_file, inactive_field) = root / path.lstrip("/"), files
        for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
            limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                inactive = _field(_read(folder / "memory.stat"), inactive_field) or 0
                yield int(limit), max(0, int(used) - inactive)


def _field(text: str, name: str) -> int | None:
    """The number after `name` at the start of a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
