"""One writer a run directory: a lock that ends with its process, however that ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from spmd_worker.errors import ConfigError

LOCK_NAME: Final = "lock"


class RunLock:
    """Held from `__enter__` to `__exit__`. Raises ConfigError naming the process that holds it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_NAME
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"job.run_dir={self._path.parent} belongs to a job that runs now (process {holder}): wait for its "
                f"end, or give another job.run_dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
