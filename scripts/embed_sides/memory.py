"""Resident memory of this process as rows are done. Imports nothing of the runtimes."""

from pathlib import Path
from typing import Any, Final

MARKS: Final = (10, 50, 100)
"""Percent of the rows."""


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status has no VmRSS: this is measured on Linux")


class MemoryMarks:
    """MiB by percent of the rows done; 0 is before the first row."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.begin()

    def begin(self) -> None:
        """No row is done: what came before does not count."""
        self.mib: dict[str, float] = {"0": round(resident_mib(), 1)}
        self._num_done, self._left = 0, list(MARKS)

    def add(self, count: int) -> None:
        """So many more rows are done."""
        self._num_done += count
        while self._left and 100 * self._num_done >= self._left[0] * self._num_rows:
            self.mib[str(self._left.pop(0))] = round(resident_mib(), 1)

    def as_bar(self, **_: Any) -> "MemoryMarks":
        """In place of a progress bar's class."""
        return self

    def update(self, count: int = 1) -> None:
        self.add(count)

    def close(self) -> None:
        """A bar has an end."""
