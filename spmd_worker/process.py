"""Processes of this machine, as /proc shows them: when one was started, its parent, its variables, its state, and what
a thread of this one has computed.

`None` stands for a process or thread that is not there; OSError is raised where nothing can be told, as when this
process has too many files open.
"""

import os
from pathlib import Path
from typing import Final

_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def boot_id() -> str:
    """Of this machine since it was started; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def node_name() -> str:
    """The same for processes that see each other's process ids, and for no others; empty where that cannot be told."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot} {namespace}" if boot else ""


def start_time_of(pid: int) -> int | None:
    """When the process was started, in the kernel's ticks since boot: with it a process id names one process for good.

    None for one that has ended, a zombie too.
    """
    fields = _stat_of(str(pid))
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The process id of the parent."""
    fields = _stat_of(str(pid))
    return None if fields is None else int(fields[1])


def state_of(pid: int) -> str | None:
    """The kernel's letter for what the process does: R runs, S sleeps, D waits for a device, T is stopped, Z ended."""
    fields = _stat_of(str(pid))
    return None if fields is None else fields[0]


def cpu_seconds_of(native_id: int) -> float | None:
    """What a thread of this process, by the system's number, has computed so far; None where it cannot be told, too."""
    try:
        fields = _stat_of(f"self/task/{native_id}")
    except OSError:
        return None
    return None if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def variables_of(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with: what it changed since does not show. None where this process may
    not look, too.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def children_of(parent: int) -> list[int]:
    """The processes on this node that have this parent."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if parent_of(pid) == parent]


def _stat_of(entry: str) -> list[str] | None:
    """The fields of `/proc/ENTRY/stat` from the state on."""
    try:
        text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything, parentheses too.
    return text.rpartition(")")[2].split()
