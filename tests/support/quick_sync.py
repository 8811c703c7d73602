"""`os.fsync` that does not wait for a disk, in the tests' processes and in those that they fork.

It is for power losses, which power_loss.py simulates, in interpreters of their own that call the real one. Seven files
of tests waited for 3,600 of them, a tenth of their time.
"""

import os
import stat
from collections.abc import Callable
from typing import IO, Any

_REAL = {"fsync": os.fsync, "fdatasync": os.fdatasync}


def make_quick() -> None:
    """Before the product is imported, which binds the function as a default argument."""
    for name in _REAL:
        setattr(os, name, _quick(name))


def _quick(name: str) -> Callable[[int | IO[Any]], None]:
    real = _REAL[name]

    def sync(file: int | IO[Any]) -> None:
        """Errors of descriptors that are no files or folders are the real one's."""
        descriptor = file if isinstance(file, int) else file.fileno()
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            real(descriptor)

    return sync
