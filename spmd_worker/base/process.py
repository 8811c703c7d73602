"""Processes of this machine, from /proc: start time, parent, environment, state, and a thread's CPU time. And ending a
process with its parent, which the kernel does.

Needs no package: a rank imports it before everything else. `None` means that the process or thread does not exist;
OSError is raised where nothing is known, as when this process has too many files open.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ConfigError

_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG: Final = 1
_PF_EXITING: Final = 0x4
_ORPHAN_EXIT_CODE: Final = 1
_STACK_BYTES: Final = 1024 * 1024
"""256 KiB would be too little: torch's threads end in a segmentation fault."""
_OPEN_FILES: Final = 256
"""Enough for the files of a checkpoint, connections to other ranks, and the files of Python and torch."""
_LAUNCHED_VARIABLE: Final = "TORCHELASTIC_RUN_ID"


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends, even while this one is stopped; exit at
    once, with code 1, when `parent` is not its parent any more. Linux only; elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
    if os.getppid() != parent:
        # The parent was gone before prctl.
        os._exit(_ORPHAN_EXIT_CODE)


def end_with_launcher(variables: Mapping[str, str] = os.environ) -> None:
    """First call of a program of ours: `end_with_parent`, if torchrun started this process.

    Other launchers end their processes themselves, and a shell that starts a program may end before it: they are
    ignored. Not for a process that belongs to a caller's program.
    """
    if _LAUNCHED_VARIABLE not in variables:
        return
    parent = os.getppid()
    if parent == 1 and not _may_be_launcher(1):
        # Adopted by process 1: the launcher ended before this line.
        os._exit(_ORPHAN_EXIT_CODE)
    end_with_parent(parent)


def outlive_parent() -> None:
    """Undo `end_with_parent`, for a process that watches its parent itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def boot_id() -> str:
    """Id of this boot of the machine; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def node_name() -> str:
    """The same for processes that see each other's process ids, and for no others; empty if unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot} {namespace}" if boot else ""


def start_time_of(pid: int) -> int | None:
    """Start time of the process, in the kernel's ticks since boot: with the process id it identifies one process for
    good.

    None for one that has ended, a zombie too.
    """
    fields = _stat_of(str(pid))
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The process id of the parent."""
    fields = _stat_of(str(pid))
    return None if fields is None else int(fields[1])


def state_of(pid: int) -> str | None:
    """The kernel's letter for the process state: R runs, S sleeps, D waits for a device, T is stopped, Z ended."""
    fields = _stat_of(str(pid))
    return None if fields is None else fields[0]


def is_exiting(pid: int) -> bool:
    """Whether the process has ended or is ending: the kernel tears it down, which may last a while."""
    fields = _stat_of(str(pid))
    return fields is None or fields[0] in ("Z", "X") or bool(int(fields[6]) & _PF_EXITING)


def check_limits(more_files: int = 0) -> None:
    """Raise ConfigError for limits under which a rank would end without a message: too small a stack, whose limit
    threads inherit, and too few open files, which must allow `more_files` in addition to those of every rank. A soft
    limit on files is raised.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack != resource.RLIM_INFINITY and stack < _STACK_BYTES:
        raise ConfigError(
            f"RLIMIT_STACK is {stack // 1024} KiB, and a rank needs {_STACK_BYTES // 1024} KiB: raise it (ulimit -s "
            f"{_STACK_BYTES // 1024}) in the shell that starts the ranks"
        )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + more_files
    if files == resource.RLIM_INFINITY or files >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(
            f"RLIMIT_NOFILE is {most} open files, and a rank needs {needed}: raise it (ulimit -n {needed}) in the "
            f"shell that starts the ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def age_s(start_time: int) -> float:
    """Seconds since `start_time_of`."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(uptime_s - start_time / _TICKS_A_SECOND, 0.0)


def command_of(pid: int) -> str:
    """Command line of a process, words separated by spaces; empty if there is none."""
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return content.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def cpu_seconds_of(native_id: int) -> float | None:
    """CPU time of a thread of this process, by the system's number; None also where it is unknown."""
    try:
        fields = _stat_of(f"self/task/{native_id}")
    except OSError:
        return None
    return None if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def variables_of(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with, without later changes. None also where this process may not read
    it.
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


def _may_be_launcher(pid: int) -> bool:
    """Whether a process can be torchrun, which is a Python program."""
    command = command_of(pid)
    return "python" in command or "torch" in command
