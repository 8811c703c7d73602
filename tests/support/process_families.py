"""Processes with all below them, and whether they are stopped."""

from pathlib import Path

from spmd_worker.base.process import children_of


def family_of(pid: int) -> list[int]:
    """The process and all below it."""
    family = [pid]
    for parent in family:
        family += children_of(parent)
    return family


def is_stopped(pid: int) -> bool:
    """Whether each thread of a process has ended the call that it was in, and begins no other."""
    try:
        states = [each.read_text().rpartition(")")[2].split()[0] for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        # A thread that ended: look again.
        return False
    return set(states) <= set("TtZX")
