"""Memory of this machine and of this process, as the kernel tells it.

Reads /proc and the limits of the control groups this process is in.
"""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")

# Limit, use, and the part of the use that the kernel gives back when it is short.
_GROUP_FILES: Final = ("memory.max", "memory.current", "inactive_file")
_OLDER_GROUP_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MOST_MMAP_THRESHOLD: Final = 32 * 1024 * 1024
"""Larger pieces glibc always asks the system for, one by one."""

_earlier_peak_bytes = 0


def total_bytes() -> int:
    """What this process may use at most: the machine's memory, or a control group's limit where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _group_limits())])


def keep_freed_memory() -> None:
    """Have this process keep what it frees and use it again, where the C library is glibc.

    The tensors of a step are as large as those of the last; without this each is given back to the system and asked for
    again, page by page. For programs of ours: a host's process is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in ((_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(parameter, value)


def give_back_freed() -> None:
    """Return to the system what this process has freed and the C library keeps, where that is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """What could be allocated now without swapping; the total where the kernel does not say."""
    machine = _field(_read(_PROC / "meminfo"), "MemAvailable:")
    available = total_bytes() if machine is None else machine * 1024
    return max(0, min([available, *(limit - used for limit, used in _group_limits())]))


def resident_bytes() -> int:
    """Memory of this process now."""
    fields = _read(_PROC / "self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory this process ever had."""
    return max(_earlier_peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def restart_peak() -> bool:
    """Let `peak_since_restart_bytes` count from now; False where the kernel does not allow it.

    It is the kernel's own mark that is set back, so the rest of this process sees a lower `ru_maxrss` until it rises
    again; `peak_resident_bytes` does not.
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
    """The most memory this process had since `restart_peak`; None where the kernel does not say."""
    kib = _field(_read(_PROC / "self/status"), "VmHWM:")
    return None if kib is None else kib * 1024


def _group_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be given back) of every control group of this process that has a limit."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = _GROUPS, _GROUP_FILES
        elif "memory" in controllers.split(","):
            root, files = _GROUPS / "memory", _OLDER_GROUP_FILES
        else:
            continue
        # In a container the path may be the host's, which is not mounted here: then the root is the container's own.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _group_limit(folder, *files)


def _group_limit(folder: Path, limit_file: str, used_file: str, inactive_field: str) -> Iterator[tuple[int, int]]:
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
