"""A process's resources that could grow: resident memory, descriptors, threads, children, shared memory, files.

    seen = Growth(lambda: llm.generate(prompts))
    seen.repeat(1000)
    seen.check(max_bytes=8 << 20)

The first part of the repetitions warms allocators and caches up and does not count. Memory is compared between the
middle and the end, so that a little that is never given back shows when it comes with every repetition.
"""

import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from waiting import NotInTime, wait_until

_LEAVE_S = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """Resources at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int
    children: int
    shared_maps: int
    files: int


def size(folders: Sequence[Path] = ()) -> Size:
    """Measure after garbage collection and a trim of free memory. `folders` are counted with their contents."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Size(
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count() + len(os.listdir("/proc/self/task")),
        len(children),
        sum("/dev/shm/" in line or "/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        sum(1 for folder in folders for _ in folder.rglob("*")),
    )


class Growth:
    """Growth caused by each call of `action`."""

    def __init__(self, action: Callable[[], object], folders: Sequence[Path] = ()) -> None:
        self._action, self._folders = action, folders
        self.middle: Size | None = None
        self.end: Size | None = None
        self.num_counted = 0

    def repeat(self, count: int) -> None:
        """The first half warms up."""
        for number in range(count):
            if number == count // 2:
                self.middle = size(self._folders)
            self._action()
        self.num_counted = count - count // 2
        # A thread that was joined is the kernel's for a moment more. What is left behind stays.
        with suppress(NotInTime):
            wait_until(self._is_as_in_the_middle, _LEAVE_S)

    def _is_as_in_the_middle(self) -> bool:
        self.end = size(self._folders)
        return not self.troubles(sys.maxsize)

    def figures(self) -> dict[str, Any]:
        """One line of a report."""
        assert self.middle is not None, "repeat comes first"
        assert self.end is not None, "repeat comes first"
        before, after = asdict(self.middle), asdict(self.end)
        return {
            "repetitions": self.num_counted,
            "resident MiB": round(after["resident_bytes"] / 2**20, 1),
            **{name: after[name] - before[name] for name in before},
        }

    def troubles(self, max_bytes: int) -> list[str]:
        """Resources that have grown: memory by more than `max_bytes`, others at all."""
        figures = self.figures()
        return [
            f"{name} grew by {figures[name]} in {self.num_counted} repetitions"
            for name in Size.__slots__
            if figures[name] > (max_bytes if name == "resident_bytes" else 0)
        ]


def report(growth: Growth, max_bytes: int) -> int:
    """Print one line of JSON; returns the exit code of a script."""
    troubles = growth.troubles(max_bytes)
    line = json.dumps({**growth.figures(), "rank": int(os.environ.get("RANK", "0")), "troubles": troubles})
    os.write(1, f"{line}\n".encode())
    sys.stdout.flush()
    return int(bool(troubles))
