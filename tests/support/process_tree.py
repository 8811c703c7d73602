"""Processes that this one has started, and theirs, by their command lines, from /proc."""

import os
from pathlib import Path


def started(words: str, parent: int | None = None) -> list[int]:
    """Descendants whose command line has `words`, oldest first; of `parent`, else of this process."""
    root = os.getpid() if parent is None else parent
    pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if words in _command_line(pid) and root in _ancestors(pid)]


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        pid = _parent_of(pid)
        found.append(pid)
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
