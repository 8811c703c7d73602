"""Memory of this machine and of this process, as the kernel tells it.

Reads /proc and the control group's limit. Knows nothing about devices other than the host.
"""

import os
import resource
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_STATUS = Path("/proc/self/statm")


def total_bytes() -> int:
    """What this process may use at most: the machine's memory, or the control group's limit where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits()])


def available_bytes() -> int:
    """What could be allocated now without swapping; the total where the kernel does not say."""
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, total_bytes())
    return total_bytes()


def resident_bytes() -> int:
    """Memory of this process now."""
    fields = _read(_STATUS).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _group_limits() -> list[int]:
    texts = [_read(path).strip() for path in _GROUP_LIMITS]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
